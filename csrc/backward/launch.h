// From a backward problem in device memory to its launch. No PyTorch here: the operator and the standalone harness both come this way.
#pragma once

#include <vector>

#include <cuda_runtime_api.h>

#include "backward/params.h"
#include "backward/plan.h"

namespace flashmhf {

// A call. With groups of heads: one sequence.
struct BackwardProblem : Operands {
    TokenTensor grad_out;
    bool deterministic;  // equal bits from run to run
    // Gradients; null: not needed. dr only with a given gate, dw only with a router.
    void *dq;            // [T, H, d_h], dense, in the element type
    void *dr;            // [T, H, E], dense, in r's type
    void *dk, *du, *dv;  // [weight heads, E, d_e, d_h], in the element type; all or none of them
    void *dw;            // [H, d_h, E] in w's type
};

// The kernels of one group of heads.
struct HeadGroupLaunch {
    bool bf16;  // otherwise fp16
    Kernels kernels;
    bool needs_tokens, needs_weights;
    HeadGroupPlan plan;
    BackwardMaps maps;  // boxes of TokenPolicy::inter rows of K, U and V
    BackwardParams params;
    // The same for the inter-stationary kernels: heads that share one of K, U and V are one head, and these heads its sequences.
    BackwardMaps group_maps;  // boxes of tile_inter rows
    BackwardParams group_params;
    RouterParams router;  // router.w is null where there is none
    size_t sums_bytes;    // to be cleared from params.query_sums on; with a router flashmhf_gate_rows does it
};

using BackwardLaunch = std::vector<HeadGroupLaunch>;  // of the groups

// What `problem` asks for. dW needs dR, hence the tokens' part.
BackwardTask backward_task(const BackwardProblem &problem);
// workspace: plan.workspace() floats; the groups use it one after the other. Throws std::runtime_error when the driver refuses a tensor
// map.
BackwardLaunch prepare_backward(const BackwardProblem &problem, const BackwardPlan &plan, float *workspace);
cudaError_t launch_backward(int head_dim, const BackwardLaunch &launch, cudaStream_t stream);

// One instance for each head dimension, in a file that CMake writes (cmake/instances.cmake).
template <int d_h> cudaError_t launch_backward(const HeadGroupLaunch &launch, cudaStream_t stream);

}  // namespace flashmhf
