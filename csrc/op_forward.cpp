// check -> allocate -> plan -> launch
#include "checks.h"
#include "host/device.h"
#include "host/launch_forward.h"
#include "host/tensor_map.h"
#include "kernels/policy.h"
#include "operators.h"

namespace flashmhf {
namespace {

struct GateSource {
    Gate kind = Gate::ones;
    std::optional<Tensor> tensor;  // R or W
    float eps = 0.f;
};

Tensor run(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, GateSource gate, const ProblemSizes &sizes, const char *range) {
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const NvtxRange nvtx(range);
    check_capability(q.get_device_index());
    Tensor out = torch::stable::new_empty(q, q.sizes());
    if (sizes.tokens == 0) return out;

    const bool r_given = gate.kind == Gate::r_float || gate.kind == Gate::r_half;
    std::optional<TokenAxes> axes = collapse(q, r_given ? *gate.tensor : q);
    if (!axes && r_given) {
        gate.tensor = torch::stable::contiguous(*gate.tensor);
        axes = collapse(q, *gate.tensor);
    }
    STD_TORCH_CHECK(axes, "the leading dimensions of q do not collapse to one or two token strides");
    const int64_t q_head = q.stride(q.dim() - 2);
    STD_TORCH_CHECK(q.stride(q.dim() - 1) == 1, "the last dimension of q must be contiguous");
    auto strided = [](int64_t size, int64_t stride) { return size == 1 || (stride > 0 && stride * element_bytes % tma_alignment == 0); };
    STD_TORCH_CHECK(aligned(q.data_ptr()) && strided(sizes.heads, q_head) && strided(axes->length, axes->q_token) && strided(axes->batch, axes->q_batch),
                    "q's strides and storage offset must be positive multiples of 16 bytes");

    const int d_h = static_cast<int>(sizes.head_dim), swizzle = d_h % 64 == 0 ? 128 : 64, panel = swizzle / element_bytes;
    ForwardLaunch launch{};
    launch.bf16 = q.scalar_type() == ScalarType::BFloat16;
    Device device;
    check_cuda(describe_device(d_h, &device));
    launch.plan = plan_forward({axes->batch, axes->length, static_cast<int>(sizes.heads), d_h, static_cast<int>(sizes.subnets), sizes.subnet_dim}, device);
    const ForwardPlan &plan = launch.plan;
    std::optional<Tensor> partials;
    if (plan.partials) partials = torch::stable::new_empty(q, {plan.partials}, ScalarType::Float);

    const int64_t row = sizes.heads * d_h;  // of the output
    launch.q = tensor_map("q", q.data_ptr(), launch.bf16,
                          {{d_h, 1, panel}, {sizes.heads, q_head, 1}, {axes->length, axes->q_token, tile_rows}, {axes->batch, axes->q_batch, 1}}, swizzle);
    launch.out = tensor_map("the output", out.data_ptr(), launch.bf16,
                            {{d_h, 1, panel}, {sizes.heads, d_h, 1}, {axes->length, axes->dense_token * row, tile_rows}, {axes->batch, axes->dense_batch * row, 1}},
                            swizzle);
    auto weights = [&](const char *name, const Tensor &x) {
        return tensor_map(name, x.data_ptr(), launch.bf16,
                          {{d_h, 1, panel}, {sizes.subnet_dim, d_h, tile_inter / plan.cluster_size}, {sizes.heads * sizes.subnets, sizes.subnet_dim * d_h, 1}},
                          swizzle);
    };
    launch.k = weights("k", k);
    launch.u = weights("u", u);
    launch.v = weights("v", v);
    launch.out_data = out.data_ptr();
    launch.stream = current_stream(q.get_device_index());

    ForwardParams &p = launch.params;
    p.schedule = plan.schedule;
    p.cluster_size = plan.cluster_size;
    p.batch = static_cast<int>(axes->batch);
    p.length = axes->length;
    p.row_tiles = plan.row_tiles;
    p.blocks = plan.blocks;
    p.heads = static_cast<int>(sizes.heads);
    p.subnets = static_cast<int>(sizes.subnets);
    p.subnet_tiles = plan.subnet_tiles;
    p.out_batch = axes->dense_batch * row;
    p.out_token = axes->dense_token * row;
    p.gate = gate.kind;
    p.gate_data = gate.tensor ? gate.tensor->data_ptr() : nullptr;
    p.eps = gate.eps;
    if (r_given) {
        p.r_batch = axes->other_batch;
        p.r_token = axes->other_token;
        p.r_head = gate.tensor->stride(gate.tensor->dim() - 2);
    }
    p.partials = partials ? static_cast<float *>(partials->data_ptr()) : nullptr;
    check_cuda(launch_forward(d_h, launch));
    return out;
}

}  // namespace

Tensor forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r, bool) {
    const ProblemSizes sizes = check_operands(q, k, u, v);
    GateSource gate;
    if (r) {
        check_r(*r, q, sizes);
        gate.kind = r->scalar_type() == ScalarType::Float ? Gate::r_float : Gate::r_half;
        gate.tensor = *r;
    }
    return run(q, k, u, v, gate, sizes, "flashmhf forward");
}

Tensor gated_forward(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w, double eps, bool) {
    const ProblemSizes sizes = check_operands(q, k, u, v);
    check_w(w, q, sizes);
    GateSource gate{w.scalar_type() == ScalarType::Float ? Gate::w_float : Gate::w_half, w, static_cast<float>(eps)};
    return run(q, k, u, v, gate, sizes, "flashmhf gated_forward");
}

}  // namespace flashmhf
