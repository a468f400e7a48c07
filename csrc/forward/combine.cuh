// Adds the fp32 parts of split items in the order of their clusters and writes the output, where the forward kernel does not
// (f16/add_parts.cuh). One block: 8 columns of one row tile.
#pragma once

#include "forward/epilogue.cuh"

namespace flashmhf {

template <int d_h, typename T> __global__ __launch_bounds__(128) void flashmhf_forward_combine(const __grid_constant__ ForwardParams p) {
    const auto &s = p.schedule;
    const int tiles = gridDim.x / s.rest;  // row tiles of an item
    const int index = blockIdx.x / tiles, rank = blockIdx.x % tiles / p.consumers, wg = blockIdx.x % tiles % p.consumers,
              column = blockIdx.y, block = blockIdx.z;
    const int first = s.first_owner(index), last = s.last_owner(index), part = s.part_of(first, index);
    const RowTile tile(p, s.waves * s.clusters + index * s.abreast + block, rank, wg);
    const int row = fragment_row(threadIdx.x);
    kittens::pdl::arrive();  // the next kernel, which waits for this one before it touches what this one writes
    kittens::pdl::wait();
    if (first == last || !holds_token(p, tile.sequence, tile.token + p.token_of(row))) return;

    // As many loads in flight as there are parts, for the most part. A span behind the first begins within the item: its part is number 0.
    constexpr int at_once = 8;
    const auto *data =
        reinterpret_cast<const float4 *>(p.parts.sums + part_offset<d_h>(p, first, block, 0, rank, wg)) + 128 * column + threadIdx.x;
    const int64_t part_quads = p.row_ctas * p.consumers * (tile_rows * d_h / 4), cluster_quads = 2 * s.abreast * part_quads;
    float4 sum = __ldcg(data + part * part_quads);
    for (int left = last - first; left > 0; left -= at_once) {
        float4 x[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            data += cluster_quads;
            if (i < left) x[i] = __ldcg(data);
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i)
            if (i < left) add(sum, x[i]);
    }
    T *out = output_at<d_h, T>(p, tile, row, 8 * column + threadIdx.x % 4 * 2);
    store_pair(out, sum.x, sum.y);
    if (holds_token(p, tile.sequence, tile.token + p.token_of(row + 8))) store_pair(out + 8 * p.out_token, sum.z, sum.w);
}

}  // namespace flashmhf
