// The plan of the FP8 forward: that of the 16-bit forward with other tiles and costs. A CTA takes as many row tiles as the policy has, or
// fewer where that leaves fewer rows or SMs idle: two of three at 193 to 256, 385 to 512 and about 1,000 tokens at H = 16, d_h = 128.
#pragma once

#include "forward/plan.h"

namespace flashmhf {

// The planner counts 0.7 us for a tile of three row tiles at d_h = 128, and 1.1 us for a tile of the 16-bit kernel. In long runs on an H200
// the former takes 0.89 us (benchmarks/results/fp8_h200.json).
constexpr ForwardCostModel forward_fp8_costs{.tile_us = 0.7 / 128, .combine = 800, .behind_waves = 2800, .next_item = 800};

// The time of an inter tile of a CTA of two, three or four row tiles, by that of three. Two take 0.73 at d_h = 128, 0.77 at 64 and 96;
// four, at 64, 1.28.
constexpr double forward_fp8_row_tiles(int count) { return count <= 2 ? 0.77 : count == 3 ? 1 : 1.28; }

// Which of the kernel's two instances: for CTAs that divide an item of one or two row tiles.
inline bool divides_few_rows(const ForwardPlan &plan) { return plan.schedule.slices > 1 && plan.consumers <= 2; }

// Throws std::invalid_argument as plan_forward() does.
ForwardPlan plan_forward_fp8(const Shape &shape, const Device &device, const ForwardCostModel &cost = forward_fp8_costs);

}  // namespace flashmhf
