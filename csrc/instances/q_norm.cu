#include "layer/launch.cuh"

template cudaError_t flashmhf::launch_q_norm<true>(int, const flashmhf::QNormParams &, cudaStream_t);
template cudaError_t flashmhf::launch_q_norm<false>(int, const flashmhf::QNormParams &, cudaStream_t);
