// check -> project -> normalise Q -> forward -> project. The layer is one operator because at inference the host is the bound: calls from
// Python, each with its checks, take longer to queue than the GPU takes to run them.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "checks.h"
#include "device.h"
#include "layer/launch.h"
#include "operators.h"
#include "tensors.h"

namespace flashmhf {
namespace {

// x [T, K] W^T + bias by cuBLAS, as torch.nn.functional.linear calls it, but not through the dispatcher.
Tensor linear(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) {
    const Tensor out = new_dense(x, std::array{x.size(0), w.size(0)});
    const Tensor transposed = strided_view(w, std::array{w.size(1), w.size(0)}, std::array{int64_t{1}, w.size(1)});
    TORCH_ERROR_CODE_CHECK(bias ? aoti_torch_cuda_addmm_out(out.get(), bias->get(), x.get(), transposed.get(), 1., 1.)
                                : aoti_torch_cuda_mm_out(out.get(), x.get(), transposed.get()));
    return out;
}

bool has_shape(const Tensor &x, std::initializer_list<int64_t> sizes) {
    if (x.dim() != static_cast<int64_t>(sizes.size())) return false;
    int64_t i = 0;
    for (const int64_t size : sizes)
        if (x.size(i++) != size) return false;
    return true;
}

// What the kernels read as it is: contiguous, aligned, on x's device, in x's type (a router and a q_norm also in fp32).
bool reads(const Tensor &x, const Tensor &operand, std::initializer_list<int64_t> sizes, bool may_be_float = false) {
    const ScalarType type = operand.scalar_type();
    return (type == x.scalar_type() || (may_be_float && type == ScalarType::Float)) && operand.is_cuda() &&
           operand.get_device_index() == x.get_device_index() && has_shape(operand, sizes) && operand.is_contiguous() &&
           aligned(operand.data_ptr());
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

}  // namespace

std::optional<Tensor> layer(const Tensor &x, const Tensor &in_w, const std::optional<Tensor> &in_bias, const std::optional<Tensor> &q_norm,
                            double q_norm_eps, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps,
                            const Tensor &out_w, const std::optional<Tensor> &out_bias) {
    if (!x.is_cuda() || x.dim() < 1 || x.numel() == 0 || k.dim() != 4 || w.dim() != 3 || out_w.dim() != 2) return std::nullopt;
    if (x.scalar_type() != ScalarType::BFloat16 && x.scalar_type() != ScalarType::Half) return std::nullopt;
    const int64_t d_model = x.size(x.dim() - 1), heads = w.size(0), head_dim = w.size(1), subnets = w.size(2), inner = heads * head_dim;
    const int64_t weight_heads = k.size(0), subnet_dim = k.size(2), d_out = out_w.size(0);
    bool takes =
        supported_head_dim(head_dim) && weight_heads > 0 && heads % weight_heads == 0 && reads(x, w, {heads, head_dim, subnets}, true);
    for (const Tensor *weights : {&k, &u, &v}) takes = takes && reads(x, *weights, {weight_heads, subnets, subnet_dim, head_dim});
    takes = takes && reads(x, in_w, {inner, d_model}) && (!in_bias || reads(x, *in_bias, {inner}));
    takes = takes && reads(x, out_w, {d_out, inner}) && (!out_bias || reads(x, *out_bias, {d_out}));
    if (!takes || (q_norm && !reads(x, *q_norm, {heads, head_dim}, true))) return std::nullopt;

    const DeviceScope scope(x.get_device_index(), "flashmhf layer");
    const Tensor rows = rows_of(x, d_model);
    // The projection kernel reads x by TMA; what it cannot read goes to cuBLAS, and so do many tokens.
    const bool readable_rows = rows.stride(1) == 1 && rows.stride(0) * element_bytes % tma_alignment == 0 && aligned(rows.data_ptr());
    const bool multiples = d_model % project_multiple == 0 && inner % project_multiple == 0 && d_out % project_multiple == 0;
    const bool fits =
        rows.size(0) <= 64 || (rows.size(0) <= project_tokens && inner <= project_most_features && d_out <= project_most_features);
    const bool few = fits && multiples && readable_rows;
    const Tensor mixed = [&] {  // Q is released before out_proj takes memory
        const Tensor q = few ? project(rows, in_w, in_bias, false) : linear(rows, in_w, in_bias);
        if (q_norm) normalise(q, *q_norm, q_norm_eps);
        return gated_forward(dense_view(q, std::array{q.size(0), heads, head_dim}), k, u, v, w, eps, true);
    }();
    // Behind the forward kernels, which wait for every older kernel, nothing that still runs can write out_w or out_bias.
    const Tensor s = dense_view(mixed, std::array{mixed.size(0), inner});
    const Tensor y = few ? project(s, out_w, out_bias, true) : linear(s, out_w, out_bias);
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = d_out;
    return dense_view(y, sizes);
}

}  // namespace flashmhf
