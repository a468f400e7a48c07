#include "backward/launch.cuh"

template cudaError_t flashmhf::launch_backward<64>(const flashmhf::HeadGroupLaunch &, cudaStream_t);
