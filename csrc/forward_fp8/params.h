// What the FP8 forward kernel gets besides tensor maps.
#pragma once

#include "forward/params.h"

namespace flashmhf {

struct ForwardFp8Params : ForwardParams {
    float *gate_rows;  // [CTAs][consumers][64][E], where the gate is computed and W or the gate does not fit shared memory
    // [weight heads, E]: what a unit of k8, u8 and v8 stands for; k's is the same for all sub-networks of a head.
    const float *k_scales, *u_scales, *v_scales;
};

// Quantisation of Q: the largest of a row of q8 is a power of two, so large that the norm of the row is in (query_norm / 2, query_norm].
// With k8 and u8 of root mean square 1 that of A is then 4 to 16, whatever the size of q, and no sum of [M|N] leaves fp16.
constexpr float query_norm = 4.f;
constexpr float smallest_query = 1e-18f;  // instead of the largest of a row of zeros

}  // namespace flashmhf
