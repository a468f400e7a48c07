// check -> project -> normalise Q -> forward -> project, in 16 bits and in FP8. The layer is one operator because at inference the host is
// the bound: calls from Python, each with its checks, take longer to queue than the GPU takes to run them.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "layer/launch.h"
#include "operators.h"
#include "project/plan.h"

namespace flashmhf {
namespace {

// out = x [T, K] W^T + bias by cuBLAS, as torch.nn.functional.linear calls it, but not through the dispatcher.
void linear(const Tensor &out, const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) {
    const Tensor transposed = strided_view(w, std::array{w.size(1), w.size(0)}, std::array{int64_t{1}, w.size(1)});
    TORCH_ERROR_CODE_CHECK(bias ? aoti_torch_cuda_addmm_out(out.get(), bias->get(), x.get(), transposed.get(), 1., 1.)
                                : aoti_torch_cuda_mm_out(out.get(), x.get(), transposed.get()));
}

Tensor some_rows(const Tensor &x, int64_t first, int64_t count) {
    if (count == x.size(0)) return x;
    return strided_view(x, std::array{count, x.size(1)}, std::array{x.stride(0), x.stride(1)}, first * x.stride(0));
}

// The rows of x in place where they have one stride; a copy of them otherwise.
Tensor rows_of(const Tensor &x, int64_t d_model) {
    if (x.is_contiguous()) return dense_view(x, std::array{x.numel() / d_model, d_model});
    return torch::stable::reshape(x, {-1, d_model});
}

void normalise(const DeviceScope &scope, const Tensor &q, const Tensor &weight, double eps) {
    const QNormParams params{.q = q.data_ptr(),
                             .weight = weight.data_ptr(),
                             .rows = q.size(0) * weight.size(0),
                             .heads = static_cast<int>(weight.size(0)),
                             .eps = static_cast<float>(eps),
                             .float_weight = weight.scalar_type() == ScalarType::Float};
    auto launch = q.scalar_type() == ScalarType::BFloat16 ? launch_q_norm<true> : launch_q_norm<false>;
    check_cuda(launch(static_cast<int>(weight.size(1)), params, scope.stream));
}

// W [N, K] and bias, in x's type.
struct Projection {
    const Tensor &w;
    const std::optional<Tensor> &bias;
};

// What bf16 and FP8 layers share: all but K, U and V.
struct Frame {
    const Tensor &x;
    Projection in, out;
    const std::optional<Tensor> &norm;  // of Q
    double norm_eps;
    const Tensor &w;  // the router's

    int64_t heads() const { return w.size(0); }
    int64_t head_dim() const { return w.size(1); }
    int64_t subnets() const { return w.size(2); }
    int64_t inner() const { return heads() * head_dim(); }

    // What the kernels read as it is: contiguous, aligned, on x's device, of this type or, where that will do, fp32.
    bool reads(const Tensor &operand, std::initializer_list<int64_t> sizes, ScalarType type, bool or_float = false) const {
        return (operand.scalar_type() == type || (or_float && operand.scalar_type() == ScalarType::Float)) && operand.is_cuda() &&
               operand.get_device_index() == x.get_device_index() && has_shape(operand, sizes) && operand.is_contiguous() &&
               aligned(operand.data_ptr());
    }
    bool reads(const Projection &p, int64_t features, int64_t depth) const {
        return reads(p.w, {features, depth}, x.scalar_type()) && (!p.bias || reads(*p.bias, {features}, x.scalar_type()));
    }
    // All of it, for a k of this shape. HeadDims: of the forward that the layer takes.
    template <typename HeadDims> bool is_readable(const Tensor &k) const {
        if (!x.is_cuda() || x.dim() < 1 || k.dim() != 4 || w.dim() != 3 || out.w.dim() != 2) return false;
        const ScalarType type = x.scalar_type();
        const int64_t d_model = x.size(x.dim() - 1), weight_heads = k.size(0), subnet_dim = k.size(2);
        return (type == ScalarType::BFloat16 || type == ScalarType::Half) && d_model > 0 && HeadDims::contains(head_dim()) &&
               subnet_dim >= 16 && subnet_dim % 16 == 0 && weight_heads > 0 && heads() % weight_heads == 0 && subnets() > 0 &&
               reads(w, {heads(), head_dim(), k.size(1)}, type, true) && reads(in, inner(), d_model) &&
               reads(out, out.w.size(0), inner()) &&
               (!norm || (QNormHeadDims::contains(head_dim()) && reads(*norm, {heads(), head_dim()}, type, true)));
    }
};

// Whether the projection kernel takes so many tokens, and is the faster one.
bool takes_few(int64_t tokens, const Projection &p, const Device &device) {
    const int64_t features = p.w.size(0);
    return features % project_multiple == 0 && p.w.size(1) % project_multiple == 0 && projects_faster(tokens, features, device);
}

constexpr int64_t chunk_tokens = 16384;

// `in` is the mix of Q [T, H, d_h]. More than chunk_tokens tokens run in equal chunks of at most so many, so that the peak memory beyond x is the
// result and S of one chunk.
Tensor run(const Frame &f, const ForwardInputs &in) {
    const bool fp8 = in.format == WeightFormat::e4m3;
    const DeviceScope scope(f.x.get_device_index());
    ProblemSizes mix{f.x.numel() / f.x.size(f.x.dim() - 1), f.heads(), f.head_dim(), f.subnets(), in.k.size(2), f.heads() / in.k.size(0)};
    const NvtxRange range(fp8 ? "fp8_layer" : "layer", mix);
    const int64_t features = f.out.w.size(0);
    std::vector<int64_t> sizes(f.x.sizes().begin(), f.x.sizes().end());
    sizes.back() = features;
    if (f.x.numel() == 0) return new_dense(f.x, sizes);

    const Tensor rows = rows_of(f.x, f.in.w.size(1));
    const int64_t tokens = rows.size(0);
    auto mixed = [&](const Tensor &q) {
        if (f.norm) normalise(scope, q, *f.norm, f.norm_eps);
        mix.tokens = q.size(0);
        const Tensor heads = dense_view(q, std::array{mix.tokens, f.heads(), f.head_dim()});
        return dense_view(run_forward(scope, fp8 ? "fp8_forward" : "gated_forward", heads, in, mix), std::array{mix.tokens, f.inner()});
    };
    // The projection kernel, which reads x by TMA, takes both projections or none.
    if (readable_rows(rows) && takes_few(tokens, f.in, scope.device) && takes_few(tokens, f.out, scope.device)) {
        const Tensor inner = mixed(run_project(scope, rows, f.in.w, f.in.bias, false));
        return dense_view(run_project(scope, inner, f.out.w, f.out.bias, true), sizes);
    }

    const Tensor out = new_dense(f.x, sizes), out_rows = dense_view(out, std::array{tokens, features});
    const int64_t chunks = ceil_div(tokens, chunk_tokens);
    for (int64_t chunk = 0, first = 0; chunk < chunks; ++chunk) {
        const int64_t count = tokens / chunks + (chunk < tokens % chunks);
        const Tensor x = some_rows(rows, first, count), y = some_rows(out_rows, first, count);
        const Tensor inner = [&] {  // Q lies where the result will, if it is as wide, or is released before out_proj takes memory
            const Tensor q = f.inner() == features ? y : new_dense(x, std::array{count, f.inner()});
            linear(q, x, f.in.w, f.in.bias);
            return mixed(q);
        }();
        linear(y, inner, f.out.w, f.out.bias);
        first += count;
    }
    return out;
}

}  // namespace

std::optional<Tensor> layer(const Tensor &x, const Tensor &in_w, const std::optional<Tensor> &in_bias, const std::optional<Tensor> &q_norm,
                            double q_norm_eps, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps,
                            const Tensor &out_w, const std::optional<Tensor> &out_bias) {
    const Frame frame{x, {in_w, in_bias}, {out_w, out_bias}, q_norm, q_norm_eps, w};
    if (!frame.is_readable<ForwardHeadDims>(k)) return std::nullopt;
    for (const Tensor *weights : {&k, &u, &v})
        if (!frame.reads(*weights, {k.size(0), frame.subnets(), k.size(2), frame.head_dim()}, x.scalar_type())) return std::nullopt;
    return run(frame, {WeightFormat::same, k, u, v, nullptr, std::nullopt, w, eps});
}

std::optional<Tensor> fp8_layer(const Tensor &x, const Tensor &in_w, const std::optional<Tensor> &in_bias,
                                const std::optional<Tensor> &q_norm, double q_norm_eps, const Tensor &k8, const Tensor &u8,
                                const Tensor &v8, const Tensor &scales, const Tensor &w, double eps, const Tensor &out_w,
                                const std::optional<Tensor> &out_bias) {
    const Frame frame{x, {in_w, in_bias}, {out_w, out_bias}, q_norm, q_norm_eps, w};
    if (!frame.is_readable<ForwardFp8HeadDims>(k8)) return std::nullopt;
    const int64_t weight_heads = k8.size(0), subnets = frame.subnets(), subnet_dim = k8.size(2), head_dim = frame.head_dim();
    constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn;
    for (const Tensor *weights : {&k8, &u8})
        if (!frame.reads(*weights, {weight_heads, subnets, subnet_dim, head_dim}, e4m3)) return std::nullopt;
    if (!frame.reads(v8, {weight_heads, subnets, head_dim, subnet_dim}, e4m3)) return std::nullopt;
    if (!frame.reads(scales, {3, weight_heads, subnets}, ScalarType::Float)) return std::nullopt;
    return run(frame, {WeightFormat::e4m3, k8, u8, v8, static_cast<const float *>(scales.data_ptr()), std::nullopt, w, eps});
}

}  // namespace flashmhf
