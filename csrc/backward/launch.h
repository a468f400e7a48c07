// Launches the backward kernels of one head dimension. Defined once per head dimension, in instances/.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "backward/params.h"
#include "backward/plan.h"

namespace flashmhf {

struct BackwardLaunch {
    bool bf16;   // otherwise fp16
    bool fused;  // one kernel for everything, else the token- and inter-stationary kernels
    bool needs_tokens, needs_weights;
    BackwardPlan plan;
    CUtensorMap q, grad_out;                // boxes of 64 tokens
    CUtensorMap k, u, v;                    // boxes of 64 inter rows
    CUtensorMap token_k, token_u, token_v;  // boxes of TokenPolicy::inter rows
    BackwardParams params;
    GateParams gate;    // gate.w: gated_backward
    size_t sums_bytes;  // to be cleared from params.query_sums on, by gate_rows where there is a router
    cudaStream_t stream;
};

template <int d_h> cudaError_t launch_backward(const BackwardLaunch &launch);
cudaError_t launch_backward(int head_dim, const BackwardLaunch &launch);

}  // namespace flashmhf
