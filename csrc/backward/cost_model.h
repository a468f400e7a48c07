// What the backward's planner counts with, in the time of one tile of 64 x 64 of all eight products (1.7 us on an H200 at d_h = 128, in
// proportion to d_h). They were measured on a chip (docs/experiments.md).
#pragma once

#include <cstdint>

namespace flashmhf {

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

}  // namespace flashmhf
