// Launches the forward kernels of one head dimension. Defined once per head dimension, in instances/.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "params.h"
#include "plan.h"

namespace flashmhf {

struct ForwardLaunch {
    bool bf16;  // otherwise fp16
    ForwardPlan plan;
    CUtensorMap q, k, u, v, out;
    void *out_data;  // [T, H, d_h]
    ForwardParams params;
    cudaStream_t stream;
};

template <int d_h> cudaError_t launch_forward(const ForwardLaunch &launch);
// Clusters of two CTAs that the current device runs at once.
template <int d_h> cudaError_t count_pairs(int *pairs);

// Dispatch over the instances.
cudaError_t launch_forward(int head_dim, const ForwardLaunch &launch);
cudaError_t describe_device(int head_dim, Device *device);  // of the current device; remembered

}  // namespace flashmhf
