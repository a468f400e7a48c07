#include "forward/launch.cuh"

template cudaError_t flashmhf::launch_forward<flashmhf::WeightFormat::same, 128>(const flashmhf::ForwardLaunch &, cudaStream_t);
template cudaError_t flashmhf::combine_parts<128>(bool, const flashmhf::ForwardPlan &, const flashmhf::ForwardParams &, cudaStream_t);
