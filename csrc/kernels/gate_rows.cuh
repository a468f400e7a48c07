// The weights r[t, e] of a warp's 16 rows: brought or computed chunk by chunk of sub-networks into shared memory, and read from there when
// the tiles of a sub-network begin. Each warp works for itself: no barrier is involved.
//
// From W: P = Q W by mma.sync on Q's fragments, r = sigmoid(P) / (sum_e sigmoid(P) + eps). The sums need all sub-networks and are taken at
// the start of an item; shared memory holds the sigmoids, and the division is one multiply by `scale` when a weight is read.
#pragma once

#include "kernels/load_tiles.cuh"
#include "kernels/ptx_ext.cuh"

namespace flashmhf {

template <int d_h, typename T> struct GateRows {
    using P = ForwardPolicy<d_h>;
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    static constexpr int chunk = P::gate_chunk;

    const ForwardParams &p;
    float (&shared)[P::gate_chunk][16];
    int head, sequence, token, rows;  // of the warp's rows: first token, how many of the 16 hold tokens
    int first;                        // sub-network at the start of the chunk
    int index, left;                  // current sub-network within the chunk; its tiles still to come
    float2 scale, r;                  // rows g and g + 8

    __device__ __forceinline__ GateRows(const ForwardParams &params, float (&buffer)[P::gate_chunk][16]) : p(params), shared(buffer) {}

    // query(k, a): fragment k of Q, d_h columns 16k.., of the warp's rows.
    template <typename Query> __device__ __forceinline__ void begin(const RowTile &tile, const Work &work, Query &&query) {
        const int warp = kittens::warpgroup::warpid();
        head = tile.head;
        sequence = tile.sequence;
        token = tile.token + 16 * warp;
        const int64_t valid = tile.rows(p) - 16 * warp;
        rows = valid < 16 ? static_cast<int>(valid) : 16;
        first = work.begin / p.subnet_tiles;
        index = 0;
        left = (first + 1) * p.subnet_tiles - work.begin;
        scale = {1.f, 1.f};
        if (p.gate >= Gate::w_float) normalise(query);
        else fill(query);
        read();
    }
    // To the next tile of the item.
    template <typename Query> __device__ __forceinline__ void advance(Query &&query) {
        if (--left == 0) {
            left = p.subnet_tiles;
            if (++index == chunk) {
                index = 0;
                first += chunk;
                fill(query);
            }
            read();
        }
    }

  private:
    __device__ __forceinline__ void read() {
        const int g = kittens::laneid() / 4;
        r = {scale.x * shared[index][g], scale.y * shared[index][g + 8]};
    }

    template <typename Query> __device__ __forceinline__ void fill(Query &&query) {
        const int lane = kittens::laneid(), row = lane % 16, count = min(chunk, p.subnets - first);
        __syncwarp();
        if (p.gate >= Gate::w_float) {
            for (int e = 0; e < count; e += 8) {
                float s[4];
                sigmoids(s, first + e, query);
                put(s, e, count);
            }
        } else {
            const int64_t at = sequence * p.r_batch + static_cast<int64_t>(token + row) * p.r_token + head * p.r_head + first;
            const bool valid = row < rows;
#pragma unroll 4
            for (int e = lane / 16; e < count; e += 2) {
                float value = 1.f;
                if (p.gate == Gate::r_float) value = valid ? __ldg(static_cast<const float *>(p.gate_data) + at + e) : 0.f;
                if (p.gate == Gate::r_half)
                    value = valid ? kittens::base_types::convertor<float, T>::convert(__ldg(static_cast<const T *>(p.gate_data) + at + e)) : 0.f;
                shared[e][row] = value;
            }
        }
        __syncwarp();
    }

    // The first chunk, and the sums over all sub-networks.
    template <typename Query> __device__ __forceinline__ void normalise(Query &&query) {
        const int t = kittens::laneid() % 4;
        float2 sum = {0.f, 0.f};
        __syncwarp();
        for (int e = 0; e < p.subnets; e += 8) {
            float s[4];
            sigmoids(s, e, query);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (e + 2 * t + j < p.subnets) {
                    sum.x += s[j];
                    sum.y += s[2 + j];
                }
            put(s, e - first, min(chunk, p.subnets - first));
        }
        __syncwarp();
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            sum.x += __shfl_xor_sync(kittens::MASK_ALL, sum.x, d);
            sum.y += __shfl_xor_sync(kittens::MASK_ALL, sum.y, d);
        }
        scale = {1.f / (sum.x + p.eps), 1.f / (sum.y + p.eps)};
    }

    // sigmoid(P) of sub-networks e..e + 7 in the fragment order of an accumulator: columns 2t, 2t + 1 of rows g, then of rows g + 8.
    template <typename Query> __device__ __forceinline__ void sigmoids(float (&s)[4], int e, Query &&query) {
        const int lane = kittens::laneid();
        const int64_t at = (static_cast<int64_t>(head) * d_h + 2 * (lane % 4)) * p.subnets + min(e + lane / 4, p.subnets - 1);
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
        for (int j = 0; j < 4; ++j) s[j] = sigmoid_fast(s[j]);
    }
    __device__ __forceinline__ static void multiply(float (&s)[4], const T2 (&q)[4], T2 b0, T2 b1) {
        mma_16x8(s, q, reinterpret_cast<const uint32_t &>(b0), reinterpret_cast<const uint32_t &>(b1));
    }
    __device__ __forceinline__ void put(const float (&s)[4], int e, int count) {
        const int g = kittens::laneid() / 4, t = kittens::laneid() % 4;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int column = e + 2 * t + j;
            if (column >= 0 && column < count) {
                shared[column][g] = s[j];
                shared[column][g + 8] = s[2 + j];
            }
        }
    }
};

}  // namespace flashmhf
