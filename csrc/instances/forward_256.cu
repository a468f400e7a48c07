#include "forward/launch.cuh"

template cudaError_t flashmhf::launch_forward<256>(const flashmhf::ForwardLaunch &, cudaStream_t);
template cudaError_t flashmhf::count_clusters<256>(int, int *);
