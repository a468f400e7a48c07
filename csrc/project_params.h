// What the kernel for projections of few tokens gets, and what shapes it takes: out[t, n] = sum_k x[t, k] w[n, k] + bias[n].
#pragma once

#include <cstdint>

namespace flashmhf {

constexpr int project_tokens = 16;    // at most; measured: faster than cuBLAS at 16, slower at 64
constexpr int project_multiple = 64;  // of the sizes of W: the features of a cluster, and the k of two steps
constexpr int project_inner = 65536;  // k at most: a bulk prefetch of four rows of W takes less than 2^20 bytes

struct ProjectParams {
    const void *x;     // [tokens, inner], rows x_stride elements apart, a multiple of 8
    const void *w;     // [features, inner]
    const void *bias;  // [features], or null
    void *out;         // [tokens, features]
    int tokens, inner, features;
    int64_t x_stride;
    bool settled;  // no kernel that may still run when this one starts writes w or bias: they are read at once

    // Set by the launch: a CTA takes the k of one chunk after the other, at most `steps` times 32 of each.
    int chunks, steps;
};

}  // namespace flashmhf
