#include "host/launch_forward.cuh"

template cudaError_t flashmhf::launch_forward<256>(const flashmhf::ForwardLaunch &, cudaStream_t);
template cudaError_t flashmhf::count_pairs<256>(int *);
