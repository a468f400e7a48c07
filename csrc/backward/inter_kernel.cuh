// Inter-stationary backward. A CTA owns 64 inter rows of one sub-network (K, U, V stay in shared memory) and walks over tokens in tiles
// of 64. Its warpgroups have roles, drawn in README.md:
//
//   loader  warp 0 streams Q and dO tiles (TMA, a ring each). Warp 1 adds staged dQ tiles into global memory (bulk reduce-add).
//           Warp 2 brings the gate R of a tile to shared memory. Warp 3 adds dR into global memory.
//   S       [M|N] = Q [K;U]^T and dA = dO V^T, the elementwise part, P and [dM|dN] as 16-bit tiles to shared memory. The fused kernel has
//           two S warpgroups, which take alternate tiles, and then compute dQ = [dM|dN] [K;U] with [dM|dN] from registers, fp32 to staging.
//   W       dK += dM^T Q, dU += dN^T Q, dV += P^T dO in registers.
//
// A warp is held at wgmma issue until the tensor pipe has taken all but its last few instructions, so overlap comes from other warpgroups.
// While an S warpgroup does its elementwise part, the pipe works for the other S warpgroup and for W. A kernel with one S warpgroup hands
// tile i to W only after it has issued its own products of tile i + 1.
//
// Ordered accumulation (deterministic sums): the CTAs of a head add to a tile in the order of their items.
//
// Power sets the clock, so moving fewer bytes is faster. The CTAs of a pair (cluster of two, fused kernel only) own neighbouring inter rows
// of one head and walk over the same tokens; one fetches the Q tiles for both, the other the dO tiles.
#pragma once

#include "backward/inter_loader.cuh"
#include "backward/inter_scores.cuh"
#include "backward/inter_weight_grads.cuh"

namespace flashmhf {

template <int d_h, int outputs, typename T>
__global__ void __launch_bounds__(InterPolicy<d_h, outputs>::threads, 1)
    flashmhf_backward_inter(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
    using namespace kittens;
    using P = InterPolicy<d_h, outputs>;
    using Shared = InterShared<d_h, outputs, T>;
    using Arrivals = InterArrivals<P>;
    static_assert(sizeof(Shared) == P::shared_memory);
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);

    // The shuffle tells the compiler that both are uniform over the warp.
    const int role = __shfl_sync(MASK_ALL, warpgroupid(), 0), warp_in_role = __shfl_sync(MASK_ALL, warpid() & 3, 0);
    const bool leader = kittens::laneid() == 0;
    const InterWork work(p, P::pairs);
    stamp(Stamp::inter_entry);

    kittens::pdl::arrive();
    if (threadIdx.x == 32)
        for (const CUtensorMap *map : {&maps.k, &maps.u, &maps.q, &maps.v, &maps.grad_out}) tma::prefetch(map);
    if (threadIdx.x == 0) {
        const int ctas = 1 + work.pair;
        init_semaphore(shared.weights_full, Arrivals::weights_full);
        for (int s = 0; s < P::q_stages; ++s) {
            init_semaphore(shared.q_full[s], Arrivals::q_full);
            init_semaphore(shared.q_empty[s], Arrivals::q_empty(ctas));
        }
        for (int s = 0; s < P::g_stages; ++s) {
            init_semaphore(shared.g_full[s], Arrivals::g_full);
            init_semaphore(shared.g_empty[s], Arrivals::g_empty(ctas));
        }
        for (int b = 0; b < P::grad_buffers; ++b) {
            for (int reader = 0; reader < P::grad_readers; ++reader) init_semaphore(shared.grads_full[b][reader], Arrivals::grads_full);
            init_semaphore(shared.grads_empty[b], Arrivals::grads_empty);
        }
        for (int slice = 0; slice < P::staged_slices; ++slice) {
            init_semaphore(shared.staged_full[slice], Arrivals::staged_full);
            for (auto &empty : shared.staged_empty) init_semaphore(empty[slice], Arrivals::staged_empty);
        }
        tma::fence_semaphore_init();
        tma::fence_shared_writes();
    }
    if constexpr (P::pairs) cluster_sync();
    else __syncthreads();

    // Each role ends here, in its own branch: a CTA must not end while its neighbour may still send it tiles or arrivals.
    auto finish = [] {
        if constexpr (P::pairs) {
            __syncwarp();
            cluster_sync();
        }
    };

    if (role == 0) {
        warpgroup::decrease_registers<P::loader_registers>();
        if (warp_in_role == 0 && leader) load_tiles(shared, maps, p, work);
        else if (P::query && warp_in_role == 1 && leader) add_query_grads(shared, p, work);
        else if (warp_in_role == 2) load_gates<T>(shared, p, work);
        else if (P::query && warp_in_role == 3) add_gate_grads(shared, p, work);
        finish();
    } else if (role <= P::s_warpgroups) {
        if constexpr (P::s_registers > P::launch_registers) warpgroup::increase_registers<P::s_registers>();
        if constexpr (P::query) scores_and_query_grads<T>(shared, work, role - 1);
        else scores<T>(shared, work);
        finish();
    } else {
        warpgroup::increase_registers<P::w_registers>();
        const int w_warpgroup = P::w_warpgroups == 1 ? 0 : role - (P::warpgroups - P::w_warpgroups);
        accumulate_weight_grads(shared, p, work, P::query + w_warpgroup, w_warpgroup);
        // Behind the token-stationary kernel this kernel starts early, since it needs no result of it. It must not end before it.
        kittens::pdl::wait();
        finish();
    }
}

}  // namespace flashmhf
