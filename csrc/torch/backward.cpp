// check -> allocate -> plan -> launch
#include "backward/launch.h"
#include "checks.h"
#include "operators.h"
#include "scope.h"
#include "tensors.h"

#include <array>

namespace flashmhf {
namespace {

// The token axes of q, R and grad_out together. A tensor with other axes than q's is copied to a contiguous one, which has every axis.
TokenAxes all_token_axes(const Tensor &q, std::optional<Tensor> &r, Tensor &grad_out, int64_t &g_batch, int64_t &g_token) {
    if (!grad_out.is_contiguous()) {
        std::optional<TokenAxes> axes = collapse(q, grad_out);
        if (axes && readable(grad_out, *axes, axes->other_batch, axes->other_token)) {
            g_batch = axes->other_batch;
            g_token = axes->other_token;
            if (r) {
                *r = torch::stable::contiguous(*r);
                const int64_t step = r->size(r->dim() - 2) * r->size(r->dim() - 1);
                axes->other_batch = axes->dense_batch * step;
                axes->other_token = axes->dense_token * step;
            }
            return *axes;
        }
    }
    if (!grad_out.is_contiguous()) grad_out = torch::stable::contiguous(grad_out);
    if (!aligned(grad_out.data_ptr())) {
        Tensor copy = new_dense(grad_out, sizes_of(grad_out));
        torch::stable::copy_(copy, grad_out);
        grad_out = copy;
    }
    const TokenAxes axes = token_axes(q, r);
    const int64_t row = q.size(q.dim() - 2) * q.size(q.dim() - 1);
    g_batch = axes.dense_batch * row;
    g_token = axes.dense_token * row;
    return axes;
}

// What a call computes from; exactly one of r and w at most.
struct Inputs {
    const Tensor &grad_out, &q, &k, &u, &v;
    std::optional<Tensor> r = {}, w = {};
    double eps = 0;
};

// Which gradients a call writes, and where.
struct Outputs {
    Tensor dq, dr;
    std::array<Tensor, 3> weights;
    Tensor dw;
    bool needs_tokens, needs_weights;
};

void zero_outputs(const Outputs &out) {
    auto zero = [](Tensor x) { torch::stable::zero_(x); };
    if (!out.needs_weights) return;
    for (const Tensor &x : out.weights) zero(x);
    zero(out.dw);
}

void run(const Inputs &in, const ProblemSizes &sizes, const Outputs &out, bool deterministic) {
    if (sizes.tokens == 0 || (!out.needs_tokens && !out.needs_weights)) return zero_outputs(out);
    Tensor q = in.q;
    Tensor grad_out = in.grad_out;
    std::optional<Tensor> r = in.r;
    int64_t g_batch, g_token;
    TokenAxes axes = all_token_axes(q, r, grad_out, g_batch, g_token);
    if (sizes.group > 1 && axes.batch > 1) {  // the heads of a group take the place of the sequences
        q = torch::stable::contiguous(q);
        grad_out = torch::stable::contiguous(grad_out);
        if (r) *r = torch::stable::contiguous(*r);
        axes = all_token_axes(q, r, grad_out, g_batch, g_token);
    }
    check_readable(q, axes);

    auto data = [](const Tensor &x, bool needed) { return needed ? x.data_ptr() : nullptr; };
    BackwardProblem problem{operands_of(q, in.k, in.u, in.v, r, in.w, in.eps, axes, sizes)};
    problem.grad_out = {grad_out.data_ptr(), g_batch, g_token, grad_out.stride(q.dim() - 2)};
    problem.deterministic = deterministic;
    problem.dq = data(out.dq, out.needs_tokens);
    problem.dr = data(out.dr, out.needs_tokens && r);
    problem.dk = data(out.weights[0], out.needs_weights);
    problem.du = data(out.weights[1], out.needs_weights);
    problem.dv = data(out.weights[2], out.needs_weights);
    problem.dw = data(out.dw, out.needs_weights && in.w);

    const BackwardPlan plan = plan_backward(problem.shape, backward_task(problem), describe_device());
    // Returned to PyTorch's allocator at the end, which keeps the order of the stream.
    const Tensor workspace = new_dense(q, std::array{plan.workspace()}, aoti_torch_dtype_float32());
    const BackwardLaunch launch = prepare_backward(problem, plan, static_cast<float *>(workspace.data_ptr()));
    check_cuda(launch_backward(problem.shape.head_dim, launch, current_stream(q.get_device_index())));
}

// Uninitialised tensors for what is needed; for the others ones of shape [0] in q's type.
Outputs allocate(const Inputs &in, bool needs_tokens, bool needs_weights) {
    auto like = [&](const Tensor &x, bool needed) { return needed ? new_dense(x, sizes_of(x)) : new_dense(in.q, std::array{int64_t{0}}); };
    return {.dq = like(in.q, needs_tokens),
            .dr = like(in.r ? *in.r : in.q, needs_tokens && in.r),
            .weights = {like(in.k, needs_weights), like(in.u, needs_weights), like(in.v, needs_weights)},
            .dw = like(in.w ? *in.w : in.q, needs_weights && in.w),
            .needs_tokens = needs_tokens,
            .needs_weights = needs_weights};
}

void check_grad_out(const Tensor &grad_out, const Tensor &q) {
    check_type_and_device(grad_out, "grad_out", grad_out.scalar_type() == q.scalar_type(), "have the dtype of q", q);
    STD_TORCH_CHECK(has_shape(grad_out, q.sizes()), "grad_out must have the shape of q; grad_out is ", shape_of(grad_out), " but q is ",
                    shape_of(q));
}

ProblemSizes check_all(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v,
                       const std::optional<Tensor> &r) {
    const ProblemSizes sizes = check_operands<BackwardHeadDims>(q, k, u, v);
    check_grad_out(grad_out, q);
    if (r) check_r(*r, q, sizes);
    return sizes;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u,
                                                            const Tensor &v, const std::optional<Tensor> &r, bool deterministic,
                                                            bool needs_tokens, bool needs_weights) {
    const ProblemSizes sizes = check_all(grad_out, q, k, u, v, r);
    const DeviceScope scope(q.get_device_index(), "backward", sizes.range());
    const Inputs in{.grad_out = grad_out, .q = q, .k = k, .u = u, .v = v, .r = r};
    const Outputs out = allocate(in, needs_tokens, needs_weights);
    run(in, sizes, out, deterministic);
    return {out.dq, out.weights[0], out.weights[1], out.weights[2], out.dr};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u,
                                                                  const Tensor &v, const Tensor &w, double eps, bool deterministic,
                                                                  bool needs_tokens, bool needs_weights) {
    const ProblemSizes sizes = check_all(grad_out, q, k, u, v, std::nullopt);
    check_w(w, q, sizes);
    const DeviceScope scope(q.get_device_index(), "gated_backward", sizes.range());
    const Inputs in{.grad_out = grad_out, .q = q, .k = k, .u = u, .v = v, .w = w, .eps = eps};
    const Outputs out = allocate(in, needs_tokens, needs_weights);
    run(in, sizes, out, deterministic);
    return {out.dq, out.weights[0], out.weights[1], out.weights[2], out.dw};
}

}  // namespace flashmhf
