// A call of the backward: inputs and gradients in device memory.
#pragma once

#include "common/problem.h"

namespace flashmhf {

struct BackwardProblem {
    bool bf16;    // otherwise fp16
    Shape shape;  // with groups: one sequence
    TokenTensor q, grad_out;
    const void *k, *u, *v;  // [weight heads, E, d_e, d_h], contiguous
    Gate gate;
    TokenTensor r;  // where the gate is given
    const void *w;  // where a router computes it: [H, d_h, E], contiguous
    float eps;      // of the router's normalisation
    DenseStrides dense;
    bool deterministic;  // equal bits from run to run
    // Gradients; null: not needed. dr only with a given gate, dw only with a router.
    void *dq;            // [T, H, d_h], dense, in the element type
    void *dr;            // [T, H, E], dense, in r's type
    void *dk, *du, *dv;  // [weight heads, E, d_e, d_h]: written in the element type, or fp32 to add to; all or none of them
    bool accumulate;     // add to dk, du, dv
    void *dw;            // [H, d_h, E] in w's type
};

}  // namespace flashmhf
