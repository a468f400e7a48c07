#include "forward/plan.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <stdexcept>
#include <string>

#include "forward/policy.h"

namespace flashmhf {
namespace {

template <int d_h>
constexpr ForwardFootprint footprint = {
    .shared_memory = ForwardPolicy<d_h>::shared_memory,
    .pieces = ForwardPolicy<d_h>::piece_slots * ForwardPolicy<d_h>::piece_bytes,
    .piece_columns = ForwardPolicy<d_h>::piece_columns,
    .gate_tile = ForwardPolicy<d_h>::gate_tile_bytes,
    .gate_tiles = ForwardPolicy<d_h>::gate_buffers * ForwardPolicy<d_h>::consumers,
    .consumers = ForwardPolicy<d_h>::consumers,
    .may_slice = ForwardPolicy<d_h>::may_slice,
    .may_add_parts = ForwardPolicy<d_h>::may_add_parts,
};

ForwardFootprint footprint_of(int head_dim) {
    return ForwardHeadDims::dispatch(head_dim, []<int d_h>() { return footprint<d_h>; });
}

int checked(int64_t x, const char *what) {
    if (x > std::numeric_limits<int>::max()) throw std::invalid_argument(std::string(what) + " exceeds the kernel's index range");
    return static_cast<int>(x);
}

// Tiles in sequence when the last `rest` items are cut into equal spans.
int64_t span_tiles(int64_t rest, int inter_tiles, int clusters) { return ceil_div(rest * inter_tiles, clusters); }

// CTAs that divide each item's inter range, when all items run at once: as many as possible; 1 when adding up in a second kernel is faster.
// Nothing is faster than the memory that streams the weights of all heads. A bundle's few rows take half the time of a full tile, so that
// adding in a second kernel costs them more than it saves.
int plan_slices(int64_t items, int heads, int inter_tiles, int head_dim, bool bundles, const Device &device, const ForwardCostModel &cost) {
    if (bundles && items <= device.large_clusters && inter_tiles >= large_slices * cost.shortest_part) return large_slices;
    const int64_t stream = int64_t{heads} * inter_tiles * cost.stream_numerator / cost.stream_denominator / device.clusters[0];
    for (int slices = max_slices; slices > 1; --slices)
        if (items <= device.clusters[slices - 1] && inter_tiles >= slices * cost.shortest_part) {
            const int64_t shared = std::max<int64_t>(ceil_div(inter_tiles, slices), stream) + 1;
            const int64_t split = std::max(span_tiles(items, inter_tiles, device.clusters[0]), stream) + cost.combine_tiles(head_dim);
            return bundles || shared <= split ? slices : 1;
        }
    return 1;
}

// Heads of a row tile, where their tokens fit: four, or two. A warp's 16 rows must be of one head, so at most four.
int plan_bundle(const Shape &shape, bool may_bundle) {
    if (!may_bundle || shape.batch != 1) return 1;
    for (int bundle : {4, 2})
        if (shape.group % bundle == 0 && bundle * shape.length <= tile_rows) return bundle;
    return 1;
}

// The blocks of a head in lanes (schedule.cuh), when all items run at once and that leaves no more clusters idle than the memory would.
// Laid end to end, each block brings the weights anew.
int plan_lanes(int heads, int blocks, int inter_tiles, int clusters, const Device &device, const ForwardCostModel &cost) {
    const int spans = clusters / blocks;
    // A head whose tiles make one part only goes as a whole item, and whole items have no lanes.
    if (blocks == 1 || spans <= heads || inter_tiles <= cost.shortest_part) return 1;
    const int64_t stream = int64_t{heads} * inter_tiles * blocks * cost.stream_numerator / cost.stream_denominator / device.clusters[0];
    const int64_t end_to_end = std::max(span_tiles(int64_t{heads} * blocks, inter_tiles, clusters), stream);
    return span_tiles(heads, inter_tiles, spans) <= end_to_end ? blocks : 1;
}

ForwardSchedule plan_schedule(int items, int lanes, int inter_tiles, int clusters, int head_dim, bool may_add_parts,
                              const ForwardCostModel &cost) {
    ForwardSchedule s{};
    s.inter_tiles = inter_tiles;
    s.slices = 1;
    s.lanes = lanes;
    if (lanes > 1) items /= lanes, clusters /= lanes;
    s.clusters = std::min<int64_t>(clusters, static_cast<int64_t>(items) * ceil_div(inter_tiles, cost.shortest_part));
    s.waves = items / s.clusters;
    s.rest = items % s.clusters;
    assert(lanes == 1 || s.waves == 0);
    if (s.rest > 0) {
        int64_t tiles = static_cast<int64_t>(s.rest) * inter_tiles;
        s.splits = static_cast<int>(std::min<int64_t>(s.clusters, std::max<int64_t>(s.rest, tiles / cost.shortest_part)));
        const int64_t parts = ceil_div(inter_tiles, tiles / s.splits) + 1;  // of an item, at most
        const bool adds = may_add_parts && s.waves == 1 && parts <= most_parts && parts * cost.tiles_a_part <= inter_tiles;
        const int gap = cost.gap_tiles(head_dim);
        const int adding = adds ? gap : s.waves > 0 ? cost.behind_waves_tiles(head_dim) : cost.combine_tiles(head_dim);
        if (inter_tiles <= span_tiles(s.rest, inter_tiles, s.splits) + adding) s.splits = s.rest;
        s.adds_parts = adds && s.splits > s.rest;
        if (tiles / s.splits >= 4 * gap) s.gap = gap;  // shorter spans may take two times to go on to an item
        // As many spans for every item, where that takes no longer: no cluster goes on to another item, and there are fewer parts to add.
        const int spans = s.splits / s.rest;
        if (s.waves == 0 && inter_tiles % spans == 0 && inter_tiles / spans <= ceil_div(tiles + int64_t{s.rest} * s.gap, s.splits))
            s.splits = s.rest * spans, s.gap = 0, s.clusters = s.splits;
        tiles += static_cast<int64_t>(s.rest) * s.gap;
        checked(tiles, "the split range");
        s.quotient = static_cast<int>(tiles / s.splits);
        s.remainder = static_cast<int>(tiles % s.splits);
        const bool equal = s.quotient * spans == inter_tiles && s.remainder == 0;
        if (may_add_parts && s.waves == 0 && s.splits > s.rest)
            s.adds_parts = (equal ? spans : ceil_div(inter_tiles, s.quotient) + 1) <= most_gathered;
    }
    return s;
}

// What CTAs that divide an item send each other: sums of warps that have a token.
void place_sums(ForwardPlan &plan, const Shape &shape, const ForwardFootprint &footprint) {
    const int64_t rows = plan.bundle > 1 ? tile_rows : std::min<int64_t>(shape.length, tile_rows);
    plan.sum_threads = static_cast<int>(32 * ceil_div(rows, 16));
    const int of_tile = shape.head_dim / footprint.piece_columns;
    plan.slice_pieces = of_tile / plan.schedule.slices;
    plan.spare_pieces = of_tile % plan.schedule.slices;
}

}  // namespace

ForwardPlan plan_forward(const Shape &shape, const Device &device, bool may_bundle, const ForwardCostModel &cost) {
    return plan_forward(shape, device, footprint_of(shape.head_dim), may_bundle, cost);
}

ForwardPlan plan_forward(const Shape &shape, const Device &device, const ForwardFootprint &footprint, bool may_bundle,
                         const ForwardCostModel &cost) {
    ForwardPlan plan{};
    plan.shared_memory = footprint.shared_memory - footprint.pieces;
    plan.pieces = footprint.pieces;
    plan.bundle = plan_bundle(shape, may_bundle);
    plan.row_tiles = checked(ceil_div(shape.length, tile_rows / plan.bundle), "the sequence length");
    plan.subnet_tiles = checked(ceil_div(shape.subnet_dim, tile_inter), "d_e");
    const int inter_tiles = checked(static_cast<int64_t>(plan.subnet_tiles) * shape.subnets, "E * d_e");

    // A head of K, U and V takes the tokens of its group one head behind the other, so one read from memory serves them all.
    const int heads = shape.weight_heads();
    const int64_t tiles = shape.batch * plan.row_tiles * (shape.group / plan.bundle);
    // CTAs of one bundle keep W of its heads.
    const int most_consumers = plan.bundle > 1 && footprint.may_slice ? 1 : footprint.consumers;
    plan.consumers = static_cast<int>(std::min<int64_t>(most_consumers, tiles));
    plan.spare_gate = (footprint.gate_tiles - plan.consumers) * footprint.gate_tile;
    const int64_t single = ceil_div(tiles, most_consumers), paired = 2 * ceil_div(tiles, 2 * most_consumers);

    // Few items: clusters that divide the inter range. Otherwise pairs of CTAs halve the traffic from L2; single CTAs waste fewer rows
    // when a head has few row tiles.
    int slices = !footprint.may_slice ? 1 : plan_slices(single * heads, heads, inter_tiles, shape.head_dim, plan.bundle > 1, device, cost);
    const bool may_add_parts = footprint.may_add_parts && plan.bundle == 1;
    // Two slices a head: pairs that halve the traffic from the L2 are faster, where all their row tiles have rows.
    if (slices == 2 && may_add_parts && device.clusters[1] > 0 && tiles % (2 * footprint.consumers) == 0) slices = 1;
    plan.row_ctas = slices == 1 && device.clusters[1] > 0 && 16 * (paired - single) <= single ? 2 : 1;
    plan.cluster_size = slices * plan.row_ctas;
    plan.blocks = checked(ceil_div(tiles, most_consumers * plan.row_ctas), "the number of tokens");
    const int items = checked(static_cast<int64_t>(plan.blocks) * heads, "tokens * heads");
    checked(static_cast<int64_t>(items) * most_consumers * plan.row_ctas, "tokens * heads");
    checked(static_cast<int64_t>(shape.heads) * shape.subnets, "H * E");
    checked(static_cast<int64_t>(shape.heads) * shape.head_dim, "H * d_h");
    if (items == 0) return plan;

    if (slices > 1) {
        plan.schedule.inter_tiles = inter_tiles;
        plan.schedule.clusters = items;
        plan.schedule.waves = 1;
        plan.schedule.slices = slices;
        plan.schedule.lanes = 1;
        plan.schedule.quotient = inter_tiles / slices;
        plan.schedule.remainder = inter_tiles % slices;
        place_sums(plan, shape, footprint);
        const int beside = (slices > max_slices ? device.large_clusters : device.clusters[slices - 1]) - items;
        plan.late_successor = beside < items && 2 * beside >= items;
        return plan;
    }
    const int clusters = device.clusters[plan.row_ctas - 1];
    const int lanes = plan_lanes(heads, plan.blocks, inter_tiles, clusters, device, cost);
    plan.schedule = plan_schedule(items, lanes, inter_tiles, clusters, shape.head_dim, may_add_parts, cost);
    if (plan.schedule.splits > plan.schedule.rest)
        plan.partials = int64_t{plan.schedule.splits} * lanes * 2 * plan.row_ctas * plan.consumers * tile_rows * shape.head_dim;
    if (plan.schedule.adds_parts) plan.flags = plan.schedule.splits * lanes * 2 * plan.row_ctas;
    return plan;
}

std::vector<PlannedWork> enumerate_work(const ForwardSchedule &schedule) {
    std::vector<PlannedWork> all;
    for (int cluster = 0; cluster < schedule.clusters; ++cluster)
        for (int lane = 0; lane < schedule.lanes; ++lane)
            for (int slice = 0; slice < schedule.slices; ++slice) {
                Work work;
                auto list = [&](auto cursor) {
                    while (cursor.next(work, cluster, lane, slice)) all.push_back({cluster, lane, slice, work});
                };
                if (schedule.gathers()) list(GatherCursor(schedule, cluster));
                else list(WorkCursor(schedule, cluster));
            }
    return all;
}

}  // namespace flashmhf
