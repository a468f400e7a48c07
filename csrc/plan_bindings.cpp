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

namespace {

// What both formats' policies have.
template <typename P> py::dict policy(int head_dim) {
    py::dict d;
    d["head_dim"] = head_dim;
    d["consumers"] = P::consumers;
    d["launch_registers"] = P::launch_registers;
    d["slots"] = P::slots;
    d["slot_bytes"] = P::slot_bytes;
    d["shared_memory"] = P::shared_memory;
    d["tile_registers"] = P::tile_registers;
    d["consumer_registers"] = P::consumer_registers;
    d["producer_registers"] = P::producer_registers;
    d["gate_chunk"] = P::gate_chunk;
    return d;
}
py::list forward_policies() {
    py::list all;
    flashmhf::ForwardHeadDims::each([&]<int d_h>() { all.append(policy<flashmhf::ForwardPolicy<d_h>>(d_h)); });
    return all;
}
py::list forward_fp8_policies() {
    py::list all;
    auto add = [&]<bool few_rows>() {
        flashmhf::ForwardFp8HeadDims::each([&]<int d_h>() {
            py::dict d = policy<flashmhf::ForwardFp8Policy<d_h, few_rows>>(d_h);
            d["few_rows"] = few_rows;
            all.append(d);
        });
    };
    add.operator()<false>(), add.operator()<true>();
    return all;
}

using Clusters = std::array<int, flashmhf::max_slices>;
constexpr Clusters h200_clusters{132, 66, 39, 30, 22, 17, 15, 15};

py::dict describe(const flashmhf::ForwardPlan &plan) {
    const flashmhf::ForwardSchedule &s = plan.schedule;
    py::dict d;
    d["cluster_size"] = plan.cluster_size;
    d["row_ctas"] = plan.row_ctas;
    d["slices"] = s.slices;
    d["slice_pieces"] = plan.slice_pieces;
    d["spare_pieces"] = plan.spare_pieces;
    d["late_successor"] = plan.late_successor;
    d["consumers"] = plan.consumers;
    d["bundle"] = plan.bundle;
    d["row_tiles"] = plan.row_tiles;
    d["blocks"] = plan.blocks;
    d["subnet_tiles"] = plan.subnet_tiles;
    d["inter_tiles"] = s.inter_tiles;
    d["clusters"] = s.clusters * s.lanes;
    d["waves"] = s.waves;
    d["lanes"] = s.lanes;
    d["rest"] = s.rest * s.lanes;
    d["splits"] = s.splits * s.lanes;
    d["partials"] = plan.partials;
    d["flags"] = plan.flags;
    d["workspace"] = plan.workspace();
    d["shared_memory"] = plan.shared_memory;
    py::list work;
    for (const auto &w : flashmhf::enumerate_work(s))
        work.append(py::make_tuple(w.cluster * s.lanes + w.lane, w.slice, w.work.item, w.work.begin, w.work.end, w.work.part));
    d["work"] = work;
    py::list owners;  // of the items after the whole waves: first and last cluster
    for (int i = 0; i < s.rest; ++i)
        for (int lane = 0; lane < s.lanes; ++lane)
            owners.append(py::make_tuple(s.first_owner(i) * s.lanes + lane, s.last_owner(i) * s.lanes + lane));
    d["owners"] = owners;
    py::list adds;  // the one of these items that a cluster adds up, or -1
    for (int cluster = 0; cluster < s.clusters * s.lanes; ++cluster) {
        const int index = s.adds_parts ? s.ends_item(cluster / s.lanes) : -1;
        adds.append(index < 0 ? -1 : index * s.lanes + cluster % s.lanes);
    }
    d["adds"] = adds;
    return d;
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
    const flashmhf::HeadGroupPlan plan = flashmhf::plan_head_group({batch, length, heads, 128, subnets, subnet_dim, group}, {sms});
    py::dict d;
    d["row_tiles"] = plan.row_tiles;
    d["subnet_tiles"] = plan.subnet_tiles;
    d["items"] = plan.items;
    d["whole"] = plan.whole;
    d["parts"] = plan.parts;
    d["token_blocks"] = plan.token_blocks;
    d["token_parts"] = plan.token_parts;
    d["inter_time"] = plan.inter_time;
    py::list work;  // (item, first tile, last tile) of every CTA of an inter-stationary kernel
    const int tiles = static_cast<int>(batch) * group * plan.row_tiles;
    for (int block = 0; block < plan.inter_blocks(); ++block) {
        const flashmhf::TokenRange range = flashmhf::token_range(block, plan.items, plan.whole, plan.parts, tiles);
        work.append(py::make_tuple(range.item, range.begin, range.end));
    }
    d["work"] = work;
    return d;
}

// Where each buffer begins, or None.
py::dict workspace(const flashmhf::BackwardWorkspace &w) {
    py::dict d;
    const std::pair<const char *, int64_t> places[] = {{"query", w.query},
                                                       {"dr_sums", w.dr_sums},
                                                       {"query_added", w.query_added},
                                                       {"dr_added", w.dr_added},
                                                       {"weight_parts", w.weight_parts},
                                                       {"r", w.r},
                                                       {"scale", w.scale},
                                                       {"dr", w.dr},
                                                       {"dw_parts", w.dw_parts}};
    for (const auto &[name, place] : places)
        d[name] = place == flashmhf::BackwardWorkspace::none ? py::object(py::none()) : py::int_(place);
    d["sums_floats"] = w.sums_floats;
    d["floats"] = w.floats;
    return d;
}

py::dict plan_head_groups(int64_t batch, int64_t length, int heads, int head_dim, int subnets, int64_t subnet_dim, bool tokens,
                          bool weights, bool gate, bool router, bool deterministic, int sms, int group) {
    const flashmhf::BackwardTask task{tokens, weights, gate || router, router, deterministic};
    const flashmhf::BackwardPlan plan = flashmhf::plan_backward({batch, length, heads, head_dim, subnets, subnet_dim, group}, task, {sms});
    py::list sizes, workspaces;
    for (int i = 0; i < plan.groups.count; ++i) {
        sizes.append(py::make_tuple(plan.groups.begin(i), plan.groups.begin(i) + plan.groups.size(i)));
        workspaces.append(workspace(plan.workspaces[i]));
    }
    py::dict d;
    d["heads"] = sizes;
    d["workspaces"] = workspaces;
    d["ordered"] = plan.kernels == flashmhf::Kernels::ordered;
    d["fused"] = plan.kernels != flashmhf::Kernels::pair;
    d["workspace"] = plan.workspace();
    d["time_us"] = plan.time * flashmhf::BackwardCostModel{}.tile_us * head_dim;
    return d;
}

py::dict forward_costs(int head_dim, bool fp8, int consumers) {
    const flashmhf::ForwardCostModel cost = fp8 ? flashmhf::forward_fp8_costs : flashmhf::ForwardCostModel{};
    py::dict d;
    d["tile_us"] = cost.tile_us * head_dim * (fp8 ? flashmhf::forward_fp8_row_tiles(consumers) : 1);
    d["combine"] = cost.combine_tiles(head_dim);
    d["next_item"] = cost.gap_tiles(head_dim);
    d["stream"] = static_cast<double>(cost.stream_numerator) / cost.stream_denominator;
    return d;
}

template <int d_h, int outputs> py::dict inter_policy(const char *outputs_name) {
    using P = flashmhf::InterPolicy<d_h, outputs>;
    py::dict d;
    d["head_dim"] = d_h;
    d["outputs"] = outputs_name;
    d["shared_memory"] = P::shared_memory;
    d["threads"] = P::threads;
    d["launch_registers"] = P::launch_registers;
    d["registers"] = P::loader_registers + P::s_warpgroups * P::s_registers + P::w_warpgroups * P::w_registers;
    return d;
}

template <int d_h> py::dict token_policy() {
    using P = flashmhf::TokenPolicy<d_h>;
    py::dict d;
    d["head_dim"] = d_h;
    d["outputs"] = "tokens";
    d["shared_memory"] = P::shared_memory;
    d["threads"] = P::threads;
    d["launch_registers"] = P::launch_registers;
    d["registers"] = P::loader_registers + P::consumers * P::consumer_registers;
    return d;
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
    m.doc() = "The launch planner of the Hopper kernels.";
    m.def("plan_backward", &plan_backward, py::arg("batch"), py::arg("length"), py::arg("heads"), py::arg("subnets"), py::arg("subnet_dim"),
          py::arg("sms") = 132, py::arg("group") = 1,
          "The backward launch for batch x length tokens: sizes, and the token tiles (item, begin, end) of every CTA of an "
          "inter-stationary kernel.\n\n"
          "Raises ValueError for shapes beyond the kernels' index range.");
    m.def("plan_head_groups", &plan_head_groups, py::arg("batch"), py::arg("length"), py::arg("heads"), py::arg("head_dim"),
          py::arg("subnets"), py::arg("subnet_dim"), py::arg("tokens") = true, py::arg("weights") = true, py::arg("gate") = false,
          py::arg("router") = false, py::arg("deterministic") = false, py::arg("sms") = 132, py::arg("group") = 1,
          "The groups of heads (begin, end) that a backward call launches one after the other, whether sums are added in order, and the "
          "fp32\n"
          "workspace of each launch: where its buffers begin, in floats, or None.");
    m.def(
        "backward_policies",
        [] {
            using namespace flashmhf;
            return py::make_tuple(inter_policy<64, all_grads>("all"), inter_policy<96, all_grads>("all"),
                                  inter_policy<128, all_grads>("all"), inter_policy<64, weight_grads>("weights"),
                                  inter_policy<96, weight_grads>("weights"), inter_policy<128, weight_grads>("weights"),
                                  inter_policy<256, key_grads>("keys"), inter_policy<256, value_grad>("values"), token_policy<64>(),
                                  token_policy<96>(), token_policy<128>(), token_policy<256>());
        },
        "Shared memory, threads and registers (a thread at launch; summed over the warpgroups later) of the backward's main kernels.");
    m.def(
        "plan_forward", &plan_forward, py::arg("batch"), py::arg("length"), py::arg("heads"), py::arg("head_dim"), py::arg("subnets"),
        py::arg("subnet_dim"), py::arg("clusters") = h200_clusters, py::arg("group") = 1, py::arg("may_bundle") = true,
        py::arg("large_clusters") = 0,
        "The forward launch for batch x length tokens on a device that runs so many clusters of 1, 2, ... 8 CTAs at once: sizes, and the\n"
        "work (cluster, slice, item, begin, end, part) of every CTA that has an inter range of its own.\n\n"
        "Raises ValueError for a head dimension without a kernel and for shapes beyond the kernel's index range.");
    m.def("forward_candidates", &forward_candidates, py::arg("batch"), py::arg("length"), py::arg("heads"), py::arg("head_dim"),
          py::arg("subnets"), py::arg("subnet_dim"), py::arg("fp8") = false, py::arg("clusters") = h200_clusters, py::arg("group") = 1,
          py::arg("may_bundle") = true, py::arg("large_clusters") = 0,
          "The ways to launch the forward that the planner compares, with their times in microseconds, as text; * is the one it takes.");
    m.def("plan_forward_fp8", &plan_forward_fp8, py::arg("batch"), py::arg("length"), py::arg("heads"), py::arg("head_dim"),
          py::arg("subnets"), py::arg("subnet_dim"), py::arg("clusters") = h200_clusters, py::arg("group") = 1,
          "plan_forward for the forward in FP8.");
    m.def("forward_fp8_policies", &forward_fp8_policies, "Shared memory and registers of the FP8 forward kernel for each head dimension.");
    m.def(
        "plan_project",
        [](int64_t tokens, int64_t features, const Clusters &clusters) {
            const flashmhf::Device device{clusters};
            const flashmhf::ProjectPlan plan = flashmhf::plan_project(tokens, features, device);
            py::dict d;
            d["warpgroups"] = plan.warpgroups;
            d["max_tokens"] = plan.max_tokens;
            d["cluster"] = plan.cluster;
            d["blocks"] = plan.blocks;
            d["block_tokens"] = plan.block_tokens;
            d["box_tokens"] = plan.box_tokens;
            d["faster"] = flashmhf::projects_faster(tokens, features, device);
            return d;
        },
        py::arg("tokens"), py::arg("features"), py::arg("clusters") = h200_clusters);
    m.def("forward_costs", &forward_costs, py::arg("head_dim"), py::arg("fp8") = false, py::arg("consumers") = 3,
          "What the forward's planner counts with: the time of an inter tile of a CTA (in FP8, of so many row tiles) in microseconds; in "
          "such tiles, adding parts in a\n"
          "second kernel, going on to another item, and the time in which the memory brings a tile for every SM.");
    m.def("forward_policies", &forward_policies, "Shared memory and registers of the forward kernel for each head dimension.");
}
