#include "forward/launch.h"

#include <atomic>
#include <random>

#include "common/driver.h"
#include "common/head_dims.h"
#include "forward/e4m3/policy.h"
#include "forward/f16/policy.h"

namespace flashmhf {
namespace {

// Another one every time, never 0: a counter from a random start, scrambled (splitmix64 maps no two counts to one number).
uint64_t launch_nonce() {
    static std::atomic<uint64_t> count{std::random_device{}() * 0x100000000ull + std::random_device{}()};
    for (;;) {
        uint64_t z = count.fetch_add(0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        if (z) return z;
    }
}

bool is_fp8(const ForwardProblem &problem) { return problem.format == WeightFormat::e4m3; }

// Columns of a tile of the gate; 0 where the producer does not bring it.
int gate_columns(const ForwardProblem &problem) {
    if (is_fp8(problem))
        return ForwardFp8HeadDims::dispatch(problem.shape.head_dim, []<int d_h>() { return int{ForwardFp8Policy<d_h>::gate_chunk}; });
    return ForwardHeadDims::dispatch(problem.shape.head_dim, []<int d_h>() {
        using P = ForwardPolicy<d_h>;
        return P::gate_early ? P::gate_chunk : 0;
    });
}

// Whether TMA brings the gate: R is fp32 with heads side by side at strides that it takes, and a tile holds all sub-networks wherever it
// begins, which is at a multiple of four columns.
bool gate_in_tiles(const ForwardProblem &problem) {
    const Shape &s = problem.shape;
    const int furthest = s.subnets % 4 == 0 ? 0 : s.subnets % 2 == 0 ? 2 : 3;
    const bool fits = s.subnets + (is_fp8(problem) ? furthest : 4) <= gate_columns(problem);
    return fits && problem.gate == Gate::r_float && (s.heads == 1 || problem.r.head_stride == s.subnets) &&
           strided(s.length, problem.r.token_stride, 4) && strided(s.batch, problem.r.batch_stride, 4) && aligned(problem.r.data);
}
CUtensorMap gate_map(const ForwardProblem &problem) {
    const Shape &s = problem.shape;
    const int columns = gate_columns(problem);
    return tensor_map(
        "r", problem.r.data, MapType::fp32,
        {{int64_t{s.heads} * s.subnets, 1, columns}, {s.length, problem.r.token_stride, tile_rows}, {s.batch, problem.r.batch_stride, 1}},
        columns * 4 == 128 ? 128 : 0);
}

// Bytes of W of a head that CTAs keep in shared memory; 0 where there is no room, a bulk copy cannot read it, or the row tiles of a CTA are
// of several heads. In FP8 the gate must fit a tile, too.
int router_bytes(const ForwardProblem &problem, const ForwardPlan &plan) {
    const Shape &s = problem.shape;
    const bool one_head = s.group == 1 || s.batch * plan.row_tiles % plan.consumers == 0;
    if (!has_router(problem.gate) || !one_head || !aligned(problem.w)) return 0;
    if (is_fp8(problem) && s.subnets > gate_columns(problem)) return 0;
    const int64_t bytes = int64_t{s.head_dim} * s.subnets * (gate_is_float(problem.gate) ? 4 : element_bytes);
    const int room = !is_fp8(problem) && plan.schedule.slices > 1 ? plan.spare_gate : plan.shared_extra;
    return bytes * plan.bundle <= room ? static_cast<int>(bytes) : 0;
}

// Tensor maps of Q and the output. A bundle's heads are the last axis: rows of a tile are tokens of its first head, then of the next.
// The driver's text wants each stride to be a multiple of the one before, and does not check it: a bundle's last one is smaller.
CUtensorMap row_map(const char *what, const ForwardProblem &problem, const ForwardPlan &plan, const TokenTensor &x) {
    const Shape &s = problem.shape;
    if (plan.bundle == 1) return token_map(what, problem.bf16, s, x);
    return tensor_map(what, x.data, map_type(problem.bf16),
                      {{s.head_dim, 1, panel_cols_of(s.head_dim)},
                       {s.heads, x.head_stride, 1},
                       {s.length, x.token_stride, tile_rows / plan.bundle},
                       {plan.bundle, x.head_stride, plan.bundle}},
                      swizzle_bytes_of(s.head_dim));
}

void map_weights(const ForwardProblem &problem, const ForwardPlan &plan, ForwardLaunch &launch) {
    const Shape &s = problem.shape;
    const int d_h = s.head_dim, panel = fp8_panel_bytes(d_h);
    const bool slices = plan.schedule.slices > 1;
    // What the L2 brings from memory at least when it misses the weights. With few tokens each CTA streams weights of its own, a panel of
    // their rows at a time: 256 bytes would bring the next panel, or the next tiles of V in FP8, before they are wanted.
    const int fetch = slices && plan.blocks == 1 ? 128 : 256;
    auto f16 = [&](const char *what, const void *x) {
        return weight_map(what, problem.bf16, s, x, slices ? slice_box_rows : tile_inter / plan.row_ctas, fetch);
    };
    auto fp8 = [&](const char *what, const void *x, int64_t rows, int64_t columns, int box_rows, int box_columns) {
        return tensor_map(
            what, x, MapType::fp8,
            {{columns, 1, box_columns}, {rows, columns, box_rows}, {int64_t{s.weight_heads()} * s.subnets, s.subnet_dim * d_h, 1}},
            box_columns, fetch);
    };
    const bool is_f16 = !is_fp8(problem);
    launch.k = is_f16 ? f16("k", problem.k) : fp8("k", problem.k, s.subnet_dim, d_h, fp8_box_rows, panel);
    launch.u = is_f16 ? f16("u", problem.u) : fp8("u", problem.u, s.subnet_dim, d_h, fp8_box_rows, panel);
    launch.v = is_f16 ? f16("v", problem.v) : fp8("v", problem.v, d_h, s.subnet_dim, d_h / plan.row_ctas, tile_inter);
}

GateSource gate_source(const ForwardProblem &problem, const ForwardPlan &plan) {
    const TokenTensor &r = problem.r;
    const int bytes = router_bytes(problem, plan);
    return {.kind = problem.gate,
            .data = has_router(problem.gate) ? problem.w : r.data,
            .batch = r.batch_stride,
            .token = r.token_stride,
            .head = r.head_stride,
            .eps = problem.eps,
            .tiles = gate_in_tiles(problem),
            .router_bytes = bytes * plan.bundle,
            .head_router_bytes = bytes};
}

}  // namespace

bool may_bundle(const ForwardProblem &problem) { return !is_fp8(problem) && !gate_is_given(problem.gate); }

int64_t workspace_of(const ForwardProblem &problem, const ForwardPlan &plan) {
    const bool rows = is_fp8(problem) && has_router(problem.gate) && router_bytes(problem, plan) == 0;
    const int64_t ctas = int64_t{plan.schedule.clusters} * plan.schedule.abreast * plan.cluster_size;
    return plan.workspace() + (rows ? ctas * plan.consumers * tile_rows * problem.shape.subnets : 0);
}

ForwardLaunch prepare_forward(const ForwardProblem &problem, const ForwardPlan &plan, float *workspace) {
    const Shape &s = problem.shape;
    const int64_t row = int64_t{s.heads} * s.head_dim;  // elements of a token
    ForwardLaunch launch{};
    launch.format = problem.format;
    launch.bf16 = problem.bf16;
    launch.plan = plan;
    launch.q = row_map("q", problem, plan, problem.q);
    launch.out = row_map("the output", problem, plan, {problem.out, problem.dense.batch * row, problem.dense.token * row, s.head_dim});
    map_weights(problem, plan, launch);

    ForwardFp8Params &p = launch.params;
    static_cast<ForwardGrid &>(p) = plan;
    p.out = problem.out;
    p.out_batch = problem.dense.batch * row;
    p.out_token = problem.dense.token * row;
    p.gate = gate_source(problem, plan);
    if (p.gate.tiles) launch.r = gate_map(problem);
    p.parts.sums = workspace;
    if (plan.flags) p.parts = {workspace, reinterpret_cast<uint64_t *>(workspace + plan.partials), launch_nonce()};
    if (is_fp8(problem)) {
        const int64_t plane = int64_t{s.weight_heads()} * s.subnets;
        p.k_scales = problem.scales;
        p.u_scales = p.k_scales + plane;
        p.v_scales = p.u_scales + plane;
        if (has_router(problem.gate) && p.gate.router_bytes == 0) p.gate_rows = workspace + plan.workspace();
    }
    const bool holds_w = p.gate.router_bytes && (is_fp8(problem) || plan.schedule.slices == 1);
    launch.shared_memory = plan.shared_memory + (holds_w ? plan.shared_extra : 0);
    return launch;
}

cudaError_t launch_forward(int head_dim, const ForwardLaunch &launch, cudaStream_t stream) {
    auto fp8 = [&]<int d_h>() { return launch_forward<WeightFormat::e4m3, d_h>(launch, stream); };
    auto f16 = [&]<int d_h>() { return launch_forward<WeightFormat::same, d_h>(launch, stream); };
    const cudaError_t error =
        launch.format == WeightFormat::e4m3 ? ForwardFp8HeadDims::dispatch(head_dim, fp8) : ForwardHeadDims::dispatch(head_dim, f16);
    if (error || launch.plan.partials == 0 || launch.plan.flags) return error;  // nothing is split, or the clusters add
    return ForwardHeadDims::dispatch(head_dim,
                                     [&]<int d_h>() { return combine_parts<d_h>(launch.bf16, launch.plan, launch.params, stream); });
}

}  // namespace flashmhf
