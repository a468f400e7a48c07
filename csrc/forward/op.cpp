// check -> allocate -> plan -> launch
#include "checks.h"
#include "device.h"
#include "forward/launch.h"
#include "forward/policy.h"
#include "operators.h"

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
    Tensor out = torch::stable::new_empty(q, q.sizes());
    if (sizes.tokens == 0) return out;

    const bool r_given = gate.kind == Gate::r_float || gate.kind == Gate::r_half;
    std::optional<Tensor> none;
    const TokenAxes axes = token_axes(q, r_given ? gate.tensor : none);
    check_readable(q, axes);

    ForwardProblem problem{};
    problem.bf16 = q.scalar_type() == ScalarType::BFloat16;
    problem.shape = {
        axes.batch,      axes.length, static_cast<int>(sizes.heads), static_cast<int>(sizes.head_dim), static_cast<int>(sizes.subnets),
        sizes.subnet_dim};
    problem.q = q.data_ptr(), problem.k = k.data_ptr(), problem.u = u.data_ptr(), problem.v = v.data_ptr(), problem.out = out.data_ptr();
    problem.q_batch = axes.q_batch, problem.q_token = axes.q_token, problem.q_head = q.stride(q.dim() - 2);
    const int64_t row = sizes.heads * sizes.head_dim;  // of the output
    problem.out_batch = axes.dense_batch * row, problem.out_token = axes.dense_token * row;
    problem.gate = gate.kind;
    problem.gate_data = gate.tensor ? gate.tensor->data_ptr() : nullptr;
    problem.eps = gate.eps;
    if (r_given) {
        problem.r_batch = axes.other_batch, problem.r_token = axes.other_token;
        problem.r_head = gate.tensor->stride(gate.tensor->dim() - 2);
    }

    Device device;
    check_cuda(describe_device(problem.shape.head_dim, &device));
    const ForwardPlan plan = plan_forward(problem.shape, device);
    std::optional<Tensor> workspace;  // lives until the launch is queued; PyTorch's allocator keeps the order of the stream
    if (plan.partials) workspace = torch::stable::new_empty(q, {plan.workspace()}, ScalarType::Float);
    const ForwardLaunch launch = prepare_forward(problem, plan, workspace ? static_cast<float *>(workspace->data_ptr()) : nullptr);
    check_cuda(launch_forward(problem.shape.head_dim, launch, current_stream(q.get_device_index())));
    return out;
}

}  // namespace

Tensor forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r, bool) {
    const ProblemSizes sizes = check_operands(q, k, u, v);
    GateSource gate;
    if (r) {
        check_r(*r, q, sizes);
        gate.kind = r->scalar_type() == ScalarType::Float ? Gate::r_float : Gate::r_half;
        gate.tensor = *r;
    }
    return run(q, k, u, v, gate, sizes, "flashmhf forward");
}

Tensor gated_forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps, bool) {
    const ProblemSizes sizes = check_operands(q, k, u, v);
    check_w(w, q, sizes);
    GateSource gate{w.scalar_type() == ScalarType::Float ? Gate::w_float : Gate::w_half, w, static_cast<float>(eps)};
    return run(q, k, u, v, gate, sizes, "flashmhf gated_forward");
}

}  // namespace flashmhf
