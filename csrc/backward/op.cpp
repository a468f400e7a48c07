// check -> allocate -> plan -> launch
#include "backward/launch.h"
#include "backward/policy.h"
#include "checks.h"
#include "common/tensor_map.h"
#include "device.h"
#include "operators.h"

#include <algorithm>
#include <array>
#include <vector>

namespace flashmhf {
namespace {

// Where the weight gradients go: fresh tensors in q's type, or fp32 buffers to add to.
using WeightGrads = std::array<Tensor, 3>;

// The token axes of q, R and grad_out together. What does not share q's axes is copied to a contiguous tensor, which has every axis.
TokenAxes all_token_axes(const Tensor &q, std::optional<Tensor> &r, Tensor &grad_out, int64_t &g_batch, int64_t &g_token) {
    if (!grad_out.is_contiguous()) {
        std::optional<TokenAxes> axes = collapse(q, grad_out);
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
    const TokenAxes axes = token_axes(q, r);
    const int64_t row = q.size(q.dim() - 2) * q.size(q.dim() - 1);
    g_batch = axes.dense_batch * row;
    g_token = axes.dense_token * row;
    return axes;
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

// Addresses of a call's tensors; a launch takes a group of consecutive heads of them.
struct Call {
    BackwardTask task;
    TokenAxes axes;
    ProblemSizes sizes;
    const Tensor &q, &k, &u, &v;
    Tensor grad_out;
    int64_t g_batch, g_token;  // its strides
    std::optional<Tensor> r;
    bool needs_dq;
    Grads grads;
    const WeightGrads &out;
    bool accumulate;
    const Router *router;
    cudaStream_t stream;
};

// What lies `heads` heads into dimension `dim` of x.
void *at_head(const Tensor &x, int64_t dim, int64_t heads) {
    return static_cast<char *>(x.data_ptr()) + heads * x.stride(dim) * static_cast<int64_t>(x.element_size());
}

BackwardShape shape_of_heads(const Call &call, int heads) {
    return {call.axes.batch, call.axes.length, heads, static_cast<int>(call.sizes.subnets), call.sizes.subnet_dim};
}

void launch_heads(const Call &call, int first, int heads, const BackwardPlan &plan, float *workspace) {
    const BackwardTask &task = call.task;
    const TokenAxes &axes = call.axes;
    const Tensor &q = call.q;
    const int64_t head_axis = q.dim() - 2, subnets = call.sizes.subnets, subnet_dim = call.sizes.subnet_dim;
    const int d_h = task.head_dim;
    const BackwardShape shape = shape_of_heads(call, heads);
    const BackwardWorkspace places = backward_workspace(shape, plan, task);
    auto floats = [&](int64_t place) { return place == BackwardWorkspace::none ? nullptr : workspace + place; };

    BackwardLaunch launch{};
    launch.plan = plan;
    launch.bf16 = q.scalar_type() == ScalarType::BFloat16;
    launch.fused = task.fused();
    launch.needs_tokens = task.tokens;
    launch.needs_weights = task.weights;
    launch.stream = call.stream;
    launch.sums_bytes = places.sums_floats * sizeof(float);

    BackwardParams &p = launch.params;
    p.batch = static_cast<int>(axes.batch);
    p.length = axes.length;
    p.row_tiles = plan.row_tiles;
    p.dense_batch = axes.dense_batch;
    p.dense_token = axes.dense_token;
    p.heads = heads;
    p.subnets = shape.subnets;
    p.subnet_dim = static_cast<int>(subnet_dim);
    p.subnet_tiles = plan.subnet_tiles;
    p.dq_heads = static_cast<int>(call.sizes.heads);
    p.whole = plan.whole;
    p.parts = plan.parts;
    p.token_parts = plan.token_parts;
    p.accumulate = call.accumulate;
    (launch.fused ? p.query_sums : p.query_parts) = floats(places.query);
    p.dr_sums = floats(places.dr_sums);
    p.query_turns = reinterpret_cast<uint32_t *>(floats(places.query_turns));
    p.dr_turns = reinterpret_cast<uint32_t *>(floats(places.dr_turns));
    p.weight_parts = floats(places.weight_parts);
    if (call.needs_dq) p.dq = at_head(call.grads.dq, head_axis, first);
    if (task.weights) {
        p.dk = at_head(call.out[0], 0, first);
        p.du = at_head(call.out[1], 0, first);
        p.dv = at_head(call.out[2], 0, first);
    }
    if (task.router) {
        const Router &router = *call.router;
        GateParams &g = launch.gate;
        g.q = at_head(q, head_axis, first);
        g.q_batch = axes.q_batch;
        g.q_token = axes.q_token;
        g.q_head = q.stride(head_axis);
        g.batch = p.batch;
        g.row_tiles = p.row_tiles;
        g.heads = heads;
        g.subnets = p.subnets;
        g.length = p.length;
        g.dense_batch = p.dense_batch;
        g.dense_token = p.dense_token;
        g.w = at_head(router.w, 0, first);
        g.w_is_float = router.w.scalar_type() == ScalarType::Float;
        g.eps = router.eps;
        g.r = floats(places.r);
        g.scale = floats(places.scale);
        g.sums = p.query_sums;
        g.sums_floats = places.sums_floats;
        g.dr_sums = p.dr_sums;
        g.dr = floats(places.dr);
        g.dw_parts = floats(places.dw_parts);
        g.dw_part_count = plan.router_parts;
        if (router.dw) g.dw = at_head(*router.dw, 0, first);
        p.r = g.r;
        p.r_is_float = true;
        p.r_batch = axes.dense_batch * heads * subnets;
        p.r_token = axes.dense_token * heads * subnets;
        p.r_head = subnets;
        p.dr = floats(places.dr);
        p.dr_heads = heads;
    } else if (call.r) {
        p.r = at_head(*call.r, head_axis, first);
        p.r_is_float = call.r->scalar_type() == ScalarType::Float;
        p.r_batch = axes.other_batch;
        p.r_token = axes.other_token;
        p.r_head = call.r->stride(head_axis);
        if (task.tokens) p.dr = at_head(call.grads.dr, head_axis, first);
        p.dr_heads = p.dq_heads;
    }

    const int swizzle = swizzle_bytes_of(d_h), panel = panel_cols_of(d_h);
    auto rows = [&](const char *name, const Tensor &x, int64_t batch_stride, int64_t token_stride) {
        return tensor_map(
            name, at_head(x, head_axis, first), map_type(launch.bf16),
            {{d_h, 1, panel}, {heads, x.stride(head_axis), 1}, {axes.length, token_stride, tile_rows}, {axes.batch, batch_stride, 1}},
            swizzle);
    };
    auto weights = [&](const char *name, const Tensor &x, int box) {
        return tensor_map(name, at_head(x, 0, first), map_type(launch.bf16),
                          {{d_h, 1, panel}, {subnet_dim, d_h, box}, {heads * subnets, subnet_dim * d_h, 1}}, swizzle);
    };
    launch.q = rows("q", q, axes.q_batch, axes.q_token);
    launch.grad_out = rows("grad_out", call.grad_out, call.g_batch, call.g_token);
    launch.k = weights("k", call.k, tile_rows);
    launch.u = weights("u", call.u, tile_rows);
    launch.v = weights("v", call.v, tile_rows);
    const int token_rows = d_h == 256 ? TokenPolicy<256>::inter : TokenPolicy<128>::inter;
    launch.token_k = weights("k", call.k, token_rows);
    launch.token_u = weights("u", call.u, token_rows);
    launch.token_v = weights("v", call.v, token_rows);
    check_cuda(launch_backward(d_h, launch));
}

Grads run(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r,
          const ProblemSizes &sizes, bool deterministic, bool needs_tokens, bool needs_weights, const WeightGrads &out, bool accumulate,
          const Router *router = nullptr) {
    const bool needs_dq = needs_tokens;
    if (router && needs_weights) needs_tokens = true;  // dW needs dR
    auto grad = [&](const Tensor &x, bool needed) {
        return needed ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_empty(q, std::vector<int64_t>{0});
    };
    const int device = q.get_device_index();
    Call call{{static_cast<int>(sizes.head_dim), needs_tokens, needs_weights, r || router, router != nullptr, deterministic, false},
              {},
              sizes,
              q,
              k,
              u,
              v,
              grad_out,
              0,
              0,
              r,
              needs_dq,
              {grad(q, needs_dq), grad(r ? *r : q, needs_tokens && r)},
              out,
              accumulate,
              router,
              current_stream(device)};
    if (sizes.tokens == 0 || (!needs_tokens && !needs_weights)) {
        if (needs_weights && !accumulate)
            for (Tensor x : out) torch::stable::zero_(x);
        if (router && router->dw) {
            Tensor dw = *router->dw;
            torch::stable::zero_(dw);
        }
        return call.grads;
    }
    call.axes = all_token_axes(q, call.r, call.grad_out, call.g_batch, call.g_token);
    check_readable(q, call.axes);

    int sms = 0;
    check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    const BackwardShape all_heads = shape_of_heads(call, static_cast<int>(sizes.heads));
    call.task.turns = takes_turns(all_heads, call.task, sms);
    const HeadGroups groups = plan_head_groups(all_heads, call.task, sms);
    std::vector<BackwardPlan> plans;
    int64_t floats = 0;
    for (int i = 0; i < groups.count; ++i) {
        const BackwardShape shape = shape_of_heads(call, groups.size(i));
        plans.push_back(plan_backward(shape, sms));
        floats = std::max(floats, backward_workspace(shape, plans.back(), call.task).floats);
    }
    // Returned to PyTorch's allocator at the end, which keeps the order of the stream; so do the groups, which all use it.
    const Tensor workspace = torch::stable::new_empty(q, std::vector<int64_t>{floats}, ScalarType::Float);
    for (int i = 0; i < groups.count; ++i)
        launch_heads(call, groups.begin(i), groups.size(i), plans[i], static_cast<float *>(workspace.data_ptr()));
    return call.grads;
}

void check_grad_out(const Tensor &grad_out, const Tensor &q) {
    STD_TORCH_CHECK(grad_out.scalar_type() == q.scalar_type(), "grad_out must have the dtype of q");
    check_same_device(grad_out, "grad_out", q);
    bool same = grad_out.dim() == q.dim();
    for (int64_t i = 0; same && i < q.dim(); ++i) same = grad_out.size(i) == q.size(i);
    STD_TORCH_CHECK(same, "grad_out must have the shape of q; grad_out is ", shape_of(grad_out), " but q is ", shape_of(q));
}

ProblemSizes check_all(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v,
                       const std::optional<Tensor> &r) {
    const ProblemSizes sizes = check_operands(q, k, u, v);
    check_grad_out(grad_out, q);
    if (r) check_r(*r, q, sizes);
    return sizes;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u,
                                                            const Tensor &v, const std::optional<Tensor> &r, bool deterministic,
                                                            bool needs_tokens, bool needs_weights) {
    const ProblemSizes sizes = check_all(grad_out, q, k, u, v, r);
    const DeviceScope scope(q.get_device_index(), "flashmhf backward");
    auto weight_grad = [&](const Tensor &x) {
        return needs_weights ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_empty(x, std::vector<int64_t>{0});
    };
    const WeightGrads out{weight_grad(k), weight_grad(u), weight_grad(v)};
    const Grads grads = run(grad_out, q, k, u, v, r, sizes, deterministic, needs_tokens, needs_weights, out, false);
    return {grads.dq, out[0], out[1], out[2], grads.dr};
}

std::tuple<Tensor, Tensor> backward_accumulate_(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v,
                                                const std::optional<Tensor> &r, bool deterministic, bool needs_tokens, bool needs_weights,
                                                Tensor dk, Tensor du, Tensor dv) {
    const ProblemSizes sizes = check_all(grad_out, q, k, u, v, r);
    const DeviceScope scope(q.get_device_index(), "flashmhf backward_accumulate_");
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
                                                                  const Tensor &v, const Tensor &w, double eps, bool deterministic,
                                                                  bool needs_tokens, bool needs_weights) {
    const ProblemSizes sizes = check_all(grad_out, q, k, u, v, std::nullopt);
    check_w(w, q, sizes);
    const DeviceScope scope(q.get_device_index(), "flashmhf gated_backward");
    auto weight_grad = [&](const Tensor &x) {
        return needs_weights ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_empty(x, std::vector<int64_t>{0});
    };
    const WeightGrads out{weight_grad(k), weight_grad(u), weight_grad(v)};
    Router router{w, static_cast<float>(eps), std::nullopt};
    const Tensor dw = weight_grad(w);
    if (needs_weights) router.dw = dw;
    const Grads grads = run(grad_out, q, k, u, v, std::nullopt, sizes, deterministic, needs_tokens, needs_weights, out, false, &router);
    return {grads.dq, out[0], out[1], out[2], dw};
}

}  // namespace flashmhf
