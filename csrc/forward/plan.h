// The launch planner: shape and device to grid, split and workspace. Pure host code, tested without a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/device.h"
#include "common/problem.h"
#include "forward/cost_model.h"
#include "forward/params.h"

namespace flashmhf {

struct ForwardPlan : ForwardGrid {
    int64_t partials;                                           // fp32 elements of workspace; 0: nothing is split
    int flags;                                                  // of 8 bytes, behind them; 0: the clusters do not add up parts themselves
    int64_t workspace() const { return partials + 2 * flags; }  // in units of 4 bytes
    int shared_memory;                                          // bytes a CTA, without `shared_extra`
    int shared_extra;                                           // bytes of shared memory more, of a launch that holds W of a head there
    int spare_gate;  // bytes of the gate tiles that nobody uses when each cluster has one item: they cache W
};

constexpr ForwardCostModel forward_costs(WeightFormat format) {
    return format == WeightFormat::e4m3 ? forward_fp8_costs : ForwardCostModel{};
}

// What the planner knows of a kernel's instance.
struct ForwardFootprint {
    int shared_memory;          // bytes
    int shared_extra;           // of them for W
    int piece_columns;          // of a piece of the sums that slices send each other
    int gate_tile, gate_tiles;  // bytes of a tile of the gate, and such tiles
    int consumers;              // row tiles of a CTA, at most
    int fewest_consumers;       // where there are more row tiles
    bool may_slice;             // CTAs of a cluster may divide an item's inter range
    bool may_add_parts;         // clusters may add parts themselves
};

// A way to launch, and what it takes, in inter tiles of a CTA.
struct Candidate {
    int bundle;  // as in ForwardGrid, as are the next two
    int consumers;
    int row_ctas;
    int blocks;  // work items of a head of K, U and V
    ForwardSchedule schedule;
    int64_t stream;   // in which the memory brings the weights of all heads
    double products;  // of the CTA that has most
    int exchange;     // of the sums of slices
    double adding;    // of the sums of parts
    // The estimate that candidates are compared by.
    double tiles() const { return (products > stream ? products : stream) + exchange + adding; }
};

// A way to launch that is forced, for measurements. 0: the planner's choice.
struct ForwardChoice {
    int slices = 0, row_ctas = 0, consumers = 0, abreast = 0;  // slices = 1: none; abreast > 1: all blocks of a head
};

// The candidate of the least tiles(), the first of equal ones. may_bundle: a row tile may be of several heads.
// FLASHMHF_LOG_PLANS=1 prints the candidates to stderr.
// Throws std::invalid_argument for shapes beyond the index range, for a head dimension without a kernel and for a choice that is none.
ForwardPlan plan_forward(const Shape &shape, const Device &device, WeightFormat format, bool may_bundle, const ForwardCostModel &cost,
                         const ForwardChoice &choice = {});
inline ForwardPlan plan_forward(const Shape &shape, const Device &device, WeightFormat format, bool may_bundle) {
    return plan_forward(shape, device, format, may_bundle, forward_costs(format));
}
// A line for each candidate with its times in microseconds; the one that plan_forward takes begins with an asterisk. `all` is tiles().
std::string list_candidates(const Shape &shape, const Device &device, WeightFormat format, bool may_bundle, const ForwardCostModel &cost);

// Which of the two instances of the FP8 kernel: for CTAs that divide an item of one or two row tiles.
inline bool divides_few_rows(const ForwardPlan &plan) { return plan.schedule.slices > 1 && plan.consumers <= 2; }

}  // namespace flashmhf
