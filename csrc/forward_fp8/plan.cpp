#include "forward_fp8/plan.h"

#include <stdexcept>
#include <string>

#include "forward_fp8/policy.h"

namespace flashmhf {
namespace {

template <int d_h>
constexpr ForwardFootprint footprint = {
    .shared_memory = ForwardFp8Policy<d_h>::shared_memory,
    .pieces = ForwardFp8Policy<d_h>::router_bytes,
    .queries = ForwardFp8Policy<d_h>::consumers * ForwardFp8Policy<d_h>::row_tile_bytes,
    .gate_tile = 0,
    .gate_tiles = 0,
    .consumers = ForwardFp8Policy<d_h>::consumers,
    .may_slice = true,
    .may_add_parts = false,
    .may_take_lanes = true,
};

ForwardFootprint footprint_of(int head_dim) {
    switch (head_dim) {
        case 64: return footprint<64>;
        case 96: return footprint<96>;
        case 128: return footprint<128>;
        case 256: return footprint<256>;
        default: throw std::invalid_argument("d_h = " + std::to_string(head_dim) + " has no kernel: supported are 64, 96, 128, 256");
    }
}

// The time of a plan, in inter tiles of a CTA of three row tiles.
double time_of(const ForwardPlan &plan, int head_dim, const ForwardCostModel &cost) {
    const ForwardSchedule &s = plan.schedule;
    if (s.clusters == 0) return 0;
    const double tile = plan.consumers == 3 ? 1 : forward_fp8_two_row_tiles;
    if (s.slices > 1) return ceil_div(s.inter_tiles, s.slices) * tile;
    const bool adds = s.splits > s.rest;
    const int64_t span = adds ? ceil_div(int64_t{s.rest} * s.inter_tiles, s.splits) : s.rest > 0 ? s.inter_tiles : 0;
    const int adding = !adds ? 0 : s.waves > 0 ? cost.behind_waves_tiles(head_dim) : 2 * cost.combine_tiles(head_dim);
    return (int64_t{s.waves} * s.inter_tiles + span) * tile + adding;
}

}  // namespace

ForwardPlan plan_forward_fp8(const Shape &shape, const Device &device, const ForwardCostModel &cost) {
    ForwardFootprint footprint = footprint_of(shape.head_dim);
    const ForwardPlan plan = plan_forward(shape, device, footprint, false, cost);
    if (plan.consumers < 3) return plan;
    footprint.consumers = 2;
    const ForwardPlan fewer_rows = plan_forward(shape, device, footprint, false, cost);
    return time_of(fewer_rows, shape.head_dim, cost) < 0.95 * time_of(plan, shape.head_dim, cost) ? fewer_rows : plan;
}

}  // namespace flashmhf
