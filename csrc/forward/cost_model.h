// What the forward's planner counts with, in the time of one inter tile of a CTA (1.1 us on an H200 at d_h = 128, in proportion to d_h).
// Fixed times are therefore given as tiles * d_h. Those called costs were measured on a chip (docs/experiments.md). Thresholds are
// where measured choices change over; they are not times.
#pragma once

namespace flashmhf {

struct ForwardCostModel {
    // Cost: an inter tile of a CTA, in microseconds for each of d_h.
    double tile_us = 1.1 / 128;
    // Threshold: adding the parts of split items where there are no whole waves, whoever adds. The second kernel takes 4 to 5 us.
    int combine = 512;
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
    // Cost: the memory brings a tile for every SM in stream_numerator / stream_denominator of the time of its products.
    int stream_numerator = 9, stream_denominator = 5;
    // Cost: the sums that slices exchange, in tiles at any d_h.
    int exchange = 1;

    constexpr int combine_tiles(int head_dim) const { return combine / head_dim; }
    constexpr int behind_waves_tiles(int head_dim) const { return behind_waves / head_dim; }
    constexpr int gap_tiles(int head_dim) const { return next_item / head_dim; }
};

// In FP8 a tile is that of three row tiles: 0.7 us at d_h = 128, 0.89 in long runs (benchmarks/results/fp8_h200.json).
constexpr ForwardCostModel forward_fp8_costs{.tile_us = 0.7 / 128, .combine = 800, .behind_waves = 2800, .next_item = 800};
// Cost: an inter tile of a CTA of two, three or four row tiles in FP8, by that of three. Two take 0.73 at d_h = 128, 0.77 at 64 and 96;
// four, at 64, 1.28.
constexpr double forward_fp8_row_tiles(int count) { return count <= 2 ? 0.77 : count == 3 ? 1 : 1.28; }

}  // namespace flashmhf
