#include "project/plan.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "common/geometry.h"

namespace flashmhf {
namespace {

// A threshold: with more clusters of 4 CTAs than this part of those that run at once cuBLAS is faster (24 of 30 on an H200).
constexpr int64_t quads_of(const Device &device) { return device.clusters[3] * 4 / 5; }

// By the tile of the fewest tokens that takes them in so many blocks, or in more by the largest.
ProjectPlan in_blocks(int warpgroups, int cluster, int64_t tokens, int most = 1) {
    int tile = -1;
    for (int i = 0; i < static_cast<int>(std::size(project_tiles)); ++i) {
        const ProjectTile &t = project_tiles[i];
        if (t.warpgroups != warpgroups || t.cluster != cluster) continue;
        tile = i;
        if (tokens <= most * t.max_tokens) break;
    }
    const int blocks = static_cast<int>(ceil_div(tokens, project_tiles[tile].max_tokens));
    const int64_t block_tokens = 8 * ceil_div(tokens, 8 * blocks);
    return {tile, blocks, static_cast<int>(block_tokens), static_cast<int>(std::min(block_tokens, tokens))};
}

// Two blocks of tokens for 64 features, in pairs that all run at once: twice as many CTAs as for 128 features in fours, and fewer sums to
// send. Thresholds: at 2,048 features the fours are faster up to 96 tokens, and cuBLAS is as fast for more than 256.
bool takes_pairs(int64_t tokens, int64_t features, const Device &device) {
    const int64_t at_once = device.clusters[1] / 2 * project_multiple;
    return tokens > 64 && features <= at_once && ((tokens > 96 && tokens <= 256) || features <= 1536);
}

}  // namespace

// Up to 64 tokens two CTAs fit an SM, so that one starts under the other. More tokens take 128 features a CTA, so that x is read half as
// often, or half the tokens a CTA.
ProjectPlan plan_project(int64_t tokens, int64_t features, const Device &device) {
    const ProjectPlan plan = [&] {
        if (tokens > 128 || takes_pairs(tokens, features, device)) return in_blocks(1, 2, tokens, 2);
        return in_blocks(tokens <= 64 || features % 128 != 0 ? 1 : 2, 4, tokens);
    }();
    const int cluster = project_tiles[plan.tile].cluster;
    if (device.clusters[cluster - 1] == 0)
        throw std::invalid_argument("the device runs no clusters of " + std::to_string(cluster) + " CTAs, which the projection takes");
    return plan;
}

bool projects_faster(int64_t tokens, int64_t features, const Device &device) {
    if (tokens <= 64) return device.clusters[3] > 0;
    return tokens <= project_tokens && (takes_pairs(tokens, features, device) || (tokens <= 128 && features <= 128 * quads_of(device)));
}

}  // namespace flashmhf
