// What the forward's planner counts with, in the time of one inter tile of a CTA (1.1 us on an H200 at d_h = 128, in proportion to d_h).
// Fixed times are therefore given as tiles * d_h. Those called costs were measured on a chip (experiments/README.md). Thresholds are
// where measured choices change over; they are not times.
#pragma once

namespace flashmhf {

struct ForwardCostModel {
    // Cost: an inter tile of a CTA, in microseconds for each of d_h.
    double tile_us = 1.1 / 128;
    // Threshold: adding the parts of split items where there are no whole waves, whoever adds. The second kernel takes 4 to 5 us.
    int combine = 512;
    // Cost: parts of items and their adding, the second item of a CTA included: 7 to 8 us. Slices have neither.
    int adding = 960;
    // Cost: the same at d_h = 256 for each sub-network, in tiles: slices save 26 to 40 us of parts there, with 22 of them.
    int adding_subnet = 0;
    // Threshold: splitting behind whole waves. At d_h = 128, of 12 tiles to gain nothing is left at T = 3,072 (1.3 % slower) and in the
    // 128M model (0.5 %); of 20 to 48, in the 370M model and at T = 6,144 and 12,288, 1.1 to 2.4 %.
    int behind_waves = 1792;
    // Cost: going on to another item while the other clusters do not, some 4 us.
    int next_item = 512;
    // Threshold: tiles at any d_h for each part of an item that clusters add behind whole items.
    int tiles_a_part = 8;
    // Cost: adding a part behind whole items, in tiles at any d_h. At d_h = 128 it is 64 KB a CTA from the L2; four take 2.4 us.
    double add_part = 0.6;
    // Threshold: a part of fewer tiles costs more to add than it saves.
    int shortest_part = 2;
    // Cost: the memory brings a tile for every SM in so many fifths of the time of its products.
    int stream_fifths = 9;
    // Threshold: the same where blocks of a head bring the weights one behind the other.
    int anew_fifths = 9;
    // Cost: the sums that slices exchange, in tiles at any d_h for each row tile of a CTA.
    int exchange = 1;
    // Cost: an inter tile of a CTA of one, two, ... row tiles. Those of FP8 are by that of three.
    double row_tiles[4] = {1, 1, 1, 1};

    constexpr double adding_tiles(int head_dim, int subnets) const {
        return 1.0 * adding / head_dim + (head_dim > 128 ? adding_subnet * subnets : 0);
    }
    constexpr int combine_tiles(int head_dim) const { return combine / head_dim; }
    constexpr int behind_waves_tiles(int head_dim) const { return behind_waves / head_dim; }
    constexpr int gap_tiles(int head_dim) const { return next_item / head_dim; }
};

// In FP8 a tile is that of three row tiles: 0.7 us at d_h = 128, 0.89 in long runs (benchmarks/results/fp8_h200.json).
constexpr ForwardCostModel forward_fp8_costs{.tile_us = 0.7 / 128,
                                             .combine = 800,
                                             .adding = 1200,
                                             .adding_subnet = 1,
                                             .behind_waves = 2800,
                                             .next_item = 800,
                                             .stream_fifths = 5,
                                             .row_tiles = {0.57, 0.77, 1, 1.24}};

}  // namespace flashmhf
