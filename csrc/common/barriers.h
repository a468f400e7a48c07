// Terms of the arrival counts of mbarriers. Who arrives and who waits stands where a kernel declares its barriers.
#pragma once

namespace flashmhf {

constexpr int loader_arrival = 1;      // expect_bytes of the thread that issues the copies; their bytes complete the phase
constexpr int thread_arrival = 1;      // one thread of a role
constexpr int warpgroup_arrivals = 4;  // one lane of each warp, behind __syncwarp

// Threads of a named barrier between groups of warps.
constexpr int warpgroup_warps = 4, warp_threads = 32;

}  // namespace flashmhf
