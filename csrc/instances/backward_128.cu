#include "backward/launch.cuh"

template cudaError_t flashmhf::launch_backward<128>(const flashmhf::HeadGroupLaunch &, cudaStream_t);
