// Tile sizes of the kernel for projections of few tokens. Pure C++.
#pragma once

#include "project/params.h"

namespace flashmhf {

template <int max_tokens> struct ProjectPolicy {
    static constexpr int features = 64, step = 64;  // of a tile of W; k of a slot
    static constexpr int cluster = 4;               // CTAs that divide k; each finishes the features of one warp
    static constexpr int slots = max_tokens > 32 ? 6 : 8, threads = 128 + 32;
    static constexpr int early = 16;  // tiles of W that are fetched before the wait, at most; of a W that fills the L2, not all
    static_assert(early >= slots);
    static_assert(project_multiple % features == 0 && project_multiple % step == 0 && max_tokens % 16 == 0);
};

}  // namespace flashmhf
