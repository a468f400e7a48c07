#include "forward/launch.h"

#include <atomic>
#include <random>

#include "common/tensor_map.h"
#include "forward/policy.h"

namespace flashmhf {

namespace {

// Another one every time, never 0: a counter from a random start, scrambled (splitmix64 maps no two counts to one token).
uint64_t launch_token() {
    static std::atomic<uint64_t> count{std::random_device{}() * 0x100000000ull + std::random_device{}()};
    for (;;) {
        uint64_t z = count.fetch_add(0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        if (z) return z;
    }
}

bool bulk_aligned(const void *x) { return reinterpret_cast<uintptr_t>(x) % tma_alignment == 0; }

// Few sub-networks: a tile holds all of them wherever it begins.
bool gate_in_tiles(const ForwardProblem &problem) {
    return problem.shape.head_dim <= 128 && problem.shape.subnets <= 28 && gate_by_tma(problem);
}

}  // namespace

bool gate_by_tma(const ForwardProblem &problem) {
    const Shape &s = problem.shape;
    auto strided = [](int64_t size, int64_t stride) { return size == 1 || (stride > 0 && stride * 4 % tma_alignment == 0); };
    return problem.gate == Gate::r_float && (s.heads == 1 || problem.r.head_stride == s.subnets) &&
           strided(s.length, problem.r.token_stride) && strided(s.batch, problem.r.batch_stride) && bulk_aligned(problem.r.data);
}

bool of_one_head(const ForwardProblem &problem, const ForwardPlan &plan) {
    const int64_t tiles = problem.shape.batch * plan.row_tiles;
    return problem.shape.group == 1 || tiles % plan.consumers == 0;
}

bool may_bundle(const ForwardProblem &problem) { return !gate_is_given(problem.gate); }

int fetch_bytes(const ForwardPlan &plan) { return plan.schedule.slices > 1 && plan.blocks == 1 ? 128 : 256; }

ForwardParams forward_params(const ForwardProblem &problem, const ForwardPlan &plan, float *workspace) {
    const Shape &s = problem.shape;
    const int64_t row = int64_t{s.heads} * s.head_dim;  // elements of a token
    ForwardParams p{};
    p.schedule = plan.schedule;
    p.cluster_size = plan.cluster_size;
    p.row_ctas = plan.row_ctas;
    p.consumers = plan.consumers;
    p.batch = static_cast<int>(s.batch);
    p.length = s.length;
    p.row_tiles = plan.row_tiles;
    p.blocks = plan.blocks;
    p.bundle = plan.bundle;
    p.bundles = s.group / plan.bundle;
    p.head_tiles = static_cast<int>(s.batch) * plan.row_tiles;
    p.tile_shift = plan.bundle == 1 ? 6 : plan.bundle == 2 ? 5 : 4;
    static_assert(tile_rows == 64);
    p.sum_threads = plan.sum_threads;
    p.slice_pieces = plan.slice_pieces;
    p.spare_pieces = plan.spare_pieces;
    p.late_successor = plan.late_successor;
    p.subnets = s.subnets;
    p.subnet_tiles = plan.subnet_tiles;
    p.out = problem.out;
    p.out_batch = problem.dense.batch * row;
    p.out_token = problem.dense.token * row;
    p.gate = problem.gate;
    p.gate_data = has_router(problem.gate) ? problem.w : problem.r.data;
    p.r_batch = problem.r.batch_stride;
    p.r_token = problem.r.token_stride;
    p.r_head = problem.r.head_stride;
    p.eps = problem.eps;
    p.partials = workspace;
    p.flags = plan.flags ? reinterpret_cast<uint64_t *>(workspace + plan.partials) : nullptr;
    if (plan.flags) p.token = launch_token();
    return p;
}

CUtensorMap gate_map(const ForwardProblem &problem, int columns) {
    const Shape &s = problem.shape;
    return tensor_map(
        "r", problem.r.data, MapType::fp32,
        {{int64_t{s.heads} * s.subnets, 1, columns}, {s.length, problem.r.token_stride, tile_rows}, {s.batch, problem.r.batch_stride, 1}},
        columns * 4 == 128 ? 128 : 0);
}

ForwardLaunch prepare_forward(const ForwardProblem &problem, const ForwardPlan &plan, float *workspace) {
    const Shape &s = problem.shape;
    const int d_h = s.head_dim;
    const int64_t row = int64_t{s.heads} * d_h;  // elements of a token
    const TokenTensor out{problem.out, problem.dense.batch * row, problem.dense.token * row, d_h};
    auto weights = [&](const char *what, const void *data) {
        const int box_rows = plan.schedule.slices > 1 ? slice_box_rows : tile_inter / plan.row_ctas;
        return weight_map(what, problem.bf16, s, data, box_rows, fetch_bytes(plan));
    };
    ForwardLaunch launch{};
    launch.bf16 = problem.bf16;
    launch.plan = plan;
    // A bundle's heads are the last axis: rows of a tile are tokens of its first head, then of the next.
    auto rows = [&](const char *what, const TokenTensor &x) {
        if (plan.bundle == 1) return token_map(what, problem.bf16, s, x);
        return tensor_map(what, x.data, map_type(problem.bf16),
                          {{d_h, 1, panel_cols_of(d_h)},
                           {s.heads, x.head_stride, 1},
                           {s.length, x.token_stride, tile_rows / plan.bundle},
                           {plan.bundle, x.head_stride, plan.bundle}},
                          swizzle_bytes_of(d_h));
    };
    launch.q = rows("q", problem.q);
    launch.k = weights("k", problem.k);
    launch.u = weights("u", problem.u);
    launch.v = weights("v", problem.v);
    launch.out = rows("the output", out);

    ForwardParams &p = launch.params;
    p = forward_params(problem, plan, workspace);
    // W of a head, where there is room, a bulk copy can read it, and all rows of a CTA are of one head or bundle.
    if (has_router(problem.gate) && of_one_head(problem, plan)) {
        const int64_t bytes = int64_t{d_h} * s.subnets * (gate_is_float(problem.gate) ? 4 : element_bytes);
        const int room = plan.schedule.slices > 1 ? plan.spare_gate : plan.pieces;
        p.head_router_bytes = static_cast<int>(bytes);
        if (bytes * plan.bundle <= room && bulk_aligned(p.gate_data)) p.router_bytes = p.head_router_bytes * plan.bundle;
    }
    const bool pieces = plan.flags || (p.router_bytes && plan.schedule.slices == 1);
    launch.shared_memory = plan.shared_memory + (pieces ? plan.pieces : 0);

    p.gate_tiles = gate_in_tiles(problem);
    if (p.gate_tiles) launch.r = gate_map(problem, 32);
    return launch;
}

cudaError_t launch_forward(int head_dim, const ForwardLaunch &launch, cudaStream_t stream) {
    return ForwardHeadDims::dispatch(head_dim, [&]<int d_h>() { return launch_forward<d_h>(launch, stream); });
}

}  // namespace flashmhf
