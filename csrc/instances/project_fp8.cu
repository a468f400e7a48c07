#include "project/launch.cuh"

template cudaError_t flashmhf::launch_project_fp8<true>(const flashmhf::ProjectPlan &, const flashmhf::ProjectParams &, cudaStream_t);
template cudaError_t flashmhf::launch_project_fp8<false>(const flashmhf::ProjectPlan &, const flashmhf::ProjectParams &, cudaStream_t);
