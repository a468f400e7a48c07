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

// Quantisation of rows for a product in e4m3: scale[t] = max |x[t]| / 448, x8[t] = e4m3(x[t] / scale[t]).
struct QuantiseRowsParams {
    const void *x;     // [rows, columns], rows x_stride elements apart
    uint8_t *x8;       // [rows, columns]
    float *scale;      // [rows]
    int64_t x_stride;  // a multiple of 8, as columns is
    int rows, columns;
};

}  // namespace flashmhf
