// A call of the forward.
#pragma once

#include "common/problem.h"

namespace flashmhf {

// K, U and V in the type of Q, or in e4m3.
enum class WeightFormat { same, e4m3 };

// In e4m3 v is [weight heads, E, d_h, d_e], and k, u and v have the order of columns of flashmhf/quantize/packing.py.
struct ForwardProblem : Operands {
    WeightFormat format;
    const float *scales;  // in e4m3: [3, weight heads, E], contiguous
    void *out;            // [T, H, d_h], dense
};

}  // namespace flashmhf
