// check -> plan -> allocate -> launch
#include "forward/launch.h"
#include "operators.h"

namespace flashmhf {

Tensor run_forward(const DeviceScope &scope, const char *name, const Tensor &q, const ForwardInputs &in, const ProblemSizes &sizes) {
    const NvtxRange range(name, sizes);
    if (sizes.tokens == 0) return new_dense(q, sizes_of(q));
    check_readable(q);
    std::optional<Tensor> r = in.r;
    const TokenAxes axes = token_axes(q, r);
    ForwardProblem problem{operands_of(q, in.k, in.u, in.v, r, in.w, in.eps, axes, sizes), in.format, in.scales, nullptr};
    const ForwardPlan plan = plan_forward(problem.shape, scope.device, problem.format, may_bundle(problem));

    Tensor out = new_dense(q, sizes_of(q));
    problem.out = out.data_ptr();
    std::optional<Tensor> workspace;  // lives until the launch is queued; PyTorch's allocator keeps the order of the stream
    const int64_t floats = workspace_of(problem, plan);
    if (floats) workspace = new_dense(q, std::array{floats}, aoti_torch_dtype_float32());
    const ForwardLaunch launch = prepare_forward(problem, plan, workspace ? static_cast<float *>(workspace->data_ptr()) : nullptr);
    check_cuda(launch_forward(problem.shape.head_dim, launch, scope.stream));
    return out;
}

namespace {

Tensor run(const char *name, const Tensor &q, const ForwardInputs &in, const ProblemSizes &sizes) {
    STD_TORCH_CHECK(!in.r || !in.w, "r and w exclude each other");
    if (in.r) check_r(*in.r, q, sizes);
    if (in.w) check_w(*in.w, q, sizes);
    return run_forward(DeviceScope(q.get_device_index()), name, q, in, sizes);
}

}  // namespace

Tensor forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r, bool) {
    return run("forward", q, {WeightFormat::same, k, u, v, nullptr, r, std::nullopt, 0.}, check_operands<ForwardHeadDims>(q, k, u, v));
}

Tensor gated_forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps, bool) {
    return run("gated_forward", q, {WeightFormat::same, k, u, v, nullptr, std::nullopt, w, eps},
               check_operands<ForwardHeadDims>(q, k, u, v));
}

Tensor fp8_forward(const Tensor &q, const Tensor &k8, const Tensor &u8, const Tensor &v8, const Tensor &scales,
                   const std::optional<Tensor> &r, const std::optional<Tensor> &w, double eps) {
    const ProblemSizes sizes = check_operands<ForwardFp8HeadDims>(q, k8, u8, v8, true);
    check_type_and_device(scales, "scales", scales.scalar_type() == ScalarType::Float, "be float32", q);
    STD_TORCH_CHECK(has_shape(scales, std::array{int64_t{3}, k8.size(0), sizes.subnets}) && scales.is_contiguous(),
                    "scales must be [3, H_kv, E] = [3, ", k8.size(0), ", ", sizes.subnets, "] and contiguous, is ", shape_of(scales));
    return run("fp8_forward", q, {WeightFormat::e4m3, k8, u8, v8, static_cast<const float *>(scales.data_ptr()), r, w, eps}, sizes);
}

}  // namespace flashmhf
