"""The operators ``torch.ops.flashmhf.*``: schemas, checks, back-end dispatch, fake kernels, autograd, autocast and vmap.

Every dispatch key is registered from here; back ends are plain functions over tensors. The fixed order of a call is
check -> select the back end -> run it on the current stream, without synchronising and without copying q.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import checks
from .backends import gating, select
from .reference import accumulate_dtype

_BACKWARD_TAIL = '*, str backend="auto", bool[2] needs=[True, True]'
_SCHEMAS = (
    'forward(Tensor q, Tensor k, Tensor u, Tensor v, Tensor? r=None, *, bool? deterministic=None, str backend="auto") -> Tensor',
    "backward(Tensor grad_out, Tensor q, Tensor k, Tensor u, Tensor v, Tensor? r=None, bool deterministic=False, "
    f"{_BACKWARD_TAIL}) -> (Tensor dq, Tensor dk, Tensor du, Tensor dv, Tensor dr)",
    'gated_forward(Tensor q, Tensor k, Tensor u, Tensor v, Tensor w, float eps, *, bool? deterministic=None, str backend="auto") -> Tensor',
    "gated_backward(Tensor grad_out, Tensor q, Tensor k, Tensor u, Tensor v, Tensor w, float eps, bool deterministic=False, "
    f"{_BACKWARD_TAIL}) -> (Tensor dq, Tensor dk, Tensor du, Tensor dv, Tensor dw)",
    "backward_accumulate_(Tensor grad_out, Tensor q, Tensor k, Tensor u, Tensor v, Tensor? r, "
    "Tensor(a!) dk, Tensor(b!) du, Tensor(c!) dv, bool deterministic=False, "
    f"{_BACKWARD_TAIL}) -> (Tensor dq, Tensor dr)",
)
_library = torch.library.Library("flashmhf", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def _back_end(q: Tensor, k: Tensor, backend: str):
    heads, subnets, subnet_dim, head_dim = k.shape
    return select(backend, q.device, q.dtype, head_dim, subnet_dim, subnets, heads)


def _resolve(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


# What an operator's kernel and its fake kernel both check


def _check_forward(q, k, u, v, r):
    checks.operands(q, k, u, v)
    checks.weights(q, k, r)


def _check_gated(q, k, u, v, w):
    checks.operands(q, k, u, v)
    checks.router(q, w, k)


def _check_backward(grad_out, q, k, u, v, r):
    _check_forward(q, k, u, v, r)
    checks.upstream_gradient(grad_out, q)


# Kernels at the CPU and CUDA keys


def _forward(q, k, u, v, r=None, *, deterministic=None, backend="auto"):
    _check_forward(q, k, u, v, r)
    module = _back_end(q, k, backend)
    if not q.numel():
        return _fake_forward(q, k, u, v, r)
    return module.forward(q, k, u, v, r, deterministic=_resolve(deterministic))


def _gated_forward(q, k, u, v, w, eps, *, deterministic=None, backend="auto"):
    _check_gated(q, k, u, v, w)
    module = _back_end(q, k, backend)
    if not q.numel():
        return _fake_forward(q, k, u, v)
    deterministic = _resolve(deterministic)
    if hasattr(module, "gated_forward"):
        return module.gated_forward(q, k, u, v, w, eps, deterministic=deterministic)
    return module.forward(q, k, u, v, gating.gate(q, w, eps), deterministic=deterministic)


def _backward(grad_out, q, k, u, v, r=None, deterministic=False, *, backend="auto", needs=(True, True)):
    _check_backward(grad_out, q, k, u, v, r)
    module = _back_end(q, k, backend)
    if not q.numel():
        return _zeros(_fake_backward(grad_out, q, k, u, v, r, needs=needs))
    return module.backward(grad_out, q, k, u, v, r, deterministic=deterministic, needs=tuple(needs))


def _gated_backward(grad_out, q, k, u, v, w, eps, deterministic=False, *, backend="auto", needs=(True, True)):
    _check_gated(q, k, u, v, w)
    checks.upstream_gradient(grad_out, q)
    module = _back_end(q, k, backend)
    if not q.numel():
        return _zeros(_fake_gated_backward(grad_out, q, k, u, v, w, eps, needs=needs))
    needs_tokens, needs_weights = needs
    if hasattr(module, "gated_backward"):
        return module.gated_backward(grad_out, q, k, u, v, w, eps, deterministic=deterministic, needs=(needs_tokens, needs_weights))
    # dr feeds dw as well as dq; the router's part of dq is added before the one rounding to q's dtype.
    r = gating.gate(q, w, eps)
    dq, dk, du, dv, dr = module.backward(
        grad_out, q, k, u, v, r, deterministic=deterministic, needs=(True, needs_weights), dq_dtype=accumulate_dtype(q.dtype)
    )
    dw = gating.gate_backward(dr, q, w, eps, dq, needs_weights)
    return dq.to(q.dtype) if needs_tokens else q.new_empty(0), dk, du, dv, dw


def _backward_accumulate(grad_out, q, k, u, v, r, dk, du, dv, deterministic=False, *, backend="auto", needs=(True, True)):
    _check_backward(grad_out, q, k, u, v, r)
    checks.accumulators(k, dk=dk, du=du, dv=dv)
    module = _back_end(q, k, backend)
    if not q.numel():
        return _fake_backward_accumulate(grad_out, q, k, u, v, r, dk, du, dv, needs=needs)
    return module.backward_accumulate_(grad_out, q, k, u, v, r, dk, du, dv, deterministic=deterministic, needs=tuple(needs))


# Fake kernels: the same checks, then the results' shapes


def _fake_forward(q, k, u, v, r=None, *, deterministic=None, backend="auto"):
    _check_forward(q, k, u, v, r)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_gated_forward(q, k, u, v, w, eps, *, deterministic=None, backend="auto"):
    _check_gated(q, k, u, v, w)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _empty(like: Tensor | None, q: Tensor, needed: bool) -> Tensor:
    """An uninitialised contiguous tensor of ``like``'s shape; without elements where there is nothing to return."""
    if like is None or not needed:
        return q.new_empty(0)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _zeros(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.zero_() for x in results)


def _fake_backward(grad_out, q, k, u, v, r=None, deterministic=False, *, backend="auto", needs=(True, True)):
    _check_backward(grad_out, q, k, u, v, r)
    return (_empty(q, q, needs[0]), *(_empty(x, q, needs[1]) for x in (k, u, v)), _empty(r, q, needs[0]))


def _fake_gated_backward(grad_out, q, k, u, v, w, eps, deterministic=False, *, backend="auto", needs=(True, True)):
    _check_gated(q, k, u, v, w)
    checks.upstream_gradient(grad_out, q)
    return (_empty(q, q, needs[0]), *(_empty(x, q, needs[1]) for x in (k, u, v, w)))


def _fake_backward_accumulate(grad_out, q, k, u, v, r, dk, du, dv, deterministic=False, *, backend="auto", needs=(True, True)):
    _check_backward(grad_out, q, k, u, v, r)
    checks.accumulators(k, dk=dk, du=du, dv=dv)
    return _empty(q, q, needs[0]), _empty(r, q, needs[0])


_KERNELS: dict[str, tuple[Callable, Callable]] = {
    "forward": (_forward, _fake_forward),
    "backward": (_backward, _fake_backward),
    "gated_forward": (_gated_forward, _fake_gated_forward),
    "gated_backward": (_gated_backward, _fake_gated_backward),
    "backward_accumulate_": (_backward_accumulate, _fake_backward_accumulate),
}
for _name, (_kernel, _fake) in _KERNELS.items():
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"flashmhf::{_name}", _fake, lib=_library)


# Autograd: the inputs are all that is saved; first derivatives in reverse mode only

_UNSUPPORTED_DERIVATIVE = (
    "flashmhf has first derivatives in reverse mode only (backward, torch.autograd.grad): {what} is not supported. "
    "flashmhf.reference.forward computes the same function from operations that PyTorch differentiates in every way"
)


class _FirstOrder(torch.autograd.Function):
    """An operator call as one node; ``differentiate(saved tensors, needs_input_grad, *grads)`` gives the inputs' gradients."""

    @staticmethod
    def forward(ctx, call, differentiate, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.differentiate = differentiate
        with torch._C._AutoDispatchBelowAutograd():
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
    if torch._C._are_functorch_transforms_active() and any(
        isinstance(x, Tensor) and torch._C._functorch.is_gradtrackingtensor(x) for x in tensors
    ):
        raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(what="a torch.func transform (grad, vjp, jvp, hessian, ...)"))
    if torch.autograd.forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(what="forward mode (jvp)"))


def _call_differentiable(call: Callable, differentiate: Callable, *tensors: Tensor | None):
    _refuse_transforms(tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _FirstOrder.apply(call, differentiate, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return call(*tensors)


def _forward_autograd(q, k, u, v, r=None, *, deterministic=None, backend="auto"):
    # The flag is read now: in backward the caller's setting may be another.
    deterministic = _resolve(deterministic)

    def call(*tensors):
        return torch.ops.flashmhf.forward(*tensors, deterministic=deterministic, backend=backend)

    def differentiate(saved, needed, grad_out):
        needs = [needed[0] or needed[4], any(needed[1:4])]
        return torch.ops.flashmhf.backward(grad_out, *saved, deterministic, backend=backend, needs=needs)

    return _call_differentiable(call, differentiate, q, k, u, v, r)


def _gated_forward_autograd(q, k, u, v, w, eps, *, deterministic=None, backend="auto"):
    deterministic = _resolve(deterministic)

    def call(*tensors):
        return torch.ops.flashmhf.gated_forward(*tensors, eps, deterministic=deterministic, backend=backend)

    def differentiate(saved, needed, grad_out):
        needs = [needed[0], any(needed[1:])]
        return torch.ops.flashmhf.gated_backward(grad_out, *saved, eps, deterministic, backend=backend, needs=needs)

    return _call_differentiable(call, differentiate, q, k, u, v, w)


def _backward_autograd(grad_out, q, k, u, v, r=None, deterministic=False, *, backend="auto", needs=(True, True)):
    def call(*tensors):
        return torch.ops.flashmhf.backward(*tensors, deterministic, backend=backend, needs=needs)

    return _call_differentiable(call, _refuse_second_derivative, grad_out, q, k, u, v, r)


def _gated_backward_autograd(grad_out, q, k, u, v, w, eps, deterministic=False, *, backend="auto", needs=(True, True)):
    def call(*tensors):
        return torch.ops.flashmhf.gated_backward(*tensors, eps, deterministic, backend=backend, needs=needs)

    return _call_differentiable(call, _refuse_second_derivative, grad_out, q, k, u, v, w)


def _backward_accumulate_autograd(*args, **kwargs):
    tensors = tuple(x for x in args if isinstance(x, Tensor))
    _refuse_transforms(tensors)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        _refuse_second_derivative(None, None)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.flashmhf.backward_accumulate_(*args, **kwargs)


for _name, _differentiable in (
    ("forward", _forward_autograd),
    ("gated_forward", _gated_forward_autograd),
    ("backward", _backward_autograd),
    ("gated_backward", _gated_backward_autograd),
    ("backward_accumulate_", _backward_accumulate_autograd),
):
    _library.impl(_name, _differentiable, "Autograd")


# Autocast: q, k, u, v go to the autocast dtype; r and w keep theirs. In backward nothing is cast, and no inner operation may be.


def _autocast(name: str, device_type: str) -> Callable:
    op = getattr(torch.ops.flashmhf, name)
    casts = name in ("forward", "gated_forward")

    def call(*args, **kwargs):
        if casts:
            dtype = torch.get_autocast_dtype(device_type)
            args = (*(x.to(dtype) if isinstance(x, Tensor) and x.dtype in checks.FLOAT_DTYPES[:3] else x for x in args[:4]), *args[4:])
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return op(*args, **kwargs)

    return call


for _name in _KERNELS:
    _library.impl(_name, _autocast(_name, "cpu"), "AutocastCPU")
    _library.impl(_name, _autocast(_name, "cuda"), "AutocastCUDA")


# vmap


def _vmap_forward(info, in_dims, q, k, u, v, last, *rest, **kwargs):
    """A batch over tokens joins the leading dimensions; a batch over weights too is one call per entry."""
    op = torch.ops.flashmhf.gated_forward if rest else torch.ops.flashmhf.forward
    weights_shared = all(dim is None for dim in in_dims[1:4])
    last_shared = in_dims[4] is None
    if weights_shared and (last is None or last_shared == bool(rest)):
        q = q.movedim(in_dims[0], 0) if in_dims[0] is not None else q.expand(info.batch_size, *q.shape)
        if last is not None and not rest:
            last = last.movedim(in_dims[4], 0)
        return op(q, k, u, v, last, *rest, **kwargs), 0
    return _vmap_loop(op)(info, in_dims, q, k, u, v, last, *rest, **kwargs)


def _vmap_loop(op: Callable) -> Callable:
    def call(info, in_dims, *args, **kwargs):
        def entry(i: int):
            return op(*(x if dim is None else x.select(dim, i).contiguous() for x, dim in zip(args, in_dims, strict=True)), **kwargs)

        results = [entry(i) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(x) for x in zip(*results, strict=True)), (0,) * len(results[0])

    return call


for _name in ("forward", "gated_forward"):
    torch.library.register_vmap(f"flashmhf::{_name}", _vmap_forward, lib=_library)
for _name in ("backward", "gated_backward"):
    torch.library.register_vmap(f"flashmhf::{_name}", _vmap_loop(getattr(torch.ops.flashmhf, _name)), lib=_library)


# The functional door


def flash_mhf(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None = None, *, backend: str = "auto", deterministic: bool | None = None
) -> Tensor:
    """S[t,h] = sum_e R[t,h,e] (SiLU(Q K_e^T) * (Q U_e^T)) V_e, without the T x d_ff intermediate (paper, section 3.2).

    Args:
        q: [..., H, d_h], any leading dimensions; bf16, fp16, fp32 or fp64 (which back end takes which: ``flashmhf.info``).
        k, u, v: [H, E, d_e, d_h], contiguous, q's dtype.
        r: gate values [..., H, E], float32 or q's dtype; None for weights 1.
        backend: "auto" (the first of hopper, triton, eager that supports device, dtype and shape) or one of these names.
        deterministic: bitwise equal gradients from run to run; None follows ``torch.are_deterministic_algorithms_enabled()``,
            read now, not in backward.

    Returns [..., H, d_h] in q's dtype, contiguous. Differentiable once in q, k, u, v, r.

    Raises TypeError (dtypes, non-tensors), ValueError (shapes, strides, devices, unknown back end), NotImplementedError (an
    explicit back end that cannot run), each naming the argument, what it got and what is supported.
    """
    checks.tensors(q=q, k=k, u=u, v=v, **({} if r is None else {"r": r}))
    return torch.ops.flashmhf.forward(q, k, u, v, r, deterministic=deterministic, backend=backend)
