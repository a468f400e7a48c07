// Semaphores and named barriers of the forward kernel, with who arrives on them.
#pragma once

#include "common/ring.h"
#include "forward/policy.h"
#include "kittens.cuh"

namespace flashmhf {

constexpr int full_arrivals = 1;    // the loader's expect_bytes; the copies complete the rest (slots, pieces, shares, w)
constexpr int q_full_arrivals = 2;  // the Q loader's expect_bytes; its warp after the weights of the sub-networks
// slot_empty: one thread of each consumer warpgroup, of every CTA of the cluster; at the start, too
// w_empty: one thread of each consumer warp, when it has the weights of an item
// part_stored: one thread of each consumer warp. Each completes once a launch at most: consumers cannot get ahead of who waits for it

// Named barriers; 0 is __syncthreads. Of a consumer warpgroup with the warp that loads its Q, for
// handing over the buffers (a waiting warp polls a semaphore, but sleeps at a named barrier); with the warpgroup before it, for its turn.
__device__ __forceinline__ kittens::barrier<5> q_empty_barrier(int warpgroup) { return kittens::barrier<5>(1 + warpgroup); }
__device__ __forceinline__ kittens::barrier<8> turn_barrier(int warpgroup) { return kittens::barrier<8>(3 + warpgroup); }

}  // namespace flashmhf
