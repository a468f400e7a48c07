// Accumulator tiles on their way out. A tile of 64 x cols fp32 lies in global memory in fragment order, the order in which a warpgroup's
// threads hold it: float4 j of thread i is columns 8j + 2 (i % 4), + 1 of row g, then of row g + 8, with g = 16 (i / 32) + i % 32 / 4.
#pragma once

#include "backward/policy.h"
#include "common/fragments.cuh"
#include "common/ptx.cuh"

namespace flashmhf {

template <typename Acc, typename Put> __device__ __forceinline__ void each_fragment(const Acc &acc, Put &&put) {
#pragma unroll
    for (int j = 0; j < Acc::cols / 8; ++j) put(j, fragment_quad<Acc::cols>(acc, j));
}

// Staging of such a tile in shared memory: fragment order with the place of a thread XORed by j, so that neither the fragments going in nor
// the rows coming out collide in banks.
template <int cols> struct StagedTile {
    float4 data[cols / 8][128];
    __device__ __forceinline__ float4 &fragment(int j, int thread) { return data[j][thread ^ (j % 8)]; }
    __device__ __forceinline__ float2 pair(int row, int j, int t) const {
        const float4 &v = data[j][(row / 16 * 32 + row % 8 * 4 + t) ^ (j % 8)];
        return row % 16 < 8 ? float2{v.x, v.y} : float2{v.z, v.w};
    }

    // Rows first..end, by `threads` threads, to out (of row 0), row_stride elements apart, as T. A rolled loop on purpose: an unrolled
    // epilogue costs more in instruction fetches than the stores themselves.
    template <typename T>
    __device__ __forceinline__ void write(void *out, int64_t row_stride, int first, int end, int thread, int threads) const {
#pragma unroll 1
        for (int i = thread; i < (end - first) * (cols / 8); i += threads) {
            const int row = first + i / (cols / 8), j = i % (cols / 8);
            float2 v[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) v[t] = pair(row, j, t);
            using T2 = typename kittens::base_types::packing<T>::packed_type;
            uint32_t packed[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const T2 both = kittens::base_types::convertor<T2, float2>::convert(v[t]);
                packed[t] = reinterpret_cast<const uint32_t &>(both);
            }
            store_16_bytes(static_cast<T *>(out) + row * row_stride + 8 * j, packed);
        }
    }
};

// The first `rows` rows of a warpgroup's accumulator tile to rows, through shared memory that the warpgroup alone uses.
template <typename T, typename Acc>
__device__ __forceinline__ void store_rows(const Acc &acc, void *staging, void *out, int64_t row_stride, int rows, int barrier) {
    using kittens::warpgroup;
    auto &staged = *static_cast<StagedTile<Acc::cols> *>(staging);
    const int thread = warpgroup::laneid();
    warpgroup::sync(barrier);  // the last use of the staging is over
    each_fragment(acc, [&](int j, float4 v) { staged.fragment(j, thread) = v; });
    warpgroup::sync(barrier);
    staged.template write<T>(out, row_stride, 0, min(rows, tile_rows), thread, 128);
}

}  // namespace flashmhf
