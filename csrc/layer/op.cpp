// check -> project -> normalise Q -> forward -> project, in 16 bits and in FP8. The layer is one operator because at inference the host is
// the bound: calls from Python, each with its checks, take longer to queue than the GPU takes to run them.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "checks.h"
#include "common/driver.h"
#include "device.h"
#include "layer/launch.h"
#include "operators.h"
#include "project/plan.h"
#include "tensors.h"

namespace flashmhf {
namespace {

// w [N, K] as [K, N], a view.
Tensor transpose(const Tensor &w) { return strided_view(w, std::array{w.size(1), w.size(0)}, std::array{int64_t{1}, w.size(1)}); }

// x [T, K] W^T + bias by cuBLAS, as torch.nn.functional.linear calls it, but not through the dispatcher.
Tensor linear(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) {
    const Tensor out = new_dense(x, std::array{x.size(0), w.size(0)}), transposed = transpose(w);
    TORCH_ERROR_CODE_CHECK(bias ? aoti_torch_cuda_addmm_out(out.get(), bias->get(), x.get(), transposed.get(), 1., 1.)
                                : aoti_torch_cuda_mm_out(out.get(), x.get(), transposed.get()));
    return out;
}

// x [T, K] W^T with both operands in e4m3 and scales of rows, as torch._scaled_mm computes it.
Tensor scaled_linear(const Tensor &x, const Tensor &w, const Tensor &scale) {
    const auto [x8, x_scale] = quantise_rows(x);
    const Tensor out = new_dense(x, std::array{x.size(0), w.size(0)}), transposed = transpose(w);
    const Tensor row_of_scales = dense_view(scale, std::array{int64_t{1}, w.size(0)});
    int32_t dtype = aoti_torch_dtype_bfloat16();
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda__scaled_mm_out(out.get(), x8.get(), transposed.get(), x_scale.get(), row_of_scales.get(),
                                                          nullptr, nullptr, &dtype, 0));
    return out;
}

bool has_shape(const Tensor &x, std::initializer_list<int64_t> sizes) {
    if (x.dim() != static_cast<int64_t>(sizes.size())) return false;
    int64_t i = 0;
    for (const int64_t size : sizes)
        if (x.size(i++) != size) return false;
    return true;
}

// What the kernels read as it is: contiguous, aligned, on x's device, of this type.
bool reads(const Tensor &x, const Tensor &operand, std::initializer_list<int64_t> sizes, ScalarType type) {
    return operand.scalar_type() == type && operand.is_cuda() && operand.get_device_index() == x.get_device_index() &&
           has_shape(operand, sizes) && operand.is_contiguous() && aligned(operand.data_ptr());
}
// The same in x's type or in fp32.
bool reads_either(const Tensor &x, const Tensor &operand, std::initializer_list<int64_t> sizes) {
    return reads(x, operand, sizes, x.scalar_type()) || reads(x, operand, sizes, ScalarType::Float);
}

// The rows of x in place where they have one stride; a copy of them otherwise.
Tensor rows_of(const Tensor &x, int64_t d_model) {
    if (x.is_contiguous()) return dense_view(x, std::array{x.numel() / d_model, d_model});
    return torch::stable::reshape(x, {-1, d_model});
}

void normalise(const Tensor &q, const Tensor &weight, double eps) {
    QNormParams params{};
    params.q = q.data_ptr(), params.weight = weight.data_ptr();
    params.heads = static_cast<int>(weight.size(0)), params.rows = q.size(0) * params.heads;
    params.eps = static_cast<float>(eps);
    params.float_weight = weight.scalar_type() == ScalarType::Float;
    auto launch = q.scalar_type() == ScalarType::BFloat16 ? launch_q_norm<true> : launch_q_norm<false>;
    check_cuda(launch(static_cast<int>(weight.size(1)), params, current_stream(q.get_device_index())));
}

// W [N, K] in x's type, or in e4m3 with a scale for each row.
struct Projection {
    const Tensor &w;
    const std::optional<Tensor> &scale, &bias;
};

struct QNorm {
    const std::optional<Tensor> &weight;
    double eps;
};

// What bf16 and FP8 layers share: all but K, U and V.
struct Frame {
    const Tensor &x;
    Projection in, out;
    QNorm norm;
    const Tensor &w;  // the router's

    int64_t heads() const { return w.size(0); }
    int64_t head_dim() const { return w.size(1); }
    int64_t inner() const { return heads() * head_dim(); }
};

// x W^T + bias by cuBLAS.
Tensor multiply(const Tensor &x, const Projection &p) { return p.scale ? scaled_linear(x, p.w, *p.scale) : linear(x, p.w, p.bias); }

bool takes_shapes(const Tensor &x, const Tensor &k, const Tensor &w, const Tensor &out_w) {
    if (!x.is_cuda() || x.dim() < 1 || x.numel() == 0 || k.dim() != 4 || w.dim() != 3 || out_w.dim() != 2) return false;
    return x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half;
}

bool reads(const Tensor &x, const Projection &p, int64_t features, int64_t depth) {
    if (p.bias && !reads(x, *p.bias, {features}, x.scalar_type())) return false;
    if (!p.scale) return reads(x, p.w, {features, depth}, x.scalar_type());
    return reads(x, p.w, {features, depth}, ScalarType::Float8_e4m3fn) && reads(x, *p.scale, {features, 1}, ScalarType::Float);
}

// HeadDims: of the forward that the layer takes.
template <typename HeadDims> bool reads(const Frame &f, int64_t weight_heads, int64_t subnets) {
    return HeadDims::contains(f.head_dim()) && weight_heads > 0 && f.heads() % weight_heads == 0 &&
           reads_either(f.x, f.w, {f.heads(), f.head_dim(), subnets}) && reads(f.x, f.in, f.inner(), f.x.size(f.x.dim() - 1)) &&
           reads(f.x, f.out, f.out.w.size(0), f.inner()) &&
           (!f.norm.weight || (QNormHeadDims::contains(f.head_dim()) && reads_either(f.x, *f.norm.weight, {f.heads(), f.head_dim()})));
}

// The most tokens that stay in 16 bits before a W in e4m3, as FEW_TOKENS of flashmhf/backends/fp8_linear.py has it. No kernel multiplies
// them.
constexpr int64_t few_tokens = 512;
// Whether the projection kernel takes so many tokens, and is the faster one.
bool takes_few(int64_t tokens, const Projection &p, const Device &device) {
    const int64_t features = p.w.size(0);
    return !p.scale && features % project_multiple == 0 && p.w.size(1) % project_multiple == 0 && projects_faster(tokens, features, device);
}
// Whether cuBLAS takes it. With scales of rows, as aten::_scaled_mm: sizes in multiples of 16, results in bf16, no bias.
bool takes_many(const Tensor &x, const Projection &p) {
    constexpr int multiple = 16;
    if (!p.scale) return true;
    if (x.size(0) <= few_tokens || !readable_rows(x)) return false;
    return x.scalar_type() == ScalarType::BFloat16 && !p.bias && p.w.size(0) % multiple == 0 && p.w.size(1) % multiple == 0;
}

// mix: Q [T, H, d_h] -> S.
template <typename Mix> std::optional<Tensor> run(const Frame &f, Mix mix) {
    const DeviceScope scope(f.x.get_device_index(), "flashmhf layer");
    const Tensor rows = rows_of(f.x, f.in.w.size(1));
    const int64_t tokens = rows.size(0);
    Device device;
    check_cuda(describe_device(&device));
    // The projection kernel, which reads x by TMA, takes both projections or none.
    const bool few = readable_rows(rows) && takes_few(tokens, f.in, device) && takes_few(tokens, f.out, device);
    if (!few && !(takes_many(rows, f.in) && takes_many(rows, f.out))) return std::nullopt;
    const Tensor mixed = [&] {  // Q is released before out_proj takes memory
        const Tensor q = few ? project(rows, f.in.w, f.in.bias) : multiply(rows, f.in);
        if (f.norm.weight) normalise(q, *f.norm.weight, f.norm.eps);
        return mix(dense_view(q, std::array{tokens, f.heads(), f.head_dim()}));
    }();
    const Tensor inner = dense_view(mixed, std::array{tokens, f.inner()});
    const Tensor y = few ? project_behind_forward(inner, f.out.w, f.out.bias) : multiply(inner, f.out);
    std::vector<int64_t> sizes(f.x.sizes().begin(), f.x.sizes().end());
    sizes.back() = f.out.w.size(0);
    return dense_view(y, sizes);
}

}  // namespace

std::tuple<Tensor, Tensor> quantise_rows(const Tensor &x) {
    check_rows_type(x);
    constexpr int multiple = 8;
    STD_TORCH_CHECK(x.dim() == 2 && x.size(0) <= INT32_MAX && x.size(1) <= INT32_MAX && x.size(1) % multiple == 0,
                    "x must be [T, K] with K a multiple of ", multiple, ", is ", shape_of(x));
    check_readable_rows(x);
    const DeviceScope scope(x.get_device_index(), "flashmhf quantise_rows");
    const Tensor x8 = new_dense(x, std::array{x.size(0), x.size(1)}, aoti_torch_dtype_float8_e4m3fn());
    const Tensor scale = new_dense(x, std::array{x.size(0), int64_t{1}}, aoti_torch_dtype_float32());
    if (x.size(0) == 0) return {x8, scale};
    QuantiseRowsParams params{};
    params.x = x.data_ptr(), params.x8 = static_cast<uint8_t *>(x8.data_ptr()), params.scale = static_cast<float *>(scale.data_ptr());
    params.x_stride = x.stride(0);
    params.rows = static_cast<int>(x.size(0)), params.columns = static_cast<int>(x.size(1));
    auto launch = x.scalar_type() == ScalarType::BFloat16 ? launch_quantise_rows<true> : launch_quantise_rows<false>;
    check_cuda(launch(params, current_stream(x.get_device_index())));
    return {x8, scale};
}

std::optional<Tensor> layer(const Tensor &x, const Tensor &in_w, const std::optional<Tensor> &in_bias, const std::optional<Tensor> &q_norm,
                            double q_norm_eps, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps,
                            const Tensor &out_w, const std::optional<Tensor> &out_bias) {
    if (!takes_shapes(x, k, w, out_w)) return std::nullopt;
    const std::optional<Tensor> no_scale;
    const Frame frame{x, {in_w, no_scale, in_bias}, {out_w, no_scale, out_bias}, {q_norm, q_norm_eps}, w};
    bool takes = reads<ForwardHeadDims>(frame, k.size(0), w.size(2));
    for (const Tensor *weights : {&k, &u, &v})
        takes = takes && reads(x, *weights, {k.size(0), w.size(2), k.size(2), frame.head_dim()}, x.scalar_type());
    if (!takes) return std::nullopt;
    return run(frame, [&](const Tensor &q) { return gated_forward(q, k, u, v, w, eps, true); });
}

std::optional<Tensor> fp8_layer(const Tensor &x, const Tensor &in_w, const std::optional<Tensor> &in_scale,
                                const std::optional<Tensor> &in_bias, const std::optional<Tensor> &q_norm, double q_norm_eps,
                                const Tensor &k8, const Tensor &u8, const Tensor &v8, const Tensor &scales, const Tensor &w, double eps,
                                const Tensor &out_w, const std::optional<Tensor> &out_scale, const std::optional<Tensor> &out_bias) {
    if (!takes_shapes(x, k8, w, out_w)) return std::nullopt;
    const Frame frame{x, {in_w, in_scale, in_bias}, {out_w, out_scale, out_bias}, {q_norm, q_norm_eps}, w};
    const int64_t weight_heads = k8.size(0), subnets = k8.size(1), subnet_dim = k8.size(2), head_dim = frame.head_dim();
    constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn;
    bool takes = reads<ForwardFp8HeadDims>(frame, weight_heads, subnets) && subnet_dim >= 16 && subnet_dim % 16 == 0;
    for (const Tensor *weights : {&k8, &u8}) takes = takes && reads(x, *weights, {weight_heads, subnets, subnet_dim, head_dim}, e4m3);
    takes = takes && reads(x, v8, {weight_heads, subnets, head_dim, subnet_dim}, e4m3);
    if (!takes || !reads(x, scales, {3, weight_heads, subnets}, ScalarType::Float)) return std::nullopt;
    return run(frame, [&](const Tensor &q) { return fp8_forward(q, k8, u8, v8, scales, std::nullopt, w, eps); });
}

}  // namespace flashmhf
