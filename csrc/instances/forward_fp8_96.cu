#include "forward/launch.cuh"

template cudaError_t flashmhf::launch_forward<flashmhf::WeightFormat::e4m3, 96>(const flashmhf::ForwardLaunch &, cudaStream_t);
