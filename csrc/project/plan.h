// Which tiles a projection takes. Pure host code, tested without a GPU.
#pragma once

#include <cstdint>

#include "common/device.h"

namespace flashmhf {

struct ProjectPlan {
    int warpgroups;    // of a CTA that compute, 64 features each
    int max_tokens;    // of a CTA
    int cluster;       // CTAs that divide k
    int blocks;        // clusters along the tokens
    int block_tokens;  // that a CTA takes, a multiple of 8
    int box_tokens;    // that a copy of x brings: rows behind the last token, which TMA fills with zeros, take longer than others
};

// For 1 to project_tokens tokens; features is a multiple of project_multiple. Throws std::invalid_argument on a device without clusters.
ProjectPlan plan_project(int64_t tokens, int64_t features, const Device &device);

// Whether the kernel is faster than cuBLAS for a W of these sizes, and takes them. False on a device without clusters.
bool projects_faster(int64_t tokens, int64_t features, const Device &device);

}  // namespace flashmhf
