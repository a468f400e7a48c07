// Position in a ring of N buffers.
#pragma once

#include <cstdint>

namespace flashmhf {

// phase: parity of the trips around the ring, which the mbarriers of a buffer wait for.
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

}  // namespace flashmhf
