// From a forward problem in device memory to its launch. No PyTorch here: the operator and the standalone harness both come this way.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "forward/params.h"
#include "forward/plan.h"

namespace flashmhf {

// Strides in elements. T = batch * length tokens; the output is dense, but its tokens may be numbered across the batch either way.
struct ForwardProblem {
    bool bf16;  // otherwise fp16
    ForwardShape shape;
    const void *q, *k, *u, *v;  // q [batch, length, H, d_h] with strides, k, u, v [H, E, d_e, d_h]
    int64_t q_batch, q_token, q_head;
    void *out;
    int64_t out_batch, out_token;
    Gate gate;
    const void *gate_data;  // r [batch, length, H, E] with strides, or w [H, d_h, E]
    int64_t r_batch, r_token, r_head;
    float eps;
};

struct ForwardLaunch {
    bool bf16;
    ForwardPlan plan;
    CUtensorMap q, k, u, v, out, r;  // r: only with params.gate_tiles
    ForwardParams params;
    int shared_memory;  // bytes a CTA
};

// workspace: of plan.workspace() floats, or null when it has none. Throws std::runtime_error when the driver refuses a tensor map.
ForwardLaunch prepare_forward(const ForwardProblem &problem, const ForwardPlan &plan, float *workspace);
cudaError_t launch_forward(int head_dim, const ForwardLaunch &launch, cudaStream_t stream);
cudaError_t describe_device(int head_dim, Device *device);  // the current device; remembered

// One instance for each head dimension, in instances/.
template <int d_h> cudaError_t launch_forward(const ForwardLaunch &launch, cudaStream_t stream);
template <int d_h> cudaError_t count_clusters(int size, int *count);  // clusters of `size` CTAs that the current device runs at once

}  // namespace flashmhf
