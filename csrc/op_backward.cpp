// check -> allocate -> plan -> launch
#include "checks.h"
#include "host/device.h"
#include "host/launch_backward.h"
#include "host/tensor_map.h"
#include "kernels/backward_policy.h"
#include "operators.h"

#include <algorithm>
#include <array>
#include <vector>

namespace flashmhf {
namespace {

constexpr int element_bytes = 2;

// Where the weight gradients go: fresh tensors in q's type, or fp32 buffers to add to.
using WeightGrads = std::array<Tensor, 3>;

// One token stride (and head stride) pair of a [..., H, d_h] tensor that TMA can read.
bool readable(const Tensor &x, const TokenAxes &axes, int64_t batch_stride, int64_t token_stride) {
    auto strided = [](int64_t size, int64_t stride) { return size == 1 || (stride > 0 && stride * element_bytes % tma_alignment == 0); };
    return x.stride(x.dim() - 1) == 1 && aligned(x.data_ptr()) && strided(x.size(x.dim() - 2), x.stride(x.dim() - 2)) &&
           strided(axes.length, token_stride) && strided(axes.batch, batch_stride);
}

// The token axes of q, R and grad_out together. What does not share q's axes is copied to a contiguous tensor, which has every axis.
TokenAxes token_axes(const Tensor &q, std::optional<Tensor> &r, Tensor &grad_out, int64_t &g_batch, int64_t &g_token) {
    const int64_t row = q.size(q.dim() - 2) * q.size(q.dim() - 1);
    std::optional<TokenAxes> axes;
    if (!grad_out.is_contiguous()) {
        axes = collapse(q, grad_out);
        if (axes && readable(grad_out, *axes, axes->other_batch, axes->other_token)) {
            g_batch = axes->other_batch;
            g_token = axes->other_token;
            if (r) {
                *r = torch::stable::contiguous(*r);
                const int64_t step = r->size(r->dim() - 2) * r->size(r->dim() - 1);
                axes->other_batch = axes->dense_batch * step;
                axes->other_token = axes->dense_token * step;
            }
            return *axes;
        }
    }
    grad_out = torch::stable::contiguous(grad_out);
    if (!aligned(grad_out.data_ptr())) {
        Tensor copy = torch::stable::new_empty(grad_out, grad_out.sizes());
        torch::stable::copy_(copy, grad_out);
        grad_out = copy;
    }
    axes = collapse(q, r ? *r : q);
    if (!axes && r) {
        *r = torch::stable::contiguous(*r);
        axes = collapse(q, *r);
    }
    STD_TORCH_CHECK(axes, "the leading dimensions of q do not collapse to one or two token strides");
    g_batch = axes->dense_batch * row;
    g_token = axes->dense_token * row;
    return *axes;
}

struct Grads {
    Tensor dq, dr;
};

// W of gated_backward and where its gradient goes, if anywhere.
struct Router {
    const Tensor &w;
    float eps;
    std::optional<Tensor> dw;
};

Grads run(Tensor grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, std::optional<Tensor> r, const ProblemSizes &sizes,
          bool deterministic, bool needs_tokens, bool needs_weights, const WeightGrads &out, bool accumulate, const Router *router = nullptr) {
    auto empty = [&](std::initializer_list<int64_t> shape, ScalarType type) {
        return torch::stable::new_empty(q, std::vector<int64_t>(shape), type);
    };
    if (router) {  // R is computed here
        std::vector<int64_t> shape(q.sizes().begin(), q.sizes().end());
        shape.back() = sizes.subnets;
        r = torch::stable::new_empty(q, shape, ScalarType::Float);
        needs_tokens = true;  // dW needs dR
    }
    const ScalarType type = q.scalar_type(), r_type = r ? r->scalar_type() : type;
    const int d_h = static_cast<int>(sizes.head_dim);
    Grads grads{needs_tokens ? torch::stable::new_empty(q, q.sizes()) : empty({0}, type),
                needs_tokens && r ? torch::stable::new_empty(*r, r->sizes()) : empty({0}, type)};
    if (sizes.tokens == 0 || (!needs_tokens && !needs_weights)) {
        if (needs_weights && !accumulate)
            for (Tensor x : out) torch::stable::zero_(x);
        if (router && router->dw) {
            Tensor dw = *router->dw;
            torch::stable::zero_(dw);
        }
        return grads;
    }

    BackwardLaunch launch{};
    BackwardParams &p = launch.params;
    int64_t g_batch = 0, g_token = 0;
    const TokenAxes axes = token_axes(q, r, grad_out, g_batch, g_token);
    STD_TORCH_CHECK(readable(q, axes, axes.q_batch, axes.q_token), "q's last dimension must be contiguous, and its strides and storage offset positive multiples of 16 bytes");

    const int device = q.get_device_index();
    int sms = 0;
    check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    launch.plan = plan_backward({axes.batch, axes.length, static_cast<int>(sizes.heads), static_cast<int>(sizes.subnets), sizes.subnet_dim}, sms);
    const BackwardPlan &plan = launch.plan;
    launch.bf16 = type == ScalarType::BFloat16;
    launch.fused = needs_tokens && needs_weights && !deterministic && d_h < 256;
    launch.needs_tokens = needs_tokens;
    launch.needs_weights = needs_weights;
    launch.stream = current_stream(device);

    p.batch = static_cast<int>(axes.batch);
    p.length = axes.length;
    p.row_tiles = plan.row_tiles;
    p.dense_batch = axes.dense_batch;
    p.dense_token = axes.dense_token;
    p.heads = static_cast<int>(sizes.heads);
    p.subnets = static_cast<int>(sizes.subnets);
    p.subnet_dim = static_cast<int>(sizes.subnet_dim);
    p.subnet_tiles = plan.subnet_tiles;
    if (r) {
        p.r = r->data_ptr();
        p.r_is_float = r_type == ScalarType::Float;
        p.r_batch = axes.other_batch;
        p.r_token = axes.other_token;
        p.r_head = r->stride(r->dim() - 2);
    }
    p.whole = plan.whole;
    p.parts = plan.parts;
    p.token_parts = plan.token_parts;
    p.accumulate = accumulate;
    p.dq = grads.dq.data_ptr();
    p.dr = needs_tokens && r ? grads.dr.data_ptr() : nullptr;
    p.dk = out[0].data_ptr();
    p.du = out[1].data_ptr();
    p.dv = out[2].data_ptr();

    // workspace, freed to the caching allocator on return
    std::vector<Tensor> workspace;
    auto floats = [&](int64_t count) {
        workspace.push_back(empty({count}, ScalarType::Float));
        return static_cast<float *>(workspace.back().data_ptr());
    };
    const int64_t tile = backward_rows * d_h, query_tiles = sizes.heads * axes.batch * plan.row_tiles;
    if (launch.fused) {
        const int64_t count = query_tiles * tile, dr_count = p.dr ? query_tiles * sizes.subnets * backward_rows : 0;
        p.query_sums = floats(count + dr_count);
        if (p.dr) p.dr_sums = p.query_sums + count;
        launch.sums_bytes = (count + dr_count) * sizeof(float);
    } else if (needs_tokens && (plan.token_parts > 1 || router)) {
        p.query_parts = floats(query_tiles * plan.token_parts * tile);
    }
    if (needs_weights && plan.items > plan.whole) p.weight_parts = floats(static_cast<int64_t>(plan.items - plan.whole) * plan.parts * 3 * tile);

    if (router) {
        GateParams &g = launch.gate;
        g.q = q.data_ptr();
        g.q_batch = axes.q_batch;
        g.q_token = axes.q_token;
        g.q_head = q.stride(q.dim() - 2);
        g.batch = p.batch;
        g.row_tiles = p.row_tiles;
        g.heads = p.heads;
        g.subnets = p.subnets;
        g.length = p.length;
        g.dense_batch = p.dense_batch;
        g.dense_token = p.dense_token;
        g.w = router->w.data_ptr();
        g.w_is_float = router->w.scalar_type() == ScalarType::Float;
        g.eps = router->eps;
        g.r = static_cast<float *>(r->data_ptr());
        g.scale = floats(sizes.tokens * sizes.heads);
        g.dr = static_cast<float *>(p.dr);
        g.dp = floats(sizes.tokens * sizes.heads * sizes.subnets);
        const int64_t tiles = axes.batch * plan.row_tiles;
        g.dw_part_count = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(tiles, 2 * sms / sizes.heads)));
        if (router->dw) {
            g.dw = router->dw->data_ptr();
            g.dw_parts = floats(g.dw_part_count * sizes.heads * d_h * sizes.subnets);
        }
    }

    const int swizzle = d_h % 64 == 0 ? 128 : 64, panel = swizzle / element_bytes;
    auto rows = [&](const char *name, const Tensor &x, int64_t batch_stride, int64_t token_stride) {
        return tensor_map(name, x.data_ptr(), launch.bf16,
                          {{d_h, 1, panel}, {sizes.heads, x.stride(x.dim() - 2), 1}, {axes.length, token_stride, backward_rows}, {axes.batch, batch_stride, 1}},
                          swizzle);
    };
    auto weights = [&](const char *name, const Tensor &x, int box) {
        return tensor_map(name, x.data_ptr(), launch.bf16,
                          {{d_h, 1, panel}, {sizes.subnet_dim, d_h, box}, {sizes.heads * sizes.subnets, sizes.subnet_dim * d_h, 1}}, swizzle);
    };
    launch.q = rows("q", q, axes.q_batch, axes.q_token);
    launch.grad_out = rows("grad_out", grad_out, g_batch, g_token);
    launch.k = weights("k", k, backward_rows);
    launch.u = weights("u", u, backward_rows);
    launch.v = weights("v", v, backward_rows);
    const int token_rows = d_h == 256 ? TokenPolicy<256>::inter : TokenPolicy<128>::inter;
    launch.token_k = weights("k", k, token_rows);
    launch.token_u = weights("u", u, token_rows);
    launch.token_v = weights("v", v, token_rows);
    check_cuda(launch_backward(d_h, launch));
    return grads;
}

void check_grad_out(const Tensor &grad_out, const Tensor &q) {
    STD_TORCH_CHECK(grad_out.scalar_type() == q.scalar_type(), "grad_out must have the dtype of q");
    check_same_device(grad_out, "grad_out", q);
    bool same = grad_out.dim() == q.dim();
    for (int64_t i = 0; same && i < q.dim(); ++i) same = grad_out.size(i) == q.size(i);
    STD_TORCH_CHECK(same, "grad_out must have the shape of q; grad_out is ", shape_of(grad_out), " but q is ", shape_of(q));
}

ProblemSizes check_all(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r) {
    const ProblemSizes sizes = check_operands(q, k, u, v);
    check_grad_out(grad_out, q);
    if (r) check_r(*r, q, sizes);
    return sizes;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v,
                                                            const std::optional<Tensor> &r, bool deterministic, bool needs_tokens, bool needs_weights) {
    const ProblemSizes sizes = check_all(grad_out, q, k, u, v, r);
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const NvtxRange nvtx("flashmhf backward");
    check_capability(q.get_device_index());
    auto weight_grad = [&](const Tensor &x) {
        return needs_weights ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_empty(x, std::vector<int64_t>{0});
    };
    const WeightGrads out{weight_grad(k), weight_grad(u), weight_grad(v)};
    const Grads grads = run(grad_out, q, k, u, v, r, sizes, deterministic, needs_tokens, needs_weights, out, false);
    return {grads.dq, out[0], out[1], out[2], grads.dr};
}

std::tuple<Tensor, Tensor> backward_accumulate_(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v,
                                                const std::optional<Tensor> &r, bool deterministic, bool needs_tokens, bool needs_weights, Tensor dk,
                                                Tensor du, Tensor dv) {
    const ProblemSizes sizes = check_all(grad_out, q, k, u, v, r);
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const NvtxRange nvtx("flashmhf backward_accumulate_");
    check_capability(q.get_device_index());
    auto check_buffer = [&](const Tensor &x, const char *name) {
        STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, " must be float32");
        check_same_device(x, name, q);
        bool same = x.dim() == 4 && x.is_contiguous();
        for (int i = 0; same && i < 4; ++i) same = x.size(i) == k.size(i);
        STD_TORCH_CHECK(same, name, " must be contiguous with the shape of k; ", name, " is ", shape_of(x), " but k is ", shape_of(k));
    };
    check_buffer(dk, "dk");
    check_buffer(du, "du");
    check_buffer(dv, "dv");
    const Grads grads = run(grad_out, q, k, u, v, r, sizes, deterministic, needs_tokens, needs_weights, {dk, du, dv}, true);
    return {grads.dq, grads.dr};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u,
                                                                  const Tensor &v, const Tensor &w, double eps, bool deterministic, bool needs_tokens,
                                                                  bool needs_weights) {
    const ProblemSizes sizes = check_all(grad_out, q, k, u, v, std::nullopt);
    check_w(w, q, sizes);
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const NvtxRange nvtx("flashmhf gated_backward");
    check_capability(q.get_device_index());
    auto weight_grad = [&](const Tensor &x) {
        return needs_weights ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_empty(x, std::vector<int64_t>{0});
    };
    const WeightGrads out{weight_grad(k), weight_grad(u), weight_grad(v)};
    Router router{w, static_cast<float>(eps), std::nullopt};
    const Tensor dw = weight_grad(w);
    if (needs_weights) router.dw = dw;
    Grads grads;
    if (needs_tokens || needs_weights) grads = run(grad_out, q, k, u, v, std::nullopt, sizes, deterministic, true, needs_weights, out, false, &router);
    if (!needs_tokens) grads.dq = torch::stable::new_empty(q, std::vector<int64_t>{0});
    return {grads.dq, out[0], out[1], out[2], dw};
}

}  // namespace flashmhf
