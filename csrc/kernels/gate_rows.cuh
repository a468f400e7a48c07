// The weights r[t, e] of a warp's 16 rows, chunk by chunk of sub-networks in shared memory, read from there when the tiles of a sub-network
// begin. Given weights of an item's first chunk come with its Q; further chunks, and everything that is computed, is up to the consumer
// warp, which works for itself: no barrier is involved.
//
// From W: P = Q W by mma.sync on Q's fragments, r = sigmoid(P) / (sum_e sigmoid(P) + eps). The sums need all sub-networks and are taken at
// the start of an item; shared memory holds the sigmoids, and the division is one multiply when a weight is read.
#pragma once

#include "kernels/load_tiles.cuh"
#include "kernels/ptx_ext.cuh"

namespace flashmhf {

// halved: Q comes at half its size, hence P too, and the weights are to be doubled.
template <int d_h, typename T, bool halved> struct GateRows {
    using P = ForwardPolicy<d_h>;
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    using Tile = GateTile<d_h>;
    static constexpr int chunk = P::gate_chunk;

    const ForwardParams &p;
    int index, left;  // column of the current sub-network, counted through the chunks from the item's first one; its tiles still to come
    float2 r;         // its weights of rows g and g + 8

    // query(k, a): fragment k of Q, d_h columns 16k.., of the warp's rows. tile: of the warpgroup; a warp uses its own 16 rows.
    template <typename Query> __device__ __forceinline__ void begin(const Item &item, Tile &tile, Query &&query) {
        const int first = item.begin / p.subnet_tiles;
        index = item.gate_column;
        left = (first + 1) * p.subnet_tiles - item.begin;
        if (p.gate >= Gate::w_float) normalise(item, first, tile, query);
        else if (!P::gate_early) load(item, first, tile);
        read(tile);
    }
    // To the next tile of the item. Called between swiglu() and the wait for the second product: the branch that overwrites r keeps ptxas
    // from sinking the elementwise part below that wait. Bringing in a chunk needs more registers, and is left for replenish().
    __device__ __forceinline__ void advance(Tile &tile) {
        if (--left == 0) {
            left = p.subnet_tiles;
            if (++index % chunk != 0) read(tile);
        }
    }
    template <typename Query> __device__ __forceinline__ void replenish(const Item &item, Tile &tile, Query &&query) {
        if (index > 0 && index % chunk == 0 && left == p.subnet_tiles) {
            const int first = item.begin / p.subnet_tiles + index;
            if (p.gate >= Gate::w_float) compute(item, first, tile, query);
            else load(item, first, tile);
            read(tile);
        }
    }

  private:
    __device__ __forceinline__ static int first_row() { return fragment_row(kittens::warpgroup::laneid()); }
    __device__ __forceinline__ void read(Tile &tile) {
        const int row = first_row(), e = index % chunk;
        constexpr float unit = halved ? 2.f : 1.f;
        r = {unit * tile.scale[row] * tile.at(row, e), unit * tile.scale[row + 8] * tile.at(row + 8, e)};
    }

    __device__ __forceinline__ void load(const Item &item, int first, Tile &tile) {
        __syncwarp();
        const int warp = kittens::warpgroup::warpid();
        load_gate<d_h, T>(p, item, 16 * warp, 16 * warp + 16, first, true, tile);
        wait_gate();
        tma::fence_shared_writes();  // the producer may fill the buffer by TMA next
    }
    template <typename Query> __device__ __forceinline__ void compute(const Item &item, int first, Tile &tile, Query &&query) {
        const int count = min(chunk, p.subnets - first);
        __syncwarp();
        for (int e = 0; e < count; e += 8) {
            float s[4];
            sigmoids(s, item, first + e, query);
            put(tile, s, e, count);
        }
        __syncwarp();
    }

    // The first chunk, and the sums over all sub-networks.
    template <typename Query> __device__ __forceinline__ void normalise(const Item &item, int first, Tile &tile, Query &&query) {
        const int t = kittens::laneid() % 4;
        float2 sum = {0.f, 0.f};
        __syncwarp();
        for (int e = 0; e < p.subnets; e += 8) {
            float s[4];
            sigmoids(s, item, e, query);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (e + 2 * t + j < p.subnets) {
                    sum.x += s[j];
                    sum.y += s[2 + j];
                }
            put(tile, s, e - first, min(chunk, p.subnets - first));
        }
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            sum.x += __shfl_xor_sync(kittens::MASK_ALL, sum.x, d);
            sum.y += __shfl_xor_sync(kittens::MASK_ALL, sum.y, d);
        }
        tile.scale[first_row()] = 1.f / (sum.x + p.eps);
        tile.scale[first_row() + 8] = 1.f / (sum.y + p.eps);
        __syncwarp();
    }

    // sigmoid(P) of sub-networks e..e + 7 in the fragment order of an accumulator: columns 2t, 2t + 1 of rows g, then of rows g + 8.
    template <typename Query> __device__ __forceinline__ void sigmoids(float (&s)[4], const Item &item, int e, Query &&query) {
        const int lane = kittens::laneid();
        const int64_t at = (static_cast<int64_t>(item.head) * d_h + 2 * (lane % 4)) * p.subnets + min(e + lane / 4, p.subnets - 1);
        s[0] = s[1] = s[2] = s[3] = 0.f;
        auto product = [&](auto *w, auto &&split) {
#pragma unroll 4
            for (int k = 0; k < d_h / 16; ++k) {
                T2 q[4];
                query(k, q);
                const auto *x = w + at + static_cast<int64_t>(16 * k) * p.subnets;
                split(q, __ldg(x), __ldg(x + p.subnets), __ldg(x + 8 * p.subnets), __ldg(x + 9 * p.subnets));
            }
        };
        if (p.gate == Gate::w_half) {
            product(static_cast<const T *>(p.gate_data), [&](const T2(&q)[4], T w0, T w1, T w2, T w3) { multiply(s, q, T2{w0, w1}, T2{w2, w3}); });
        } else {  // W = its rounding plus a remainder: two products carry 16 (bf16) or 22 (fp16) bits of it
            product(static_cast<const float *>(p.gate_data), [&](const T2(&q)[4], float w0, float w1, float w2, float w3) {
                using to = kittens::base_types::convertor<T2, float2>;
                using from = kittens::base_types::convertor<float2, T2>;
                const T2 high0 = to::convert(float2{w0, w1}), high1 = to::convert(float2{w2, w3});
                const float2 back0 = from::convert(high0), back1 = from::convert(high1);
                multiply(s, q, high0, high1);
                multiply(s, q, to::convert(float2{w0 - back0.x, w1 - back0.y}), to::convert(float2{w2 - back1.x, w3 - back1.y}));
            });
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) s[j] = sigmoid_fast(halved ? 2.f * s[j] : s[j]);
    }
    __device__ __forceinline__ static void multiply(float (&s)[4], const T2 (&q)[4], T2 b0, T2 b1) {
        mma_16x8(s, q, reinterpret_cast<const uint32_t &>(b0), reinterpret_cast<const uint32_t &>(b1));
    }
    __device__ __forceinline__ static void put(Tile &tile, const float (&s)[4], int e, int count) {
        const int row = first_row(), t = kittens::laneid() % 4;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int column = e + 2 * t + j;
            if (column >= 0 && column < count) {
                tile.at(row, column) = s[j];
                tile.at(row + 8, column) = s[2 + j];
            }
        }
    }
};

}  // namespace flashmhf
