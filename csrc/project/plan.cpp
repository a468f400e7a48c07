#include "project/plan.h"

#include <algorithm>
#include <initializer_list>

#include "common/geometry.h"
#include "project/params.h"

namespace flashmhf {
namespace {

// As many clusters of 4 CTAs as are faster than cuBLAS (30 run at once).
constexpr int quads = 24;

ProjectPlan in_blocks(int warpgroups, int max_tokens, int cluster, int64_t tokens) {
    const int blocks = static_cast<int>(ceil_div(tokens, max_tokens));
    const int64_t block_tokens = 8 * ceil_div(tokens, 8 * blocks);
    return {warpgroups, max_tokens, cluster, blocks, static_cast<int>(block_tokens), static_cast<int>(std::min(block_tokens, tokens))};
}

// Two blocks of tokens for 64 features, in pairs: twice as many CTAs as for 128 features in fours, and fewer sums to send. At 2,048
// features the fours are faster up to 96 tokens, and cuBLAS is as fast for more than 256.
bool takes_pairs(int64_t tokens, int64_t features) {
    return tokens > 64 && features <= project_paired_features && ((tokens > 96 && tokens <= 256) || features <= 1536);
}

}  // namespace

// Up to 64 tokens two CTAs fit an SM, so that one starts under the other. More tokens take 128 features a CTA, so that x is read half as
// often, or half the tokens a CTA. A W in e4m3 is converted in registers, which a CTA's share of k bounds: it has pairs for more than 128
// tokens only.
ProjectPlan plan_project(int64_t tokens, int64_t features, bool fp8) {
    if (tokens <= 64) return in_blocks(1, tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64, 4, tokens);
    if (tokens > 128 || (!fp8 && takes_pairs(tokens, features)))
        for (const int most : {48, 64, 96, 128, 192, 256})
            if (tokens <= 2 * most) return in_blocks(1, most, 2, tokens);
    return features % 128 != 0 ? in_blocks(1, 64, 4, tokens) : in_blocks(2, tokens <= 96 ? 96 : 128, 4, tokens);
}

bool projects_faster(int64_t tokens, int64_t features) {
    if (tokens <= 64) return true;
    return tokens <= project_tokens && (takes_pairs(tokens, features) || (tokens <= 128 && features <= 128 * quads));
}

}  // namespace flashmhf
