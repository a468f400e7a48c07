// Collective operations of a group of consecutive warps: group<1> = warp, group<4> = warpgroup, group<8> = two warpgroups...
#pragma once

namespace kittens {

// Elementwise operators for unary_map and bin_map.
namespace base_ops {
#define KITTENS_UNARY(name, expression)                                            \
    struct name {                                                                  \
        __device__ static inline float op(const float &x) { return expression; }   \
        template <typename T2> __device__ static inline T2 op(const T2 &v) {       \
            float2 f = base_types::convertor<float2, T2>::convert(v);              \
            return base_types::convertor<T2, float2>::convert({op(f.x), op(f.y)}); \
        }                                                                          \
    };
KITTENS_UNARY(exp, __expf(x))
#undef KITTENS_UNARY
#define KITTENS_BINARY(name, expression)                                                                                 \
    struct name {                                                                                                        \
        __device__ static inline float op(const float &a, const float &b) { return expression; }                         \
        template <typename T2> __device__ static inline T2 op(const T2 &x, const T2 &y) {                                \
            float2 f = base_types::convertor<float2, T2>::convert(x), g = base_types::convertor<float2, T2>::convert(y); \
            return base_types::convertor<T2, float2>::convert({op(f.x, g.x), op(f.y, g.y)});                             \
        }                                                                                                                \
    };
KITTENS_BINARY(sum, a + b)
KITTENS_BINARY(sub, a - b)
KITTENS_BINARY(mul, a *b)
KITTENS_BINARY(div, a / b)
KITTENS_BINARY(max, fmaxf(a, b))
KITTENS_BINARY(min, fminf(a, b))
#undef KITTENS_BINARY
}  // namespace base_ops

template <int _GROUP_WARPS> struct group {
    static constexpr int GROUP_WARPS = _GROUP_WARPS;
    static constexpr int GROUP_THREADS = GROUP_WARPS * WARP_THREADS;
    __device__ static inline int laneid() { return threadIdx.x % GROUP_THREADS; }
    __device__ static inline int warpid() { return laneid() / WARP_THREADS; }
    __device__ static inline int groupid() { return threadIdx.x / GROUP_THREADS; }

    // ---- synchronisation: the semaphore operations below run in the group's first thread
    __device__ static inline void sync(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(GROUP_THREADS) : "memory"); }
    template <uint32_t MASK = 0xFFFFFFFF> __device__ static inline void sync() {
        static_assert(GROUP_WARPS == 1, "only a warp synchronises without a named barrier");
        __syncwarp(MASK);
    }
    __device__ static inline void arrive(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(GROUP_THREADS) : "memory"); }
    __device__ static inline void arrive(barrier<GROUP_WARPS> bar) { ::kittens::arrive(bar); }
    __device__ static inline void arrive_and_wait(barrier<GROUP_WARPS> bar) { ::kittens::arrive_and_wait(bar); }
    __device__ static inline void init_semaphore(semaphore &sem, int thread_count, int transaction_count = 0) {
        if (laneid() == 0) ::kittens::init_semaphore(sem, thread_count, transaction_count);
    }
    __device__ static inline void arrive(semaphore &sem) {
        if (laneid() == 0) ::kittens::arrive(sem);
    }
    __device__ static inline void arrive(semaphore &sem, uint32_t count) {
        if (laneid() == 0) ::kittens::arrive(sem, count);
    }
    __device__ static inline void wait(semaphore &sem, int kPhaseBit) { ::kittens::wait(sem, kPhaseBit); }
    __device__ static inline bool try_wait(semaphore &sem, int kPhaseBit) { return ::kittens::try_wait(sem, kPhaseBit); }

    template <int n_reg> __device__ static inline void increase_registers() {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n_reg));
    }
    template <int n_reg> __device__ static inline void decrease_registers() {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n_reg));
    }

    // ---- shared <-> register tiles: warp w of the group holds rows [w * RT::rows, (w + 1) * RT::rows) of the shared tile
    template <ducks::rt::all RT, ducks::st::all ST> __device__ static inline void load(RT &dst, const ST &src) {
        each_base_tile<RT, ST>(src, [&](int i, int j, uint32_t address, int row, int col, uint32_t base) {
            using U2 = typename base_types::packing<typename ST::dtype>::packed_type;
            using convert = base_types::convertor<typename RT::dtype, U2>;
            U2 v[4];
            if constexpr (sizeof(typename ST::dtype) == 2) {
                if constexpr (RT::base::is_row) move<U2>::ldsm4(v[0], v[1], v[2], v[3], address);
                else move<U2>::ldsm4t(v[0], v[2], v[1], v[3], address);
            } else {
                static_assert(RT::base::is_row, "32-bit tiles are loaded in row layout");
#pragma unroll
                for (int k = 0; k < 4; k++) move<U2>::lds(v[k], src.idx(base, {row + 8 * (k & 1), col + 8 * (k >> 1)}));
            }
#pragma unroll
            for (int k = 0; k < 4; k++) dst.tiles[i][j].data[k] = convert::convert(v[k]);
        });
    }
    template <ducks::st::all ST, ducks::rt::all RT> __device__ static inline void store(ST &dst, const RT &src) {
        each_base_tile<RT, ST>(dst, [&](int i, int j, uint32_t address, int row, int col, uint32_t base) {
            using U2 = typename base_types::packing<typename ST::dtype>::packed_type;
            using convert = base_types::convertor<U2, typename RT::dtype>;
            U2 v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = convert::convert(src.tiles[i][j].data[k]);
            if constexpr (sizeof(typename ST::dtype) == 2) {
                if constexpr (RT::base::is_row) move<U2>::stsm4(address, v[0], v[1], v[2], v[3]);
                else move<U2>::stsm4t(address, v[0], v[2], v[1], v[3]);
            } else {
                static_assert(RT::base::is_row, "32-bit tiles are stored in row layout");
#pragma unroll
                for (int k = 0; k < 4; k++) move<U2>::sts(dst.idx(base, {row + 8 * (k & 1), col + 8 * (k >> 1)}), v[k]);
            }
        });
    }

    // ---- shared <-> register vectors: warp w holds elements [w * RV::length, (w + 1) * RV::length)
    template <ducks::rv::all RV, ducks::sv::all SV> __device__ static inline void load(RV &dst, const SV &src) {
        static_assert(SV::length == RV::length * GROUP_WARPS);
        using T = typename RV::T;
        auto get = [&](int i) { return base_types::convertor<T, typename SV::dtype>::convert(src[warpid() * RV::length + i]); };
        const int lane = ::kittens::laneid(), g = lane / 4, t = lane % 4;
#pragma unroll
        for (int w = 0; w < RV::outer_dim; w++) {
            if constexpr (std::is_same_v<typename RV::layout, ducks::rv_layout::ortho>) dst[w][0] = {get(16 * w + g), get(16 * w + g + 8)};
            else if constexpr (std::is_same_v<typename RV::layout, ducks::rv_layout::align>) {
                dst[w][0] = {get(16 * w + 2 * t), get(16 * w + 2 * t + 1)};
                dst[w][1] = {get(16 * w + 2 * t + 8), get(16 * w + 2 * t + 9)};
            } else if (32 * w + lane < RV::length) dst[w][0] = get(32 * w + lane);
        }
    }
    template <ducks::sv::all SV, ducks::rv::all RV> __device__ static inline void store(SV &dst, const RV &src) {
        static_assert(SV::length == RV::length * GROUP_WARPS);
        using T = typename RV::T;
        auto put = [&](int i, const T &x) { dst[warpid() * RV::length + i] = base_types::convertor<typename SV::dtype, T>::convert(x); };
        const int lane = ::kittens::laneid(), g = lane / 4, t = lane % 4;
#pragma unroll
        for (int w = 0; w < RV::outer_dim; w++) {
            if constexpr (std::is_same_v<typename RV::layout, ducks::rv_layout::ortho>) {
                if (t == 0) {
                    put(16 * w + g, src[w][0].x);
                    put(16 * w + g + 8, src[w][0].y);
                }
            } else if constexpr (std::is_same_v<typename RV::layout, ducks::rv_layout::align>) {
                if (g == 0) {
                    put(16 * w + 2 * t, src[w][0].x);
                    put(16 * w + 2 * t + 1, src[w][0].y);
                    put(16 * w + 2 * t + 8, src[w][1].x);
                    put(16 * w + 2 * t + 9, src[w][1].y);
                }
            } else if (32 * w + lane < RV::length) put(32 * w + lane, src[w][0]);
        }
    }

    // ---- elementwise operations on register tiles
    template <typename op, ducks::rt::all RT> __device__ static inline void unary_map(RT &dst, const RT &src) {
        each_pair<RT>([&](int i, int j, int k) { dst.tiles[i][j].data[k] = op::template op<typename RT::dtype>(src.tiles[i][j].data[k]); });
    }
    template <typename op, ducks::rt::all RT> __device__ static inline void bin_map(RT &dst, const RT &lhs, const RT &rhs) {
        each_pair<RT>([&](int i, int j, int k) {
            dst.tiles[i][j].data[k] = op::template op<typename RT::dtype>(lhs.tiles[i][j].data[k], rhs.tiles[i][j].data[k]);
        });
    }
    template <typename op, ducks::rt::all RT> __device__ static inline void bin_map(RT &dst, const RT &lhs, const typename RT::T &rhs) {
        const typename RT::dtype pair = base_types::packing<typename RT::T>::pack(rhs);
        each_pair<RT>(
            [&](int i, int j, int k) { dst.tiles[i][j].data[k] = op::template op<typename RT::dtype>(lhs.tiles[i][j].data[k], pair); });
    }
    // op with one value per row (col_vec of the tile) or per column (row_vec)
    template <typename op, ducks::rt::row_layout RT, ducks::rv::all V>
    __device__ static inline void row_map(RT &dst, const RT &src, const V &values) {
        static_assert(std::is_same_v<V, typename RT::col_vec>);
        each_pair<RT>([&](int i, int j, int k) {
            const auto v = (k & 1) ? values[i][0].y : values[i][0].x;
            dst.tiles[i][j].data[k] = op::template op<typename RT::dtype>(src.tiles[i][j].data[k], typename RT::dtype{v, v});
        });
    }
    template <typename op, ducks::rt::row_layout RT, ducks::rv::all V>
    __device__ static inline void col_map(RT &dst, const RT &src, const V &values) {
        static_assert(std::is_same_v<V, typename RT::row_vec>);
        each_pair<RT>([&](int i, int j, int k) {
            dst.tiles[i][j].data[k] = op::template op<typename RT::dtype>(src.tiles[i][j].data[k], values[j][k >> 1]);
        });
    }
    template <ducks::rt::all RT> __device__ static inline void zero(RT &dst) {
        dst = base_types::convertor<typename RT::T, float>::convert(0.f);
    }
    template <ducks::rt::all RT> __device__ static inline void one(RT &dst) {
        dst = base_types::convertor<typename RT::T, float>::convert(1.f);
    }
    template <ducks::rt::all RT, ducks::rt::all RU> __device__ static inline void copy(RT &dst, const RU &src) {
        static_assert(RT::rows == RU::rows && RT::cols == RU::cols && std::is_same_v<typename RT::layout, typename RU::layout>);
        each_pair<RT>([&](int i, int j, int k) {
            dst.tiles[i][j].data[k] = base_types::convertor<typename RT::dtype, typename RU::dtype>::convert(src.tiles[i][j].data[k]);
        });
    }
    template <ducks::rt::all RT> __device__ static inline void exp(RT &dst, const RT &src) { unary_map<base_ops::exp>(dst, src); }
    template <ducks::rt::all RT, typename U> __device__ static inline void add(RT &dst, const RT &lhs, const U &rhs) {
        bin_map<base_ops::sum>(dst, lhs, rhs);
    }
    template <ducks::rt::all RT, typename U> __device__ static inline void sub(RT &dst, const RT &lhs, const U &rhs) {
        bin_map<base_ops::sub>(dst, lhs, rhs);
    }
    template <ducks::rt::all RT, typename U> __device__ static inline void mul(RT &dst, const RT &lhs, const U &rhs) {
        bin_map<base_ops::mul>(dst, lhs, rhs);
    }
    template <ducks::rt::all RT, typename U> __device__ static inline void div(RT &dst, const RT &lhs, const U &rhs) {
        bin_map<base_ops::div>(dst, lhs, rhs);
    }
    template <ducks::rt::all RT, typename U> __device__ static inline void max(RT &dst, const RT &lhs, const U &rhs) {
        bin_map<base_ops::max>(dst, lhs, rhs);
    }
    template <ducks::rt::all RT, typename U> __device__ static inline void min(RT &dst, const RT &lhs, const U &rhs) {
        bin_map<base_ops::min>(dst, lhs, rhs);
    }
    template <ducks::rt::all RT, ducks::rv::all V> __device__ static inline void mul_row(RT &dst, const RT &src, const V &v) {
        row_map<base_ops::mul>(dst, src, v);
    }
    template <ducks::rt::all RT, ducks::rv::all V> __device__ static inline void add_col(RT &dst, const RT &src, const V &v) {
        col_map<base_ops::sum>(dst, src, v);
    }
    // sum of each row, in all lanes that hold it
    template <ducks::rv::all V, ducks::rt::row_layout RT> __device__ static inline void row_sum(V &dst, const RT &src) {
        row_reduce<base_ops::sum>(dst, src);
    }

    // ---- wgmma. Each product is one commit group. accumulate = 0 (mm_*) overwrites d. fence = 0 leaves mma_fence to the caller.
    //
    // mma_fence orders the registers of d (and earlier register writes) before the products. Unlike upstream's it holds no proxy fence:
    // shared tiles written by ordinary stores need fence.proxy.async in every writing thread, before the barrier that hands them over.
    template <ducks::rt::row_layout D> __device__ static inline void mma_fence(D &d) {
        each_pair<D>([&](int i, int j, int k) {
            auto &pair = d.tiles[i][j].data[k];
            if constexpr (std::is_same_v<typename D::T, float>) asm volatile("" : "+f"(pair.x), "+f"(pair.y)::"memory");
            else asm volatile("" : "+r"(*reinterpret_cast<uint32_t *>(&pair))::"memory");
        });
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

#define KITTENS_MMA(NAME, A_KIND, TA, TB)                                                                          \
    template <ducks::rt::row_layout D, A_KIND A, ducks::st_descriptor::input B, int fence = 1, int accumulate = 1> \
    __device__ static inline void mma_##NAME(D &d, const A &a, const B &b) {                                       \
        product<fence, accumulate, TA, TB>(d, a, b);                                                               \
    }                                                                                                              \
    template <ducks::rt::row_layout D, A_KIND A, ducks::st_descriptor::input B>                                    \
    __device__ static inline void mm_##NAME(D &d, const A &a, const B &b) {                                        \
        product<1, 0, TA, TB>(d, a, b);                                                                            \
    }
    KITTENS_MMA(AB, ducks::rt::row_layout, 0, 1)
    KITTENS_MMA(ABt, ducks::rt::row_layout, 0, 0)
    KITTENS_MMA(AB, ducks::st_descriptor::input, 0, 1)
    KITTENS_MMA(ABt, ducks::st_descriptor::input, 0, 0)
    KITTENS_MMA(AtB, ducks::st_descriptor::input, 1, 1)
    KITTENS_MMA(AtBt, ducks::st_descriptor::input, 1, 0)
#undef KITTENS_MMA

    // ---- bulk copies, issued by the group's first thread
    struct tma {
        __device__ static inline void expect_bytes(semaphore &sem, uint32_t bytes) {
            if (laneid() == 0) ::kittens::tma::expect_bytes(sem, bytes);
        }
        template <typename T, typename... Args> __device__ static inline void expect(semaphore &sem, const T &, const Args &...) {
            expect_bytes(sem, size_bytes<T, Args...>);
        }
        __device__ static inline void load_async(void *dst, void *src, uint32_t size_bytes, semaphore &sem) {
            if (laneid() == 0) ::kittens::tma::load_async(dst, src, size_bytes, sem);
        }
        __device__ static inline void store_async(void *dst, void *src, uint32_t size_bytes) {
            if (laneid() == 0) ::kittens::tma::store_async(dst, src, size_bytes);
        }
        __device__ static inline void store_commit_group() { ::kittens::tma::store_commit_group(); }
        template <int N = 0> __device__ static inline void store_async_wait() { ::kittens::tma::store_async_wait<N>(); }
        template <int N = 0> __device__ static inline void store_async_read_wait() { ::kittens::tma::store_async_read_wait<N>(); }
        struct cluster {
            __device__ static inline void wait(semaphore &sem, int kPhaseBit) { ::kittens::tma::cluster::wait(sem, kPhaseBit); }
            __device__ static inline void arrive(semaphore &sem, int dst_cta, uint32_t count = 1) {
                if (laneid() == 0) ::kittens::tma::cluster::arrive(sem, dst_cta, count);
            }
            __device__ static inline void load_async(void *dst, void *src, uint32_t size_bytes, semaphore &sem, uint16_t cta_mask) {
                if (laneid() == 0) ::kittens::tma::cluster::load_async(dst, src, size_bytes, sem, cta_mask);
            }
        };
    };

  private:
    template <ducks::rt::all RT, typename F> __device__ static inline void each_pair(F &&f) {
#pragma unroll
        for (int i = 0; i < RT::height; i++)
#pragma unroll
            for (int j = 0; j < RT::width; j++)
#pragma unroll
                for (int k = 0; k < RT::packed_per_tile; k++) f(i, j, k);
    }
    // f(i, j, ldmatrix/stmatrix address of this lane, row and column of this lane's data[0], address of the tile)
    template <ducks::rt::all RT, ducks::st::all ST, typename F> __device__ static inline void each_base_tile(const ST &tile, F &&f) {
        static_assert(ST::rows == RT::rows * GROUP_WARPS && ST::cols == RT::cols, "the group's register tiles must cover the shared tile");
        const int lane = ::kittens::laneid(), base_row = group_warp() * RT::rows;
        const uint32_t base = detail::shared_address(tile.data);
#pragma unroll
        for (int i = 0; i < RT::height; i++)
#pragma unroll
            for (int j = 0; j < RT::width; j++)
                f(i, j, tile.idx(base, {base_row + 16 * i + lane % 16, 16 * j + lane / 16 * 8}), base_row + 16 * i + lane / 4,
                  16 * j + 2 * (lane % 4), base);
    }
    // The warp whose rows come w-th: of two or more warpgroups, warp w of each stands side by side (64 * warpgroups rows as wgmma tiles).
    __device__ static inline int group_warp() {
        if constexpr (GROUP_WARPS % 4 == 0) return warpid() / 4 + (warpid() % 4) * (GROUP_WARPS / 4);
        else return warpid();
    }
    template <typename op, ducks::rv::all V, ducks::rt::row_layout RT> __device__ static inline void row_reduce(V &dst, const RT &src) {
        static_assert(std::is_same_v<V, typename RT::col_vec>);
        using D = typename RT::dtype;
#pragma unroll
        for (int i = 0; i < RT::height; i++) {
            D lo = src.tiles[i][0].data[0], hi = src.tiles[i][0].data[1];
#pragma unroll
            for (int j = 0; j < RT::width; j++) {
                if (j > 0) {
                    lo = op::template op<D>(lo, src.tiles[i][j].data[0]);
                    hi = op::template op<D>(hi, src.tiles[i][j].data[1]);
                }
                lo = op::template op<D>(lo, src.tiles[i][j].data[2]);
                hi = op::template op<D>(hi, src.tiles[i][j].data[3]);
            }
            D both = op::template op<D>(D{lo.x, hi.x}, D{lo.y, hi.y});
#pragma unroll
            for (int s = 1; s <= 2; s *= 2)
                both = op::template op<D>(both, D{__shfl_xor_sync(MASK_ALL, both.x, s), __shfl_xor_sync(MASK_ALL, both.y, s)});
            dst[i][0] = both;
        }
    }
    template <int fence, int accumulate, int TA, int TB, typename D, typename A, typename B>
    __device__ static inline void product(D &d, const A &a, const B &b) {
        static_assert(GROUP_WARPS == 4, "wgmma needs a warpgroup");
        using ST_B = ducks::st_descriptor::detail::get_st<B>;
        constexpr int N = TB ? ST_B::cols : ST_B::rows, K = TB ? ST_B::rows : ST_B::cols;
        static_assert(std::is_same_v<typename D::T, float> && D::cols == N, "d must be an fp32 tile as wide as the product");
        using mma = detail::wgmma::base<typename ST_B::T, N, TA, TB>;
        st_descriptor<ST_B, TB> b_desc(b);
        if constexpr (fence) mma_fence(d);
        if constexpr (ducks::rt::all<A>) {
            static_assert(std::is_same_v<typename A::T, typename ST_B::T> && A::cols == K && D::height == A::height,
                          "operand shapes or types differ");
#pragma unroll
            for (int m = 0; m < D::height; m++)
#pragma unroll
                for (int k = 0; k < K / 16; k++)
                    mma::rt_st(&d.tiles[m][0].data[0].x, reinterpret_cast<const uint32_t *>(a.tiles[m][k].data), b_desc.chunk_descriptor(k),
                               k > 0 || accumulate);
        } else {
            using ST_A = ducks::st_descriptor::detail::get_st<A>;
            static_assert(std::is_same_v<typename ST_A::T, typename ST_B::T> && (TA ? ST_A::rows : ST_A::cols) == K,
                          "operand shapes or types differ");
            static_assert((TA ? ST_A::cols : ST_A::rows) == 64 && D::height == 1, "a shared A operand has 64 rows");
            st_descriptor<ST_A, TA> a_desc(a);
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
