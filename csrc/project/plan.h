// The projection of few tokens, out[t, n] = sum_k x[t, k] w[n, k] + bias[n]: what shapes it takes, in which tiles, and what its kernel gets.
// Pure C++, tested without a GPU.
#pragma once

#include <cstdint>

#include "common/device.h"

namespace flashmhf {

constexpr int project_tokens = 384;   // at most
constexpr int project_multiple = 64;  // of the sizes of W: the features of a warpgroup, and the k of a tile

struct ProjectParams {
    const void *x;     // [tokens, depth], rows x_stride elements apart, a multiple of 8
    const void *w;     // [features, depth]
    const void *bias;  // [features], or null
    void *out;         // [tokens, features]
    int tokens, depth, features;
    int block_tokens, box_tokens;  // as in ProjectPlan
    int64_t x_stride;
    bool weights_ready;  // no kernel that may still run when this one starts writes w or bias: they are read at once
};

struct ProjectTile {
    int warpgroups;  // of a CTA that compute, 64 features each
    int max_tokens;  // of a CTA
    int cluster;     // CTAs that divide k
};
// Those that have kernels; of equal warpgroups and clusters, those of fewer tokens come first.
constexpr ProjectTile project_tiles[] = {{1, 16, 4}, {1, 32, 4}, {1, 64, 4}, {2, 96, 4},  {2, 128, 4},
                                         {1, 48, 2}, {1, 64, 2}, {1, 96, 2}, {1, 128, 2}, {1, 192, 2}};

struct ProjectPlan {
    int tile;          // in project_tiles
    int blocks;        // clusters along the tokens
    int block_tokens;  // that a CTA takes, a multiple of 8
    int box_tokens;    // that a copy of x brings: rows behind the last token, which TMA fills with zeros, take longer than others
};

// For 1 to project_tokens tokens; features is a multiple of project_multiple. Throws std::invalid_argument on a device without clusters.
ProjectPlan plan_project(int64_t tokens, int64_t features, const Device &device);

// Whether the kernel is faster than cuBLAS for a W of these sizes, and takes them. False on a device without clusters.
bool projects_faster(int64_t tokens, int64_t features, const Device &device);

}  // namespace flashmhf
