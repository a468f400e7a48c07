#include "forward_fp8/launch.cuh"

template cudaError_t flashmhf::launch_forward_fp8<96>(const flashmhf::ForwardFp8Launch &, cudaStream_t);
