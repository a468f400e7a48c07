// check -> project -> forward -> project. The layer is one operator because at inference the host is the bound: three calls from Python,
// each with its checks, take longer to queue than the GPU takes to run them.
#include "checks.h"
#include "device.h"
#include "operators.h"

#include <array>

namespace flashmhf {
namespace {

// x [T, K] W^T + bias by cuBLAS.
Tensor linear(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) {
    std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(w), torch::stable::detail::from(bias)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

Tensor layer(const Tensor &x, const Tensor &in_w, const std::optional<Tensor> &in_bias, const Tensor &k, const Tensor &u, const Tensor &v,
             const Tensor &w, double eps, const Tensor &out_w, const std::optional<Tensor> &out_bias) {
    STD_TORCH_CHECK(x.is_cuda(), "x must be on a CUDA device");
    STD_TORCH_CHECK(x.dim() >= 1 && w.dim() == 3 && x.size(x.dim() - 1) == w.size(0) * w.size(1),
                    "x must be [..., H d_h] with the H and d_h of w; x is ", shape_of(x), " but w is ", shape_of(w));
    const DeviceScope scope(x.get_device_index(), "flashmhf layer");
    const int64_t d_model = x.size(x.dim() - 1), heads = w.size(0), head_dim = w.size(1);
    const Tensor rows = torch::stable::reshape(x, {-1, d_model});
    // The kernel for few tokens reads x by TMA; what it cannot read goes to cuBLAS.
    const bool readable_rows = rows.stride(1) == 1 && rows.stride(0) * element_bytes % tma_alignment == 0 && aligned(rows.data_ptr());
    const bool few = rows.size(0) <= project_tokens && d_model % project_multiple == 0 && readable_rows;
    const Tensor mixed = [&] {  // Q is released before out_proj takes memory
        const Tensor q = few ? project(rows, in_w, in_bias, false) : linear(rows, in_w, in_bias);
        return gated_forward(torch::stable::view(q, {-1, heads, head_dim}), k, u, v, w, eps, true);
    }();
    // Behind the forward kernels, which wait for every older kernel, nothing that still runs can write out_w or out_bias.
    const Tensor s = torch::stable::view(mixed, {-1, d_model});
    const Tensor y = few ? project(s, out_w, out_bias, true) : linear(s, out_w, out_bias);
    return torch::stable::view(y, x.sizes());
}

}  // namespace flashmhf
