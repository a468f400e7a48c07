// The operators that bindings.cpp registers as flashmhf_hopper::*. Shapes, types and layouts: checks.h.
#pragma once

#include <optional>
#include <tuple>

#include "checks.h"
#include "forward/params.h"

namespace flashmhf {

// out [..., H, d_h] = sum_e r_e silu(q K_e^T) (q U_e^T) V_e; r [..., H, E] or nothing for weights of 1. Deterministic in any case.
Tensor forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r, bool deterministic);
// The same with r = sigmoid(q W) / (sum_e sigmoid(q W) + eps), computed in the kernel; w [H, d_h, E].
Tensor gated_forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps, bool deterministic);

// The forward on packed weights in e4m3: k8, u8 [H_kv, E, d_e, d_h] and v8 [H_kv, E, d_h, d_e], their columns in the kernel's order;
// scales [3, H_kv, E] of k8, u8 and v8, k8's the same for all sub-networks of a head. r [..., H, E], or w [H, d_h, E] and eps, or neither.
Tensor fp8_forward(const Tensor &q, const Tensor &k8, const Tensor &u8, const Tensor &v8, const Tensor &scales,
                   const std::optional<Tensor> &r, const std::optional<Tensor> &w, double eps);

// x W^T + bias of few tokens: x [T, K], w [N, K], bias [N] or nothing; [T, N].
Tensor project(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias);

// The parts of the layer, which has checked its tensors and entered the scope.
struct ForwardInputs {
    WeightFormat format;
    const Tensor &k, &u, &v;
    const float *scales;      // of e4m3
    std::optional<Tensor> r;  // or w, or neither
    std::optional<Tensor> w;
    double eps;
};
Tensor run_forward(const DeviceScope &scope, const char *name, const Tensor &q, const ForwardInputs &in, const ProblemSizes &sizes);
// behind_forward: queued right behind run_forward; w and bias are then read before that one has ended, which is a race behind any other
// kernel (csrc/project/README.md).
Tensor run_project(const DeviceScope &scope, const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias, bool behind_forward);

// The whole layer at inference, x [..., d_model] -> [..., d_out]: linear, split heads, RMS normalisation with weight q_norm [H, d_h] where
// given, gated_forward, linear. in_w [H d_h, d_model], out_w [d_out, H d_h]. Nothing for tensors of other dtypes, shapes or layouts than
// the kernels read: the caller then takes the parts, which name what is wrong or copy. The operator of compiled graphs refuses them.
std::optional<Tensor> layer(const Tensor &x, const Tensor &in_w, const std::optional<Tensor> &in_bias, const std::optional<Tensor> &q_norm,
                            double q_norm_eps, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps,
                            const Tensor &out_w, const std::optional<Tensor> &out_bias);

// The same with packed K, U and V.
std::optional<Tensor> fp8_layer(const Tensor &x, const Tensor &in_w, const std::optional<Tensor> &in_bias,
                                const std::optional<Tensor> &q_norm, double q_norm_eps, const Tensor &k8, const Tensor &u8,
                                const Tensor &v8, const Tensor &scales, const Tensor &w, double eps, const Tensor &out_w,
                                const std::optional<Tensor> &out_bias);

// (dq, dk, du, dv, dr) of forward, or with dw in place of dr. What is not needed comes back as a tensor of shape [0]: dq and dr without
// needs_tokens, dk, du, dv and dw without needs_weights, dr without r. deterministic: bitwise equal from run to run (choose_kernels in
// backward/plan.cpp).
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
Gradients backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v,
                   const std::optional<Tensor> &r, bool deterministic, bool needs_tokens, bool needs_weights);
// Of gated_forward; R is computed again. dw [H, d_h, E] in w's type.
Gradients gated_backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w,
                         double eps, bool deterministic, bool needs_tokens, bool needs_weights);

}  // namespace flashmhf
