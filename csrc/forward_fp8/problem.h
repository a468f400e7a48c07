// A call of the FP8 forward: inputs and output in device memory.
#pragma once

#include "forward/problem.h"

namespace flashmhf {

// Q, the gate and the output are those of the 16-bit forward. k and u: e4m3 [weight heads, E, d_e, d_h], and v: e4m3 [weight heads, E, d_h,
// d_e], contiguous, in the order of columns of flashmhf/quantize.py.
struct ForwardFp8Problem : ForwardProblem {
    const float *scales;  // [3, weight heads, E], contiguous
};

}  // namespace flashmhf
