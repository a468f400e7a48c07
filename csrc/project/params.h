// What the kernel for projections of few tokens gets, and what shapes it takes: out[t, n] = sum_k x[t, k] w[n, k] + bias[n]; with w in e4m3
// the sum is multiplied by scale[n].
#pragma once

#include <cstdint>

namespace flashmhf {

constexpr int project_tokens = 384, project_fp8_tokens = 128;  // at most; fp8: of a w in e4m3
constexpr int project_multiple = 64;                           // of the sizes of W: the features of a warpgroup, and the k of a tile

struct ProjectParams {
    const void *x;     // [tokens, depth], rows x_stride elements apart, a multiple of 8
    const void *w;     // [features, depth]
    const void *bias;  // [features], or null
    void *out;         // [tokens, features]
    int tokens, depth, features;
    int64_t x_stride;
    bool weights_ready;  // no kernel that may still run when this one starts writes w or bias: they are read at once
    const float *scale;  // [features], of the rows of a w in e4m3
};

}  // namespace flashmhf
