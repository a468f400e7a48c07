#include "forward_fp8/launch.cuh"

template cudaError_t flashmhf::launch_forward_fp8<128>(const flashmhf::ForwardFp8Launch &, cudaStream_t);
