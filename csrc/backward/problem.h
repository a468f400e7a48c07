// A call of the backward.
#pragma once

#include "common/problem.h"

namespace flashmhf {

// With groups of heads: one sequence.
struct BackwardProblem : Operands {
    TokenTensor grad_out;
    bool deterministic;  // equal bits from run to run
    // Gradients; null: not needed. dr only with a given gate, dw only with a router.
    void *dq;            // [T, H, d_h], dense, in the element type
    void *dr;            // [T, H, E], dense, in r's type
    void *dk, *du, *dv;  // [weight heads, E, d_e, d_h], in the element type; all or none of them
    void *dw;            // [H, d_h, E] in w's type
};

}  // namespace flashmhf
