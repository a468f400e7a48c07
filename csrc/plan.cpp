#include "plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels/policy.h"

namespace flashmhf {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Footprint {
    int shared_memory, consumers;
};
template <int d_h> constexpr Footprint footprint = {ForwardPolicy<d_h>::shared_memory, ForwardPolicy<d_h>::consumers};

Footprint footprint_of(int head_dim) {
    switch (head_dim) {
        case 64: return footprint<64>;
        case 96: return footprint<96>;
        case 128: return footprint<128>;
        case 256: return footprint<256>;
        default: throw std::invalid_argument("d_h = " + std::to_string(head_dim) + " has no kernel: supported are 64, 96, 128, 256");
    }
}

int checked(int64_t x, const char *what) {
    if (x > std::numeric_limits<int>::max()) throw std::invalid_argument(std::string(what) + " exceeds the kernel's index range");
    return static_cast<int>(x);
}

// A part shorter than this costs more to add up than it saves.
constexpr int shortest_part = 2;

ForwardSchedule plan_schedule(int items, int inter_tiles, int clusters) {
    ForwardSchedule s{};
    s.inter_tiles = inter_tiles;
    s.clusters = std::min<int64_t>(clusters, static_cast<int64_t>(items) * ceil_div(inter_tiles, shortest_part));
    s.waves = items / s.clusters;
    s.rest = items % s.clusters;
    if (s.rest > 0) {
        const int64_t tiles = static_cast<int64_t>(s.rest) * inter_tiles;
        checked(tiles, "the split range");
        s.splits = static_cast<int>(std::min<int64_t>(s.clusters, std::max<int64_t>(s.rest, tiles / shortest_part)));
        s.quotient = static_cast<int>(tiles / s.splits);
        s.remainder = static_cast<int>(tiles % s.splits);
    }
    return s;
}

}  // namespace

ForwardPlan plan_forward(const ForwardShape &shape, const Device &device) {
    ForwardPlan plan{};
    const auto [shared_memory, consumers] = footprint_of(shape.head_dim);
    plan.shared_memory = shared_memory;
    plan.consumers = consumers;
    plan.row_tiles = checked(ceil_div(shape.length, tile_rows), "the sequence length");
    plan.subnet_tiles = checked(ceil_div(shape.subnet_dim, tile_inter), "d_e");
    const int inter_tiles = checked(static_cast<int64_t>(plan.subnet_tiles) * shape.subnets, "E * d_e");

    // Pairs of CTAs halve the traffic from L2; single CTAs waste fewer rows when a head has few row tiles.
    const int64_t tiles = shape.batch * plan.row_tiles;
    const int64_t single = ceil_div(tiles, consumers), paired = 2 * ceil_div(tiles, 2 * consumers);
    plan.cluster_size = device.pairs > 0 && 16 * (paired - single) <= single ? 2 : 1;
    plan.blocks = checked(ceil_div(tiles, consumers * plan.cluster_size), "the number of tokens");
    const int items = checked(static_cast<int64_t>(plan.blocks) * shape.heads, "tokens * heads");
    checked(static_cast<int64_t>(items) * consumers * plan.cluster_size, "tokens * heads");
    checked(static_cast<int64_t>(shape.heads) * shape.subnets, "H * E");
    if (items == 0) return plan;

    plan.schedule = plan_schedule(items, inter_tiles, plan.cluster_size == 2 ? device.pairs : device.sms);
    if (plan.schedule.splits > plan.schedule.rest)
        plan.partials = static_cast<int64_t>(plan.schedule.splits) * 2 * plan.cluster_size * consumers * tile_rows * shape.head_dim;
    return plan;
}

std::vector<PlannedWork> enumerate_work(const ForwardSchedule &schedule) {
    std::vector<PlannedWork> all;
    for (int cluster = 0; cluster < schedule.clusters; ++cluster) {
        WorkCursor cursor(schedule, cluster);
        Work work;
        while (cursor.next(work)) all.push_back({cluster, work});
    }
    return all;
}

}  // namespace flashmhf
