// flashmhf._plan: the launch planner in Python, for tests and for benchmarks.plan. The package works without it.
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

using namespace flashmhf;

// The numbers of an instance by their names in its policy; `which`: what tells it from others of the head dimension.
using Numbers = std::initializer_list<std::pair<const char *, int>>;
#define FLASHMHF_NUMBER(name) {#name, P::name}
template <typename P> void add(py::list &all, const char *kernel, int head_dim, const Numbers &which, const Numbers &own) {
    py::dict policy("kernel"_a = kernel, "head_dim"_a = head_dim);
    const Numbers shared = {FLASHMHF_NUMBER(shared_memory), FLASHMHF_NUMBER(launch_registers), FLASHMHF_NUMBER(row_tile_bytes)};
    for (const Numbers *numbers : {&which, &shared, &own})
        for (const auto &[name, value] : *numbers) policy[name] = value;
    all.append(policy);
}
template <typename P> void add_forward(py::list &all, const char *kernel, int head_dim, const Numbers &which) {
    add<P>(all, kernel, head_dim, which,
           {FLASHMHF_NUMBER(consumers), FLASHMHF_NUMBER(slots), FLASHMHF_NUMBER(slot_bytes), FLASHMHF_NUMBER(gate_bytes),
            FLASHMHF_NUMBER(router_bytes), FLASHMHF_NUMBER(producer_registers), FLASHMHF_NUMBER(consumer_registers)});
}
template <typename P> void add_inter(py::list &all, int head_dim, int outputs) {
    add<P>(all, "backward_inter", head_dim, {{"outputs", outputs}},
           {FLASHMHF_NUMBER(query), FLASHMHF_NUMBER(keys), FLASHMHF_NUMBER(values), FLASHMHF_NUMBER(s_warpgroups),
            FLASHMHF_NUMBER(w_warpgroups), FLASHMHF_NUMBER(loader_registers), FLASHMHF_NUMBER(s_registers), FLASHMHF_NUMBER(w_registers),
            FLASHMHF_NUMBER(q_stages), FLASHMHF_NUMBER(g_stages), FLASHMHF_NUMBER(reloaded_blocks)});
}
// Of every kernel whose warpgroups trade registers.
py::list policies() {
    py::list all;
    ForwardHeadDims::each([&]<int d_h>() {
        using P = ForwardPolicy<d_h>;
        add_forward<P>(all, "forward", d_h, {FLASHMHF_NUMBER(q_in_registers)});
    });
    ForwardFp8HeadDims::each([&]<int d_h>() {
        auto instance = [&]<bool few_rows>() {
            using P = ForwardFp8Policy<d_h, few_rows>;
            add_forward<P>(all, "forward_fp8", d_h, {{"few_rows", few_rows}, FLASHMHF_NUMBER(chunk_inter)});
        };
        instance.template operator()<false>(), instance.template operator()<true>();
    });
    BackwardHeadDims::each([&]<int d_h>() {
        using P = TokenPolicy<d_h>;
        add<P>(all, "backward_token", d_h, {},
               {FLASHMHF_NUMBER(consumers), FLASHMHF_NUMBER(inter), FLASHMHF_NUMBER(stages), FLASHMHF_NUMBER(loader_registers),
                FLASHMHF_NUMBER(consumer_registers)});
        auto inter = [&]<int outputs>() { add_inter<InterPolicy<d_h, outputs>>(all, d_h, outputs); };
        if constexpr (d_h <= widest_fused) inter.template operator()<all_grads>(), inter.template operator()<weight_grads>();
        else inter.template operator()<key_grads>(), inter.template operator()<value_grad>();
    });
    return all;
}
#undef FLASHMHF_NUMBER

using Clusters = std::array<int, max_slices>;
constexpr Clusters h200_clusters{132, 66, 39, 30, 22, 17, 15, 15};

py::dict forward_plan(int64_t batch, int64_t length, int heads, int head_dim, int subnets, int64_t subnet_dim, bool fp8,
                      const Clusters &clusters, int group, bool may_bundle, int large_clusters, int slices, int row_ctas, int consumers,
                      int abreast) {
    const Shape shape{batch, length, heads, head_dim, subnets, subnet_dim, group};
    const Device device{clusters, large_clusters};
    const auto format = fp8 ? WeightFormat::e4m3 : WeightFormat::same;
    const ForwardChoice choice{slices, row_ctas, consumers, abreast};
    const ForwardPlan plan = plan_forward(shape, device, format, may_bundle && !fp8, forward_costs(format), choice);
    const ForwardSchedule &s = plan.schedule;
    py::list work;
    auto list = [&](auto cursor, int cluster, int block, int slice) {
        for (Work w; cursor.next(w, cluster, block, slice);)
            work.append(py::make_tuple(cluster * s.abreast + block, slice, w.item, w.begin, w.end, w.part));
    };
    for (int cluster = 0; cluster < s.clusters; ++cluster)
        for (int block = 0; block < s.abreast; ++block)
            for (int slice = 0; slice < s.slices; ++slice)
                if (s.gathers()) list(GatherCursor(s, cluster), cluster, block, slice);
                else list(WorkCursor(s, cluster), cluster, block, slice);
    py::list owners, adds;  // of the items after the whole waves: first and last cluster; the one of them that a cluster adds up, or -1
    for (int i = 0; i < s.rest * s.abreast; ++i)
        owners.append(py::make_tuple(s.first_owner(i / s.abreast) * s.abreast + i % s.abreast,
                                     s.last_owner(i / s.abreast) * s.abreast + i % s.abreast));
    for (int cluster = 0; cluster < s.clusters * s.abreast; ++cluster) {
        const int index = s.adds_parts ? s.adds_item(cluster / s.abreast) : -1;
        adds.append(index < 0 ? -1 : index * s.abreast + cluster % s.abreast);
    }
    return py::dict("cluster_size"_a = plan.cluster_size, "row_ctas"_a = plan.row_ctas, "slices"_a = s.slices,
                    "slice_pieces"_a = plan.slices.pieces, "spare_pieces"_a = plan.slices.spare_pieces, "consumers"_a = plan.consumers,
                    "bundle"_a = plan.bundle, "row_tiles"_a = plan.row_tiles, "blocks"_a = plan.blocks,
                    "subnet_tiles"_a = plan.subnet_tiles, "inter_tiles"_a = s.inter_tiles, "clusters"_a = s.clusters * s.abreast,
                    "waves"_a = s.waves, "abreast"_a = s.abreast, "rest"_a = s.rest * s.abreast, "splits"_a = s.splits * s.abreast,
                    "partials"_a = plan.partials, "flags"_a = plan.flags, "workspace"_a = plan.workspace(),
                    "shared_memory"_a = plan.shared_memory, "work"_a = work, "owners"_a = owners, "adds"_a = adds,
                    "division"_a = division_names[static_cast<int>(s.division())], "few_rows"_a = fp8 && divides_few_rows(plan),
                    "candidates"_a = list_candidates(shape, device, format, may_bundle && !fp8, forward_costs(format)));
}

py::dict head_group_plan(int64_t batch, int64_t length, int heads, int subnets, int64_t subnet_dim, const Clusters &clusters, int group) {
    const HeadGroupPlan plan = plan_head_group({batch, length, heads, 128, subnets, subnet_dim, group}, {clusters});
    py::list work;  // (item, first tile, last tile) of every CTA of an inter-stationary kernel
    const int tiles = static_cast<int>(batch) * group * plan.row_tiles;
    for (int block = 0; block < plan.inter_blocks(); ++block) {
        const TokenRange range = token_range(block, plan.items, plan.whole, plan.parts, tiles);
        work.append(py::make_tuple(range.item, range.begin, range.end));
    }
    return py::dict("row_tiles"_a = plan.row_tiles, "subnet_tiles"_a = plan.subnet_tiles, "items"_a = plan.items, "whole"_a = plan.whole,
                    "parts"_a = plan.parts, "token_parts"_a = plan.token_parts, "may_pair"_a = plan.may_pair, "work"_a = work);
}

// Where each buffer begins, or None.
py::dict workspace(const BackwardWorkspace &w) {
    py::dict all("sums_floats"_a = w.sums_floats, "floats"_a = w.floats);
#define FLASHMHF_PLACE(name) std::pair<const char *, int64_t>(#name, w.name)
    const std::pair<const char *, int64_t> places[] = {FLASHMHF_PLACE(query),    FLASHMHF_PLACE(dr_sums),      FLASHMHF_PLACE(query_added),
                                                       FLASHMHF_PLACE(dr_added), FLASHMHF_PLACE(weight_parts), FLASHMHF_PLACE(r),
                                                       FLASHMHF_PLACE(scale),    FLASHMHF_PLACE(dr),           FLASHMHF_PLACE(dw_parts)};
#undef FLASHMHF_PLACE
    for (const auto &[name, begin] : places) all[name] = begin == BackwardWorkspace::none ? py::object(py::none()) : py::int_(begin);
    return all;
}

py::dict head_groups(int64_t batch, int64_t length, int heads, int head_dim, int subnets, int64_t subnet_dim, bool tokens, bool weights,
                     bool gate, bool router, bool deterministic, const Clusters &clusters, int group) {
    const BackwardTask task{tokens, weights, gate || router, router, deterministic};
    const BackwardPlan plan = plan_backward({batch, length, heads, head_dim, subnets, subnet_dim, group}, task, {clusters});
    py::list sizes, workspaces;
    for (int i = 0; i < plan.groups.count; ++i) {
        sizes.append(py::make_tuple(plan.groups.begin(i), plan.groups.begin(i) + plan.groups.size(i)));
        workspaces.append(workspace(plan.workspaces[i]));
    }
    return py::dict("heads"_a = sizes, "workspaces"_a = workspaces, "kernels"_a = kernels_names[static_cast<int>(plan.kernels)],
                    "workspace"_a = plan.workspace(), "time_us"_a = plan.time * BackwardCostModel{}.tile_us * head_dim);
}

py::dict plan_of_projection(int64_t tokens, int64_t features, const Clusters &clusters) {
    const ProjectPlan plan = plan_project(tokens, features, {clusters});
    const ProjectTile &tile = project_tiles[plan.tile];
    return py::dict("warpgroups"_a = tile.warpgroups, "max_tokens"_a = tile.max_tokens, "cluster"_a = tile.cluster,
                    "blocks"_a = plan.blocks, "block_tokens"_a = plan.block_tokens, "box_tokens"_a = plan.box_tokens);
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
    m.doc() = "The launch planner of the Hopper kernels.";
    m.def("plan_head_group", &head_group_plan, "batch"_a, "length"_a, "heads"_a, "subnets"_a, "subnet_dim"_a, "clusters"_a = h200_clusters,
          "group"_a = 1,
          "The backward launch of a group of heads for batch x length tokens: sizes, and the token tiles (item, begin, end) of every CTA\n"
          "of an inter-stationary kernel. Raises ValueError for shapes beyond the kernels' index range.");
    m.def("plan_backward", &head_groups, "batch"_a, "length"_a, "heads"_a, "head_dim"_a, "subnets"_a, "subnet_dim"_a, "tokens"_a = true,
          "weights"_a = true, "gate"_a = false, "router"_a = false, "deterministic"_a = false, "clusters"_a = h200_clusters, "group"_a = 1,
          "The groups of heads (begin, end) that a backward call launches one after the other, whether sums are added in order, and the\n"
          "fp32 workspace of each launch: where its buffers begin, in floats, or None.");
    m.def(
        "plan_forward", &forward_plan, "batch"_a, "length"_a, "heads"_a, "head_dim"_a, "subnets"_a, "subnet_dim"_a, "fp8"_a = false,
        "clusters"_a = h200_clusters, "group"_a = 1, "may_bundle"_a = true, "large_clusters"_a = 0, "slices"_a = 0, "row_ctas"_a = 0,
        "consumers"_a = 0, "abreast"_a = 0,
        "The forward launch for batch x length tokens on a device that runs so many clusters of 1, 2, ... 8 CTAs at once: sizes, the\n"
        "work (cluster, slice, item, begin, end, part) of every CTA that has an inter range of its own, and the ways to launch that the\n"
        "planner compares, with their times in microseconds, as text; * is the one it takes. slices, row_ctas,\n"
        "consumers and abreast force a plan, as the harness' arguments of these names do.\n\n"
        "Raises ValueError for a head dimension without a kernel, for shapes beyond the kernel's index range and for a plan that is none.");
    m.def("plan_project", &plan_of_projection, "tokens"_a, "features"_a, "clusters"_a = h200_clusters);
    m.def("policies", &policies, "Shared memory and registers at launch of the main kernels.");
}
