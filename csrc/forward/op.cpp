// check -> allocate -> plan -> launch
#include "checks.h"
#include "common/driver.h"
#include "device.h"
#include "forward/launch.h"
#include "forward/policy.h"
#include "operators.h"
#include "tensors.h"

namespace flashmhf {
namespace {

struct GateSource {
    Gate kind = Gate::ones;
    std::optional<Tensor> tensor;  // R or W
    float eps = 0.f;
};

Tensor run(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, GateSource gate, const ProblemSizes &sizes,
           const char *range) {
    const DeviceScope scope(q.get_device_index(), range);
    Tensor out = new_dense(q, Sizes(q.sizes().data(), q.sizes().size()));
    if (sizes.tokens == 0) return out;

    std::optional<Tensor> r = gate_is_given(gate.kind) ? gate.tensor : std::nullopt;
    const TokenAxes axes = token_axes(q, r);
    check_readable(q, axes);
    const ForwardProblem problem{
        .bf16 = q.scalar_type() == ScalarType::BFloat16,
        .shape = shape_of_call(axes, sizes),
        .q = {q.data_ptr(), axes.q_batch, axes.q_token, q.stride(q.dim() - 2)},
        .k = k.data_ptr(),
        .u = u.data_ptr(),
        .v = v.data_ptr(),
        .gate = gate.kind,
        .r = r ? TokenTensor{r->data_ptr(), axes.other_batch, axes.other_token, r->stride(r->dim() - 2)} : TokenTensor{},
        .w = has_router(gate.kind) ? gate.tensor->data_ptr() : nullptr,
        .eps = gate.eps,
        .out = out.data_ptr(),
        .dense = {axes.dense_batch, axes.dense_token},
    };

    Device device;
    check_cuda(describe_device(&device));
    const ForwardPlan plan = plan_forward(problem.shape, device, WeightFormat::same, may_bundle(problem));
    std::optional<Tensor> workspace;  // lives until the launch is queued; PyTorch's allocator keeps the order of the stream
    if (plan.partials) workspace = new_dense(q, std::array{plan.workspace()}, aoti_torch_dtype_float32());
    const ForwardLaunch launch = prepare_forward(problem, plan, workspace ? static_cast<float *>(workspace->data_ptr()) : nullptr);
    check_cuda(launch_forward(problem.shape.head_dim, launch, current_stream(q.get_device_index())));
    return out;
}

}  // namespace

Tensor forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r, bool) {
    const ProblemSizes sizes = check_operands<ForwardHeadDims>(q, k, u, v);
    GateSource gate;
    if (r) {
        check_r(*r, q, sizes);
        gate.kind = r->scalar_type() == ScalarType::Float ? Gate::r_float : Gate::r_half;
        gate.tensor = *r;
    }
    return run(q, k, u, v, gate, sizes, "flashmhf forward");
}

Tensor gated_forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps, bool) {
    const ProblemSizes sizes = check_operands<ForwardHeadDims>(q, k, u, v);
    check_w(w, q, sizes);
    GateSource gate{w.scalar_type() == ScalarType::Float ? Gate::w_float : Gate::w_half, w, static_cast<float>(eps)};
    return run(q, k, u, v, gate, sizes, "flashmhf gated_forward");
}

}  // namespace flashmhf
