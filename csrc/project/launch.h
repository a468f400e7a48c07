// Launches the projection of few tokens. Defined once per element type, in a file that CMake writes (cmake/instances.cmake).
#pragma once

#include <cuda_runtime_api.h>

#include "project/plan.h"

namespace flashmhf {

// bf16: all tensors; otherwise fp16.
template <bool bf16> cudaError_t launch_project(const ProjectPlan &plan, const ProjectParams &params, cudaStream_t stream);

}  // namespace flashmhf
