// The elementwise part of the backward, shared by all its kernels. Per (token, inter) element, with m = q.k, n = q.u, d = grad_out.v, and
// the activation a = act(m) with its derivative c:   P = a n r   dN = d a r   dM = d n c r   dR += d a n
// In two steps: a and c need M only, so that the special functions run while the product dA = grad_out V^T is still in the tensor cores.
#pragma once

#include "common/activation.cuh"
#include "common/fragments.cuh"

namespace flashmhf {

// Base tile of M to a, in place, and c.
template <typename Activation, typename Base> __device__ __forceinline__ void activate(Base &m, Base &c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        Activation::forward_and_slope(m.data[k].x, c.data[k].x);
        Activation::forward_and_slope(m.data[k].y, c.data[k].y);
    }
}

// 16 columns of P, dM, dN as 16-bit base tiles, in the fragment order of the accumulators.
template <typename T> struct GradBlock {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    T2 p[4], dm[4], dn[4];
};
// Rows g and g + 8 have weights r.x, r.y; their dR sums grow by the columns of this thread. What the caller does not use costs nothing.
template <typename T, typename Base>
__device__ __forceinline__ void swiglu_grad(GradBlock<T> &out, const Base &a, const Base &c, const Base &n, const Base &d, float2 r,
                                            float2 &dr) {
    using to = kittens::base_types::convertor<typename GradBlock<T>::T2, float2>;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float gate = k % 2 ? r.y : r.x;
        float &sum = k % 2 ? dr.y : dr.x;
        float2 p, dm, dn;
        auto element = [&](float a, float c, float n, float d, float &p, float &dm, float &dn) {
            const float an = a * n, dr = d * gate;
            p = an * gate;
            dn = dr * a;
            dm = dr * n * c;
            sum = fmaf(d, an, sum);
        };
        element(a.data[k].x, c.data[k].x, n.data[k].x, d.data[k].x, p.x, dm.x, dn.x);
        element(a.data[k].y, c.data[k].y, n.data[k].y, d.data[k].y, p.y, dm.y, dn.y);
        out.p[k] = to::convert(p);
        out.dm[k] = to::convert(dm);
        out.dn[k] = to::convert(dn);
    }
}

}  // namespace flashmhf
