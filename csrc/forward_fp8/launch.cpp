#include "forward_fp8/launch.h"

#include "common/tensor_map.h"
#include "forward_fp8/policy.h"

namespace flashmhf {
namespace {

constexpr int chunk_inter = 32, gate_columns = ForwardFp8Policy<128>::gate_chunk;

CUtensorMap ku_map(const char *what, const Shape &s, const void *x, int panel, int fetch_bytes) {
    return tensor_map(what, x, MapType::fp8,
                      {{s.head_dim, 1, panel},
                       {s.subnet_dim, s.head_dim, chunk_inter},
                       {int64_t{s.weight_heads()} * s.subnets, s.subnet_dim * s.head_dim, 1}},
                      panel, fetch_bytes);
}

// Of W of a head.
int64_t router_bytes(const ForwardFp8Problem &problem) {
    return int64_t{problem.shape.head_dim} * problem.shape.subnets * (gate_is_float(problem.gate) ? 4 : element_bytes);
}
// W of a head, where there is room, a bulk copy can read it, all rows of a CTA are of one head, and the gate fits a tile.
bool router_in_shared_memory(const ForwardFp8Problem &problem, const ForwardPlan &plan) {
    return has_router(problem.gate) && of_one_head(problem, plan) && router_bytes(problem) <= plan.pieces &&
           problem.shape.subnets <= gate_columns && reinterpret_cast<uintptr_t>(problem.w) % tma_alignment == 0;
}

}  // namespace

int64_t workspace_forward_fp8(const ForwardFp8Problem &problem, const ForwardPlan &plan) {
    const bool rows = has_router(problem.gate) && !router_in_shared_memory(problem, plan);
    const int64_t ctas = int64_t{plan.schedule.clusters} * plan.schedule.lanes * plan.cluster_size;
    return plan.workspace() + (rows ? ctas * plan.consumers * tile_rows * problem.shape.subnets : 0);
}

ForwardFp8Launch prepare_forward_fp8(const ForwardFp8Problem &problem, const ForwardPlan &plan, float *workspace) {
    const Shape &s = problem.shape;
    const int d_h = s.head_dim, panel = d_h % 128 == 0 ? 128 : d_h % 64 == 0 ? 64 : 32;
    const int64_t row = int64_t{s.heads} * d_h;  // elements of a token
    const TokenTensor out{problem.out, problem.dense.batch * row, problem.dense.token * row, d_h};
    ForwardFp8Launch launch{};
    launch.bf16 = problem.bf16;
    launch.plan = plan;
    launch.q = token_map("q", problem.bf16, s, problem.q);
    const int fetch = fetch_bytes(plan);
    launch.k = ku_map("k8", s, problem.k, panel, fetch);
    launch.u = ku_map("u8", s, problem.u, panel, fetch);
    launch.v = tensor_map("v8", problem.v, MapType::fp8,
                          {{s.subnet_dim, 1, tile_inter},
                           {d_h, s.subnet_dim, d_h / plan.row_ctas},
                           {int64_t{s.weight_heads()} * s.subnets, s.subnet_dim * d_h, 1}},
                          tile_inter, fetch);
    launch.out = token_map("the output", problem.bf16, s, out);

    ForwardFp8Params &p = launch.params;
    static_cast<ForwardParams &>(p) = forward_params(problem, plan, workspace);
    const int64_t plane = int64_t{s.weight_heads()} * s.subnets;
    p.k_scales = problem.scales;
    p.u_scales = p.k_scales + plane;
    p.v_scales = p.u_scales + plane;
    if (router_in_shared_memory(problem, plan)) p.router_bytes = static_cast<int>(router_bytes(problem));
    else if (has_router(problem.gate)) p.gate_rows = workspace + plan.workspace();
    launch.shared_memory = plan.shared_memory + (p.router_bytes ? plan.pieces : 0);

    // TMA reads from multiples of four columns on: all sub-networks fit a tile wherever it begins.
    const int furthest = s.subnets % 4 == 0 ? 0 : s.subnets % 2 == 0 ? 2 : 3;
    p.gate_tiles = s.subnets + furthest <= gate_columns && gate_by_tma(problem);
    if (p.gate_tiles) launch.r = gate_map(problem, gate_columns);
    return launch;
}

cudaError_t launch_forward_fp8(int head_dim, const ForwardFp8Launch &launch, cudaStream_t stream) {
    return ForwardFp8HeadDims::dispatch(head_dim, [&]<int d_h>() { return launch_forward_fp8<d_h>(launch, stream); });
}

}  // namespace flashmhf
