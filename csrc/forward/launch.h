// From a forward problem in device memory to its launch. No PyTorch here: the operator and the standalone harness both come this way.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "forward/params.h"
#include "forward/plan.h"
#include "forward/problem.h"

namespace flashmhf {

struct ForwardLaunch {
    bool bf16;
    ForwardPlan plan;
    CUtensorMap q, k, u, v, out, r;  // r: only with params.gate_tiles
    ForwardParams params;
    int shared_memory;  // bytes a CTA
};

// Whether a row tile may be of several heads: a router computes the gate, or there is none.
bool may_bundle(const ForwardProblem &problem);
// Whether R is fp32 with heads side by side at strides that TMA takes.
bool gate_by_tma(const ForwardProblem &problem);
// The tensor map of such an R: tiles of `columns` sub-networks of a row tile.
CUtensorMap gate_map(const ForwardProblem &problem, int columns);
// Whether all row tiles of a CTA are of one head or bundle.
bool of_one_head(const ForwardProblem &problem, const ForwardPlan &plan);
// What the L2 brings from memory at least when it misses the weights. With few tokens each CTA streams weights of its own, a panel of their
// rows at a time: 256 bytes would bring the next panel, or the next tiles of V in FP8, before they are wanted.
int fetch_bytes(const ForwardPlan &plan);
// What the forward kernels in 16 bits and in FP8 get alike.
ForwardParams forward_params(const ForwardProblem &problem, const ForwardPlan &plan, float *workspace);
// workspace: of plan.workspace() floats, or null when it has none. Throws std::runtime_error when the driver refuses a tensor map.
ForwardLaunch prepare_forward(const ForwardProblem &problem, const ForwardPlan &plan, float *workspace);
cudaError_t launch_forward(int head_dim, const ForwardLaunch &launch, cudaStream_t stream);

// One instance for each head dimension, in instances/.
template <int d_h> cudaError_t launch_forward(const ForwardLaunch &launch, cudaStream_t stream);
// Adds the parts of split items in a kernel of its own, where the plan has parts that the clusters do not add.
template <int d_h> cudaError_t combine_parts(bool bf16, const ForwardPlan &plan, const ForwardParams &params, cudaStream_t stream);

}  // namespace flashmhf
