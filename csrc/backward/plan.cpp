#include "backward/plan.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <utility>

#include "backward/policy.h"
#include "common/log_plans.h"

namespace flashmhf {
namespace {

// Parts of split items live in memory, 3 * 64 * d_h fp32 each: bound their number.
constexpr int64_t max_parts = 768;
// CTAs of the kernel that computes R on an SM; at d_h = 256 three, and the others wait.
constexpr int64_t gate_rows_ctas = 5;
// CTAs that divide the sub-networks of a block of tokens, at most; CTAs of the kernel for dW and dq on an SM.
constexpr int64_t max_token_parts = 32, gate_grad_ctas = 2;
// A workspace of this size needs no groups, and more groups than this are not tried: planning takes time too.
constexpr int64_t small_workspace_bytes = 32 << 20, max_groups = 32;
// Time that saving memory may cost: by fewer parts, by more groups of heads.
constexpr double allowed_loss = 0.01, allowed_group_loss = 0.006;

// The predicted time of a launch, in tiles of all eight products. The pair executes 5 of them by token and 6 by inter rows.
double launch_time(const Shape &shape, const HeadGroupPlan &plan, const BackwardTask &task, Kernels kernels,
                   const BackwardCostModel &cost) {
    switch (kernels) {
        case Kernels::fused: return plan.inter_time;
        case Kernels::ordered: return cost.ordered_slowdown * plan.inter_time + cost.ordered_tiles * shape.subnets * plan.subnet_tiles;
        default: return cost.pair_slowdown * 8 / 11 * (task.tokens * plan.token_time + task.weights * plan.inter_time * 6 / 8);
    }
}

Shape with_weight_heads(Shape shape, int weight_heads) {
    shape.heads = weight_heads * shape.group;
    return shape;
}

BackwardWorkspace backward_workspace(const Shape &shape, const HeadGroupPlan &plan, const BackwardTask &task, Kernels kernels) {
    constexpr int64_t none = BackwardWorkspace::none, alignment = 64;  // floats
    int64_t end = 0;
    auto take = [&](bool needed, int64_t count) {
        const int64_t begin = end;
        if (needed) end = ceil_div(end + count, alignment) * alignment;
        return needed ? begin : none;
    };
    const int64_t tile = int64_t{tile_rows} * shape.head_dim, tiles = shape.batch * plan.row_tiles * shape.heads;
    const int64_t tokens = shape.batch * shape.length * shape.heads, split = plan.items - plan.whole;
    const bool one_kernel = kernels != Kernels::pair, ordered = kernels == Kernels::ordered;
    const bool parts = !one_kernel && task.tokens && (plan.token_parts > 1 || task.router);
    BackwardWorkspace w{};
    w.query = take(one_kernel || parts, tiles * (one_kernel ? 1 : plan.token_parts) * tile);
    w.dr_sums = take(one_kernel && task.gate, tiles * shape.subnets * tile_rows);
    w.query_added = take(ordered, tiles);
    w.dr_added = take(ordered && task.gate, tiles * shape.subnets);
    w.sums_floats = one_kernel ? end : 0;
    w.weight_parts = take(task.weights && split > 0, split * plan.parts * 3 * tile);
    w.r = take(task.router, tokens * shape.subnets);
    w.scale = take(task.router, tokens);
    w.dr = take(task.router && (!one_kernel || shape.group > 1), tokens * shape.subnets);
    w.dw_parts = take(task.router && task.weights, int64_t{plan.router_parts} * shape.heads * shape.head_dim * shape.subnets);
    w.floats = end;
    return w;
}

// fused for everything where that fits; deterministic: ordered, or the pair where that is predicted to be faster.
Kernels choose_kernels(const Shape &shape, const BackwardTask &task, const Device &device, const BackwardCostModel &cost) {
    if (!task.tokens || !task.weights || shape.head_dim > widest_fused) return Kernels::pair;
    if (!task.deterministic) return Kernels::fused;
    if (shape.head_dim == 64) return Kernels::pair;  // a tile takes less time than the next CTA waits for its order
    const HeadGroupPlan plan = plan_head_group(shape, device, cost);
    auto time = [&](Kernels kernels) { return launch_time(shape, plan, task, kernels, cost); };
    return time(Kernels::ordered) < time(Kernels::pair) ? Kernels::ordered : Kernels::pair;
}

// The groups with the least workspace whose predicted time is within allowed_group_loss of the shortest; a small workspace is not worth a
// second launch.
HeadGroups plan_head_groups(const Shape &shape, const BackwardTask &task, Kernels kernels, const Device &device,
                            const BackwardCostModel &cost) {
    const int weight_heads = shape.weight_heads();
    struct Candidate {
        double time;
        int64_t floats;
    };
    auto evaluate = [&](int64_t count) {  // groups of floor(H / count) and ceil(H / count) heads
        Candidate all{0, 0};
        const int64_t small = weight_heads / count, large_groups = weight_heads % count;
        for (const auto &[heads, groups] : {std::pair{small, count - large_groups}, std::pair{small + 1, large_groups}}) {
            if (groups == 0) continue;
            const Shape group = with_weight_heads(shape, static_cast<int>(heads));
            const HeadGroupPlan plan = plan_head_group(group, device, cost);
            all.time += groups * (launch_time(group, plan, task, kernels, cost) + cost.launch_tiles(shape.head_dim));
            all.floats = std::max(all.floats, backward_workspace(group, plan, task, kernels).floats);
        }
        return all;
    };
    std::vector<Candidate> candidates{evaluate(1)};  // of 1, 2, ... groups
    const bool small = candidates[0].floats * static_cast<int64_t>(sizeof(float)) <= small_workspace_bytes;
    for (int64_t count = 2; !small && count <= std::min<int64_t>(weight_heads, max_groups); ++count) candidates.push_back(evaluate(count));
    const double limit = (1 + allowed_group_loss) * std::ranges::min(candidates, {}, &Candidate::time).time;
    auto floats = [&](const Candidate &c) { return c.time <= limit ? c.floats : std::numeric_limits<int64_t>::max(); };
    return {weight_heads, static_cast<int>(std::ranges::min_element(candidates, {}, floats) - candidates.begin()) + 1};
}

}  // namespace

HeadGroupPlan plan_head_group(const Shape &shape, const Device &device, const BackwardCostModel &cost) {
    const int sms = device.sms();
    const int64_t row_tiles = ceil_div(shape.length, tile_rows), head_tiles = shape.batch * row_tiles, tiles = shape.group * head_tiles;
    const int64_t subnet_tiles = ceil_div(shape.subnet_dim, tile_inter), items = shape.weight_heads() * shape.subnets * subnet_tiles;
    if (tiles >= (int64_t{1} << 30) || items * max_parts >= (int64_t{1} << 31) || shape.heads > 65535 ||
        shape.length >= (int64_t{1} << 31) - 128)
        throw std::invalid_argument("the backward kernels index fewer than 2^31 tokens of a sequence, 2^30 tiles and 65,536 heads");
    HeadGroupPlan plan{};
    static_cast<Rows &>(plan) = {static_cast<int>(shape.batch), static_cast<int>(row_tiles), shape.length};
    plan.subnet_tiles = static_cast<int>(subnet_tiles);
    plan.items = static_cast<int>(items);

    // Items that do not fill a wave: the fewest parts that come near the shortest makespan.
    const int64_t rest = items % sms, waves = items / sms * (tiles + cost.cta_tiles);
    auto rest_time = [&](int64_t parts) { return ceil_div(rest * parts, sms) * (ceil_div(tiles, parts) + cost.cta_tiles); };
    int64_t parts = 1, shortest_rest = rest ? rest_time(1) : 0;
    for (int64_t n = 2; rest && n <= tiles && rest * n <= max_parts; ++n) shortest_rest = std::min(shortest_rest, rest_time(n));
    while (rest && waves + rest_time(parts) > (1 + allowed_loss) * (waves + shortest_rest)) ++parts;
    plan.parts = static_cast<int>(parts);
    plan.whole = static_cast<int>(parts > 1 ? items - rest : items);
    plan.inter_time = static_cast<double>(waves + (rest ? rest_time(parts) : 0));
    // Both CTAs of a pair need the same head and the same tokens.
    plan.may_pair = device.clusters[1] > 0 && shape.subnets * subnet_tiles % 2 == 0 && plan.whole % 2 == 0;

    const int64_t blocks = ceil_div(head_tiles, token_consumers), ctas = blocks * shape.heads;
    plan.token_blocks = static_cast<int>(blocks);
    int64_t token_parts = 1;
    double shortest = 0;
    for (int64_t n = 1; n <= std::min<int64_t>(shape.subnets, max_token_parts); ++n) {
        if (n > 1 && ctas * (n - 1) >= sms) break;  // a wave is filled already
        const double time = static_cast<double>(ceil_div(ctas * n, sms)) * (ceil_div(shape.subnets, n) * subnet_tiles + cost.cta_tiles);
        if (n == 1 || time < shortest) shortest = time, token_parts = n;
    }
    plan.token_parts = static_cast<int>(token_parts);
    plan.token_time = shortest * token_consumers * 5 / 8;  // five of the eight products
    plan.gate_rows_parts = static_cast<int>(ceil_div(gate_rows_ctas * sms, shape.heads));
    plan.router_parts = static_cast<int>(std::clamp<int64_t>(gate_grad_ctas * sms / shape.heads, 1, head_tiles));
    return plan;
}

std::string describe(const Shape &shape, const BackwardPlan &plan, const BackwardCostModel &cost) {
    const HeadGroupPlan &first = plan.launches[0];
    char text[320];
    std::snprintf(
        text, sizeof text,
        "kernels %s, groups %d, items %d of which %d whole and the others in %d parts, %spairs, token tiles %lld, workspace %.1f MB, "
        "%.1f us",
        kernels_names[static_cast<int>(plan.kernels)], plan.groups.count, first.items, first.whole, first.parts,
        first.may_pair ? "" : "no ", static_cast<long long>(shape.batch * shape.group * first.row_tiles), plan.workspace() * 4e-6,
        plan.time * cost.tile_us * shape.head_dim);
    return text;
}

BackwardPlan plan_backward(const Shape &shape, const BackwardTask &task, const Device &device, const BackwardCostModel &cost) {
    BackwardPlan plan = plan_backward(shape, task, device, choose_kernels(shape, task, device, cost), 0, cost);
    if (logs_plans()) log_plan("backward", shape, describe(shape, plan, cost) + "\n");
    return plan;
}

BackwardPlan plan_backward(const Shape &shape, const BackwardTask &task, const Device &device, Kernels kernels, int groups,
                           const BackwardCostModel &cost) {
    if (groups < 0 || groups > shape.weight_heads())
        throw std::invalid_argument("groups must be between 0 and the number of heads of K, U and V");
    BackwardPlan plan{};
    plan.task = task;
    plan.kernels = kernels;
    plan.groups = groups ? HeadGroups{shape.weight_heads(), groups} : plan_head_groups(shape, task, kernels, device, cost);
    for (int i = 0; i < plan.groups.count; ++i) {
        const Shape group = with_weight_heads(shape, plan.groups.size(i));
        plan.launches.push_back(plan_head_group(group, device, cost));
        plan.workspaces.push_back(backward_workspace(group, plan.launches.back(), task, kernels));
        plan.time += launch_time(group, plan.launches.back(), task, kernels, cost) + cost.launch_tiles(shape.head_dim);
    }
    return plan;
}

int64_t BackwardPlan::workspace() const {
    int64_t floats = 0;
    for (const BackwardWorkspace &w : workspaces) floats = std::max(floats, w.floats);
    return floats;
}

}  // namespace flashmhf
