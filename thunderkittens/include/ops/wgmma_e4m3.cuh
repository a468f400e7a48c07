// wgmma.mma_async m64nNk32 with e4m3 operands, A from registers, and accumulators in fp16: two to a register.
//
// ThunderKittens has no interface for A in registers with sums in fp16, so these take plain registers, and the file is used with either set
// of headers.
//
// A fragment of A of 32 columns is four registers: columns 4t.. of rows g and g + 8, then columns 16 + 4t.. of both (g = lane / 4,
// t = lane % 4). Register 2b + i of the sums holds columns 8b + 2t, + 1 of row g + 8i. Both operands are K-major.
#pragma once

#include <cstdint>

#include "ops/wgmma_operands.cuh"

namespace kittens {
namespace e4m3 {

// Of an operand in shared memory whose rows are swizzle_bytes wide, in groups of 8 rows. 32 columns further: + 2.
template <int swizzle_bytes> __device__ static inline uint64_t descriptor(uint32_t shared_address) {
    constexpr uint64_t mode = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : 3;
    return mode << 62 | uint64_t{8 * swizzle_bytes / 16} << 32 | uint64_t{1} << 16 | (shared_address & 0x3FFFF) >> 4;
}

// d [64 x N] (+)= a [64 x 32] b [N x 32]^T; accumulate = 0 overwrites. P0.. are the operand numbers after the accumulators.
#define KITTENS_MULTIPLY(N, LAST, P0, P1, P2, P3, P4, P5)                                                                        \
    __device__ static inline void multiply(uint32_t (&d)[N / 4], const uint32_t *a, uint64_t b, int accumulate) {                \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                       \
                     "k32.f16.e4m3.e4m3 {" KITTENS_TL##LAST "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1;\n}" \
                     : KITTENS_DL##LAST("+r")                                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                     \
    }
KITTENS_MULTIPLY(64, 1, 16, 17, 18, 19, 20, 21)
KITTENS_MULTIPLY(96, 2, 24, 25, 26, 27, 28, 29)
KITTENS_MULTIPLY(128, 3, 32, 33, 34, 35, 36, 37)
KITTENS_MULTIPLY(256, 7, 64, 65, 66, 67, 68, 69)
#undef KITTENS_MULTIPLY

}  // namespace e4m3
}  // namespace kittens
