// Adds the fp32 parts of split items in the order of their clusters and writes the output. One block: 8 columns of one row tile.
#pragma once

#include "kernels/ptx_ext.cuh"
#include "kernels/store_tiles.cuh"

namespace flashmhf {

template <int d_h, typename T> __global__ __launch_bounds__(128) void combine(T *out, const __grid_constant__ ForwardParams p) {
    constexpr int consumers = ForwardPolicy<d_h>::consumers;
    const auto &s = p.schedule;
    const int tiles = gridDim.x / s.rest;  // row tiles of an item
    const int index = blockIdx.x / tiles, rank = blockIdx.x % tiles / consumers, wg = blockIdx.x % tiles % consumers, column = blockIdx.y;
    const int first = s.first_owner(index), last = s.last_owner(index);
    const RowTile tile(p, s.waves * s.clusters + index, rank, consumers, wg);
    const int row = fragment_row(threadIdx.x);
    wait_for_prerequisites();
    if (first == last || !holds_token(p, tile.sequence, tile.token + row)) return;

    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
    for (int c = first; c <= last; ++c) {
        const float *part = p.partials + part_offset<d_h>(p, c, s.part_of(c, index), rank, wg);
        const float4 x = __ldcg(reinterpret_cast<const float4 *>(part) + 128 * column + threadIdx.x);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    using to = kittens::base_types::convertor<T2, float2>;
    T *dst = out + tile.sequence * p.out_batch + (tile.token + row) * p.out_token + tile.head * d_h + 8 * column + threadIdx.x % 4 * 2;
    *reinterpret_cast<T2 *>(dst) = to::convert(float2{sum.x, sum.y});
    if (holds_token(p, tile.sequence, tile.token + row + 8)) *reinterpret_cast<T2 *>(dst + 8 * p.out_token) = to::convert(float2{sum.z, sum.w});
}

}  // namespace flashmhf
