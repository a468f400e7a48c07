// The launch planner of the backward: pure host code, tested without a GPU.
#pragma once

#include <cstdint>

#include "forward/schedule.cuh"

namespace flashmhf {

// T = batch * length tokens (tiles never cross a sequence), H heads, E sub-networks of width d_e.
struct BackwardShape {
    int64_t batch, length;
    int heads, subnets;
    int64_t subnet_dim;
};

// What a call computes.
struct BackwardTask {
    int head_dim;
    bool tokens, weights;  // needed: dQ and dR; dK, dU and dV
    bool gate, router;     // R is not all ones; R comes from W, whose gradient is needed with the weights'
    bool deterministic;
    bool turns;  // deterministic, by the fused kernel whose CTAs add in turn; see takes_turns()
    bool fused() const { return may_fuse() && (!deterministic || turns); }  // one kernel for everything
    bool may_fuse() const { return tokens && weights && head_dim < 256; }
};

struct BackwardPlan {
    int row_tiles;                  // of 64 tokens, of a sequence
    int subnet_tiles;               // of 64 inter rows, of a sub-network
    int items;                      // H * E * subnet_tiles: CTAs of an inter-stationary kernel when nothing is split
    int whole, parts;               // items taken by one CTA each; CTAs that share the tokens of each of the others
    int token_blocks;               // of two row tiles: CTAs of a head of the token-stationary kernel
    int token_parts;                // CTAs that share the sub-networks of a token block
    int router_parts;               // CTAs that share the tokens of a head's dW
    int gate_rows_parts;            // CTAs that share the tokens of a head's R
    double inter_time, token_time;  // predicted makespans of the two kinds of kernels, in tiles of 64 x 64 of all eight products
    int inter_blocks() const { return whole + (items - whole) * parts; }
};

// The share of one CTA of an inter-stationary kernel: its item, and token tiles begin..end of it. The kernel and the planner's tests run
// this.
struct TokenShare {
    int item, part, begin, end;
    bool split;
};
// Neighbouring blocks take the same tokens of neighbouring items.
FLASHMHF_HOST_DEVICE TokenShare token_share(int block, int items, int whole, int parts, int tiles) {
    if (block < whole) return {block, 0, 0, tiles, false};
    const int part = (block - whole) / (items - whole), index = block - whole - part * (items - whole);
    return {whole + index, part, static_cast<int>(static_cast<int64_t>(tiles) * part / parts),
            static_cast<int>(static_cast<int64_t>(tiles) * (part + 1) / parts), true};
}

// Whether a deterministic task is faster in turns than in two kernels without atomics.
bool takes_turns(const BackwardShape &shape, const BackwardTask &task, int sms);

// One launch for all heads of `shape`. Throws std::invalid_argument for shapes beyond the index range.
BackwardPlan plan_backward(const BackwardShape &shape, int sms);

// The fp32 workspace of a launch: where its buffers begin, in floats; `none` for what the task does without.
struct BackwardWorkspace {
    static constexpr int64_t none = -1;
    int64_t query;    // sums of dQ tiles (fused), or their parts
    int64_t dr_sums;  // right behind `query`; all up to sums_floats is cleared at once
    int64_t query_turns, dr_turns;
    int64_t weight_parts;            // of split items
    int64_t r, scale, dr, dw_parts;  // the router's; no dr beside dr_sums
    int64_t sums_floats;             // of all that is cleared
    int64_t floats;                  // of everything
};
BackwardWorkspace backward_workspace(const BackwardShape &shape, const BackwardPlan &plan, const BackwardTask &task);

// Heads are independent. A call takes them in groups of nearly equal size, one launch after the other in the same workspace.
struct HeadGroups {
    int heads, count;
    int begin(int group) const { return static_cast<int>(static_cast<int64_t>(heads) * group / count); }
    int size(int group) const { return begin(group + 1) - begin(group); }
};
// The groups with the least workspace whose predicted time is within 0.6 % of the shortest; a small workspace is not worth a second launch.
HeadGroups plan_head_groups(const BackwardShape &shape, const BackwardTask &task, int sms);

}  // namespace flashmhf
