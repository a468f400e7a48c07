// The operators that bindings.cpp registers as flashmhf_hopper::*. Shapes, types and layouts: checks.h.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace flashmhf {

using torch::stable::Tensor;

// out [..., H, d_h] = sum_e r_e silu(q K_e^T) (q U_e^T) V_e; r [..., H, E] or nothing for weights of 1. Deterministic in any case.
Tensor forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r, bool deterministic);
// The same with r = sigmoid(q W) / (sum_e sigmoid(q W) + eps), computed in the kernel; w [H, d_h, E].
Tensor gated_forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps, bool deterministic);

}  // namespace flashmhf
