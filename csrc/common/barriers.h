// Rings of buffers, and the terms of the arrival counts of their mbarriers. Who arrives and who waits stands where a kernel declares its
// barriers.
#pragma once

#include <cstdint>

namespace flashmhf {

// Position in a ring of N buffers. phase: parity of the trips around the ring, which the mbarriers of a buffer wait for.
template <int N> struct Ring {
    int slot = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == N) {
            slot = 0;
            phase ^= 1;
        }
    }
};

constexpr int loader_arrival = 1;      // expect_bytes of the thread that issues the copies; their bytes complete the phase
constexpr int thread_arrival = 1;      // one thread of a role
constexpr int warpgroup_arrivals = 4;  // one lane of each warp, behind __syncwarp

// Threads of a named barrier between groups of warps.
constexpr int warpgroup_warps = 4, warp_threads = 32;

}  // namespace flashmhf
