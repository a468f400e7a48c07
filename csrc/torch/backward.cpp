// check -> allocate -> plan -> launch
#include "backward/launch.h"
#include "operators.h"

namespace flashmhf {
namespace {

// What a call computes from; r, w or neither.
struct Inputs {
    const Tensor &grad_out, &q, &k, &u, &v;
    std::optional<Tensor> r, w;
    double eps;
};

ProblemSizes check(const Inputs &in) {
    const ProblemSizes sizes = check_operands<BackwardHeadDims>(in.q, in.k, in.u, in.v);
    check_type_and_device(in.grad_out, "grad_out", in.grad_out.scalar_type() == in.q.scalar_type(), "have the dtype of q", in.q);
    STD_TORCH_CHECK(has_shape(in.grad_out, in.q.sizes()), "grad_out must have the shape of q; grad_out is ", shape_of(in.grad_out),
                    " but q is ", shape_of(in.q));
    if (in.r) check_r(*in.r, in.q, sizes);
    if (in.w) check_w(*in.w, in.q, sizes);
    return sizes;
}

// The token axes of q, which is readable, R and grad_out. A tensor with other axes than q's, or which TMA cannot read, is copied to a contiguous one.
TokenAxes all_token_axes(const Tensor &q, std::optional<Tensor> &r, Tensor &grad_out) {
    token_axes(q, r);
    if (std::optional<TokenAxes> axes = collapse(q, r ? &*r : nullptr, &grad_out))
        if (readable(grad_out, *axes, axes->of[TokenAxes::grad_out])) return *axes;
    Tensor copy = new_dense(grad_out, sizes_of(grad_out));
    torch::stable::copy_(copy, grad_out);
    grad_out = copy;
    return *collapse(q, r ? &*r : nullptr, &grad_out);
}

Gradients run(const Inputs &in, const char *range, bool deterministic, bool needs_tokens, bool needs_weights) {
    const ProblemSizes sizes = check(in);
    const DeviceScope scope(in.q.get_device_index());
    const NvtxRange marked(range, sizes);
    if (sizes.tokens > 0) check_readable(in.q);
    auto like = [&](const Tensor &x, bool needed) { return needed ? new_dense(x, sizes_of(x)) : new_dense(in.q, std::array{int64_t{0}}); };
    const Tensor &gate = in.r ? *in.r : in.w ? *in.w : in.q;
    const bool needs_gate = in.r ? needs_tokens : in.w && needs_weights;
    const Gradients out{like(in.q, needs_tokens), like(in.k, needs_weights), like(in.u, needs_weights), like(in.v, needs_weights),
                        like(gate, needs_gate)};
    const auto &[dq, dk, du, dv, d_gate] = out;
    if (sizes.tokens == 0) {  // those of q and R have no elements
        for (Tensor x : {dk, du, dv, d_gate}) torch::stable::zero_(x);
        return out;
    }
    if (!needs_tokens && !needs_weights) return out;

    Tensor q = in.q, grad_out = in.grad_out;
    std::optional<Tensor> r = in.r;
    TokenAxes axes = all_token_axes(q, r, grad_out);
    if (sizes.group > 1 && axes.batch > 1) {  // the heads of a group take the place of the sequences
        q = torch::stable::contiguous(q);
        grad_out = torch::stable::contiguous(grad_out);
        if (r) *r = torch::stable::contiguous(*r);
        axes = all_token_axes(q, r, grad_out);
    }

    auto data = [](const Tensor &x, bool needed) { return needed ? x.data_ptr() : nullptr; };
    BackwardProblem problem{operands_of(q, in.k, in.u, in.v, r, in.w, in.eps, axes, sizes)};
    problem.grad_out = token_tensor(grad_out, axes.of[TokenAxes::grad_out]);
    problem.deterministic = deterministic;
    problem.dq = data(dq, needs_tokens);
    problem.dk = data(dk, needs_weights);
    problem.du = data(du, needs_weights);
    problem.dv = data(dv, needs_weights);
    (in.r ? problem.dr : problem.dw) = data(d_gate, needs_gate);

    const BackwardPlan plan = plan_backward(problem.shape, backward_task(problem), scope.device);
    // Returned to PyTorch's allocator at the end, which keeps the order of the stream.
    const Tensor workspace = new_dense(q, std::array{plan.workspace()}, aoti_torch_dtype_float32());
    const BackwardLaunch launch = prepare_backward(problem, plan, static_cast<float *>(workspace.data_ptr()));
    check_cuda(launch_backward(problem.shape.head_dim, launch, scope.stream));
    return out;
}

}  // namespace

Gradients backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v,
                   const std::optional<Tensor> &r, bool deterministic, bool needs_tokens, bool needs_weights) {
    return run({grad_out, q, k, u, v, r, std::nullopt, 0.}, "backward", deterministic, needs_tokens, needs_weights);
}

Gradients gated_backward(const Tensor &grad_out, const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const Tensor &w,
                         double eps, bool deterministic, bool needs_tokens, bool needs_weights) {
    return run({grad_out, q, k, u, v, std::nullopt, w, eps}, "gated_backward", deterministic, needs_tokens, needs_weights);
}

}  // namespace flashmhf
