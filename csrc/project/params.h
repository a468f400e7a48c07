// What the kernel for projections of few tokens gets, and what shapes it takes: out[t, n] = sum_k x[t, k] w[n, k] + bias[n].
#pragma once

#include <cstdint>

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

}  // namespace flashmhf
