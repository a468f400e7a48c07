// The wgmma.mma_async instructions in 16 bits, m64nNk16 with sums in fp32:
//
// wgmma<T, N, TA, TB>::st_st(d, a, b, accumulate): d[64xN] (+)= A B, both from shared memory through descriptors;
// wgmma<T, N, 0, TB>::rt_st(d, a, b, accumulate): A from registers. TA, TB = 1: the operand is MN-major. accumulate = 0 overwrites d.
#pragma once

#include "ops/extensions.cuh"

namespace kittens {
namespace detail {
namespace wgmma {

template <typename T, int N, int TA, int TB> struct base;

// LAST: of the lists of accumulators. P0.. are the operand numbers after the accumulators.
#define KITTENS_WGMMA(N, LAST, TYPE, NAME, P0, P1, P2, P3, P4, P5, P6)                                                                  \
    template <int TA, int TB> struct base<TYPE, N, TA, TB> {                                                                            \
        __device__ static inline void st_st(float *d, uint64_t a, uint64_t b, int accumulate) {                                         \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                         " {" KITTENS_TL##LAST "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}"                                 \
                         : KITTENS_DL##LAST("+f")                                                                                       \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TA), "n"(TB));                                                          \
        }                                                                                                                               \
        __device__ static inline void rt_st(float *d, const uint32_t *a, uint64_t b, int accumulate) {                                  \
            static_assert(TA == 0, "A in registers is K-major");                                                                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                         " {" KITTENS_TL##LAST "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}"           \
                         : KITTENS_DL##LAST("+f")                                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TB));                               \
        }                                                                                                                               \
    };
#define KITTENS_WGMMA_TYPES(N, LAST, ...) KITTENS_WGMMA(N, LAST, bf16, "bf16", __VA_ARGS__) KITTENS_WGMMA(N, LAST, half, "f16", __VA_ARGS__)

KITTENS_WGMMA_TYPES(16, 0, 8, 9, 10, 11, 12, 13, 14)
KITTENS_WGMMA_TYPES(32, 1, 16, 17, 18, 19, 20, 21, 22)
KITTENS_WGMMA_TYPES(48, 2, 24, 25, 26, 27, 28, 29, 30)
KITTENS_WGMMA_TYPES(64, 3, 32, 33, 34, 35, 36, 37, 38)
KITTENS_WGMMA_TYPES(96, 5, 48, 49, 50, 51, 52, 53, 54)
KITTENS_WGMMA_TYPES(128, 7, 64, 65, 66, 67, 68, 69, 70)
KITTENS_WGMMA_TYPES(192, 11, 96, 97, 98, 99, 100, 101, 102)
KITTENS_WGMMA_TYPES(256, 15, 128, 129, 130, 131, 132, 133, 134)

#undef KITTENS_WGMMA_TYPES
#undef KITTENS_WGMMA

}  // namespace wgmma
}  // namespace detail

}  // namespace kittens
