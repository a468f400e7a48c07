// check -> allocate -> plan -> launch
#include "checks.h"
#include "forward/launch.h"
#include "operators.h"
#include "scope.h"
#include "tensors.h"

namespace flashmhf {
namespace {

void check_packed(const Tensor &x, const char *name, const char *axes, std::array<int64_t, 4> shape, const Tensor &k8, const Tensor &q) {
    check_type_and_device(x, name, x.scalar_type() == ScalarType::Float8_e4m3fn, "be float8_e4m3fn", q);
    STD_TORCH_CHECK(has_shape(x, shape) && x.is_contiguous(), name, " must be ", axes, " and contiguous, is ", shape_of(x), " but k8 is ",
                    shape_of(k8));
    STD_TORCH_CHECK(aligned(x.data_ptr()), name, " must start at a multiple of 16 bytes");
}

// k8, u8: [H_kv, E, d_e, d_h]; v8: [H_kv, E, d_h, d_e]; scales: [3, H_kv, E].
ProblemSizes check_fp8_operands(const Tensor &q, const Tensor &k8, const Tensor &u8, const Tensor &v8, const Tensor &scales) {
    check_query(q);
    STD_TORCH_CHECK(k8.dim() == 4, "k8 must be [H_kv, E, d_e, d_h], is ", shape_of(k8));
    const int64_t heads = k8.size(0), subnets = k8.size(1), d_e = k8.size(2), d_h = k8.size(3);
    check_packed(k8, "k8", "[H_kv, E, d_e, d_h]", {heads, subnets, d_e, d_h}, k8, q);
    check_packed(u8, "u8", "[H_kv, E, d_e, d_h]", {heads, subnets, d_e, d_h}, k8, q);
    check_packed(v8, "v8", "[H_kv, E, d_h, d_e]", {heads, subnets, d_h, d_e}, k8, q);
    const ProblemSizes sizes = check_sizes<ForwardFp8HeadDims>(q, k8, "k8");
    check_type_and_device(scales, "scales", scales.scalar_type() == ScalarType::Float, "be float32", q);
    STD_TORCH_CHECK(has_shape(scales, std::array{int64_t{3}, heads, subnets}) && scales.is_contiguous(),
                    "scales must be [3, H_kv, E] = [3, ", heads, ", ", subnets, "] and contiguous, is ", shape_of(scales));
    return sizes;
}

// What the formats' operators differ in.
struct Inputs {
    WeightFormat format;
    const Tensor &k, &u, &v;
    const float *scales;      // of e4m3
    std::optional<Tensor> r;  // or w, or neither
    std::optional<Tensor> w;
    double eps;
};

Tensor run(const Tensor &q, const Inputs &in, const ProblemSizes &sizes, const char *range) {
    STD_TORCH_CHECK(!in.r || !in.w, "r and w exclude each other");
    if (in.r) check_r(*in.r, q, sizes);
    if (in.w) check_w(*in.w, q, sizes);
    const DeviceScope scope(q.get_device_index(), range, sizes.range());
    Tensor out = new_dense(q, sizes_of(q));
    if (sizes.tokens == 0) return out;

    std::optional<Tensor> r = in.r;
    const TokenAxes axes = token_axes(q, r);
    check_readable(q, axes);
    const ForwardProblem problem{operands_of(q, in.k, in.u, in.v, r, in.w, in.eps, axes, sizes), in.format, in.scales, out.data_ptr()};
    const ForwardPlan plan = plan_forward(problem.shape, describe_device(), problem.format, may_bundle(problem));
    std::optional<Tensor> workspace;  // lives until the launch is queued; PyTorch's allocator keeps the order of the stream
    const int64_t floats = workspace_of(problem, plan);
    if (floats) workspace = new_dense(q, std::array{floats}, aoti_torch_dtype_float32());
    const ForwardLaunch launch = prepare_forward(problem, plan, workspace ? static_cast<float *>(workspace->data_ptr()) : nullptr);
    check_cuda(launch_forward(problem.shape.head_dim, launch, current_stream(q.get_device_index())));
    return out;
}

}  // namespace

Tensor forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r, bool) {
    return run(q, {WeightFormat::same, k, u, v, nullptr, r, std::nullopt, 0.}, check_operands<ForwardHeadDims>(q, k, u, v), "forward");
}

Tensor gated_forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps, bool) {
    return run(q, {WeightFormat::same, k, u, v, nullptr, std::nullopt, w, eps}, check_operands<ForwardHeadDims>(q, k, u, v),
               "gated_forward");
}

Tensor fp8_forward(const Tensor &q, const Tensor &k8, const Tensor &u8, const Tensor &v8, const Tensor &scales,
                   const std::optional<Tensor> &r, const std::optional<Tensor> &w, double eps) {
    const ProblemSizes sizes = check_fp8_operands(q, k8, u8, v8, scales);
    return run(q, {WeightFormat::e4m3, k8, u8, v8, static_cast<const float *>(scales.data_ptr()), r, w, eps}, sizes, "fp8_forward");
}

}  // namespace flashmhf
