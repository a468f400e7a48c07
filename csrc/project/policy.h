// Tile sizes of the kernel for projections, and its shared memory. Pure C++.
#pragma once

#include "common/geometry.h"
#include "project/plan.h"

namespace flashmhf {

// warpgroups: that compute, 64 features each. max_tokens: of a CTA. cluster: CTAs that divide k; each finishes its part of the features.
template <int warpgroups_, int max_tokens_, int cluster_> struct ProjectPolicy {
    static constexpr int warpgroups = warpgroups_, max_tokens = max_tokens_, cluster = cluster_;
    static constexpr int features = 64 * warpgroups, step = 64;  // of a CTA; k of a slot
    static constexpr int finished = 4 * warpgroups / cluster;    // strips of 16 features, a warp's, that a CTA finishes
    static constexpr int threads = 128 * warpgroups + 32;
    static constexpr int slot_bytes = (features + max_tokens) * step * element_bytes, parts_bytes = 4 * features * max_tokens;
    // Up to 64 tokens two CTAs fit an SM, so that one starts under the other.
    static constexpr bool two_fit = warpgroups == 1 && cluster == 4;
    static constexpr int room = (two_fit ? (shared_memory_limit + 1024) / 2 - 1024 : shared_memory_limit) - parts_bytes - 1024;
    static constexpr int most_slots = 32 / cluster;  // all of d_model = 2048
    static constexpr int slots = room / slot_bytes < most_slots ? room / slot_bytes : most_slots;
    static constexpr int early = 16;  // tiles of W that are fetched before the wait, at most; of a W that fills the L2, not all
    static_assert(early >= slots && slots >= 3);
    static_assert(4 * warpgroups % cluster == 0 && project_multiple % step == 0 && max_tokens % 16 == 0);
};

}  // namespace flashmhf
