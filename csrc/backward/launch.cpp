#include "backward/launch.h"

#include <stdexcept>

#include "backward/policy.h"
#include "common/driver.h"

namespace flashmhf {
namespace {

// `count` elements of `bytes` each into a tensor; null stays null.
template <typename Void> Void *at(Void *data, int64_t count, int bytes) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return data ? static_cast<Byte *>(data) + count * bytes : nullptr;
}
TokenTensor from_head(TokenTensor x, int head, int bytes) {
    x.data = at(x.data, head * x.head_stride, bytes);
    return x;
}
// x of one sequence with the heads of a group as sequences of one head.
TokenTensor heads_as_sequences(TokenTensor x, int group) {
    x.batch_stride = x.head_stride;
    x.head_stride *= group;
    return x;
}

HeadGroupLaunch prepare_heads(const BackwardProblem &problem, const BackwardPlan &call, int index, float *workspace) {
    const BackwardTask &task = call.task;
    const HeadGroupPlan &plan = call.launches[index];
    const BackwardWorkspace &places = call.workspaces[index];
    const int group = problem.shape.group, first_weights = call.groups.begin(index), first = first_weights * group,
              d_h = problem.shape.head_dim;
    Shape shape = problem.shape;
    shape.heads = call.groups.size(index) * group;
    auto floats = [&](int64_t place) { return place == BackwardWorkspace::none ? nullptr : workspace + place; };

    // This group's heads of each tensor.
    const int64_t weights_of_head = shape.subnets * shape.subnet_dim * d_h, router_of_head = int64_t{shape.subnets} * d_h;
    const int gate_bytes = gate_is_float(problem.gate) ? int{sizeof(float)} : element_bytes;
    const TokenTensor q = from_head(problem.q, first, element_bytes), grad_out = from_head(problem.grad_out, first, element_bytes);
    const int64_t weights_before = first_weights * weights_of_head;
    const void *k = at(problem.k, weights_before, element_bytes), *u = at(problem.u, weights_before, element_bytes),
               *v = at(problem.v, weights_before, element_bytes);

    HeadGroupLaunch launch{.bf16 = problem.bf16,
                           .kernels = call.kernels,
                           .needs_tokens = task.tokens,
                           .needs_weights = task.weights,
                           .plan = plan,
                           .sums_bytes = places.sums_floats * sizeof(float)};
    BackwardParams &p = launch.params;
    static_cast<Rows &>(p) = plan;
    static_cast<BackwardSplit &>(p) = plan;
    p.dense = problem.dense;
    p.group = group;
    p.heads = shape.heads;
    p.subnets = shape.subnets;
    p.subnet_dim = static_cast<int>(shape.subnet_dim);
    p.dq_heads = problem.shape.heads;
    (call.kernels == Kernels::pair ? p.query_parts : p.query_sums) = floats(places.query);
    p.dr_sums = floats(places.dr_sums);
    p.query_added = reinterpret_cast<uint32_t *>(floats(places.query_added));
    p.dr_added = reinterpret_cast<uint32_t *>(floats(places.dr_added));
    p.weight_parts = floats(places.weight_parts);
    p.dq = at(problem.dq, int64_t{first} * d_h, element_bytes);
    p.dk = at(problem.dk, weights_before, element_bytes);
    p.du = at(problem.du, weights_before, element_bytes);
    p.dv = at(problem.dv, weights_before, element_bytes);
    if (task.router) {
        const int64_t row = int64_t{shape.heads} * shape.subnets;  // R of a token
        RouterParams &g = launch.router;
        static_cast<Rows &>(g) = plan;
        g.q = q;
        g.dense = problem.dense;
        g.heads = shape.heads;
        g.subnets = shape.subnets;
        g.w = at(problem.w, first * router_of_head, gate_bytes);
        g.w_is_float = gate_is_float(problem.gate);
        g.eps = problem.eps;
        g.r = floats(places.r);
        g.scale = floats(places.scale);
        g.sums = p.query_sums;
        g.sums_floats = places.sums_floats;
        g.dr_sums = group == 1 ? p.dr_sums : nullptr;  // of groups: in another order, and turned into g.dr
        g.dr = floats(places.dr);
        g.dq = p.dq;
        g.dq_heads = p.dq_heads;
        g.dw_parts = floats(places.dw_parts);
        g.dw_part_count = plan.router_parts;
        g.dw = at(problem.dw, first * router_of_head, gate_bytes);
        p.r = {g.r, p.dense.batch * row, p.dense.token * row, shape.subnets};
        p.r_is_float = true;
        p.dr = floats(places.dr);
        p.dr_heads = shape.heads;
    } else if (gate_is_given(problem.gate)) {
        p.r = from_head(problem.r, first, gate_bytes);
        p.r_is_float = gate_is_float(problem.gate);
        p.dr = at(problem.dr, int64_t{first} * shape.subnets, gate_bytes);
        p.dr_heads = p.dq_heads;
    }

    // The view of the inter-stationary kernels.
    Shape view = shape;
    BackwardParams &of_groups = launch.group_params = p;
    if (group > 1) {
        view.heads = of_groups.heads = shape.weight_heads();
        view.batch = of_groups.batch = group;
        of_groups.r = heads_as_sequences(p.r, group);
    }

    auto maps = [&](const Shape &of, const TokenTensor &rows, const TokenTensor &grads, int box_rows) {
        auto weights = [&](const char *name, const void *x) { return weight_map(name, problem.bf16, shape, x, box_rows); };
        return BackwardMaps{token_map("q", problem.bf16, of, rows), token_map("grad_out", problem.bf16, of, grads), weights("k", k),
                            weights("u", u), weights("v", v)};
    };
    const int token_inter = BackwardHeadDims::dispatch(d_h, []<int dim>() { return int{TokenPolicy<dim>::inter}; });
    if (call.kernels == Kernels::pair && task.tokens)
        launch.maps = maps(shape, q, grad_out, token_inter);  // of the token-stationary kernel
    launch.group_maps = group == 1 ? maps(shape, q, grad_out, tile_inter)
                                   : maps(view, heads_as_sequences(q, group), heads_as_sequences(grad_out, group), tile_inter);
    return launch;
}

}  // namespace

BackwardTask backward_task(const BackwardProblem &problem) {
    return {.tokens = problem.dq || problem.dr || problem.dw,
            .weights = problem.dk != nullptr,
            .gate = problem.gate != Gate::ones,
            .router = has_router(problem.gate),
            .deterministic = problem.deterministic};
}

BackwardLaunch prepare_backward(const BackwardProblem &problem, const BackwardPlan &plan, float *workspace) {
    if (problem.shape.group > 1 && problem.shape.batch > 1) throw std::invalid_argument("grouped heads need one sequence");
    BackwardLaunch launch;
    for (int i = 0; i < plan.groups.count; ++i) launch.push_back(prepare_heads(problem, plan, i, workspace));
    return launch;
}

cudaError_t launch_backward(int head_dim, const BackwardLaunch &launch, cudaStream_t stream) {
    for (const HeadGroupLaunch &group : launch) {
        auto launch_it = [&]<int d_h>() { return launch_backward<d_h>(group, stream); };
        if (cudaError_t error = BackwardHeadDims::dispatch(head_dim, launch_it)) return error;
    }
    return cudaSuccess;
}

}  // namespace flashmhf
