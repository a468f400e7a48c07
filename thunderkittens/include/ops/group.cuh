// Collective operations of a group of consecutive warps, group<1> = warp, group<4> = warpgroup, and the instructions of their products.
#pragma once

#include "ops/extensions.cuh"

namespace kittens {

// The wgmma.mma_async instructions in 16 bits, m64nNk16 with sums in fp32:
//
// base<T, N, TA, TB>::st_st(d, a, b, accumulate): d[64xN] (+)= A B, both from shared memory through descriptors;
// base<T, N, 0, TB>::rt_st(d, a, b, accumulate): A from registers. TA, TB = 1: the operand is MN-major. accumulate = 0 overwrites d.
namespace detail::wgmma {

template <typename T, int N, int TA, int TB> struct base;

// LAST: of the lists of accumulators. P0.. are the operand numbers after the accumulators.
#define KITTENS_WGMMA(N, LAST, TYPE, NAME, P0, P1, P2, P3, P4, P5, P6)                                                                  \
    template <int TA, int TB> struct base<TYPE, N, TA, TB> {                                                                            \
        __device__ static inline void st_st(float *d, uint64_t a, uint64_t b, int accumulate) {                                         \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                         " {" KITTENS_TL##LAST "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}"                                 \
                         : KITTENS_DL##LAST("+f")                                                                                       \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TA), "n"(TB));                                                          \
        }                                                                                                                               \
        __device__ static inline void rt_st(float *d, const uint32_t *a, uint64_t b, int accumulate) {                                  \
            static_assert(TA == 0, "A in registers is K-major");                                                                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                         " {" KITTENS_TL##LAST "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}"           \
                         : KITTENS_DL##LAST("+f")                                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TB));                               \
        }                                                                                                                               \
    };
#define KITTENS_WGMMA_TYPES(N, LAST, ...) KITTENS_WGMMA(N, LAST, bf16, "bf16", __VA_ARGS__) KITTENS_WGMMA(N, LAST, half, "f16", __VA_ARGS__)

KITTENS_WGMMA_TYPES(16, 0, 8, 9, 10, 11, 12, 13, 14)
KITTENS_WGMMA_TYPES(32, 1, 16, 17, 18, 19, 20, 21, 22)
KITTENS_WGMMA_TYPES(48, 2, 24, 25, 26, 27, 28, 29, 30)
KITTENS_WGMMA_TYPES(64, 3, 32, 33, 34, 35, 36, 37, 38)
KITTENS_WGMMA_TYPES(96, 5, 48, 49, 50, 51, 52, 53, 54)
KITTENS_WGMMA_TYPES(128, 7, 64, 65, 66, 67, 68, 69, 70)
KITTENS_WGMMA_TYPES(192, 11, 96, 97, 98, 99, 100, 101, 102)
KITTENS_WGMMA_TYPES(256, 15, 128, 129, 130, 131, 132, 133, 134)

#undef KITTENS_WGMMA_TYPES
#undef KITTENS_WGMMA

}  // namespace detail::wgmma

template <int _GROUP_WARPS> struct group {
    static constexpr int GROUP_WARPS = _GROUP_WARPS;
    static constexpr int GROUP_THREADS = GROUP_WARPS * WARP_THREADS;
    __device__ static inline int laneid() { return threadIdx.x % GROUP_THREADS; }
    __device__ static inline int warpid() { return laneid() / WARP_THREADS; }
    __device__ static inline void sync(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(GROUP_THREADS) : "memory"); }

    template <int n_reg> __device__ static inline void increase_registers() {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n_reg));
    }
    template <int n_reg> __device__ static inline void decrease_registers() {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n_reg));
    }

    // ---- shared <-> register tiles: warp w of the group holds rows [w * RT::rows, (w + 1) * RT::rows) of a shared tile of 16 bits
    template <register_tile RT, shared_tile ST> __device__ static inline void load(RT &dst, const ST &src) {
        each_base_tile<RT, ST>(src, [&](int i, int j, uint32_t address) {
            using U2 = typename base_types::packing<typename ST::dtype>::packed_type;
            U2 v[4];
            move<U2>::ldsm4(v[0], v[1], v[2], v[3], address);
#pragma unroll
            for (int k = 0; k < 4; k++) dst.tiles[i][j].data[k] = base_types::convertor<typename RT::dtype, U2>::convert(v[k]);
        });
    }
    template <shared_tile ST, register_tile RT> __device__ static inline void store(ST &dst, const RT &src) {
        each_base_tile<RT, ST>(dst, [&](int i, int j, uint32_t address) {
            using U2 = typename base_types::packing<typename ST::dtype>::packed_type;
            U2 v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = base_types::convertor<U2, typename RT::dtype>::convert(src.tiles[i][j].data[k]);
            move<U2>::stsm4(address, v[0], v[1], v[2], v[3]);
        });
    }

    // ---- elementwise operations on register tiles
    // in fp32, rounded to the tile's type
    template <register_tile RT> __device__ static inline void mul(RT &dst, const RT &lhs, const typename RT::T &rhs) {
        using to_float = base_types::convertor<float2, typename RT::dtype>;
        const float2 g = to_float::convert(base_types::packing<typename RT::T>::pack(rhs));
        dst = lhs;
        dst.each_pair([&](auto &pair) {
            const float2 f = to_float::convert(pair);
            pair = base_types::convertor<typename RT::dtype, float2>::convert({f.x * g.x, f.y * g.y});
        });
    }

    // ---- wgmma. Each product is one commit group. accumulate = 0 (mm_*) overwrites d. fence = 0 leaves mma_fence to the caller.
    //
    // mma_fence orders the registers of d (and earlier register writes) before the products. Unlike upstream's it holds no proxy fence:
    // shared tiles written by ordinary stores need fence.proxy.async in every writing thread, before the barrier that hands them over.
    template <register_tile D> __device__ static inline void mma_fence(D &d) {
        d.each_pair([](float2 &pair) { asm volatile("" : "+f"(pair.x), "+f"(pair.y)::"memory"); });
        mma_fence();
    }
    __device__ static inline void mma_fence() {
        static_assert(GROUP_WARPS == 4, "wgmma needs a warpgroup");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    __device__ static inline void mma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
    template <int N = 0> __device__ static inline void mma_async_wait() {
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    }

    // A: a register tile, or (as in AtB always) a shared tile of 64 rows of the product. B: a shared tile.
    template <register_tile D, typename A, shared_tile B, int fence = 1, int accumulate = 1>
    __device__ static inline void mma_AB(D &d, const A &a, const B &b) {
        product<fence, accumulate, 0, 1>(d, a, b);
    }
    template <register_tile D, typename A, shared_tile B, int fence = 1, int accumulate = 1>
    __device__ static inline void mma_ABt(D &d, const A &a, const B &b) {
        product<fence, accumulate, 0, 0>(d, a, b);
    }
    template <register_tile D, shared_tile A, shared_tile B, int fence = 1, int accumulate = 1>
    __device__ static inline void mma_AtB(D &d, const A &a, const B &b) {
        product<fence, accumulate, 1, 1>(d, a, b);
    }
    template <register_tile D, typename A, shared_tile B> __device__ static inline void mm_AB(D &d, const A &a, const B &b) {
        product<1, 0, 0, 1>(d, a, b);
    }
    template <register_tile D, typename A, shared_tile B> __device__ static inline void mm_ABt(D &d, const A &a, const B &b) {
        product<1, 0, 0, 0>(d, a, b);
    }

  private:
    // f(i, j, ldmatrix/stmatrix address of this lane)
    template <register_tile RT, shared_tile ST, typename F> __device__ static inline void each_base_tile(const ST &tile, F &&f) {
        static_assert(ST::rows == RT::rows * GROUP_WARPS && ST::cols == RT::cols, "the group's register tiles must cover the shared tile");
        static_assert(sizeof(typename ST::dtype) == 2, "32-bit tiles are not covered");
        const int lane = ::kittens::laneid(), base_row = warpid() * RT::rows;
        const uint32_t base = shared_address(tile.data);
#pragma unroll
        for (int i = 0; i < RT::height; i++)
#pragma unroll
            for (int j = 0; j < RT::width; j++) f(i, j, tile.idx(base, {base_row + 16 * i + lane % 16, 16 * j + lane / 16 * 8}));
    }
    template <int fence, int accumulate, int TA, int TB, typename D, typename A, typename B>
    __device__ static inline void product(D &d, const A &a, const B &b) {
        static_assert(GROUP_WARPS == 4, "wgmma needs a warpgroup");
        constexpr int N = TB ? B::cols : B::rows, K = TB ? B::rows : B::cols;
        static_assert(std::is_same_v<typename D::T, float> && D::cols == N, "d must be an fp32 tile as wide as the product");
        static_assert(std::is_same_v<typename A::T, typename B::T>, "operand types differ");
        using mma = detail::wgmma::base<typename B::T, N, TA, TB>;
        st_descriptor<B, TB> b_desc(b);
        if constexpr (fence) mma_fence(d);
        if constexpr (register_tile<A>) {
            static_assert(A::cols == K && D::height == A::height, "operand shapes differ");
#pragma unroll
            for (int m = 0; m < D::height; m++)
#pragma unroll
                for (int k = 0; k < K / 16; k++)
                    mma::rt_st(&d.tiles[m][0].data[0].x, reinterpret_cast<const uint32_t *>(a.tiles[m][k].data), b_desc.chunk_descriptor(k),
                               k > 0 || accumulate);
        } else {
            static_assert((TA ? A::rows : A::cols) == K, "operand shapes differ");
            static_assert((TA ? A::cols : A::rows) == 64 && D::height == 1, "a shared A operand has 64 rows");
            st_descriptor<A, TA> a_desc(a);
#pragma unroll
            for (int k = 0; k < K / 16; k++)
                mma::st_st(&d.tiles[0][0].data[0].x, a_desc.chunk_descriptor(k), b_desc.chunk_descriptor(k), k > 0 || accumulate);
        }
        mma_commit_group();
    }
};

using warp = group<1>;
using warpgroup = group<4>;

}  // namespace kittens
