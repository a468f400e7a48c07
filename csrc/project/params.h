// What the kernel for projections of few tokens gets, and what shapes it takes: out[t, n] = sum_k x[t, k] w[n, k] + bias[n]; with w in e4m3
// the sum is multiplied by scale[n].
#pragma once

#include <cstdint>

namespace flashmhf {

constexpr int project_tokens = 384;                                     // at most
constexpr int project_fp8_tokens = 512, project_fp8_wide_tokens = 128;  // of a w in e4m3
constexpr int project_multiple = 64;  // of the sizes of W: the features of a warpgroup, and the k of a tile
// Two blocks of tokens of so many features run at once on an H100 or H200, in pairs of CTAs. More features of a w in e4m3, which are
// `wide`, take aten::_scaled_mm earlier.
constexpr int project_pairs = 66, project_paired_features = project_pairs / 2 * 64;

// The most tokens that the kernel takes.
constexpr int project_most_tokens(int64_t features, bool fp8) {
    return !fp8 ? project_tokens : features > project_paired_features ? project_fp8_wide_tokens : project_fp8_tokens;
}

struct ProjectParams {
    const void *x;     // [tokens, depth], rows x_stride elements apart, a multiple of 8
    const void *w;     // [features, depth]
    const void *bias;  // [features], or null
    void *out;         // [tokens, features]
    int tokens, depth, features;
    int block_tokens, box_tokens;  // as in ProjectPlan
    int64_t x_stride;
    bool weights_ready;  // no kernel that may still run when this one starts writes w or bias: they are read at once
    const float *scale;  // [features], of the rows of a w in e4m3
};

}  // namespace flashmhf
