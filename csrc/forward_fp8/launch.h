// From an FP8 forward problem in device memory to its launch. No PyTorch here: the operator and the standalone harness both come this way.
#pragma once

#include "forward/launch.h"
#include "forward_fp8/params.h"
#include "forward_fp8/problem.h"

namespace flashmhf {

struct ForwardFp8Launch {
    bool bf16;
    ForwardPlan plan;
    CUtensorMap q, k, u, v, out, r;  // r: only with params.gate_tiles
    ForwardFp8Params params;
    int shared_memory;  // bytes a CTA
};

// Floats of workspace.
int64_t workspace_forward_fp8(const ForwardFp8Problem &problem, const ForwardPlan &plan);
// workspace: of so many floats, or null for none. Throws std::runtime_error when the driver refuses a tensor map.
ForwardFp8Launch prepare_forward_fp8(const ForwardFp8Problem &problem, const ForwardPlan &plan, float *workspace);
cudaError_t launch_forward_fp8(int head_dim, const ForwardFp8Launch &launch, cudaStream_t stream);

// One instance for each head dimension, in instances/.
template <int d_h> cudaError_t launch_forward_fp8(const ForwardFp8Launch &launch, cudaStream_t stream);

}  // namespace flashmhf
