// wgmma.mma_async m64nNk16 with fp32 accumulators and bf16 or fp16 operands, for N = 16, 32, ... 256.
//
// wgmma<T, N, TA, TB>::st_st(d, a, b, accumulate): d[64xN] (+)= A B, both from shared memory through descriptors;
// wgmma<T, N, 0, TB>::rt_st(d, a, b, accumulate): A from registers. TA, TB = 1: the operand is MN-major. accumulate = 0 overwrites d.
//
// Inline PTX numbers the operands of an instruction in order, so the text needs one line per N; the macros below supply the lists.
// KITTENS_T<n> is the text, KITTENS_D<n> are the operands of accumulators 8n..8n+7, KITTENS_TL<n> and KITTENS_DL<n> those of 0..8n+7.
#pragma once

namespace kittens {
namespace detail {
namespace wgmma {

#define KITTENS_T0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KITTENS_T1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define KITTENS_T2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define KITTENS_T3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define KITTENS_T4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define KITTENS_T5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define KITTENS_T6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define KITTENS_T7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define KITTENS_T8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define KITTENS_T9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define KITTENS_T10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define KITTENS_T11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define KITTENS_T12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define KITTENS_T13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define KITTENS_T14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define KITTENS_T15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define KITTENS_D(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KITTENS_TL0 KITTENS_T0
#define KITTENS_DL0 KITTENS_D(0)
#define KITTENS_TL1 KITTENS_TL0 ", " KITTENS_T1
#define KITTENS_DL1 KITTENS_DL0, KITTENS_D(8)
#define KITTENS_TL2 KITTENS_TL1 ", " KITTENS_T2
#define KITTENS_DL2 KITTENS_DL1, KITTENS_D(16)
#define KITTENS_TL3 KITTENS_TL2 ", " KITTENS_T3
#define KITTENS_DL3 KITTENS_DL2, KITTENS_D(24)
#define KITTENS_TL4 KITTENS_TL3 ", " KITTENS_T4
#define KITTENS_DL4 KITTENS_DL3, KITTENS_D(32)
#define KITTENS_TL5 KITTENS_TL4 ", " KITTENS_T5
#define KITTENS_DL5 KITTENS_DL4, KITTENS_D(40)
#define KITTENS_TL6 KITTENS_TL5 ", " KITTENS_T6
#define KITTENS_DL6 KITTENS_DL5, KITTENS_D(48)
#define KITTENS_TL7 KITTENS_TL6 ", " KITTENS_T7
#define KITTENS_DL7 KITTENS_DL6, KITTENS_D(56)
#define KITTENS_TL8 KITTENS_TL7 ", " KITTENS_T8
#define KITTENS_DL8 KITTENS_DL7, KITTENS_D(64)
#define KITTENS_TL9 KITTENS_TL8 ", " KITTENS_T9
#define KITTENS_DL9 KITTENS_DL8, KITTENS_D(72)
#define KITTENS_TL10 KITTENS_TL9 ", " KITTENS_T10
#define KITTENS_DL10 KITTENS_DL9, KITTENS_D(80)
#define KITTENS_TL11 KITTENS_TL10 ", " KITTENS_T11
#define KITTENS_DL11 KITTENS_DL10, KITTENS_D(88)
#define KITTENS_TL12 KITTENS_TL11 ", " KITTENS_T12
#define KITTENS_DL12 KITTENS_DL11, KITTENS_D(96)
#define KITTENS_TL13 KITTENS_TL12 ", " KITTENS_T13
#define KITTENS_DL13 KITTENS_DL12, KITTENS_D(104)
#define KITTENS_TL14 KITTENS_TL13 ", " KITTENS_T14
#define KITTENS_DL14 KITTENS_DL13, KITTENS_D(112)
#define KITTENS_TL15 KITTENS_TL14 ", " KITTENS_T15
#define KITTENS_DL15 KITTENS_DL14, KITTENS_D(120)

template <typename T, int N, int TA, int TB> struct base;

// P0.. are the operand numbers after the accumulators.
#define KITTENS_WGMMA(N, LAST, TYPE, NAME, P0, P1, P2, P3, P4, P5, P6)                                                                  \
    template <int TA, int TB> struct base<TYPE, N, TA, TB> {                                                                            \
        __device__ static inline void st_st(float *d, uint64_t a, uint64_t b, int accumulate) {                                         \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                         " {" KITTENS_TL##LAST "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}"                                 \
                         : KITTENS_DL##LAST                                                                                             \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TA), "n"(TB));                                                          \
        }                                                                                                                               \
        __device__ static inline void rt_st(float *d, const uint32_t *a, uint64_t b, int accumulate) {                                  \
            static_assert(TA == 0, "A in registers is K-major");                                                                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                         " {" KITTENS_TL##LAST "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}"           \
                         : KITTENS_DL##LAST                                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TB));                               \
        }                                                                                                                               \
    };
#define KITTENS_WGMMA_TYPES(N, LAST, ...) KITTENS_WGMMA(N, LAST, bf16, "bf16", __VA_ARGS__) KITTENS_WGMMA(N, LAST, half, "f16", __VA_ARGS__)

KITTENS_WGMMA_TYPES(16, 0, 8, 9, 10, 11, 12, 13, 14)
KITTENS_WGMMA_TYPES(32, 1, 16, 17, 18, 19, 20, 21, 22)
KITTENS_WGMMA_TYPES(48, 2, 24, 25, 26, 27, 28, 29, 30)
KITTENS_WGMMA_TYPES(64, 3, 32, 33, 34, 35, 36, 37, 38)
KITTENS_WGMMA_TYPES(80, 4, 40, 41, 42, 43, 44, 45, 46)
KITTENS_WGMMA_TYPES(96, 5, 48, 49, 50, 51, 52, 53, 54)
KITTENS_WGMMA_TYPES(112, 6, 56, 57, 58, 59, 60, 61, 62)
KITTENS_WGMMA_TYPES(128, 7, 64, 65, 66, 67, 68, 69, 70)
KITTENS_WGMMA_TYPES(144, 8, 72, 73, 74, 75, 76, 77, 78)
KITTENS_WGMMA_TYPES(160, 9, 80, 81, 82, 83, 84, 85, 86)
KITTENS_WGMMA_TYPES(176, 10, 88, 89, 90, 91, 92, 93, 94)
KITTENS_WGMMA_TYPES(192, 11, 96, 97, 98, 99, 100, 101, 102)
KITTENS_WGMMA_TYPES(208, 12, 104, 105, 106, 107, 108, 109, 110)
KITTENS_WGMMA_TYPES(224, 13, 112, 113, 114, 115, 116, 117, 118)
KITTENS_WGMMA_TYPES(240, 14, 120, 121, 122, 123, 124, 125, 126)
KITTENS_WGMMA_TYPES(256, 15, 128, 129, 130, 131, 132, 133, 134)

#undef KITTENS_WGMMA_TYPES
#undef KITTENS_WGMMA

}  // namespace wgmma
}  // namespace detail
}  // namespace kittens
