// Adds the fp32 parts of split items in the order of their clusters and writes the output, where the forward kernel does not
// (add_parts.cuh). One block: 8 columns of one row tile.
#pragma once

#include "common/ptx.cuh"
#include "forward/epilogue.cuh"

namespace flashmhf {

template <int d_h, typename T> __global__ __launch_bounds__(128) void flashmhf_forward_combine(const __grid_constant__ ForwardParams p) {
    const auto &s = p.schedule;
    const int tiles = gridDim.x / s.rest;  // row tiles of an item
    const int index = blockIdx.x / tiles, rank = blockIdx.x % tiles / p.consumers, wg = blockIdx.x % tiles % p.consumers,
              column = blockIdx.y;
    const int first = s.first_owner(index), last = s.last_owner(index);
    const RowTile tile(p, s.waves * s.clusters + index, rank, wg);
    const int row = fragment_row(threadIdx.x);
    kittens::pdl::arrive();  // the next kernel, which waits for this one before it touches what this one writes
    kittens::pdl::wait();
    if (first == last || !holds_token(p, tile.sequence, tile.token + p.token_of(row))) return;

    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
    for (int c = first; c <= last; ++c) {
        const float *part = p.partials + part_offset<d_h>(p, c, s.part_of(c, index), rank, wg);
        add(sum, __ldcg(reinterpret_cast<const float4 *>(part) + 128 * column + threadIdx.x));
    }
    store_quad<d_h, T>(sum, p, tile, row, 8 * column + threadIdx.x % 4 * 2);
}

}  // namespace flashmhf
