// Inter-stationary backward: a CTA owns 64 inter rows of one sub-network (K, U, V stay in shared memory) and walks over tokens in tiles
// of 64. Specialised warpgroups, drawn in ../README.md:
//
//   loader  warp 0 streams Q and dO tiles (TMA, rings of their own), warp 1 adds finished dQ tiles into global memory (bulk reduce-add),
//           warp 2 brings the weights R of a tile to shared memory
//   S       [M|N] = Q [K;U]^T and dA = dO V^T, elementwise part, 16-bit tiles P and [dM|dN] to shared memory, dR
//   Q       dQ = [dM|dN] [K;U], fp32 tile to a staging buffer (fused kernel only)
//   W       dK += dM^T Q, dU += dN^T Q, dV += P^T dO in registers
//
// A warp is held at wgmma issue until the tensor pipe has taken all but its last few instructions, so overlap comes from other warpgroups:
// S hands tile i over only after it has issued its own products of tile i + 1. Then the pipe's order is S(i + 1), Q(i), W(i), and the
// latter two cover the elementwise part of tile i + 1. The proxy fence of the hand-over then waits for stores that are long done.
#pragma once

#include "backward_params.h"
#include "kernels/backward_math.cuh"
#include "kernels/backward_policy.h"
#include "kernels/barriers.h"
#include "kernels/tma_ext.cuh"

namespace flashmhf {

struct BackwardMaps {
    CUtensorMap q, grad_out;  // [batch][length][H][d_h], boxes of 64 tokens; rows behind the last token read as zeros
    CUtensorMap k, u, v;      // [H * E][d_e][d_h]; rows from d_e on read as zeros
};

template <int d_h, int outputs, typename T> struct alignas(1024) InterShared {
    using P = InterPolicy<d_h, outputs>;
    template <int rows, int cols> using tile = kittens::st<T, rows, cols, true, cols * sizeof(T) % 128 == 0 ? 128 : 64>;
    using KU = tile<2 * backward_rows, d_h>;  // K over U
    using Rows = tile<backward_rows, d_h>;
    using Grads = tile<backward_rows, 2 * backward_rows>;  // dM beside dN, 64 tokens each
    using Weighted = tile<backward_rows, backward_rows>;   // P

    KU ku;
    Rows v[P::needs_v];
    Rows q[P::q_stages], grad_out[P::g_stages];
    Grads grads[P::keys ? 2 : 0];
    Weighted weighted[P::values ? 2 : 0];
    float staged[P::query ? backward_rows * d_h : 0];  // dQ in fragment order
    float r[P::q_stages][backward_rows];
    kittens::semaphore weights_full, q_full[P::q_stages], q_empty[P::q_stages], g_full[P::g_stages], g_empty[P::g_stages],
        grads_full[2][3], grads_empty[2],  // one "full" per reading role: Q, first W, second W
        staged_full, staged_empty;
};

// The 64-token tiles of a CTA, in order.
struct TokenCursor {
    int sequence, tile, row_tiles;
    __device__ __forceinline__ TokenCursor(const BackwardParams &p, int first)
        : sequence(first / p.row_tiles), tile(first - sequence * p.row_tiles), row_tiles(p.row_tiles) {}
    __device__ __forceinline__ int token() const { return tile * backward_rows; }
    __device__ __forceinline__ void advance() {
        if (++tile == row_tiles) {
            tile = 0;
            ++sequence;
        }
    }
};

// Accumulator tile <-> fragment order in memory: float4 j of thread i holds columns 8j + 2 (i % 4), + 1 of rows g and g + 8.
template <typename Acc, typename Put> __device__ __forceinline__ void each_fragment(const Acc &acc, Put &&put) {
#pragma unroll
    for (int j = 0; j < Acc::cols / 8; ++j) {
        const auto &pair = acc.tiles[0][j / 2].data;
        const float2 low = pair[j % 2 * 2], high = pair[j % 2 * 2 + 1];
        put(j, float4{low.x, low.y, high.x, high.y});
    }
}

// Rows 0..rows of a warpgroup's accumulator tile to columns first_col.. of row-major memory: converted, or added to fp32.
template <typename T, int d_h, typename Acc>
__device__ __forceinline__ void store_weight_grad(const Acc &acc, int first_col, void *out, int64_t first_row, int rows, bool accumulate) {
    const int lane = kittens::laneid(), row = kittens::warpgroup::warpid() * 16 + lane / 4;
    each_fragment(acc, [&](int j, float4 v) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (row + 8 * half >= rows) continue;
            const float2 pair = half ? float2{v.z, v.w} : float2{v.x, v.y};
            const int64_t at = (first_row + row + 8 * half) * d_h + first_col + 8 * j + 2 * (lane % 4);
            if (accumulate) {
                auto *dst = reinterpret_cast<float2 *>(static_cast<float *>(out) + at);
                const float2 old = *dst;
                *dst = {old.x + pair.x, old.y + pair.y};
            } else {
                using T2 = typename kittens::base_types::packing<T>::packed_type;
                *reinterpret_cast<T2 *>(static_cast<T *>(out) + at) = kittens::base_types::convertor<T2, float2>::convert(pair);
            }
        }
    });
}

// Where a CTA works: its item, and its share of the tokens if the item is split.
struct InterWork {
    int item, part, head, subnet, row;  // subnet of the head; first inter row within the sub-network
    int begin, end;                     // token tiles
    bool split;
    __device__ __forceinline__ InterWork(const BackwardParams &p) {
        const int block = blockIdx.x, tiles = p.batch * p.row_tiles;
        split = block >= p.whole;
        const int share = split ? (block - p.whole) / p.parts : 0;
        item = split ? p.whole + share : block;
        part = split ? block - p.whole - share * p.parts : 0;
        begin = split ? static_cast<int>(static_cast<int64_t>(tiles) * part / p.parts) : 0;
        end = split ? static_cast<int>(static_cast<int64_t>(tiles) * (part + 1) / p.parts) : tiles;
        const int group = item / p.subnet_tiles;
        row = (item - group * p.subnet_tiles) * backward_rows;
        head = group / p.subnets;
        subnet = group - head * p.subnets;
    }
};

// acc += a^T b, the columns of b spread over the accumulators.
template <int halves, typename Acc, typename A, typename B> __device__ __forceinline__ void add_product(Acc (&acc)[halves], const A &a, B &b) {
#pragma unroll
    for (int c = 0; c < halves; ++c) kittens::warpgroup::mma_AtB(acc[c], a, b.template subtile<Acc::cols>(c));
}

// W role: accumulates weight gradients over all tiles. Where two warpgroups share the role, `share` 0 takes dK and 1 takes dU.
template <typename Shared>
__device__ __forceinline__ void accumulate_weight_grads(Shared &shared, const BackwardParams &p, const InterWork &work, int reader, int share) {
    using namespace kittens;
    using P = typename Shared::P;
    using T = typename Shared::Rows::T;
    using Acc = rt_fl<16, P::w_columns>;
    constexpr int d_h = Shared::Rows::cols, halves = d_h / P::w_columns;
    constexpr bool keys = P::keys, ups = P::keys && P::accumulator_groups == 1, values = P::values;
    Acc dk[halves], du[halves], dv[halves];
#pragma unroll
    for (int c = 0; c < halves; ++c) {
        warp::zero(dk[c]);
        warp::zero(du[c]);
        warp::zero(dv[c]);
    }
    Ring<P::q_stages> q;
    Ring<P::g_stages> g;
    Ring<2> buffer;
    const bool leader = kittens::laneid() == 0;
#pragma unroll 1
    for (int it = work.begin; it < work.end; ++it) {
        if constexpr (keys) wait(shared.q_full[q.slot], q.phase);
        if constexpr (values) wait(shared.g_full[g.slot], g.phase);
        wait(shared.grads_full[buffer.slot][reader], buffer.phase);
        if constexpr (keys) add_product(dk, shared.grads[buffer.slot].template subtile<backward_rows>(share), shared.q[q.slot]);
        if constexpr (ups) add_product(du, shared.grads[buffer.slot].template subtile<backward_rows>(1), shared.q[q.slot]);
        if constexpr (values) add_product(dv, shared.weighted[buffer.slot], shared.grad_out[g.slot]);
        if constexpr (keys) {
            warpgroup::mma_async_wait<values * halves>();
            if (leader) arrive(shared.q_empty[q.slot]);
        }
        warpgroup::mma_async_wait<0>();
        if (leader) {
            if constexpr (values) arrive(shared.g_empty[g.slot]);
            arrive(shared.grads_empty[buffer.slot]);
        }
        q.advance();
        g.advance();
        buffer.advance();
    }
    warpgroup::mma_async_wait<0>();
    constexpr int size = backward_rows * d_h;
    auto finish = [&](Acc(&acc)[halves], void *out, int which) {
#pragma unroll
        for (int c = 0; c < halves; ++c) {
            pin(acc[c]);
            if (work.split) {
                float *slot = p.weight_parts + ((static_cast<int64_t>(work.item - p.whole) * p.parts + work.part) * 3 + which) * size;
                each_fragment(acc[c], [&](int j, float4 v) { __stcg(reinterpret_cast<float4 *>(slot) + 128 * (P::w_columns / 8 * c + j) + warpgroup::laneid(), v); });
            } else {
                const int64_t first_row = static_cast<int64_t>(work.head * p.subnets + work.subnet) * p.subnet_dim + work.row;
                store_weight_grad<T, d_h>(acc[c], P::w_columns * c, out, first_row, p.subnet_dim - work.row, p.accumulate);
            }
        }
    };
    if constexpr (keys) finish(dk, share ? p.du : p.dk, share);
    if constexpr (ups) finish(du, p.du, 1);
    if constexpr (values) finish(dv, p.dv, 2);
}

template <int d_h, int outputs, typename T>
__global__ void __launch_bounds__(InterPolicy<d_h, outputs>::threads, 1)
flashmhf_backward_inter(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
    using namespace kittens;
    using P = InterPolicy<d_h, outputs>;
    using Shared = InterShared<d_h, outputs, T>;
    static_assert(sizeof(Shared) <= backward_shared_memory_limit);
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);

    // uniform over the warp, and known to be
    const int role = __shfl_sync(MASK_ALL, warpgroupid(), 0), warp_in_role = __shfl_sync(MASK_ALL, warpid() & 3, 0);
    const int lane = kittens::laneid();
    const bool leader = lane == 0;
    const InterWork work(p);

    constexpr int readers = P::query + P::accumulator_groups;  // roles that read the tiles S hands over
    constexpr int first_w = P::query;                          // their numbers
    if (threadIdx.x == 0) {
        init_semaphore(shared.weights_full, 1);
        for (int s = 0; s < P::q_stages; ++s) {
            init_semaphore(shared.q_full[s], 2);                                            // loader, R warp
            init_semaphore(shared.q_empty[s], P::keys ? 4 * P::accumulator_groups : 4);     // warps of the last readers: W, or S
        }
        for (int s = 0; s < P::g_stages; ++s) {
            init_semaphore(shared.g_full[s], 1);
            init_semaphore(shared.g_empty[s], 4);                                           // warps of W, or of S
        }
        for (int b = 0; b < 2; ++b) {
            for (int reader = 0; reader < readers; ++reader) init_semaphore(shared.grads_full[b][reader], 4);
            init_semaphore(shared.grads_empty[b], 4 * readers);
        }
        init_semaphore(shared.staged_full, 4);
        init_semaphore(shared.staged_empty, 1);
        tma::fence_semaphore_init();
        tma::fence_shared_writes();
    }
    __syncthreads();

    if (role == 0) {
        warpgroup::decrease_registers<P::loader_registers>();
        if (warp_in_role == 0 && leader) {
            const int subnet = work.head * p.subnets + work.subnet;
            kittens::tma::expect_bytes(shared.weights_full, sizeof(shared.ku) + sizeof(shared.v));
#pragma unroll
            for (int c = 0; c < d_h; c += P::panel_cols) {
                const int3 at = {c, work.row, subnet};
                tma::load_async(&shared.ku.data[c * 2 * backward_rows], &maps.k, at, shared.weights_full);
                tma::load_async(&shared.ku.data[c * 2 * backward_rows + backward_rows * P::panel_cols], &maps.u, at, shared.weights_full);
                if constexpr (P::needs_v) tma::load_async(&shared.v[0].data[c * backward_rows], &maps.v, at, shared.weights_full);
            }
            TokenCursor tokens(p, work.begin);
            Ring<P::q_stages> q;
            Ring<P::g_stages> g;
#pragma unroll 1
            for (int it = work.begin; it < work.end; ++it) {
                wait(shared.q_empty[q.slot], q.phase ^ 1);
                kittens::tma::expect_bytes(shared.q_full[q.slot], sizeof(typename Shared::Rows));
#pragma unroll
                for (int c = 0; c < d_h; c += P::panel_cols)
                    tma::load_async(&shared.q[q.slot].data[c * backward_rows], &maps.q, int4{c, work.head, tokens.token(), tokens.sequence}, shared.q_full[q.slot]);
                wait(shared.g_empty[g.slot], g.phase ^ 1);
                kittens::tma::expect_bytes(shared.g_full[g.slot], sizeof(typename Shared::Rows));
#pragma unroll
                for (int c = 0; c < d_h; c += P::panel_cols)
                    tma::load_async(&shared.grad_out[g.slot].data[c * backward_rows], &maps.grad_out, int4{c, work.head, tokens.token(), tokens.sequence}, shared.g_full[g.slot]);
                tokens.advance();
                q.advance();
                g.advance();
            }
        } else if (P::query && warp_in_role == 1 && leader) {
            float *sums = p.query_sums + (static_cast<int64_t>(work.head) * p.batch * p.row_tiles + work.begin) * backward_rows * d_h;
            uint32_t phase = 0;
#pragma unroll 1
            for (int it = work.begin; it < work.end; ++it) {
                wait(shared.staged_full, phase);
                tma::reduce_add_async(sums, shared.staged, sizeof(shared.staged));
                kittens::tma::store_commit_group();
                kittens::tma::store_async_read_wait<0>();
                arrive(shared.staged_empty);
                sums += backward_rows * d_h;
                phase ^= 1;
            }
            kittens::tma::store_async_wait<0>();  // read is not yet added
        } else if (warp_in_role == 2) {
            // one running address: this role has few registers
            const int size = p.r_is_float ? 4 : 2;
            TokenCursor tokens(p, work.begin);
            const char *at = static_cast<const char *>(p.r) + size * (tokens.sequence * p.r_batch + (tokens.token() + lane) * p.r_token +
                                                                      work.head * p.r_head + work.subnet);
            Ring<P::q_stages> q;
#pragma unroll 1
            for (int it = work.begin; it < work.end; ++it) {
                float r[2] = {1.f, 1.f};
                if (p.r) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const char *row = at + size * 32 * half * p.r_token;
                        if (tokens.token() + lane + 32 * half < p.length)
                            r[half] = p.r_is_float ? __ldg(reinterpret_cast<const float *>(row))
                                                   : base_types::convertor<float, T>::convert(__ldg(reinterpret_cast<const T *>(row)));
                    }
                }
                wait(shared.q_empty[q.slot], q.phase ^ 1);
                shared.r[q.slot][lane] = r[0];
                shared.r[q.slot][lane + 32] = r[1];
                __syncwarp();
                if (leader) arrive(shared.q_full[q.slot]);
                tokens.advance();
                at += size * backward_rows * p.r_token;
                if (tokens.tile == 0) at += size * (p.r_batch - static_cast<int64_t>(p.row_tiles) * backward_rows * p.r_token);
                q.advance();
            }
        }
    } else if (role == 1) {
        if constexpr (P::s_registers > P::launch_registers) warpgroup::increase_registers<P::s_registers>();
        const int row = warp_in_role * 16 + lane / 4;
        // stmatrix address of this lane within a tile of 128-byte rows; columns 16j.. lie at offset ^ 32j
        const uint32_t lane_offset = Shared::Weighted::idx(0u, int2{warp_in_role * 16 + lane % 16, lane / 16 * 8});
        using T2 = typename base_types::packing<T>::packed_type;

        TokenCursor tokens(p, work.begin);
        Ring<P::q_stages> q;
        Ring<P::g_stages> g;
        Ring<2> buffer;
        float2 dr = {0.f, 0.f};
        auto hand_over = [&](int slot) {
            tma::fence_shared_writes();
            __syncwarp();
            if (leader)
#pragma unroll
                for (int reader = 0; reader < readers; ++reader) arrive(shared.grads_full[slot][reader]);
        };
        const bool wants_dr = P::query && p.dr_sums != nullptr;
        auto add_dr = [&]() {
            if (!wants_dr) return;
            dr = quad_sum(dr);
            if (lane % 4 == 0) {
                const int token = tokens.token() + row;
                float *at = p.dr_sums + (p.dense_index(tokens.sequence, token) * p.heads + work.head) * p.subnets + work.subnet;
                if (token < p.length) atomicAdd(at, dr.x);
                if (token + 8 < p.length) atomicAdd(at + 8 * p.dense_token * p.heads * p.subnets, dr.y);
            }
        };

        wait(shared.weights_full, 0);
        wait(shared.q_full[0], 0);
#pragma unroll 1
        for (int it = work.begin; it < work.end; ++it) {
            rt_fl<16, 2 * backward_rows> mn;
            rt_fl<16, backward_rows> da;
            warpgroup::mm_ABt(mn, shared.q[q.slot], shared.ku);
            if constexpr (P::keys) {
                wait(shared.g_full[g.slot], g.phase);
                warpgroup::mm_ABt(da, shared.grad_out[g.slot], shared.v[0]);
            }
            if (it > work.begin) {
                hand_over(buffer.slot ^ 1);
                add_dr();
                tokens.advance();
            }
            const float2 r = {shared.r[q.slot][row], shared.r[q.slot][row + 8]};
            wait(shared.grads_empty[buffer.slot], buffer.phase ^ 1);
            warpgroup::mma_async_wait<0>();
            pin(mn);
            if constexpr (P::keys) pin(da);
            if (!P::keys || !P::values) {   // S is the last reader of one of the operands
                __syncwarp();
                if (leader) arrive(P::keys ? shared.g_empty[g.slot] : shared.q_empty[q.slot]);
            }
            dr = {0.f, 0.f};
            q.advance();
            g.advance();
            const uint32_t grads = P::keys ? tma::shared_address(shared.grads[P::keys ? buffer.slot : 0].data) : 0;
            const uint32_t weighted = P::values ? tma::shared_address(shared.weighted[P::values ? buffer.slot : 0].data) : 0;
#pragma unroll
            for (int j = 0; j < backward_rows / 16; ++j) {
                // the next Q: before the last stores, whose queue would delay the answer
                if (j == 2 && it + 1 < work.end) wait(shared.q_full[q.slot], q.phase);
                GradBlock<T> block;
                const auto &n = mn.tiles[0][j + backward_rows / 16];
                swiglu_grad(block, mn.tiles[0][j], n, P::keys ? da.tiles[0][j] : n, r, dr);
                const uint32_t at = lane_offset ^ (32 * j);
                if constexpr (P::values) move<T2>::stsm4(weighted + at, block.p[0], block.p[1], block.p[2], block.p[3]);
                if constexpr (P::keys) {
                    move<T2>::stsm4(grads + at, block.dm[0], block.dm[1], block.dm[2], block.dm[3]);
                    move<T2>::stsm4(grads + sizeof(typename Shared::Weighted) + at, block.dn[0], block.dn[1], block.dn[2], block.dn[3]);
                }
            }
            buffer.advance();
        }
        if (work.begin < work.end) {
            hand_over(buffer.slot ^ 1);
            add_dr();
        }
    } else if (P::query && role == 2) {
        if constexpr (P::query) {
            warpgroup::decrease_registers<P::q_registers>();
            const uint32_t staged = tma::shared_address(shared.staged) + 16 * warpgroup::laneid();
            Ring<2> buffer;
            uint32_t phase = 1;
            wait(shared.weights_full, 0);
#pragma unroll 1
            for (int it = work.begin; it < work.end; ++it) {
                rt_fl<16, d_h> dq;
                wait(shared.grads_full[buffer.slot][0], buffer.phase);
                warpgroup::mm_AB(dq, shared.grads[buffer.slot], shared.ku);
                warpgroup::mma_async_wait<0>();
                pin(dq);
                if (leader) arrive(shared.grads_empty[buffer.slot]);
                wait(shared.staged_empty, phase);
                each_fragment(dq, [&](int j, float4 v) { move<float4>::sts(staged + 2048 * j, v); });
                tma::fence_shared_writes();
                __syncwarp();
                if (leader) arrive(shared.staged_full);
                buffer.advance();
                phase ^= 1;
            }
        }
    } else {
        if constexpr (P::w_registers > P::launch_registers) warpgroup::increase_registers<P::w_registers>();
        const int share = P::accumulator_groups == 1 ? 0 : role - (P::warpgroups - P::accumulator_groups);
        accumulate_weight_grads(shared, p, work, first_w + share, share);
    }
}

}  // namespace flashmhf
