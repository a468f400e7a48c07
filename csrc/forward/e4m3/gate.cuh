// The gate of a warp's 16 rows in the FP8 forward kernel, times the scales of u8 and v8. It is needed when the sums of a sub-network are
// promoted, first a sub-network after the item's begin: R comes behind Q, into one buffer. A gate computed from W is computed while
// Q lies in shared memory.
#pragma once

#include "common/fp8.cuh"
#include "forward/e4m3/shared_memory.cuh"
#include "forward/router.cuh"

namespace flashmhf {

// Gates of a row tile that the router puts into global memory.
struct Fp8GateRows {
    static constexpr int chunk = 1 << 30;
    float *values, *scale;
    int subnets;
    __device__ __forceinline__ float &at(unsigned row, int subnet) { return values[static_cast<int64_t>(row) * subnets + subnet]; }
};
template <int d_h> __device__ __forceinline__ float *gate_rows(const ForwardFp8Params &p, int warpgroup) {
    return p.gate_rows + ((static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * p.consumers + warpgroup) * tile_rows * p.subnets;
}

// Factors are divided by the sum of their magnitudes over the sub-networks seen so far, so that sums in fp16 neither overflow nor vanish;
// the output's scale has that sum. tile.scale holds its reciprocal.
template <int d_h, typename T> struct Fp8Gate {
    using Tile = Fp8GateTile<d_h>;
    static constexpr int chunk = Tile::chunk;

    const ForwardFp8Params &p;
    int index, left;  // column of the current sub-network, counted through the chunks; its tiles still to come
    float uv;         // scales of the sub-network of column `lane` of the chunk
    uint32_t r;       // factors of rows g and g + 8, as a pair of fp16

    // Before the item's first tile.
    __device__ __forceinline__ void begin(const Item &item) {
        index = item.gate_column;
        left = (item.subnet + 1) * p.subnet_tiles - item.begin;
    }
    // Before the first promotion. scale: of the output's rows g and g + 8.
    __device__ __forceinline__ void prepare(const Item &item, Tile &tile, const Fp8Scales<d_h> &scales, int warpgroup, float2 &scale) {
        const int lane = kittens::laneid(), row = first_row();
        uv = lane < chunk ? scales.uv[lane] : 0.f;
        if (has_router(p.gate.kind)) scale.x *= tile.scale[row], scale.y *= tile.scale[row + 8];
        if (!p.gate.tiles && !p.gate.router_bytes) load(item, item.subnet, warpgroup, tile);
        const float2 norm = magnitude(tile, index, min(chunk, p.subnets - item.subnet + index), {0.f, 0.f});
        scale.x *= norm.x, scale.y *= norm.y;
        read(tile);
    }
    // To the next sub-network; true when a chunk has been used up, and replenish() must come before the next promotion.
    __device__ __forceinline__ bool advance(Tile &tile) {
        left = p.subnet_tiles;
        if (++index % chunk == 0) return true;
        read(tile);
        return false;
    }
    // The next chunk. Returns what the sums so far must be multiplied with.
    __device__ __forceinline__ float2 replenish(const Item &item, Tile &tile, int warpgroup, float2 &scale) {
        const int first = item.subnet + index, lane = kittens::laneid(), row = first_row();
        if (first >= p.subnets) return {1.f, 1.f};
        const float2 before = {tile.scale[row], tile.scale[row + 8]};
        __syncwarp();
        const int at = item.head / p.bundles * p.subnets + first + lane;
        uv = lane < chunk && first + lane < p.subnets ? load_behind_wait(p.u_scales + at) * load_behind_wait(p.v_scales + at) : 0.f;
        load(item, first, warpgroup, tile);
        const float2 norm = magnitude(tile, 0, min(chunk, p.subnets - first), {1.f / before.x, 1.f / before.y});
        const float2 factor = {1.f / (before.x * norm.x), 1.f / (before.y * norm.y)};
        scale.x /= factor.x, scale.y /= factor.y;
        read(tile);
        return factor;
    }

  private:
    __device__ __forceinline__ static int first_row() { return fragment_row(kittens::warpgroup::laneid()); }
    // The sum of |gate * scales| of columns from..to - 1 and of `before`; leaves its reciprocal in tile.scale.
    __device__ __forceinline__ float2 magnitude(Tile &tile, int from, int to, float2 before) {
        const int t = kittens::laneid() % 4, row = first_row();
        float2 sum = {0.f, 0.f};
        for (int e = from; e < to; e += 4) {
            const int column = e + t;
            const float scale = __shfl_sync(kittens::MASK_ALL, uv, column);
            if (column < to) sum.x += fabsf(tile.at(row, column) * scale), sum.y += fabsf(tile.at(row + 8, column) * scale);
        }
        sum = quad_sum(sum);
        // Not below the smallest normal number: NaN stays NaN.
        sum.x = before.x + (sum.x < 1e-30f ? 1e-30f : sum.x);
        sum.y = before.y + (sum.y < 1e-30f ? 1e-30f : sum.y);
        __syncwarp();
        tile.scale[row] = 1.f / sum.x;
        tile.scale[row + 8] = 1.f / sum.y;
        __syncwarp();
        return sum;
    }
    __device__ __forceinline__ void read(Tile &tile) {
        const int row = first_row(), e = index % chunk;
        const float scale = __shfl_sync(kittens::MASK_ALL, uv, e);
        r = fp8::pack_half(tile.at(row, e) * scale * tile.scale[row], tile.at(row + 8, e) * scale * tile.scale[row + 8]);
    }
    // The gate of the warp's rows, sub-networks first.. of a chunk, where neither TMA nor the router puts it into the tile: lanes along the
    // sub-networks.
    __device__ __forceinline__ void load(const Item &item, int first, int warpgroup, Tile &tile) {
        const int lane = kittens::laneid(), from = 16 * kittens::warpgroup::warpid();
        const bool mine = lane < chunk && first + lane < p.subnets;
        const int64_t left = item.sequence < p.batch ? p.length - item.token - from : 0;
        const int64_t at = item.sequence * p.gate.batch + (item.token + from) * p.gate.token + item.head * p.gate.head + first + lane;
        const float *computed = gate_rows<d_h>(p, warpgroup) + int64_t{from} * p.subnets + first + lane;
        __syncwarp();
#pragma unroll 4
        for (int row = 0; row < 16; ++row) {
            float x = p.gate.kind == Gate::ones ? 1.f : 0.f;
            if (has_router(p.gate.kind)) x = mine ? computed[row * p.subnets] : 0.f;
            else if (p.gate.kind != Gate::ones && mine && row < left)
                x = load_real<T>(p.gate.data, at + row * p.gate.token, p.gate.kind == Gate::r_float);
            if (lane < chunk) tile.at(from + row, lane) = x;
        }
        __syncwarp();
    }
};

}  // namespace flashmhf
