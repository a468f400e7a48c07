// The forward with K, U and V in the type of Q.
#pragma once

#include <cstddef>

#include "forward/f16/consumer.cuh"
#include "forward/f16/producer.cuh"

namespace flashmhf {

template <int head_dim, typename Element> struct F16 {
    static constexpr int d_h = head_dim;
    using T = Element;
    using Policy = ForwardPolicy<d_h>;
    using Params = ForwardParams;
    using Shared = ForwardShared<d_h, T>;
    template <Division division> using Consumer = ForwardConsumer<d_h, T, division>;
    // An instance for each way to divide items: the loops of one are faster without the branches of another.
    static constexpr bool has_instance(Division division) {
        return division == Division::waves || (division == Division::slices ? Policy::may_slice : Policy::may_add_parts);
    }
    static constexpr bool stages_router = Policy::gate_early;  // W may lie in shared memory
    static_assert(offsetof(Shared, w) + Policy::router_bytes <= Policy::shared_memory);

    template <Division division> __device__ __forceinline__ static void prefetch(const ForwardMaps &maps, const Params &p) {
        if (division != Division::slices && kittens::laneid() == 0) prefetch_weights<d_h, division>(maps, p);
    }
    // By one thread. Where multicast is always, both are one instance.
    template <Division division> __device__ __forceinline__ static void stream(Shared &shared, const ForwardMaps &maps, const Params &p) {
        if (division != Division::slices && (p.row_ctas > 1 || Policy::always_multicast))
            load_weights<d_h, T, true, division>(shared, maps, p);
        else load_weights<d_h, T, Policy::always_multicast, division>(shared, maps, p);
    }
    // By each of the producer's other warps, 1 to 3.
    template <Division division>
    __device__ __forceinline__ static void other_warps(Shared &shared, const ForwardMaps &maps, const Params &p, int warp) {
        if (warp <= p.consumers) {
            RowsOfItems<F16, division> rows{{shared, maps, p, warp == 1}};
            return load_items(rows, [=](auto body) { body(warp - 1); });
        }
        wait_for_cluster_and_predecessor(p);
        if constexpr (division != Division::slices && Policy::may_add_parts)
            if (p.schedule.adds_parts && warp == p.consumers + 1) signal_parts<d_h, T, division>(shared, p);
    }
};

}  // namespace flashmhf
