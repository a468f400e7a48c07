#include "forward_fp8/plan.h"

#include "forward_fp8/policy.h"

namespace flashmhf {
namespace {

template <int d_h, bool few_rows> constexpr ForwardFootprint footprint() {
    using P = ForwardFp8Policy<d_h, few_rows>;
    return {.shared_memory = P::shared_memory,
            .pieces = P::router_bytes,
            .piece_columns = P::piece_columns,
            .gate_tile = 0,
            .gate_tiles = 0,
            .consumers = P::consumers,
            .may_slice = true,
            .may_add_parts = false};
}
template <bool few_rows> ForwardFootprint footprint_of(int head_dim) {
    return ForwardFp8HeadDims::dispatch(head_dim, []<int d_h>() { return footprint<d_h, few_rows>(); });
}

// The time of a plan, in inter tiles of a CTA of three row tiles.
double time_of(const ForwardPlan &plan, int head_dim, const ForwardCostModel &cost) {
    const ForwardSchedule &s = plan.schedule;
    if (s.clusters == 0) return 0;
    const double tile = forward_fp8_row_tiles(plan.consumers);
    if (s.slices > 1) return ceil_div(s.inter_tiles, s.slices) * tile;
    const bool adds = s.splits > s.rest;
    const int64_t span = adds ? ceil_div(int64_t{s.rest} * s.inter_tiles, s.splits) : s.rest > 0 ? s.inter_tiles : 0;
    const int adding = !adds ? 0 : s.waves > 0 ? cost.behind_waves_tiles(head_dim) : 2 * cost.combine_tiles(head_dim);
    return (int64_t{s.waves} * s.inter_tiles + span) * tile + adding;
}

}  // namespace

ForwardPlan plan_forward_fp8(const Shape &shape, const Device &device, const ForwardCostModel &cost) {
    ForwardFootprint footprint = footprint_of<false>(shape.head_dim);
    ForwardPlan plan = plan_forward(shape, device, footprint, false, cost);
    for (footprint.consumers = plan.consumers - 1; footprint.consumers >= 2; --footprint.consumers) {
        const ForwardPlan fewer_rows = plan_forward(shape, device, footprint, false, cost);
        if (time_of(fewer_rows, shape.head_dim, cost) < 0.95 * time_of(plan, shape.head_dim, cost)) plan = fewer_rows;
    }
    // The same plan in the shared memory of the other instance.
    return divides_few_rows(plan) ? plan_forward(shape, device, footprint_of<true>(shape.head_dim), false, cost) : plan;
}

}  // namespace flashmhf
