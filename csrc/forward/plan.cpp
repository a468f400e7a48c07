#include "forward/plan.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/log_plans.h"
#include "forward/e4m3/policy.h"
#include "forward/f16/policy.h"

namespace flashmhf {
namespace {

template <typename P> constexpr ForwardFootprint footprint() {
    return {.shared_memory = P::shared_memory,
            .shared_extra = P::router_bytes,
            .piece_columns = P::piece_columns,
            .gate_tile = P::gate_tile_bytes,
            .gate_tiles = P::gate_buffers * P::consumers,
            .consumers = P::consumers,
            .fewest_consumers = P::fewest_consumers,
            .may_slice = P::may_slice,
            .may_add_parts = P::may_add_parts};
}
ForwardFootprint footprint_of(WeightFormat format, int head_dim, bool few_rows) {
    if (format == WeightFormat::same) return ForwardHeadDims::dispatch(head_dim, []<int d_h>() { return footprint<ForwardPolicy<d_h>>(); });
    return ForwardFp8HeadDims::dispatch(head_dim, [&]<int d_h>() {
        return few_rows ? footprint<ForwardFp8Policy<d_h, true>>() : footprint<ForwardFp8Policy<d_h, false>>();
    });
}

int checked(int64_t x, const char *what) {
    if (x > std::numeric_limits<int>::max()) throw std::invalid_argument(std::string(what) + " exceeds the kernel's index range");
    return static_cast<int>(x);
}

// Tiles in sequence when the last `rest` items are cut into equal spans.
int64_t span_tiles(int64_t rest, int inter_tiles, int clusters) { return ceil_div(rest * inter_tiles, clusters); }

// What the memory takes for the weights of so many heads, in tiles of a CTA: `fifths` of the products of all SMs.
int64_t stream_tiles(int64_t heads, int inter_tiles, const Device &device, int fifths) {
    return heads * inter_tiles * fifths / 5 / device.sms();
}

// Heads of a row tile, where their tokens fit: four, or two. A warp's 16 rows must be of one head, so at most four.
int plan_bundle(const Shape &shape, bool may_bundle) {
    if (!may_bundle || shape.batch != 1) return 1;
    for (int bundle : {4, 2})
        if (shape.group % bundle == 0 && bundle * shape.length <= tile_rows) return bundle;
    return 1;
}

// How many blocks of a head run side by side: all, where every item runs at once and the longest span takes no longer than end to end,
// where each block brings the weights anew; else one.
int plan_abreast(int heads, int blocks, int inter_tiles, int clusters, const Device &device, const ForwardCostModel &cost, int forced) {
    const int spans = clusters / blocks;
    // A head whose tiles make one part only goes as a whole item, and whole items have no blocks side by side.
    if (blocks == 1 || spans <= heads || inter_tiles <= cost.shortest_part) return 1;
    if (forced) return forced > 1 ? blocks : 1;
    const int64_t items = int64_t{heads} * blocks;
    const int64_t anew = stream_tiles(items, inter_tiles, device, cost.anew_fifths);
    const int64_t end_to_end = std::max(span_tiles(items, inter_tiles, clusters), anew);
    return span_tiles(heads, inter_tiles, spans) <= end_to_end ? blocks : 1;
}

ForwardSchedule plan_schedule(int items, int abreast, int inter_tiles, int clusters, int head_dim, bool may_add_parts,
                              const ForwardCostModel &cost) {
    ForwardSchedule s{};
    s.inter_tiles = inter_tiles;
    s.slices = 1;
    s.abreast = abreast;
    if (abreast > 1) items /= abreast, clusters /= abreast;
    s.clusters = std::min<int64_t>(clusters, static_cast<int64_t>(items) * ceil_div(inter_tiles, cost.shortest_part));
    s.waves = items / s.clusters;
    s.rest = items % s.clusters;
    assert(abreast == 1 || s.waves == 0);
    if (s.rest > 0) {
        int64_t tiles = static_cast<int64_t>(s.rest) * inter_tiles;
        s.splits = static_cast<int>(std::min<int64_t>(s.clusters, std::max<int64_t>(s.rest, tiles / cost.shortest_part)));
        const int64_t parts = ceil_div(inter_tiles, tiles / s.splits) + 1;  // of an item, at most
        const bool adds = may_add_parts && s.waves == 1 && parts <= most_behind_wave && parts * cost.tiles_a_part <= inter_tiles;
        const int gap = cost.gap_tiles(head_dim), own_adding = adds ? static_cast<int>(parts * cost.add_part + 0.5) : 0;
        const int adding = adds ? gap + own_adding : s.waves > 0 ? cost.behind_waves_tiles(head_dim) : cost.combine_tiles(head_dim);
        if (inter_tiles <= span_tiles(s.rest, inter_tiles, s.splits) + adding) s.splits = s.rest;
        s.adds_parts = adds && s.splits > s.rest;
        if (tiles / s.splits >= 4 * gap) {  // shorter spans may take two times to go on to an item
            s.tail = static_cast<int16_t>(s.adds_parts ? own_adding : 0);
            s.gap = gap + s.tail;
        }
        // As many spans for every item, where that takes no longer: no cluster goes on to another item, and there are fewer parts to add.
        const int spans = s.splits / s.rest;
        if (s.waves == 0 && inter_tiles % spans == 0 && inter_tiles / spans <= ceil_div(tiles + int64_t{s.rest} * s.gap, s.splits))
            s.splits = s.rest * spans, s.gap = 0, s.clusters = s.splits;
        tiles += static_cast<int64_t>(s.rest) * s.gap + s.tail;
        checked(tiles, "the split range");
        s.quotient = static_cast<int>(tiles / s.splits);
        s.remainder = static_cast<int>(tiles % s.splits);
        const bool equal = s.quotient * spans == inter_tiles && s.remainder == 0;
        if (may_add_parts && s.waves == 0 && s.splits > s.rest)
            s.adds_parts = (equal ? spans : ceil_div(inter_tiles, s.quotient) + 1) <= most_gathered;
    }
    return s;
}

// All items run at once, in clusters whose CTAs divide an item.
ForwardSchedule slice_schedule(int items, int slices, int inter_tiles) {
    ForwardSchedule s{};
    s.inter_tiles = inter_tiles;
    s.abreast = s.waves = 1;
    s.clusters = items;
    s.slices = slices;
    s.quotient = inter_tiles / slices;
    s.remainder = inter_tiles % slices;
    return s;
}

int inter_tiles_of(const Shape &shape) { return checked(ceil_div(shape.subnet_dim, tile_inter) * shape.subnets, "E * d_e"); }
// A head of K, U and V takes the tokens of its group one head behind the other, so one read from memory serves them all.
int64_t row_tiles_of_head(const Shape &shape, int bundle) {
    return shape.batch * ceil_div(shape.length, tile_rows / bundle) * (shape.group / bundle);
}

// A call, and what is known of kernel and device.
struct Call {
    const Shape &shape;
    const Device &device;
    const ForwardCostModel &cost;
    const ForwardChoice &choice;
    const ForwardFootprint footprint;
    const int bundle, heads = shape.weight_heads(), inter_tiles = inter_tiles_of(shape);
    const int64_t tiles = row_tiles_of_head(shape, bundle);
};

// The candidates of CTAs of up to `consumers` row tiles.
void add_candidates(std::vector<Candidate> &all, const Call &call, int consumers) {
    const auto &[shape, device, cost, choice, footprint, bundle, heads, inter_tiles, tiles] = call;
    const int64_t single = ceil_div(tiles, consumers), paired = 2 * ceil_div(tiles, 2 * consumers);  // CTAs of a head
    const int64_t stream = stream_tiles(heads, inter_tiles, device, cost.stream_fifths);
    const int taken = static_cast<int>(std::min<int64_t>(consumers, tiles));
    const bool may_add_parts = footprint.may_add_parts && bundle == 1, pairs = device.clusters[1] > 0;
    const double tile = cost.row_tiles[taken - 1];
    const size_t before = all.size();

    // Clusters that divide the inter range of one item each. Threshold: two slices are slower than pairs that halve the traffic from the
    // L2, where all row tiles of these have rows; not so at d_h = 64, where adding parts is long beside a tile.
    const bool pairs_win = may_add_parts && shape.head_dim > 64 && pairs && tiles % (2 * consumers) == 0 && choice.slices != 2;
    auto slices = [&](int count, int clusters) {
        if (!footprint.may_slice || single * heads > clusters || inter_tiles < count * cost.shortest_part) return;
        all.push_back({bundle, taken, 1, static_cast<int>(single), slice_schedule(static_cast<int>(single) * heads, count, inter_tiles),
                       stream, ceil_div(inter_tiles, count) * tile, taken * cost.exchange, 0});
    };
    if (bundle > 1) slices(large_slices, device.large_clusters);
    for (int count = max_slices; count > (pairs_win ? 2 : 1); --count) slices(count, device.clusters[count - 1]);
    // Threshold: a bundle's few rows take half the time of a full tile, so adding parts costs more than it saves.
    if (bundle > 1 && all.size() > before && choice.slices != 1) return;

    // Threshold: pairs of CTAs, which halve the traffic from the L2, where they waste at most a sixteenth of the rows, or where the only
    // row tile cannot be divided by slices and waits for the memory.
    const bool lone = tiles == 1 && !footprint.may_slice;
    const int row_ctas = choice.row_ctas ? choice.row_ctas : pairs && (lone || 16 * (paired - single) <= single) ? 2 : 1;
    const int clusters = device.clusters[row_ctas - 1];
    if (clusters == 0) return;
    const int blocks = static_cast<int>(ceil_div(tiles, consumers * row_ctas));
    const int abreast = plan_abreast(heads, blocks, inter_tiles, clusters, device, cost, choice.abreast);
    const ForwardSchedule s = plan_schedule(blocks * heads, abreast, inter_tiles, clusters, shape.head_dim, may_add_parts, cost);
    const bool split = s.splits > s.rest;
    const int64_t rest = s.rest == 0 ? 0 : split ? span_tiles(s.rest, inter_tiles, s.splits) : inter_tiles;
    // Without whole waves the spans are counted as dealt to all SMs: how pairs and blocks side by side round them is not what decides
    // against slices.
    const int64_t products =
        split && s.waves == 0 ? span_tiles(single * heads, inter_tiles, device.sms()) : int64_t{s.waves} * inter_tiles + rest;
    const double adding = split ? cost.adding_tiles(shape.head_dim, s.waves > 0 ? 0 : shape.subnets) : 0;
    all.push_back({bundle, taken, row_ctas, blocks, s, stream, products * tile, 0, adding});
}

// Those that the limits and thresholds leave, in the order in which ties are decided.
std::vector<Candidate> forward_candidates(const Call &call) {
    std::vector<Candidate> all;
    if (call.tiles == 0) return all;
    const ForwardChoice &choice = call.choice;
    // CTAs of one bundle keep W of its heads.
    const int most = call.bundle > 1 && call.footprint.may_slice ? 1 : call.footprint.consumers;
    const int fewest = choice.consumers ? choice.consumers : call.footprint.fewest_consumers;
    for (int consumers = most; consumers == most || consumers >= fewest; --consumers)
        if (consumers == most || consumers < call.tiles) add_candidates(all, call, consumers);
    auto is_other = [](int forced, int has) { return forced && (forced > 1) != (has > 1); };
    std::erase_if(all, [&](const Candidate &c) {
        return (choice.slices && c.schedule.slices != choice.slices) || (choice.row_ctas && c.row_ctas != choice.row_ctas) ||
               (choice.consumers && c.consumers != choice.consumers) || is_other(choice.abreast, c.schedule.abreast);
    });
    if (all.empty()) throw std::invalid_argument("the kernels take no such slices=, row_ctas=, consumers= and abreast= for this shape");
    return all;
}

size_t best_of(const std::vector<Candidate> &all) { return std::ranges::min_element(all, {}, &Candidate::tiles) - all.begin(); }

std::string list(const std::vector<Candidate> &all, int head_dim, const ForwardCostModel &cost) {
    std::string text = "  division        heads row tiles CTAs slices abreast |  us: stream products exchange adding    all\n";
    const size_t best = best_of(all);
    const double unit = cost.tile_us * head_dim;
    for (size_t i = 0; i < all.size(); ++i) {
        const Candidate &c = all[i];
        char line[160];
        std::snprintf(line, sizeof line, "%c %-15s %5d %9d %4d %6d %7d | %11.1f %8.1f %8.1f %6.1f %6.1f\n", i == best ? '*' : ' ',
                      division_names[static_cast<int>(c.schedule.division())], c.bundle, c.consumers, c.row_ctas, c.schedule.slices,
                      c.schedule.abreast, c.stream * unit, c.products * unit, c.exchange * unit, c.adding * unit, c.tiles() * unit);
        text += line;
    }
    return text;
}

}  // namespace

ForwardPlan plan_forward(const Shape &shape, const Device &device, WeightFormat format, bool may_bundle, const ForwardCostModel &cost,
                         const ForwardChoice &choice) {
    const Call call{shape, device, cost, choice, footprint_of(format, shape.head_dim, false), plan_bundle(shape, may_bundle)};
    ForwardPlan plan{};
    plan.bundle = call.bundle;
    plan.tile_shift = std::countr_zero(static_cast<unsigned>(tile_rows / plan.bundle));
    plan.bundles = shape.group / plan.bundle;
    plan.row_tiles = checked(ceil_div(shape.length, tile_rows / plan.bundle), "the sequence length");
    plan.length = shape.length;
    plan.subnets = shape.subnets;
    plan.subnet_tiles = checked(ceil_div(shape.subnet_dim, tile_inter), "d_e");
    checked((call.tiles + 2 * call.footprint.consumers) * call.heads, "tokens * heads");
    checked(int64_t{shape.heads} * shape.subnets, "H * E");
    checked(int64_t{shape.heads} * shape.head_dim, "H * d_h");

    plan.batch = static_cast<int>(shape.batch);
    plan.head_tiles = plan.batch * plan.row_tiles;

    const std::vector<Candidate> all = forward_candidates(call);
    if (all.empty()) return plan;
    if (logs_plans()) log_plan("forward", shape, list(all, shape.head_dim, cost));
    const Candidate &taken = all[best_of(all)];
    const ForwardSchedule &s = plan.schedule = taken.schedule;
    plan.consumers = taken.consumers;
    plan.row_ctas = taken.row_ctas;
    plan.blocks = taken.blocks;
    plan.cluster_size = taken.row_ctas * s.slices;
    const ForwardFootprint footprint = divides_few_rows(plan) ? footprint_of(format, shape.head_dim, true) : call.footprint;
    plan.shared_memory = footprint.shared_memory - footprint.shared_extra;
    plan.shared_extra = footprint.shared_extra;
    plan.spare_gate = (footprint.gate_tiles - plan.consumers) * footprint.gate_tile;
    if (s.slices > 1) {
        const int64_t rows = plan.bundle > 1 ? tile_rows : std::min<int64_t>(shape.length, tile_rows);
        const int of_tile = shape.head_dim / footprint.piece_columns;
        plan.slices.sum_threads = static_cast<int>(32 * ceil_div(rows, 16));
        plan.slices.pieces = of_tile / s.slices;
        plan.slices.spare_pieces = of_tile % s.slices;
        const int beside = (s.slices > max_slices ? device.large_clusters : device.clusters[s.slices - 1]) - s.clusters;
        plan.slices.late_successor = format == WeightFormat::same && beside < s.clusters && 2 * beside >= s.clusters;
    } else if (s.splits > s.rest) {
        plan.partials = int64_t{s.splits} * s.abreast * 2 * plan.row_ctas * plan.consumers * tile_rows * shape.head_dim;
        if (s.adds_parts) plan.flags = s.splits * s.abreast * 2 * plan.row_ctas;
    }
    return plan;
}

std::string list_candidates(const Shape &shape, const Device &device, WeightFormat format, bool may_bundle, const ForwardCostModel &cost) {
    plan_forward(shape, device, format, may_bundle, cost);  // for its checks
    const auto all =
        forward_candidates({shape, device, cost, {}, footprint_of(format, shape.head_dim, false), plan_bundle(shape, may_bundle)});
    return all.empty() ? "" : list(all, shape.head_dim, cost);
}

}  // namespace flashmhf
