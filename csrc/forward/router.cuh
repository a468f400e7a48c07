// The router's gate of 16 rows of a row tile, by one warp: P = Q W by mma.sync on fragments of Q, r = sigmoid(P) / (sum_e sigmoid(P) +
// eps). The sums need all sub-networks; shared memory holds the sigmoids of a chunk of them, and the division is one multiply when a factor
// is read. Wherever W is read from, the bits are the same.
#pragma once

#include "common/fragments.cuh"
#include "common/ptx.cuh"
#include "forward/params.h"

namespace flashmhf {

// How W is read, how many times 16 of its rows at once, and for how many times 8 sub-networks side by side.
struct FromGlobal {
    static constexpr int batch = 4, chains = 1;
    template <typename X> __device__ __forceinline__ static X load(const X *w) { return load_behind_wait(w); }
};
struct FromShared {
    static constexpr int batch = 8, chains = 1;
    template <typename X> __device__ __forceinline__ static X load(const X *w) { return *w; }
};

// q_part: Q comes divided by it, hence P too.
template <int d_h, typename T, int q_part, typename Source, typename Tile> struct RouterRows {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    static constexpr int chunk = Tile::chunk;

    const ForwardParams &p;
    const void *w;  // of the head, [d_h, E]
    Tile &tile;
    int first_row;  // of the 16

    // Sub-networks first.. of a chunk. query(k, a): fragment k of Q, d_h columns 16k.., of the warp's rows.
    template <typename Query> __device__ __forceinline__ void compute(int first, Query &&query) {
        const int count = min(chunk, p.subnets - first);
        __syncwarp();
        for (int e = 0; e < count; e += 8) {
            float s[4];
            sigmoids(s, first + e, query);
            put(s, first + e, first);
        }
        __syncwarp();
    }
    // Those of the first chunk, and the sums over all sub-networks.
    template <typename Query> __device__ __forceinline__ void normalise(int first, Query &&query) {
        float2 sum = {0.f, 0.f};
        auto collect = [&](const float (&s)[4], int e) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (column(e) + j < p.subnets) {
                    sum.x += s[j];
                    sum.y += s[2 + j];
                }
            put(s, e, first);
        };
        __syncwarp();
#pragma unroll 1
        for (int e = 0; e < p.subnets; e += 8 * Source::chains) {
            if constexpr (Source::chains == 1) {
                float s[4];
                sigmoids(s, e, query);
                collect(s, e);
            } else {
                float s[Source::chains][4];
                sigmoids(s, e, query);
#pragma unroll
                for (int i = 0; i < Source::chains; ++i) collect(s[i], e + 8 * i);
            }
        }
        sum = quad_sum(sum);
        tile.scale[row()] = 1.f / (sum.x + p.gate.eps);
        tile.scale[row() + 8] = 1.f / (sum.y + p.gate.eps);
        __syncwarp();
    }

  private:
    __device__ __forceinline__ static unsigned lane() { return kittens::laneid(); }
    __device__ __forceinline__ unsigned row() const { return first_row + lane() / 4; }  // the first of two; the other is 8 below
    __device__ __forceinline__ static int column(int e) { return e + static_cast<int>(lane() % 4 * 2); }  // the first of two neighbours
    // The first of the thread's elements of W: row 2t, sub-network e + g.
    __device__ __forceinline__ int first_element(int e) const {
        return column(0) * p.subnets + min(e + static_cast<int>(lane() / 4), p.subnets - 1);
    }
    // s += q times 16 rows of W, of which the thread's elements begin at x.
    template <typename W> __device__ __forceinline__ void add_products(float (&s)[4], const T2 (&q)[4], const W *w, int x) const {
        multiply(s, q, Source::load(w + x), Source::load(w + (x + p.subnets)), Source::load(w + (x + 8 * p.subnets)),
                 Source::load(w + (x + 9 * p.subnets)));
    }
    // sigmoid(P) of sub-networks e..e + 7 in the fragment order of an accumulator: columns 2t, 2t + 1 of rows g, then of rows g + 8.
    template <typename Query> __device__ __forceinline__ void sigmoids(float (&s)[4], int e, Query &&query) {
        const int at = first_element(e);
        s[0] = s[1] = s[2] = s[3] = 0.f;
        auto product = [&](auto *w) {
            int x = at;
#pragma unroll(Source::batch)
            for (int k = 0; k < d_h / 16; ++k, x += 16 * p.subnets) {
                T2 q[4];
                query(k, q);
                add_products(s, q, w, x);
            }
        };
        if (p.gate.kind == Gate::w_half) product(static_cast<const T *>(w));
        else product(static_cast<const float *>(w));
#pragma unroll
        for (int j = 0; j < 4; ++j) s[j] = sigmoid_fast(q_part * s[j]);
    }
    // The same of `chains` times 8 sub-networks: as many chains of products side by side. Not one function with the one above: written so, ptxas
    // arranges the loops of the 16-bit kernels anew, and in one form spills.
    template <int chains, typename Query> __device__ __forceinline__ void sigmoids(float (&s)[chains][4], int e, Query &&query) {
        int at[chains];
#pragma unroll
        for (int i = 0; i < chains; ++i) at[i] = first_element(e + 8 * i), s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
        auto product = [&](auto *w) {
#pragma unroll(Source::batch)
            for (int k = 0; k < d_h / 16; ++k) {
                T2 q[4];
                query(k, q);
#pragma unroll
                for (int i = 0; i < chains; ++i) add_products(s[i], q, w, at[i] + 16 * k * p.subnets);
            }
        };
        if (p.gate.kind == Gate::w_half) product(static_cast<const T *>(w));
        else product(static_cast<const float *>(w));
#pragma unroll
        for (int i = 0; i < chains; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) s[i][j] = sigmoid_fast(q_part * s[i][j]);
    }
    // The compiler's own way of it takes more registers in bf16.
    __device__ __forceinline__ static float2 widen(T2 x) {
        if constexpr (std::is_same_v<T, kittens::half>) return kittens::base_types::convertor<float2, T2>::convert(x);
        const uint32_t bits = reinterpret_cast<const uint32_t &>(x);
        return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000)};
    }
    __device__ __forceinline__ static void multiply(float (&s)[4], const T2 (&q)[4], T2 b0, T2 b1) {
        mma_16x8(s, q, reinterpret_cast<const uint32_t &>(b0), reinterpret_cast<const uint32_t &>(b1));
    }
    __device__ __forceinline__ static void multiply(float (&s)[4], const T2 (&q)[4], T w0, T w1, T w2, T w3) {
        multiply(s, q, T2{w0, w1}, T2{w2, w3});
    }
    // W = its rounding plus a remainder: two products carry 16 (bf16) or 22 (fp16) bits of it.
    __device__ __forceinline__ static void multiply(float (&s)[4], const T2 (&q)[4], float w0, float w1, float w2, float w3) {
        using to = kittens::base_types::convertor<T2, float2>;
        const T2 high0 = to::convert(float2{w0, w1}), high1 = to::convert(float2{w2, w3});
        const float2 back0 = widen(high0), back1 = widen(high1);
        multiply(s, q, high0, high1);
        multiply(s, q, to::convert(float2{w0 - back0.x, w1 - back0.y}), to::convert(float2{w2 - back1.x, w3 - back1.y}));
    }
    // Those of sub-networks e..e + 7 that belong to the chunk first...
    __device__ __forceinline__ void put(const float (&s)[4], int e, int first) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = column(e) + j - first;
            if (i >= 0 && i < chunk && i + first < p.subnets) {
                tile.at(row(), i) = s[j];
                tile.at(row() + 8, i) = s[2 + j];
            }
        }
    }
};

template <int d_h, typename T> __device__ __forceinline__ const void *router_of(const ForwardParams &p, int head) {
    const int64_t row = static_cast<int64_t>(p.subnets) * (p.gate.kind == Gate::w_half ? int{sizeof(T)} : int{sizeof(float)});
    return static_cast<const uint8_t *>(p.gate.data) + head * d_h * row;
}

}  // namespace flashmhf
