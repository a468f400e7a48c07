// Turns fp32 tiles in fragment order into rows: sums the parts of each tile in order, then converts.
#pragma once

#include "backward/params.h"
#include "backward/rows.cuh"

namespace flashmhf {

// One CTA for 64 (or 96) columns of a tile: blockIdx (tile, column block, output).
template <int d_h, typename T>
__global__ void __launch_bounds__(row_tile_threads) flashmhf_backward_collect(const __grid_constant__ CollectParams p) {
    constexpr int cols = collect_columns<d_h>;
    __shared__ StagedTile<cols> staged;
    kittens::pdl::wait();
    const int thread = threadIdx.x, tile = p.first_tile + blockIdx.x, band = tile / p.band_tiles;
    const int64_t first = static_cast<int64_t>(tile - band * p.band_tiles) * tile_rows;
    const int64_t rows = min(static_cast<int64_t>(tile_rows), p.band_rows - first);
    const int64_t start = (band / p.inner_bands) * p.outer_step + (band % p.inner_bands) * p.inner_step + first * p.row_step;

    const float4 *src = reinterpret_cast<const float4 *>(p.tiles + blockIdx.x * p.parts * p.part_stride + blockIdx.z * p.out_step) +
                        blockIdx.y * (cols / 8) * 128 + thread;
    float4 sums[cols / 8];
#pragma unroll
    for (int j = 0; j < cols / 8; ++j) sums[j] = __ldcs(src + 128 * j);
#pragma unroll 1
    for (int part = 1; part < p.parts; ++part) {
        src += p.part_stride / 4;
#pragma unroll
        for (int j = 0; j < cols / 8; ++j) add(sums[j], __ldcs(src + 128 * j));
    }
#pragma unroll
    for (int j = 0; j < cols / 8; ++j) staged.fragment(j, thread) = sums[j];
    __syncthreads();
    staged.template write<T>(static_cast<T *>(p.out[blockIdx.z]) + start * d_h + blockIdx.y * cols, p.row_step * d_h, 0,
                             static_cast<int>(rows), thread, 128);
}

// dr_sums [H / group, E, group * batch * row_tiles * 64] to dR [T, H, E] in R's type. One CTA a tile of 64 tokens and head.
template <typename T> __global__ void __launch_bounds__(element_threads, 6) flashmhf_backward_dr(const __grid_constant__ BackwardParams p) {
    constexpr int chunk = 32;
    __shared__ float sums[chunk][tile_rows + 1];
    kittens::pdl::wait();
    // heads fastest: CTAs that run together write neighbouring rows of E
    const int block = blockIdx.y * gridDim.x + blockIdx.x, tile = block / p.heads, head = block - tile * p.heads;
    const TokenTile tokens(tile, p.row_tiles);
    const int64_t first = static_cast<int64_t>(tokens.tile) * tile_rows;
    const int tiles = p.batch * p.row_tiles, weight_head = head / p.group;
    const int64_t columns = static_cast<int64_t>(p.group) * tiles * tile_rows;
    const int64_t first_column = static_cast<int64_t>((head - weight_head * p.group) * tiles + tile) * tile_rows;
    const int rows = static_cast<int>(min(static_cast<int64_t>(tile_rows), p.length - first));
    for (int e = 0; e < p.subnets; e += chunk) {
        const int count = min(chunk, p.subnets - e);
        __syncthreads();
#pragma unroll 2
        for (int i = threadIdx.x; i < count * (tile_rows / 4); i += element_threads) {
            const int row = i / (tile_rows / 4), column = i % (tile_rows / 4) * 4;
            const float4 v = __ldcs(reinterpret_cast<const float4 *>(
                p.dr_sums + (static_cast<int64_t>(weight_head) * p.subnets + e + row) * columns + first_column + column));
            sums[row][column] = v.x;
            sums[row][column + 1] = v.y;
            sums[row][column + 2] = v.z;
            sums[row][column + 3] = v.w;
        }
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < chunk * rows; i += element_threads) {
            const int row = i / chunk, column = i % chunk;
            if (column >= count) continue;
            const int64_t at = (p.dense.index(tokens.sequence, static_cast<int>(first) + row) * p.dr_heads + head) * p.subnets + e + column;
            store_real<T>(p.dr, at, p.r_is_float, sums[column][row]);
        }
    }
}

}  // namespace flashmhf
