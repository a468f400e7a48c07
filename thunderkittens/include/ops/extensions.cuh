// What ThunderKittens' interface does not have; the kernels take this file with either set of headers.
//
// e4m3::multiply(d, a, b, accumulate): m64nNk32 with A from registers and sums in fp16, two to a register. Both operands are K-major. A
// fragment of A of 32 columns is four registers: columns 4t.. of rows g and g + 8, then columns 16 + 4t.. of both (g = lane / 4,
// t = lane % 4). Register 2b + i of the sums holds columns 8b + 2t, + 1 of row g + 8i.
#pragma once

#include <cstdint>

// Inline PTX numbers the operands of an instruction in order, so its text needs a list of numbers for each count of accumulators.
// KITTENS_T<n> is the text of accumulators 8n..8n+7; KITTENS_TL<n> is the text of 0..8n+7 and KITTENS_DL<n>(kind) are the operands, kind
// "+f" or "+r".
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
#define KITTENS_D(kind, i) \
    kind(d[i]), kind(d[i + 1]), kind(d[i + 2]), kind(d[i + 3]), kind(d[i + 4]), kind(d[i + 5]), kind(d[i + 6]), kind(d[i + 7])
#define KITTENS_TL0 KITTENS_T0
#define KITTENS_DL0(kind) KITTENS_D(kind, 0)
#define KITTENS_TL1 KITTENS_TL0 ", " KITTENS_T1
#define KITTENS_DL1(kind) KITTENS_DL0(kind), KITTENS_D(kind, 8)
#define KITTENS_TL2 KITTENS_TL1 ", " KITTENS_T2
#define KITTENS_DL2(kind) KITTENS_DL1(kind), KITTENS_D(kind, 16)
#define KITTENS_TL3 KITTENS_TL2 ", " KITTENS_T3
#define KITTENS_DL3(kind) KITTENS_DL2(kind), KITTENS_D(kind, 24)
#define KITTENS_TL5 KITTENS_TL3 ", " KITTENS_T4 ", " KITTENS_T5
#define KITTENS_DL5(kind) KITTENS_DL3(kind), KITTENS_D(kind, 32), KITTENS_D(kind, 40)
#define KITTENS_TL7 KITTENS_TL5 ", " KITTENS_T6 ", " KITTENS_T7
#define KITTENS_DL7(kind) KITTENS_DL5(kind), KITTENS_D(kind, 48), KITTENS_D(kind, 56)
#define KITTENS_TL11 KITTENS_TL7 ", " KITTENS_T8 ", " KITTENS_T9 ", " KITTENS_T10 ", " KITTENS_T11
#define KITTENS_DL11(kind) KITTENS_DL7(kind), KITTENS_D(kind, 64), KITTENS_D(kind, 72), KITTENS_D(kind, 80), KITTENS_D(kind, 88)
#define KITTENS_TL15 KITTENS_TL11 ", " KITTENS_T12 ", " KITTENS_T13 ", " KITTENS_T14 ", " KITTENS_T15
#define KITTENS_DL15(kind) KITTENS_DL11(kind), KITTENS_D(kind, 96), KITTENS_D(kind, 104), KITTENS_D(kind, 112), KITTENS_D(kind, 120)

namespace kittens {

__device__ __forceinline__ uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

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
