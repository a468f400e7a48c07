// Sizes that all kernels, planners and launches use. Pure C++.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMHF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMHF_HOST_DEVICE inline
#endif

namespace flashmhf {

constexpr int tile_rows = 64;     // tokens of a row tile: the M of wgmma
constexpr int tile_inter = 64;    // rows of K, U and V of a weight tile; K and U stacked make the N = 128 of the first product
constexpr int element_bytes = 2;  // bf16 or fp16

constexpr int shared_memory_limit = 227 * 1024;  // bytes a CTA may use
constexpr int sm_registers = 64 * 1024;
constexpr int tma_alignment = 16;  // bytes: bases and strides of a tensor map, bulk copies

inline bool aligned(const void *base) { return reinterpret_cast<uintptr_t>(base) % tma_alignment == 0; }
// Whether TMA takes the stride of an axis of `size` elements of so many bytes.
constexpr bool strided(int64_t size, int64_t stride, int bytes) { return size == 1 || (stride > 0 && stride * bytes % tma_alignment == 0); }

// The widest swizzle that divides a row of d_h elements; a tile is panels that wide, a box each. Above 128, where [K;U] comes in halves of d_h,
// it divides half a row.
constexpr int swizzle_bytes_of(int d_h) { return (d_h > 128 ? d_h / 2 : d_h) % 64 == 0 ? 128 : 64; }
constexpr int panel_cols_of(int d_h) { return swizzle_bytes_of(d_h) / element_bytes; }
// Registers a thread at launch, when the CTA has all of the SM's: a multiple of 8.
constexpr int launch_registers_of(int threads) { return sm_registers / threads / 8 * 8; }

template <typename A, typename B> constexpr auto ceil_div(A a, B b) { return (a + b - 1) / b; }

}  // namespace flashmhf
