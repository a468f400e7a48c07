"""The operators ``torch.ops.flashmhf.*`` of the heads' networks, and the functions in front of them.

Each operator turns its arguments into a :class:`_Call`. What follows is the same for all: check -> select the back end
-> run it on the current stream, without synchronising and without copying q; shapes for fake tensors, autograd,
autocast and vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, checks, torch_private
from ..backends import REFERENCE
from ..backends.contract import Gate, Router, Settings, Sums
from ..backends.tokens import collapse
from .library import LIBRARY, cast, define, widen

Result = Tensor | tuple[Tensor, ...]


class _Call(NamedTuple):
    """One call: the operands of a back end's ``forward``, or with ``upstream`` of its ``backward``."""

    upstream: tuple[()] | tuple[Tensor]  # grad_out
    q: Tensor
    k: Tensor
    u: Tensor
    v: Tensor
    r: Gate
    into: Sums  # dk, du, dv of backward_accumulate_
    backend: str
    settings: Settings


def _check(call: _Call) -> None:
    """Raise for operands that do not belong together.

    The definition reads weights of any strides, such as vmap's slices of a batch.
    """
    upstream, q, k, u, v, r, into, backend, settings = call
    contiguous = backend != REFERENCE
    checks.activation(settings.activation)
    checks.operands(q, k, u, v, contiguous=contiguous)
    checks.gate(q, k, r, contiguous=contiguous)
    for grad_out in upstream:
        checks.upstream_gradient(grad_out, q)
    if into is not None:
        checks.accumulators(k, **dict(zip(("dk", "du", "dv"), into, strict=True)))


def _values(call: _Call) -> Result:
    """Check the call, run its back end and return the results: what every operator's kernel does."""
    _check(call)
    upstream, q, k, u, v, r, into, backend, settings = call
    if backend == REFERENCE:
        back_end = backends.reference  # without the cache of select, which Dynamo would trace
    else:
        back_end = backends.select(backend, q.device, q.dtype, k.shape[3], k.shape[2], settings.activation)
    # the definition takes empty tensors as they are, and keeps them differentiable
    if backend == REFERENCE or q.numel():
        if not upstream:
            return back_end.forward(q, k, u, v, r, settings)
        gradients = back_end.backward(*upstream, q, k, u, v, r, settings, into)
        return gradients if into is None else (gradients[0], gradients[4])
    result = _empty(call)
    for x in (result,) if isinstance(result, Tensor) else result:
        x.zero_()
    return result


def _empty(call: _Call) -> Result:
    """Return uninitialised contiguous results; those that are not needed have no elements."""
    q, (tokens, weights) = call.q, call.settings.needs
    if not call.upstream:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def gradient(x: Tensor | None, needed: bool) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if x is not None and needed else q.new_empty(0)

    of_gate = gradient(call.r.w, weights) if isinstance(call.r, Router) else gradient(call.r, tokens)
    if call.into is not None:
        return gradient(q, tokens), of_gate
    return gradient(q, tokens), *(gradient(x, weights) for x in (call.k, call.u, call.v)), of_gate


# Autograd: the inputs are all that is saved; first derivatives in reverse mode only. backend="reference" runs here,
# above autograd

_UNSUPPORTED_DERIVATIVE = (
    "flashmhf has first derivatives in reverse mode only (backward, torch.autograd.grad): {what} is not supported. "
    'backend="reference" computes the same function from operations that PyTorch differentiates and transforms in every way'
)


class _FirstOrder(torch.autograd.Function):
    """An operator call as one node;

    ``differentiate(saved tensors, needs_input_grad, *grads)`` gives the inputs' gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Result], differentiate: Callable[..., Sequence[Tensor]], *tensors: Tensor | None
    ) -> Result:
        ctx.save_for_backward(*tensors)
        ctx.differentiate = differentiate
        with torch_private.below_autograd():
            return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        results = ctx.differentiate(ctx.saved_tensors, needed, *grads)
        return (None, None, *(grad if need else None for grad, need in zip(results, needed, strict=True)))


def _refuse_second_derivative(*_: object) -> Sequence[Tensor]:
    raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(what="a second derivative"))


def _refuse_transforms(tensors: Sequence[Tensor | None]) -> None:
    """Refuse torch.func.grad and forward mode, which would otherwise fail obscurely or drop the tangent silently."""
    if torch_private.differentiated_by_functorch(*tensors):
        raise NotImplementedError(
            _UNSUPPORTED_DERIVATIVE.format(what="a torch.func transform (grad, vjp, jvp, hessian, ...)")
        )
    if torch_private.has_tangent(*tensors):
        raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(what="forward mode (jvp)"))


def _autograd(name: str, operands: int, describe: Callable[..., _Call]) -> Callable[..., Result]:
    """Return the kernel above autograd of operator ``name``, whose first ``operands`` arguments are its tensors."""

    def kernel(*args: Any, **settings: Any) -> Result:
        if settings.get("backend") == REFERENCE and name != "backward_accumulate_":
            return _values(describe(*args, **settings))
        tensors, rest = (*args[:operands], *[None] * (operands - len(args))), args[operands:]
        _refuse_transforms(tensors)
        if "forward" in name:  # the flag is read now: in backward the caller's setting may be another
            settings["deterministic"] = _resolve(settings.get("deterministic"))

        def run(*tensors: Tensor | None) -> Result:
            return getattr(torch.ops.flashmhf, name)(*tensors, *rest, **settings)

        if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors):
            with torch_private.below_autograd():
                return run(*tensors)
        if name == "backward_accumulate_":
            _refuse_second_derivative()
        differentiate = _differentiate(name, *rest, **settings) if "forward" in name else _refuse_second_derivative
        return _FirstOrder.apply(run, differentiate, *tensors)

    return kernel


def _differentiate(name: str, *eps: float, deterministic: bool, **settings: str) -> Callable[..., Sequence[Tensor]]:
    """Return the gradients' function of operator ``name``."""
    is_gated, backward = bool(eps), getattr(torch.ops.flashmhf, name.replace("forward", "backward"))

    def differentiate(saved: Sequence[Tensor | None], needed: Sequence[bool], grad_out: Tensor) -> Sequence[Tensor]:
        q, k, u, v, gate = needed
        needs = [q or (gate and not is_gated), k or u or v or (gate and is_gated)]
        return backward(grad_out, *saved, *eps, deterministic, needs=needs, **settings)

    return differentiate


# The operators' arguments. The dispatcher leaves out those that have their default values


def _resolve(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def _describe(
    *operands: Any,
    deterministic: bool | None = None,
    backend: str = "auto",
    needs: Sequence[bool] = (True, True),
    activation: str = "silu",
) -> _Call:
    tokens, weights = needs
    return _Call(*operands, backend, Settings(_resolve(deterministic), (tokens, weights), activation))


def _forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None = None, **how: Any) -> _Call:
    return _describe((), q, k, u, v, r, None, **how)


def _gated_forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, w: Tensor, eps: float, **how: Any) -> _Call:
    return _describe((), q, k, u, v, Router(w, eps), None, **how)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    r: Tensor | None = None,
    deterministic: bool = False,
    **how: Any,
) -> _Call:
    return _describe((grad_out,), q, k, u, v, r, None, deterministic=deterministic, **how)


def _gated_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    w: Tensor,
    eps: float,
    deterministic: bool = False,
    **how: Any,
) -> _Call:
    return _describe((grad_out,), q, k, u, v, Router(w, eps), None, deterministic=deterministic, **how)


def _backward_accumulate(
    grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, *sums_and_flag: Any, **how: Any
) -> _Call:
    dk, du, dv, deterministic = (*sums_and_flag, False)[:4]
    return _describe((grad_out,), q, k, u, v, r, (dk, du, dv), deterministic=deterministic, **how)


def _define(schema: str, describe: Callable[..., _Call], casts: str = "") -> None:
    """Define the operator whose arguments ``describe`` takes."""
    name, operands = schema.partition("(")[0], schema.partition("->")[0].count("Tensor")

    def kernel(*args: Any, **settings: Any) -> Result:
        return _values(describe(*args, **settings))

    def fake(*args: Any, **settings: Any) -> Result:
        call = describe(*args, **settings)
        _check(call)
        return _empty(call)

    define(schema, kernel, fake, _autograd(name, operands, describe), casts)


_NETWORKS = "Tensor q, Tensor k, Tensor u, Tensor v"
_FORWARD = '*, bool? deterministic=None, str backend="auto", str activation="silu") -> Tensor'
_BACKWARD = 'bool deterministic=False, *, str backend="auto", bool[2] needs=[True, True], str activation="silu") -> (Tensor dq, '
_WEIGHT_GRADS = "Tensor dk, Tensor du, Tensor dv, "
# Under autocast q, k, u and v go to its dtype; r and w keep theirs, or go to float32. In backward nothing is cast.
_define(f"forward({_NETWORKS}, Tensor? r=None, {_FORWARD}", _forward, casts="qkuv")
_define(f"gated_forward({_NETWORKS}, Tensor w, float eps, {_FORWARD}", _gated_forward, casts="qkuv")
_define(f"backward(Tensor grad_out, {_NETWORKS}, Tensor? r=None, {_BACKWARD}{_WEIGHT_GRADS}Tensor dr)", _backward)
_define(
    f"gated_backward(Tensor grad_out, {_NETWORKS}, Tensor w, float eps, {_BACKWARD}{_WEIGHT_GRADS}Tensor dw)",
    _gated_backward,
)
_define(
    f"backward_accumulate_(Tensor grad_out, {_NETWORKS}, Tensor? r, Tensor(a!) dk, Tensor(b!) du, Tensor(c!) dv, {_BACKWARD}Tensor dr)",
    _backward_accumulate,
)


# vmap: a batch over tokens joins the leading dimensions; a batch over weights is one call per entry


def _leading_batch(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Return the batch as the first dimension, copied where the tokens would lie at more strides than every back end
    reads in place.
    """
    if x is None:
        return None
    if dim is None:
        return x.expand(size, *x.shape).contiguous()
    x = x.movedim(dim, 0)
    return x if len(collapse(x)) <= 2 else x.contiguous()


def register_vmap(name: str, *tokens: int) -> None:
    """Register the vmap rule of an operator whose operands at the places ``tokens`` have leading dimensions."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **settings: Any) -> tuple[Any, Any]:
        op = getattr(torch.ops.flashmhf, name)
        if any(dim is not None for place, dim in enumerate(in_dims) if place not in tokens):
            return _one_by_one(op, info.batch_size, in_dims, args, settings)
        places = enumerate(zip(args, in_dims, strict=True))
        args = [_leading_batch(x, dim, info.batch_size) if place in tokens else x for place, (x, dim) in places]
        return op(*args, **settings), 0

    torch.library.register_vmap(f"flashmhf::{name}", rule, lib=LIBRARY)


def _one_by_one(
    op: Callable[..., Result], size: int, in_dims: tuple[int | None, ...], args: Sequence[Any], settings: dict[str, Any]
) -> tuple[Any, Any]:
    def entry(i: int) -> tuple[Tensor, ...]:
        result = op(
            *(x if dim is None else x.select(dim, i).contiguous() for x, dim in zip(args, in_dims, strict=True)),
            **settings,
        )
        return (result,) if isinstance(result, Tensor) else result

    if size:
        results = [torch.stack(x) for x in zip(*map(entry, range(size)), strict=True)]
    else:  # one entry of zeros shows the results' shapes
        args = [
            x if dim is None else x.new_zeros((*x.shape[:dim], 1, *x.shape[dim:][1:]))
            for x, dim in zip(args, in_dims, strict=True)
        ]
        results = [x.new_empty((0, *x.shape)) for x in entry(0)]
    return (results[0], 0) if len(results) == 1 else (tuple(results), (0,) * len(results))


register_vmap("forward", 0, 4)
register_vmap("gated_forward", 0)
register_vmap("backward")
register_vmap("gated_backward")


# What Python calls: the dispatcher's operators, or the definition without the dispatcher, which exporters see operation
# by operation


def _definition(
    describe: Callable[..., _Call], q: Tensor, k: Tensor, u: Tensor, v: Tensor, *gate: Any, activation: str
) -> Tensor:
    if torch_private.autocasts(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        operands = (*(cast(x, dtype) for x in (q, k, u, v)), *(widen(x, dtype) for x in gate))
        with torch.autocast(q.device.type, enabled=False):
            return _definition(describe, *operands, activation=activation)
    return _values(describe(q, k, u, v, *gate, backend=REFERENCE, activation=activation))


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
    """Compute S[t,h] = sum_e R[t,h,e] (SiLU(Q K_e^T) * (Q U_e^T)) V_e without the T x d_ff intermediate (paper, section
    3.2).

    Args:
        q: [..., H, d_h], any leading dimensions; bf16, fp16, fp32 or fp64 (which back end takes which:
            ``flashmhf.info``). k, u, v: [H_kv, E, d_e, d_h], contiguous, q's dtype. H is a multiple of H_kv; head h of
            q takes head h // (H / H_kv) of k, u, v.
        r: gate values [..., H, E], float32 or q's dtype; None stands for weights of 1.
        backend: "auto" (the first of hopper, triton, eager that supports device, dtype and shape), one of these names,
            or "reference": the definition, which materialises T x d_ff per head and which PyTorch differentiates,
            transforms and exports in every way.
        deterministic: whether gradients are bitwise equal from run to run; None follows
            ``torch.are_deterministic_algorithms_enabled()``, read now, not in backward.
        activation: "silu" (the paper's), "gelu" (with erf), "relu" or "relu2" (its square); hopper has "silu" only.

    Returns [..., H, d_h] in q's dtype, contiguous. Differentiable once in q, k, u, v, r; with backend="reference" any
    number of times.

    Raises TypeError (dtypes, non-tensors), ValueError (shapes, strides, devices, unknown back end), NotImplementedError
    (an explicit back end that cannot run), each naming the argument, what it got and what is supported.
    """
    checks.strided(q=q, k=k, u=u, v=v, **({} if r is None else {"r": r}))
    checks.instance("backend", backend, str)  # the dispatcher would raise a RuntimeError
    checks.instance("activation", activation, str)
    checks.instance("deterministic", deterministic, bool | None, "a bool or None")
    if backend == REFERENCE:
        return _definition(_forward, q, k, u, v, r, activation=activation)
    return torch.ops.flashmhf.forward(
        q, k, u, v, r, deterministic=deterministic, backend=backend, activation=activation
    )


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
    """Compute :func:`flash_mhf` with r = gate(q, w, eps), which the hopper back end computes in the same kernel.

    w: [H, d_h, E].
    """
    if backend == REFERENCE:
        return _definition(_gated_forward, q, k, u, v, w, eps, activation=activation)
    return torch.ops.flashmhf.gated_forward(
        q, k, u, v, w, eps, deterministic=deterministic, backend=backend, activation=activation
    )
