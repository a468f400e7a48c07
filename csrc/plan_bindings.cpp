// flashmhf._plan: the launch planner in Python, for tests and for flashmhf.info(). The package works without it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backward/plan.h"
#include "backward/policy.h"
#include "forward/e4m3/policy.h"
#include "forward/f16/policy.h"
#include "forward/plan.h"
#include "project/plan.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

// Shared memory and registers of an instance; `which`: what tells it from others of the head dimension.
template <typename P, typename... Which> py::dict policy(int head_dim, Which &&...which) {
    return py::dict("head_dim"_a = head_dim, "shared_memory"_a = P::shared_memory, "launch_registers"_a = P::launch_registers,
                    std::forward<Which>(which)...);
}
py::list forward_policies() {
    py::list all;
    flashmhf::ForwardHeadDims::each([&]<int d_h>() { all.append(policy<flashmhf::ForwardPolicy<d_h>>(d_h)); });
    return all;
}
py::list forward_fp8_policies() {
    py::list all;
    flashmhf::ForwardFp8HeadDims::each([&]<int d_h>() {
        all.append(policy<flashmhf::ForwardFp8Policy<d_h, false>>(d_h, "few_rows"_a = false));
        all.append(policy<flashmhf::ForwardFp8Policy<d_h, true>>(d_h, "few_rows"_a = true));
    });
    return all;
}
py::list backward_policies() {
    using namespace flashmhf;
    py::list all;
    BackwardHeadDims::each([&]<int d_h>() {
        all.append(policy<TokenPolicy<d_h>>(d_h, "outputs"_a = "tokens"));
        if constexpr (d_h < 256) {
            all.append(policy<InterPolicy<d_h, all_grads>>(d_h, "outputs"_a = "all"));
            all.append(policy<InterPolicy<d_h, weight_grads>>(d_h, "outputs"_a = "weights"));
        } else {
            all.append(policy<InterPolicy<d_h, key_grads>>(d_h, "outputs"_a = "keys"));
            all.append(policy<InterPolicy<d_h, value_grad>>(d_h, "outputs"_a = "values"));
        }
    });
    return all;
}

using Clusters = std::array<int, flashmhf::max_slices>;
constexpr Clusters h200_clusters{132, 66, 39, 30, 22, 17, 15, 15};

py::dict describe(const flashmhf::ForwardPlan &plan) {
    const flashmhf::ForwardSchedule &s = plan.schedule;
    py::list work;
    for (const auto &w : flashmhf::enumerate_work(s))
        work.append(py::make_tuple(w.cluster * s.abreast + w.block, w.slice, w.work.item, w.work.begin, w.work.end, w.work.part));
    py::list owners;  // of the items after the whole waves: first and last cluster
    for (int i = 0; i < s.rest; ++i)
        for (int block = 0; block < s.abreast; ++block)
            owners.append(py::make_tuple(s.first_owner(i) * s.abreast + block, s.last_owner(i) * s.abreast + block));
    py::list adds;  // the one of these items that a cluster adds up, or -1
    for (int cluster = 0; cluster < s.clusters * s.abreast; ++cluster) {
        const int index = s.adds_parts ? s.ends_item(cluster / s.abreast) : -1;
        adds.append(index < 0 ? -1 : index * s.abreast + cluster % s.abreast);
    }
    return py::dict("cluster_size"_a = plan.cluster_size, "row_ctas"_a = plan.row_ctas, "slices"_a = s.slices,
                    "slice_pieces"_a = plan.slice_pieces, "spare_pieces"_a = plan.spare_pieces, "late_successor"_a = plan.late_successor,
                    "consumers"_a = plan.consumers, "bundle"_a = plan.bundle, "row_tiles"_a = plan.row_tiles, "blocks"_a = plan.blocks,
                    "subnet_tiles"_a = plan.subnet_tiles, "inter_tiles"_a = s.inter_tiles, "clusters"_a = s.clusters * s.abreast,
                    "waves"_a = s.waves, "abreast"_a = s.abreast, "rest"_a = s.rest * s.abreast, "splits"_a = s.splits * s.abreast,
                    "partials"_a = plan.partials, "flags"_a = plan.flags, "workspace"_a = plan.workspace(),
                    "shared_memory"_a = plan.shared_memory, "work"_a = work, "owners"_a = owners, "adds"_a = adds);
}

py::dict plan_forward(int64_t batch, int64_t length, int heads, int head_dim, int subnets, int64_t subnet_dim, const Clusters &clusters,
                      int group, bool may_bundle, int large_clusters) {
    return describe(flashmhf::plan_forward({batch, length, heads, head_dim, subnets, subnet_dim, group}, {clusters, large_clusters},
                                           flashmhf::WeightFormat::same, may_bundle));
}
py::dict plan_forward_fp8(int64_t batch, int64_t length, int heads, int head_dim, int subnets, int64_t subnet_dim, const Clusters &clusters,
                          int group) {
    return describe(flashmhf::plan_forward({batch, length, heads, head_dim, subnets, subnet_dim, group}, {clusters},
                                           flashmhf::WeightFormat::e4m3, false));
}

std::string forward_candidates(int64_t batch, int64_t length, int heads, int head_dim, int subnets, int64_t subnet_dim, bool fp8,
                               const Clusters &clusters, int group, bool may_bundle, int large_clusters) {
    const auto format = fp8 ? flashmhf::WeightFormat::e4m3 : flashmhf::WeightFormat::same;
    return flashmhf::list_candidates({batch, length, heads, head_dim, subnets, subnet_dim, group}, {clusters, large_clusters}, format,
                                     may_bundle && !fp8, flashmhf::forward_costs(format));
}

py::dict plan_backward(int64_t batch, int64_t length, int heads, int subnets, int64_t subnet_dim, int sms, int group) {
    const flashmhf::HeadGroupPlan plan =
        flashmhf::plan_head_group({batch, length, heads, 128, subnets, subnet_dim, group}, {.clusters = {sms}});
    py::list work;  // (item, first tile, last tile) of every CTA of an inter-stationary kernel
    const int tiles = static_cast<int>(batch) * group * plan.row_tiles;
    for (int block = 0; block < plan.inter_blocks(); ++block) {
        const flashmhf::TokenRange range = flashmhf::token_range(block, plan.items, plan.whole, plan.parts, tiles);
        work.append(py::make_tuple(range.item, range.begin, range.end));
    }
    return py::dict("row_tiles"_a = plan.row_tiles, "subnet_tiles"_a = plan.subnet_tiles, "items"_a = plan.items, "whole"_a = plan.whole,
                    "parts"_a = plan.parts, "token_blocks"_a = plan.token_blocks, "token_parts"_a = plan.token_parts,
                    "inter_time"_a = plan.inter_time, "work"_a = work);
}

// Where each buffer begins, or None.
py::dict workspace(const flashmhf::BackwardWorkspace &w) {
    auto place = [](int64_t begin) { return begin == flashmhf::BackwardWorkspace::none ? py::object(py::none()) : py::int_(begin); };
    return py::dict("query"_a = place(w.query), "dr_sums"_a = place(w.dr_sums), "query_added"_a = place(w.query_added),
                    "dr_added"_a = place(w.dr_added), "weight_parts"_a = place(w.weight_parts), "r"_a = place(w.r),
                    "scale"_a = place(w.scale), "dr"_a = place(w.dr), "dw_parts"_a = place(w.dw_parts), "sums_floats"_a = w.sums_floats,
                    "floats"_a = w.floats);
}

py::dict plan_head_groups(int64_t batch, int64_t length, int heads, int head_dim, int subnets, int64_t subnet_dim, bool tokens,
                          bool weights, bool gate, bool router, bool deterministic, int sms, int group) {
    const flashmhf::BackwardTask task{tokens, weights, gate || router, router, deterministic};
    const flashmhf::BackwardPlan plan =
        flashmhf::plan_backward({batch, length, heads, head_dim, subnets, subnet_dim, group}, task, {.clusters = {sms}});
    py::list sizes, workspaces;
    for (int i = 0; i < plan.groups.count; ++i) {
        sizes.append(py::make_tuple(plan.groups.begin(i), plan.groups.begin(i) + plan.groups.size(i)));
        workspaces.append(workspace(plan.workspaces[i]));
    }
    return py::dict("heads"_a = sizes, "workspaces"_a = workspaces, "ordered"_a = plan.kernels == flashmhf::Kernels::ordered,
                    "fused"_a = plan.kernels != flashmhf::Kernels::pair, "workspace"_a = plan.workspace(),
                    "time_us"_a = plan.time * flashmhf::BackwardCostModel{}.tile_us * head_dim);
}

py::dict forward_costs(int head_dim, bool fp8, int consumers) {
    const flashmhf::ForwardCostModel cost = fp8 ? flashmhf::forward_fp8_costs : flashmhf::ForwardCostModel{};
    return py::dict("tile_us"_a = cost.tile_us * head_dim * (fp8 ? flashmhf::forward_fp8_row_tiles(consumers) : 1),
                    "combine"_a = cost.combine_tiles(head_dim), "next_item"_a = cost.gap_tiles(head_dim),
                    "stream"_a = static_cast<double>(cost.stream_numerator) / cost.stream_denominator);
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
    m.doc() = "The launch planner of the Hopper kernels.";
    m.def("plan_backward", &plan_backward, "batch"_a, "length"_a, "heads"_a, "subnets"_a, "subnet_dim"_a, "sms"_a = 132, "group"_a = 1,
          "The backward launch for batch x length tokens: sizes, and the token tiles (item, begin, end) of every CTA of an "
          "inter-stationary kernel.\n\n"
          "Raises ValueError for shapes beyond the kernels' index range.");
    m.def("plan_head_groups", &plan_head_groups, "batch"_a, "length"_a, "heads"_a, "head_dim"_a, "subnets"_a, "subnet_dim"_a,
          "tokens"_a = true, "weights"_a = true, "gate"_a = false, "router"_a = false, "deterministic"_a = false, "sms"_a = 132,
          "group"_a = 1,
          "The groups of heads (begin, end) that a backward call launches one after the other, whether sums are added in order, and the "
          "fp32\n"
          "workspace of each launch: where its buffers begin, in floats, or None.");
    m.def("backward_policies", &backward_policies, "Shared memory and registers at launch of the backward's main kernels.");
    m.def(
        "plan_forward", &plan_forward, "batch"_a, "length"_a, "heads"_a, "head_dim"_a, "subnets"_a, "subnet_dim"_a,
        "clusters"_a = h200_clusters, "group"_a = 1, "may_bundle"_a = true, "large_clusters"_a = 0,
        "The forward launch for batch x length tokens on a device that runs so many clusters of 1, 2, ... 8 CTAs at once: sizes, and the\n"
        "work (cluster, slice, item, begin, end, part) of every CTA that has an inter range of its own.\n\n"
        "Raises ValueError for a head dimension without a kernel and for shapes beyond the kernel's index range.");
    m.def("forward_candidates", &forward_candidates, "batch"_a, "length"_a, "heads"_a, "head_dim"_a, "subnets"_a, "subnet_dim"_a,
          "fp8"_a = false, "clusters"_a = h200_clusters, "group"_a = 1, "may_bundle"_a = true, "large_clusters"_a = 0,
          "The ways to launch the forward that the planner compares, with their times in microseconds, as text; * is the one it takes.");
    m.def("plan_forward_fp8", &plan_forward_fp8, "batch"_a, "length"_a, "heads"_a, "head_dim"_a, "subnets"_a, "subnet_dim"_a,
          "clusters"_a = h200_clusters, "group"_a = 1, "plan_forward for the forward in FP8.");
    m.def("forward_fp8_policies", &forward_fp8_policies, "Shared memory and registers of the FP8 forward kernel for each head dimension.");
    m.def(
        "plan_project",
        [](int64_t tokens, int64_t features, const Clusters &clusters) {
            const flashmhf::Device device{clusters};
            const flashmhf::ProjectPlan plan = flashmhf::plan_project(tokens, features, device);
            return py::dict("warpgroups"_a = plan.warpgroups, "max_tokens"_a = plan.max_tokens, "cluster"_a = plan.cluster,
                            "blocks"_a = plan.blocks, "block_tokens"_a = plan.block_tokens, "box_tokens"_a = plan.box_tokens,
                            "faster"_a = flashmhf::projects_faster(tokens, features, device));
        },
        "tokens"_a, "features"_a, "clusters"_a = h200_clusters);
    m.def("forward_costs", &forward_costs, "head_dim"_a, "fp8"_a = false, "consumers"_a = 3,
          "What the forward's planner counts with: the time of an inter tile of a CTA (in FP8, of so many row tiles) in microseconds; in "
          "such tiles, adding parts in a\n"
          "second kernel, going on to another item, and the time in which the memory brings a tile for every SM.");
    m.def("forward_policies", &forward_policies, "Shared memory and registers of the forward kernel for each head dimension.");
}
