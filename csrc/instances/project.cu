#include "project/launch.cuh"

template cudaError_t flashmhf::launch_project<true>(const flashmhf::ProjectPlan &, const flashmhf::ProjectParams &, cudaStream_t);
template cudaError_t flashmhf::launch_project<false>(const flashmhf::ProjectPlan &, const flashmhf::ProjectParams &, cudaStream_t);
