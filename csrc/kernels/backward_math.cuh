// The elementwise part of the backward, shared by all its kernels. Per (token, inter) element, with m = q.k, n = q.u, d = grad_out.v:
//   s = sigmoid(m)   a = m s   P = a n r   dN = d a r   dM = d n r (s + a (1 - s))   dR += d a n
#pragma once

#include "kernels/ptx_ext.cuh"

namespace flashmhf {

struct SwigluGrad {
    float p, dm, dn, dr;
};
__device__ __forceinline__ SwigluGrad swiglu_grad(float m, float n, float d, float r) {
    const float s = sigmoid_fast(m);
    const float a = m * s, ar = a * r;
    const float slope = fmaf(ar, 1.f - s, s * r);
    const float w = d * n;
    return {ar * n, w * slope, d * ar, w * a};
}

// Columns 16j.. of a tile, from base tile j of M, N and dA, as 16-bit base tiles in the same fragment order. Rows g and g + 8 have weights
// r.x, r.y; their dR sums grow by the columns of this thread.
template <typename T> struct GradBlock {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    T2 p[4], dm[4], dn[4];
};
template <typename T, typename Base>
__device__ __forceinline__ void swiglu_grad(GradBlock<T> &out, const Base &m, const Base &n, const Base &d, float2 r, float2 &dr) {
    using to = kittens::base_types::convertor<typename GradBlock<T>::T2, float2>;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float weight = k % 2 ? r.y : r.x;
        const SwigluGrad x = swiglu_grad(m.data[k].x, n.data[k].x, d.data[k].x, weight);
        const SwigluGrad y = swiglu_grad(m.data[k].y, n.data[k].y, d.data[k].y, weight);
        out.p[k] = to::convert(float2{x.p, y.p});
        out.dm[k] = to::convert(float2{x.dm, y.dm});
        out.dn[k] = to::convert(float2{x.dn, y.dn});
        float &sum = k % 2 ? dr.y : dr.x;
        sum += x.dr;
        sum += y.dr;
    }
}

// Sum over the four threads that share a row.
__device__ __forceinline__ float2 quad_sum(float2 v) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        v.x += __shfl_xor_sync(kittens::MASK_ALL, v.x, lanes);
        v.y += __shfl_xor_sync(kittens::MASK_ALL, v.y, lanes);
    }
    return v;
}

}  // namespace flashmhf
