// What the layer's own kernels get. Q's normalisation: q[t, h] = q[t, h] / sqrt(mean(q[t, h]^2) + eps) * weight[h].
#pragma once

#include <cstdint>

namespace flashmhf {

struct QNormParams {
    void *q;             // [rows, d_h], dense; row t * heads + h
    const void *weight;  // [heads, d_h]
    int64_t rows;
    int heads;
    float eps;
    bool float_weight;  // otherwise in q's type
};

}  // namespace flashmhf
