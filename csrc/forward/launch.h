// From a forward problem in device memory to its launch. No PyTorch here: the operator and the standalone harness both come this way.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "forward/params.h"
#include "forward/plan.h"

namespace flashmhf {

// A call. In e4m3 v is [weight heads, E, d_h, d_e], and k, u and v have the order of columns of flashmhf/quantize/packing.py.
struct ForwardProblem : Operands {
    WeightFormat format;
    const float *scales;  // in e4m3: [3, weight heads, E], contiguous
    void *out;            // [T, H, d_h], dense
};

struct ForwardLaunch {
    WeightFormat format;
    bool bf16;
    ForwardPlan plan;
    CUtensorMap q, k, u, v, out, r;  // r: only with params.gate.tiles
    ForwardFp8Params params;         // those of e4m3 are unused in the other format
    int shared_memory;               // bytes a CTA
};

// Whether a row tile may be of several heads: in the type of Q, where a router computes the gate or there is none.
bool may_bundle(const ForwardProblem &problem);
// Floats of workspace.
int64_t workspace_of(const ForwardProblem &problem, const ForwardPlan &plan);
// workspace: of so many floats, or null for none. Throws std::runtime_error when the driver refuses a tensor map.
ForwardLaunch prepare_forward(const ForwardProblem &problem, const ForwardPlan &plan, float *workspace);
cudaError_t launch_forward(int head_dim, const ForwardLaunch &launch, cudaStream_t stream);

// One instance for each format and head dimension, in a file that CMake writes (cmake/instances.cmake).
template <WeightFormat format, int d_h> cudaError_t launch_forward(const ForwardLaunch &launch, cudaStream_t stream);
// Adds the parts of split items in a kernel of its own. In the instances of 16 bits, for both formats.
template <int d_h> cudaError_t combine_parts(bool bf16, const ForwardPlan &plan, const ForwardParams &params, cudaStream_t stream);

}  // namespace flashmhf
