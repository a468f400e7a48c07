// The launch planner of the backward: shape and device to kernels, groups of heads, grids and workspace. Pure host code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/device.h"
#include "common/geometry.h"
#include "common/problem.h"

namespace flashmhf {

// What the backward's planner counts with, in the time of one tile of 64 x 64 of all eight products (1.7 us on an H200 at d_h = 128, in
// proportion to d_h). They were measured on a chip (experiments/README.md).
struct BackwardCostModel {
    // A tile of all eight products on an H200, in microseconds for each of d_h. Only predictions in seconds need it.
    double tile_us = 1.7 / 128;
    // A CTA besides its tiles: loading K, U, V, the epilogue, and the later sum of its part.
    int64_t cta_tiles = 4;
    // A launch besides its CTAs, tiles * d_h: 40 us, in which the kernels before and after it drain and fill the device. That its CTAs do
    // not end together costs nothing where power sets the clock.
    int launch = 3072;
    // Ordered accumulation in the fused kernel, measured at d_h = 128: time of a tile over that of the unordered kernel; and, once a
    // launch, how far the CTAs of a head end up behind one another, in tiles for each inter tile of a head (9 us for all).
    double ordered_slowdown = 1.16, ordered_tiles = 5;
    // The pair of kernels without atomics: time of a tile over that of the fused kernel.
    double pair_slowdown = 1.27;

    constexpr int launch_tiles(int head_dim) const { return launch / head_dim; }
};

// What a call computes.
struct BackwardTask {
    bool tokens, weights;  // needed: dQ and dR; dK, dU and dV
    bool gate, router;     // R is not all ones; R comes from W, whose gradient is needed with the weights'
    bool deterministic;
};

// Which kernels compute it.
enum class Kernels {
    fused,    // one kernel for everything; dQ and dR are summed in no fixed order
    ordered,  // the same kernel; its CTAs add to each sum in the order of their items
    pair,  // a token-stationary kernel for dQ and dR, an inter-stationary one for dK, dU and dV: no atomics; each alone where one is needed
};
constexpr const char *kernels_names[] = {"fused", "ordered", "pair"};

// How CTAs divide a launch: what the kernels need of the plan.
struct BackwardSplit {
    int subnet_tiles;  // of tile_inter rows, of a sub-network
    int whole, parts;  // items of an inter-stationary kernel taken by one CTA each; CTAs that divide the tokens of each of the others
    int token_parts;   // CTAs that divide the sub-networks of a token block of the token-stationary kernel
};

// One launch: a group of heads of K, U and V, with all heads of q that share them.
struct HeadGroupPlan : Rows, BackwardSplit {
    int items;            // weight heads * E * subnet_tiles: CTAs of an inter-stationary kernel when nothing is split
    bool may_pair;        // CTAs of neighbouring items may be clusters of two: the device takes them, and both have the same tokens
    int token_blocks;     // of token_consumers row tiles: CTAs of a head of the token-stationary kernel
    int router_parts;     // CTAs that divide the tokens of a head's dW
    int gate_rows_parts;  // CTAs that divide the tokens of a head's R
    double inter_time, token_time;  // predicted makespans of the two kinds of kernels, in tiles of all eight products
    int inter_blocks() const { return whole + (items - whole) * parts; }
};

// The work of one CTA of an inter-stationary kernel: its item, and token tiles begin..end of it.
struct TokenRange {
    int item, part, begin, end;
    bool split;
};
// Neighbouring blocks take the same tokens of neighbouring items.
FLASHMHF_HOST_DEVICE TokenRange token_range(int block, int items, int whole, int parts, int tiles) {
    if (block < whole) return {block, 0, 0, tiles, false};
    const int part = (block - whole) / (items - whole), index = block - whole - part * (items - whole);
    return {whole + index, part, static_cast<int>(static_cast<int64_t>(tiles) * part / parts),
            static_cast<int>(static_cast<int64_t>(tiles) * (part + 1) / parts), true};
}

// The fp32 workspace of a launch: where its buffers begin, in floats; `none` for what the task does without.
struct BackwardWorkspace {
    static constexpr int64_t none = -1;
    int64_t query;                   // sums of dQ tiles (fused), or their parts
    int64_t dr_sums;                 // right behind `query`; all up to sums_floats is cleared at once
    int64_t query_added, dr_added;   // counters of ordered accumulation
    int64_t weight_parts;            // of split items
    int64_t r, scale, dr, dw_parts;  // the router's; no dr beside dr_sums, but for groups of heads
    int64_t sums_floats;             // of all that is cleared
    int64_t floats;                  // of everything
};

// Heads of K, U and V are independent. A call takes them in groups of nearly equal size, one launch after the other in the same workspace.
struct HeadGroups {
    int heads, count;
    int begin(int group) const { return static_cast<int>(static_cast<int64_t>(heads) * group / count); }
    int size(int group) const { return begin(group + 1) - begin(group); }
};

struct BackwardPlan {
    BackwardTask task;
    Kernels kernels;
    HeadGroups groups;
    std::vector<HeadGroupPlan> launches;        // of each group
    std::vector<BackwardWorkspace> workspaces;  // of each group
    double time;                                // predicted, of all launches, in tiles of all eight products
    int64_t workspace() const;                  // floats: of the group that needs most
};

// Throws std::invalid_argument for shapes beyond the index range. FLASHMHF_LOG_PLANS=1 prints the plan to stderr.
BackwardPlan plan_backward(const Shape &shape, const BackwardTask &task, const Device &device, const BackwardCostModel &cost = {});

// The plan in one line, with its predicted time.
std::string describe(const Shape &shape, const BackwardPlan &plan, const BackwardCostModel &cost = {});

// The same with given kernels and number of groups (0: the planner's choice), for measurements. The kernels must suit the task.
BackwardPlan plan_backward(const Shape &shape, const BackwardTask &task, const Device &device, Kernels kernels, int groups,
                           const BackwardCostModel &cost = {});

// One launch for all heads of `shape`. Throws as plan_backward does.
HeadGroupPlan plan_head_group(const Shape &shape, const Device &device, const BackwardCostModel &cost = {});

}  // namespace flashmhf
