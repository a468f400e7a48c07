// What the forward's planner counts with, in the time of one inter tile of a CTA (1.1 us on an H200 at d_h = 128, in proportion to d_h).
// Fixed times are therefore given as tiles * d_h. benchmarks/measure_cost_model.py measures them on a chip.
#pragma once

namespace flashmhf {

struct ForwardCostModel {
    // An inter tile of a CTA on an H200, in microseconds for each of d_h. Only predictions in seconds need it.
    double tile_us = 1.1 / 128;
    // Adding the parts of split items in a second kernel: 4 to 5 us. In the forward kernel itself: as long as `next_item`.
    int combine = 512;
    // Splitting behind whole waves: measured in alternation at d_h = 128. Of 12 tiles to gain, nothing is left at T = 3,072 (1.3 % slower)
    // and in the 128M model (0.5 %); of 20 to 48, in the 370M model and at T = 6,144 and 12,288, 1.1 to 2.4 %.
    int behind_waves = 1792;
    // Going on to another item while the other clusters do not: some 4 us.
    int next_item = 512;
    // Reading and adding one part of an item in the forward kernel, in tiles at any d_h: 6 pieces of 2 KB in flight for 1.5 us. Counted,
    // not measured.
    int tiles_a_part = 8;
    // A part of fewer tiles costs more to add than it saves.
    int shortest_part = 2;
    // The memory brings a tile for every SM in stream_numerator / stream_denominator of the time of its products.
    int stream_numerator = 9, stream_denominator = 5;

    constexpr int combine_tiles(int head_dim) const { return combine / head_dim; }
    constexpr int behind_waves_tiles(int head_dim) const { return behind_waves / head_dim; }
    constexpr int gap_tiles(int head_dim) const { return next_item / head_dim; }
};

}  // namespace flashmhf
