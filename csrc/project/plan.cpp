#include "project/plan.h"

namespace flashmhf {

// Up to 64 tokens two CTAs fit an SM, so that one starts under the other. More tokens take 128 features a CTA: x is read half as often, and
// 64 CTAs are as fast as 128 at d_model = 2048.
ProjectPlan plan_project(int64_t tokens, int64_t features) {
    const int few = tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
    if (tokens <= few || features % 128 != 0) return {1, few, static_cast<int>((tokens + few - 1) / few)};
    return {2, tokens <= 96 ? 96 : 128, 1};
}

}  // namespace flashmhf
