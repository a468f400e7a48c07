// A call of the forward: inputs and output in device memory.
#pragma once

#include "common/problem.h"

namespace flashmhf {

struct ForwardProblem {
    bool bf16;  // otherwise fp16
    Shape shape;
    TokenTensor q;
    const void *k, *u, *v;  // [weight heads, E, d_e, d_h], contiguous
    Gate gate;
    TokenTensor r;  // where the gate is given
    const void *w;  // where a router computes it: [H, d_h, E], contiguous
    float eps;      // of the router's normalisation
    void *out;      // [T, H, d_h], dense
    DenseStrides dense;
};

}  // namespace flashmhf
