#include "layer/launch.cuh"

template cudaError_t flashmhf::launch_quantise_rows<true>(const flashmhf::QuantiseRowsParams &, cudaStream_t);
template cudaError_t flashmhf::launch_quantise_rows<false>(const flashmhf::QuantiseRowsParams &, cudaStream_t);
