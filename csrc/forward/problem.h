// A call of the forward: inputs and output in device memory.
#pragma once

#include "common/problem.h"

namespace flashmhf {

// K, U and V in the type of Q, or in e4m3.
enum class WeightFormat { same, e4m3 };

struct ForwardProblem {
    WeightFormat format;
    bool bf16;  // Q and the output; otherwise fp16
    Shape shape;
    TokenTensor q;
    // [weight heads, E, d_e, d_h], contiguous. In e4m3 v is [weight heads, E, d_h, d_e], and all have the order of columns of
    // flashmhf/quantize/packing.py.
    const void *k, *u, *v;
    const float *scales;  // in e4m3: [3, weight heads, E], contiguous
    Gate gate;
    TokenTensor r;  // where the gate is given
    const void *w;  // where a router computes it: [H, d_h, E], contiguous
    float eps;      // of the router's normalisation
    void *out;      // [T, H, d_h], dense
    DenseStrides dense;
};

}  // namespace flashmhf
