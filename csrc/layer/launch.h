// Launches the normalisation of Q, in place. Defined once per element type, in a file that CMake writes (cmake/instances.cmake).
#pragma once

#include <cuda_runtime_api.h>

#include "layer/params.h"

namespace flashmhf {

template <bool bf16> cudaError_t launch_q_norm(int head_dim, const QNormParams &params, cudaStream_t stream);  // otherwise fp16

}  // namespace flashmhf
