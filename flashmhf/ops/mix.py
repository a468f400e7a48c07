"""The operators ``torch.ops.flashmhf.*``: schemas, checks, back-end dispatch, fake kernels, autograd, autocast and vmap.

Every dispatch key is registered from here; back ends are plain functions over tensors. The fixed order of a call is
check -> select the back end -> run it on the current stream, without synchronising and without copying q.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import backends, checks, torch_private
from ..backends import REFERENCE
from ..backends.contract import Backend, Settings
from ..backends.tokens import collapse
from .library import LIBRARY, cast, define

_BACKWARD_TAIL = '*, str backend="auto", bool[2] needs=[True, True], str activation="silu"'
_SCHEMAS = {
    "forward": 'forward(Tensor q, Tensor k, Tensor u, Tensor v, Tensor? r=None, *, bool? deterministic=None, str backend="auto", '
    'str activation="silu") -> Tensor',
    "backward": "backward(Tensor grad_out, Tensor q, Tensor k, Tensor u, Tensor v, Tensor? r=None, bool deterministic=False, "
    f"{_BACKWARD_TAIL}) -> (Tensor dq, Tensor dk, Tensor du, Tensor dv, Tensor dr)",
    "gated_forward": "gated_forward(Tensor q, Tensor k, Tensor u, Tensor v, Tensor w, float eps, *, bool? deterministic=None, "
    'str backend="auto", str activation="silu") -> Tensor',
    "gated_backward": "gated_backward(Tensor grad_out, Tensor q, Tensor k, Tensor u, Tensor v, Tensor w, float eps, "
    f"bool deterministic=False, {_BACKWARD_TAIL}) -> (Tensor dq, Tensor dk, Tensor du, Tensor dv, Tensor dw)",
    "backward_accumulate_": "backward_accumulate_(Tensor grad_out, Tensor q, Tensor k, Tensor u, Tensor v, Tensor? r, "
    "Tensor(a!) dk, Tensor(b!) du, Tensor(c!) dv, bool deterministic=False, "
    f"{_BACKWARD_TAIL}) -> (Tensor dq, Tensor dr)",
}


def _back_end(q: Tensor, k: Tensor, backend: str, activation: str) -> Backend:
    if backend == REFERENCE:
        return backends.reference  # without the cache of select, which Dynamo would trace
    return backends.select(backend, q.device, q.dtype, k.shape[3], k.shape[2], activation)


def _resolve(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


# What an operator's kernel and its fake kernel both check. The definition reads weights of any strides: under vmap a slice of a batch of
# weights need not be contiguous.


def _check_forward(q, k, u, v, r, backend, activation):
    checks.activation(activation)
    checks.operands(q, k, u, v, contiguous=backend != REFERENCE)
    checks.weights(q, k, r)


def _check_gated(q, k, u, v, w, eps, backend, activation):
    checks.activation(activation)
    checks.operands(q, k, u, v, contiguous=backend != REFERENCE)
    checks.router(q, w, eps, k, contiguous=backend != REFERENCE)


def _check_backward(grad_out, q, k, u, v, r, backend, activation):
    _check_forward(q, k, u, v, r, backend, activation)
    checks.upstream_gradient(grad_out, q)


def _check_gated_backward(grad_out, q, k, u, v, w, eps, backend, activation):
    _check_gated(q, k, u, v, w, eps, backend, activation)
    checks.upstream_gradient(grad_out, q)


def _is_empty(q: Tensor, backend: str) -> bool:
    """Whether the result follows from the shapes. The definition takes empty tensors as they are, and keeps them differentiable."""
    return not q.numel() and backend != REFERENCE


# Kernels at the CPU and CUDA keys


def _forward(q, k, u, v, r=None, *, deterministic=None, backend="auto", activation="silu"):
    _check_forward(q, k, u, v, r, backend, activation)
    module = _back_end(q, k, backend, activation)
    if _is_empty(q, backend):
        return _fake_forward(q, k, u, v, r)
    return module.forward(q, k, u, v, r, Settings(_resolve(deterministic), activation=activation))


def _gated_forward(q, k, u, v, w, eps, *, deterministic=None, backend="auto", activation="silu"):
    _check_gated(q, k, u, v, w, eps, backend, activation)
    module = _back_end(q, k, backend, activation)
    if _is_empty(q, backend):
        return _fake_forward(q, k, u, v)
    return module.gated_forward(q, k, u, v, w, eps, Settings(_resolve(deterministic), activation=activation))


def _backward(grad_out, q, k, u, v, r=None, deterministic=False, *, backend="auto", needs=(True, True), activation="silu"):
    _check_backward(grad_out, q, k, u, v, r, backend, activation)
    module = _back_end(q, k, backend, activation)
    if _is_empty(q, backend):
        return _zeros(_fake_backward(grad_out, q, k, u, v, r, needs=needs))
    return module.backward(grad_out, q, k, u, v, r, Settings(deterministic, tuple(needs), activation))


def _gated_backward(grad_out, q, k, u, v, w, eps, deterministic=False, *, backend="auto", needs=(True, True), activation="silu"):
    _check_gated_backward(grad_out, q, k, u, v, w, eps, backend, activation)
    module = _back_end(q, k, backend, activation)
    if _is_empty(q, backend):
        return _zeros(_fake_gated_backward(grad_out, q, k, u, v, w, eps, needs=needs))
    return module.gated_backward(grad_out, q, k, u, v, w, eps, Settings(deterministic, tuple(needs), activation))


def _backward_accumulate(
    grad_out, q, k, u, v, r, dk, du, dv, deterministic=False, *, backend="auto", needs=(True, True), activation="silu"
):
    _check_backward(grad_out, q, k, u, v, r, backend, activation)
    checks.accumulators(k, dk=dk, du=du, dv=dv)
    module = _back_end(q, k, backend, activation)
    if _is_empty(q, backend):
        return _fake_backward_accumulate(grad_out, q, k, u, v, r, dk, du, dv, needs=needs)
    return module.backward_accumulate_(grad_out, q, k, u, v, r, (dk, du, dv), Settings(deterministic, tuple(needs), activation))


# Fake kernels: the same checks, then the results' shapes


def _fake_forward(q, k, u, v, r=None, *, deterministic=None, backend="auto", activation="silu"):
    _check_forward(q, k, u, v, r, backend, activation)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_gated_forward(q, k, u, v, w, eps, *, deterministic=None, backend="auto", activation="silu"):
    _check_gated(q, k, u, v, w, eps, backend, activation)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _empty(like: Tensor | None, q: Tensor, needed: bool) -> Tensor:
    """An uninitialised contiguous tensor of ``like``'s shape; without elements where there is nothing to return."""
    if like is None or not needed:
        return q.new_empty(0)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _zeros(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.zero_() for x in results)


def _fake_backward(grad_out, q, k, u, v, r=None, deterministic=False, *, backend="auto", needs=(True, True), activation="silu"):
    _check_backward(grad_out, q, k, u, v, r, backend, activation)
    return (_empty(q, q, needs[0]), *(_empty(x, q, needs[1]) for x in (k, u, v)), _empty(r, q, needs[0]))


def _fake_gated_backward(grad_out, q, k, u, v, w, eps, deterministic=False, *, backend="auto", needs=(True, True), activation="silu"):
    _check_gated_backward(grad_out, q, k, u, v, w, eps, backend, activation)
    return (_empty(q, q, needs[0]), *(_empty(x, q, needs[1]) for x in (k, u, v, w)))


def _fake_backward_accumulate(
    grad_out, q, k, u, v, r, dk, du, dv, deterministic=False, *, backend="auto", needs=(True, True), activation="silu"
):
    _check_backward(grad_out, q, k, u, v, r, backend, activation)
    checks.accumulators(k, dk=dk, du=du, dv=dv)
    return _empty(q, q, needs[0]), _empty(r, q, needs[0])


# Autograd: the inputs are all that is saved; first derivatives in reverse mode only. backend="reference" runs here, above autograd

_UNSUPPORTED_DERIVATIVE = (
    "flashmhf has first derivatives in reverse mode only (backward, torch.autograd.grad): {what} is not supported. "
    'backend="reference" computes the same function from operations that PyTorch differentiates and transforms in every way'
)


class _FirstOrder(torch.autograd.Function):
    """An operator call as one node; ``differentiate(saved tensors, needs_input_grad, *grads)`` gives the inputs' gradients."""

    @staticmethod
    def forward(ctx, call, differentiate, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.differentiate = differentiate
        with torch_private.below_autograd():
            return call(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        needed = ctx.needs_input_grad[2:]
        results = ctx.differentiate(ctx.saved_tensors, needed, *grads)
        return (None, None, *(grad if need else None for grad, need in zip(results, needed, strict=True)))


def _refuse_second_derivative(saved, needed, *grads):
    raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(what="a second derivative"))


def _refuse_transforms(tensors: tuple[Tensor | None, ...]) -> None:
    """torch.func.grad and forward mode would otherwise fail obscurely, or drop the tangent silently."""
    if torch_private.differentiated_by_functorch(*tensors):
        raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(what="a torch.func transform (grad, vjp, jvp, hessian, ...)"))
    if torch_private.has_tangent(*tensors):
        raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(what="forward mode (jvp)"))


def _call_differentiable(call: Callable, differentiate: Callable, *tensors: Tensor | None):
    _refuse_transforms(tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _FirstOrder.apply(call, differentiate, *tensors)
    with torch_private.below_autograd():
        return call(*tensors)


def _forward_autograd(q, k, u, v, r=None, *, deterministic=None, backend="auto", activation="silu"):
    if backend == REFERENCE:
        return _forward(q, k, u, v, r, backend=backend, activation=activation)
    # The flag is read now: in backward the caller's setting may be another.
    deterministic = _resolve(deterministic)

    def call(*tensors):
        return torch.ops.flashmhf.forward(*tensors, deterministic=deterministic, backend=backend, activation=activation)

    def differentiate(saved, needed, grad_out):
        needs = [needed[0] or needed[4], any(needed[1:4])]
        return torch.ops.flashmhf.backward(grad_out, *saved, deterministic, backend=backend, needs=needs, activation=activation)

    return _call_differentiable(call, differentiate, q, k, u, v, r)


def _gated_forward_autograd(q, k, u, v, w, eps, *, deterministic=None, backend="auto", activation="silu"):
    if backend == REFERENCE:
        return _gated_forward(q, k, u, v, w, eps, backend=backend, activation=activation)
    deterministic = _resolve(deterministic)

    def call(*tensors):
        return torch.ops.flashmhf.gated_forward(*tensors, eps, deterministic=deterministic, backend=backend, activation=activation)

    def differentiate(saved, needed, grad_out):
        needs = [needed[0], any(needed[1:])]
        return torch.ops.flashmhf.gated_backward(grad_out, *saved, eps, deterministic, backend=backend, needs=needs, activation=activation)

    return _call_differentiable(call, differentiate, q, k, u, v, w)


def _backward_autograd(grad_out, q, k, u, v, r=None, deterministic=False, *, backend="auto", needs=(True, True), activation="silu"):
    if backend == REFERENCE:
        return _backward(grad_out, q, k, u, v, r, backend=backend, needs=needs, activation=activation)

    def call(*tensors):
        return torch.ops.flashmhf.backward(*tensors, deterministic, backend=backend, needs=needs, activation=activation)

    return _call_differentiable(call, _refuse_second_derivative, grad_out, q, k, u, v, r)


def _gated_backward_autograd(grad_out, q, k, u, v, w, eps, deterministic=False, *, backend="auto", needs=(True, True), activation="silu"):
    if backend == REFERENCE:
        return _gated_backward(grad_out, q, k, u, v, w, eps, backend=backend, needs=needs, activation=activation)

    def call(*tensors):
        return torch.ops.flashmhf.gated_backward(*tensors, eps, deterministic, backend=backend, needs=needs, activation=activation)

    return _call_differentiable(call, _refuse_second_derivative, grad_out, q, k, u, v, w)


def _backward_accumulate_autograd(*args, **kwargs):
    tensors = tuple(x for x in args if isinstance(x, Tensor))
    _refuse_transforms(tensors)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        _refuse_second_derivative(None, None)
    with torch_private.below_autograd():
        return torch.ops.flashmhf.backward_accumulate_(*args, **kwargs)


for _name, _kernel, _fake, _autograd in (
    ("forward", _forward, _fake_forward, _forward_autograd),
    ("backward", _backward, _fake_backward, _backward_autograd),
    ("gated_forward", _gated_forward, _fake_gated_forward, _gated_forward_autograd),
    ("gated_backward", _gated_backward, _fake_gated_backward, _gated_backward_autograd),
    ("backward_accumulate_", _backward_accumulate, _fake_backward_accumulate, _backward_accumulate_autograd),
):
    # Under autocast q, k, u and v go to its dtype; r and w keep theirs. In backward nothing is cast.
    define(_SCHEMAS[_name], _kernel, _fake, _autograd, casts="qkuv" if "forward" in _name else ())


# vmap: a batch over tokens joins the leading dimensions; a batch over weights is one call per entry


def _leading_batch(x: Tensor, dim: int | None, size: int) -> Tensor:
    """The batch as the first dimension; copied where the tokens would lie at more strides than every back end reads in place."""
    if dim is None:
        return x.expand(size, *x.shape).contiguous()
    x = x.movedim(dim, 0)
    return x if len(collapse(x)) <= 2 else x.contiguous()


def _vmap_forward(info, in_dims, q, k, u, v, r=None, **kwargs):
    args, dims = (q, k, u, v, r), (*in_dims, None)[:5]  # PyTorch leaves out trailing arguments that have their default value
    if any(dim is not None for dim in dims[1:4]):
        return vmap_loop(torch.ops.flashmhf.forward)(info, dims, *args, **kwargs)
    q, r = _leading_batch(q, dims[0], info.batch_size), None if r is None else _leading_batch(r, dims[4], info.batch_size)
    return torch.ops.flashmhf.forward(q, k, u, v, r, **kwargs), 0


def _vmap_gated_forward(info, in_dims, q, k, u, v, w, eps, **kwargs):
    if any(dim is not None for dim in in_dims[1:5]):
        return vmap_loop(torch.ops.flashmhf.gated_forward)(info, in_dims, q, k, u, v, w, eps, **kwargs)
    return torch.ops.flashmhf.gated_forward(_leading_batch(q, in_dims[0], info.batch_size), k, u, v, w, eps, **kwargs), 0


def vmap_loop(op: Callable) -> Callable:
    """One call of the operator for every entry of the batch."""

    def call(info, in_dims, *args, **kwargs):
        def entry(i: int) -> tuple[Tensor, ...]:
            result = op(*(x if dim is None else x.select(dim, i).contiguous() for x, dim in zip(args, in_dims, strict=True)), **kwargs)
            return (result,) if isinstance(result, Tensor) else result

        if info.batch_size:
            results = [torch.stack(x) for x in zip(*map(entry, range(info.batch_size)), strict=True)]
        else:  # one entry of zeros shows the results' shapes
            args = [
                x if dim is None else x.new_zeros((*x.shape[:dim], 1, *x.shape[dim:][1:])) for x, dim in zip(args, in_dims, strict=True)
            ]
            results = [x.new_empty((0, *x.shape)) for x in entry(0)]
        return (results[0], 0) if len(results) == 1 else (tuple(results), (0,) * len(results))

    return call


for _name, _batched in (
    ("forward", _vmap_forward),
    ("gated_forward", _vmap_gated_forward),
    ("backward", vmap_loop(torch.ops.flashmhf.backward)),
    ("gated_backward", vmap_loop(torch.ops.flashmhf.gated_backward)),
):
    torch.library.register_vmap(f"flashmhf::{_name}", _batched, lib=LIBRARY)


# What Python calls: the dispatcher's operators, or the definition without the dispatcher, which exporters see operation by operation


def _without_dispatcher(kernel: Callable, q: Tensor, k: Tensor, u: Tensor, v: Tensor, *rest, activation: str) -> Tensor:
    device_type = q.device.type
    if not torch_private.autocasts(device_type):
        return kernel(q, k, u, v, *rest, backend=REFERENCE, activation=activation)
    q, k, u, v = (cast(x, torch.get_autocast_dtype(device_type)) for x in (q, k, u, v))
    with torch.autocast(device_type, enabled=False):
        return kernel(q, k, u, v, *rest, backend=REFERENCE, activation=activation)


def flash_mhf(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    r: Tensor | None = None,
    *,
    backend: str = "auto",
    deterministic: bool | None = None,
    activation: str = "silu",
) -> Tensor:
    """S[t,h] = sum_e R[t,h,e] (SiLU(Q K_e^T) * (Q U_e^T)) V_e, without the T x d_ff intermediate (paper, section 3.2).

    Args:
        q: [..., H, d_h], any leading dimensions; bf16, fp16, fp32 or fp64 (which back end takes which: ``flashmhf.info``).
        k, u, v: [H_kv, E, d_e, d_h], contiguous, q's dtype. H is a multiple of H_kv; head h of q takes head h // (H / H_kv) of k, u, v.
        r: gate values [..., H, E], float32 or q's dtype; None for weights 1.
        backend: "auto" (the first of hopper, triton, eager that supports device, dtype and shape), one of these names, or "reference":
            the definition, which materialises T x d_ff per head and which PyTorch differentiates, transforms and exports in every way.
        deterministic: bitwise equal gradients from run to run; None follows ``torch.are_deterministic_algorithms_enabled()``,
            read now, not in backward.
        activation: "silu" (the paper's), "gelu" (with erf), "relu" or "relu2" (its square); hopper has "silu" only.

    Returns [..., H, d_h] in q's dtype, contiguous. Differentiable once in q, k, u, v, r; with backend="reference" any number of times.

    Raises TypeError (dtypes, non-tensors), ValueError (shapes, strides, devices, unknown back end), NotImplementedError (an
    explicit back end that cannot run), each naming the argument, what it got and what is supported.
    """
    checks.strided(q=q, k=k, u=u, v=v, **({} if r is None else {"r": r}))
    checks.options(backend=(backend, str), activation=(activation, str))
    if deterministic is not None:
        checks.options(deterministic=(deterministic, bool))
    if backend == REFERENCE:
        return _without_dispatcher(_forward, q, k, u, v, r, activation=activation)
    return torch.ops.flashmhf.forward(q, k, u, v, r, deterministic=deterministic, backend=backend, activation=activation)


def gated_flash_mhf(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    w: Tensor,
    eps: float,
    *,
    backend: str = "auto",
    deterministic: bool | None = None,
    activation: str = "silu",
) -> Tensor:
    """:func:`flash_mhf` with r = gate(q, w, eps), which the hopper back end computes in the same kernel. w: [H, d_h, E]."""
    if backend == REFERENCE:
        return _without_dispatcher(_gated_forward, q, k, u, v, w, eps, activation=activation)
    return torch.ops.flashmhf.gated_forward(q, k, u, v, w, eps, deterministic=deterministic, backend=backend, activation=activation)
