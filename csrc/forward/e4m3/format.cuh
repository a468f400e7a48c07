// The forward with K, U and V in e4m3.
#pragma once

#include <cstddef>

#include "forward/e4m3/consumer.cuh"
#include "forward/e4m3/producer.cuh"

namespace flashmhf {

// few_rows: CTAs that divide an item of one or two row tiles.
template <int head_dim, typename Element, bool few_rows> struct E4m3 {
    static constexpr int d_h = head_dim;
    using T = Element;
    using Policy = ForwardFp8Policy<d_h, few_rows>;
    using Params = ForwardFp8Params;
    using Shared = ForwardFp8Shared<d_h, T, few_rows>;
    template <Division> using Consumer = ForwardFp8Consumer<d_h, T, few_rows>;
    // One for all ways to divide items but that of few rows.
    static constexpr bool has_instance(Division division) { return division == Division::waves; }
    static constexpr bool stages_router = Policy::router_bytes > 0;  // W may lie in shared memory
    static_assert(offsetof(Shared, w) + Policy::router_bytes <= Policy::shared_memory);

    template <Division> __device__ __forceinline__ static void prefetch(const ForwardMaps &maps, const Params &p) {
        if (Policy::prefetched_tiles > 0 && kittens::laneid() == 0) prefetch_weights_fp8<Policy, d_h>(maps, p);
    }
    template <Division> __device__ __forceinline__ static void stream(Shared &shared, const ForwardMaps &maps, const Params &p) {
        if (!few_rows && p.row_ctas > 1) load_weights_fp8<d_h, T, few_rows, true>(shared, maps, p);
        else load_weights_fp8<d_h, T, few_rows, false>(shared, maps, p);
    }
    template <Division division>
    __device__ __forceinline__ static void other_warps(Shared &shared, const ForwardMaps &maps, const Params &p, int warp) {
        const int last = warp == 3 ? p.consumers : warp;  // the last warp has the rows of two of four warpgroups
        if (warp <= p.consumers) {
            RowsOfItemsFp8<E4m3, division> rows{{shared, maps, p, warp == 1}};
            return load_items(rows, [=](auto body) {
                if constexpr (Policy::consumers <= 3) body(warp - 1);  // one needs no loop
                else
#pragma unroll 1
                    for (int warpgroup = warp - 1; warpgroup < last; ++warpgroup) body(warpgroup);
            });
        }
        wait_for_cluster_and_predecessor(p);
    }
};

}  // namespace flashmhf
