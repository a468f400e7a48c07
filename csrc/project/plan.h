// Which tiles a projection takes. Pure host code, tested without a GPU.
#pragma once

#include <cstdint>

namespace flashmhf {

struct ProjectPlan {
    int warpgroups;  // of a CTA that compute, 64 features each
    int max_tokens;  // of a CTA
    int blocks;      // CTAs along the tokens
};

// For at most project_tokens tokens; features is a multiple of project_multiple.
ProjectPlan plan_project(int64_t tokens, int64_t features);

}  // namespace flashmhf
