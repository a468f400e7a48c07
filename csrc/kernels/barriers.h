// Semaphores and named barriers of the forward kernel, with who arrives on them.
#pragma once

#include "kernels/policy.h"

namespace flashmhf {

// Position in a ring of N slots. The phase is the parity of the trips around it.
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

// Named barriers: 0 is __syncthreads; one a consumer warpgroup, around the staging of its output.
__device__ __forceinline__ int output_barrier(int warpgroup) { return 1 + warpgroup; }

constexpr int slot_full_arrivals = 1;                    // the loader's expect_bytes; the copies complete the rest
constexpr int slot_empty_arrivals = consumers;           // one thread of each consumer warpgroup, of every CTA of the cluster
constexpr int q_full_arrivals = 1;                       // the Q loader's expect_bytes
constexpr int q_empty_arrivals = 4;                      // one thread of each warp that has read Q
constexpr int q_empty_arrivals_staged = 1;               // the thread that has stored the output from Q's buffer (Q not in registers)

}  // namespace flashmhf
