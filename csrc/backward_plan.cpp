#include "backward_plan.h"

#include <algorithm>
#include <stdexcept>

namespace flashmhf {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a CTA costs besides its tiles, in tiles: loading K, U, V, the epilogue, and the later sum of its part.
constexpr int64_t cta_overhead_tiles = 4;
// Parts of split items live in memory, 3 * 64 * d_h fp32 each: bound their number.
constexpr int64_t max_parts = 768;

}  // namespace

BackwardPlan plan_backward(const BackwardShape &shape, int sms) {
    const int64_t row_tiles = ceil_div(shape.length, 64), tiles = shape.batch * row_tiles, subnet_tiles = ceil_div(shape.subnet_dim, 64);
    const int64_t items = shape.heads * shape.subnets * subnet_tiles;
    if (tiles >= (int64_t{1} << 30) || items * max_parts >= (int64_t{1} << 31) || shape.heads > 65535 || shape.length >= (int64_t{1} << 31) - 128)
        throw std::invalid_argument("the backward kernels index fewer than 2^31 tokens of a sequence, 2^30 tiles and 65,536 heads");
    BackwardPlan plan{};
    plan.row_tiles = static_cast<int>(row_tiles);
    plan.subnet_tiles = static_cast<int>(subnet_tiles);
    plan.items = static_cast<int>(items);

    // Items that do not fill a wave: the number of parts with the shortest makespan, ties to the fewest.
    const int64_t rest = items % sms;
    int64_t best_parts = 1, best = rest ? tiles + cta_overhead_tiles : 0;
    for (int64_t parts = 2; rest && parts <= tiles && rest * parts <= max_parts; ++parts) {
        const int64_t cost = ceil_div(rest * parts, sms) * (ceil_div(tiles, parts) + cta_overhead_tiles);
        if (cost < best) best = cost, best_parts = parts;
    }
    plan.parts = static_cast<int>(best_parts);
    plan.whole = static_cast<int>(best_parts > 1 ? items - rest : items);

    const int64_t blocks = ceil_div(tiles, 2), ctas = blocks * shape.heads;
    plan.token_blocks = static_cast<int>(blocks);
    int64_t token_parts = 1;
    double shortest = 0;
    for (int64_t parts = 1; parts <= std::min<int64_t>(shape.subnets, 32); ++parts) {
        if (parts > 1 && ctas * (parts - 1) >= sms) break;  // a wave is filled already
        const double time = static_cast<double>(ceil_div(ctas * parts, sms)) * (ceil_div(shape.subnets, parts) * subnet_tiles + cta_overhead_tiles);
        if (parts == 1 || time < shortest) shortest = time, token_parts = parts;
    }
    plan.token_parts = static_cast<int>(token_parts);
    return plan;
}

}  // namespace flashmhf
