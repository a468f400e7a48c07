// What the FP8 forward kernel gets besides tensor maps.
#pragma once

#include "forward/params.h"

namespace flashmhf {

struct ForwardFp8Params : ForwardParams {
    float *gate_rows;  // [CTAs][consumers][64][E], where the gate is computed and W or the gate does not fit shared memory
    // [weight heads, E]: what a unit of k8, u8 and v8 stands for; k's is the same for all sub-networks of a head.
    const float *k_scales, *u_scales, *v_scales;
};

// Quantisation of Q and A: |q8| <= query_limit, so that with rows of k8 and u8 of norm 180 at most no fp16 sum of [M|N] overflows; the
// root mean square of A is about activation_gain, whatever the size of q.
constexpr float query_limit = 16.f, activation_gain = 16.f;

}  // namespace flashmhf
