"""The operators ``torch.ops.flashmhf.*`` of the heads' networks, and the functions in front of them.

Each turns its arguments into a :class:`Call`; the rest is the same for all: check -> select the back end -> run it on
the current stream, without synchronising and without copying q; fakes, autograd, autocast and vmap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, checks, torch_private
from ..backends import REFERENCE
from ..backends.contract import Gate, Router, Settings
from ..backends.fp8_layout import check_packed
from ..backends.hopper import fp8 as hopper_fp8
from .library import cast, define, is_direct, register_vmap, widen

Result = Tensor | tuple[Tensor, ...]


class Call(NamedTuple):
    """One call: the operands of a back end's ``forward``, or with ``grad_out`` of its ``backward``."""

    q: Tensor
    networks: tuple[Tensor, ...]  # k, u, v, or packed in FP8 k8, u8, v8, scales
    r: Gate
    backend: str
    settings: Settings
    grad_out: Tensor | None = None


# The operators' arguments, by their names


def _describe(
    q: Tensor, *, r: Tensor | None = None, w: Tensor | None = None, eps: float | None = None,
    deterministic: bool | None = None, backend: str = "auto", needs: Sequence[bool] = (True, True),
    activation: str = "silu", **networks: Tensor,
) -> Call:  # fmt: skip
    """Return a call. ``networks``: k, u, v, or packed in FP8 k8, u8, v8, scales; eps comes with a router alone."""
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    tokens, weights = needs
    gate = r if eps is None else Router(w, eps)
    return Call(q, tuple(networks.values()), gate, backend, Settings(deterministic, (tokens, weights), activation))


def _describe_backward(grad_out: Tensor, *, deterministic: bool = False, **arguments: Any) -> Call:
    checks.tensors(grad_out=grad_out)  # None would stand for a forward
    return _describe(deterministic=deterministic, **arguments)._replace(grad_out=grad_out)


# What they do


def check(call: Call) -> None:
    """Raise for operands that do not belong together. The definition reads any strides, such as vmap's."""
    q, networks, r, backend, settings, grad_out = call
    contiguous = backend != REFERENCE
    checks.activation(settings.activation)
    if len(networks) == 4:
        checks.tensors(q=q)
        check_packed(*networks, q)
    else:
        checks.operands(q, *networks, contiguous=contiguous)
    checks.gate(q, networks[0], r, contiguous=contiguous)
    if grad_out is not None:  # of any strides
        checks.expect_like("grad_out", grad_out, q, q.shape, "q's shape")


def values(call: Call) -> Result:
    """Run the call's back end and return the results: what every operator's kernel does.

    The hopper back end checks its operands in C++ and is asked first: Python explains what it refuses.
    """
    q, networks, r, backend, settings, grad_out = call
    is_fp8 = len(networks) == 4
    if backend == REFERENCE and not is_fp8:
        check(call)
        return _run(backends.reference, call)  # without the cache of select, which Dynamo would trace
    try:
        _, _, d_e, d_h = networks[0].shape
        back_end = backends.select(backend, q.device, q.dtype, d_h, d_e, settings.activation, is_fp8)
        checked = back_end is backends.hopper and not (isinstance(r, Router) and not 0 <= r.eps < math.inf)
        if not checked:
            check(call)
        # that of imag of a conjugate, or of its gradient; Triton's kernels read memory as it is
        if q.is_neg() or (isinstance(r, Tensor) and r.is_neg()) or (grad_out is not None and grad_out.is_neg()):
            call = _without_negative_bits(call)
        if q.numel():
            return _run(back_end, call)
    except Exception:
        check(call)
        raise
    check(call)
    results = shapes(call)  # the definition takes empty tensors as they are, and keeps them differentiable
    return results.zero_() if isinstance(results, Tensor) else tuple(x.zero_() for x in results)


def _without_negative_bits(call: Call) -> Call:
    """Return a call with copies of tensors that hold their values negated; contiguous weights never do."""
    resolved = (x.resolve_neg() if isinstance(x, Tensor) else x for x in (call.q, call.r, call.grad_out))
    return call._replace(**dict(zip(("q", "r", "grad_out"), resolved, strict=True)))


def _run(back_end: Any, call: Call) -> Result:
    q, networks, r, _, settings, grad_out = call
    if len(networks) == 4:
        return back_end.forward(q, *networks, r)
    if grad_out is None:
        return back_end.forward(q, *networks, r, settings)
    return back_end.backward(grad_out, q, *networks, r, settings)


def _in_graph(call: Call) -> Result | None:
    """Run the call on fake tensors by the hopper back end's operator, if that is its back end and reads q in place."""
    q, networks, r, backend, settings, _ = call
    _, _, d_e, d_h = networks[0].shape
    if not backends.chooses_hopper(backend, q.device, q.dtype, d_h, d_e, settings.activation):
        return None
    back_end = hopper_fp8 if len(networks) == 4 else backends.hopper
    return _run(back_end, call) if backends.hopper.reads(q, r, networks) else None


def shapes(call: Call) -> Result:
    """Return uninitialised contiguous results; those that are not needed have no elements."""
    q, networks, r, _, settings, grad_out = call
    tokens, weights = settings.needs
    if grad_out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def gradient(x: Tensor | None, needed: bool) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if x is not None and needed else q.new_empty(0)

    of_gate = gradient(r.w, weights) if isinstance(r, Router) else gradient(r, tokens)
    return gradient(q, tokens), *(gradient(x, weights) for x in networks), of_gate


def _fake(call: Call) -> Result:
    check(call)
    if call.q.device.type == "cuda":
        backends.hopper.library()  # the graph that is traced may come from a cache, without another call
    return shapes(call)


def _dispatch(call: Call) -> Result:
    """Call the operator that ``call`` came from."""
    q, networks, r, backend, (deterministic, needs, activation), grad_out = call
    ops = torch.ops.flashmhf
    if isinstance(r, Router):
        operands, forward, backward = (q, *networks, *r), ops.gated_forward, ops.gated_backward
    else:
        operands, forward, backward = (q, *networks, r), ops.forward, ops.backward
    if grad_out is None:
        return forward.default(*operands, deterministic=deterministic, backend=backend, activation=activation)
    how = {"backend": backend, "needs": needs, "activation": activation}
    return backward.default(grad_out, *operands, deterministic, **how)


# Autograd: the inputs are all that is saved; first derivatives in reverse mode only. The definition runs above it

_UNSUPPORTED_DERIVATIVE = (
    "flashmhf has first derivatives in reverse mode only (backward, torch.autograd.grad): {way} is not supported. "
    'backend="reference" computes the same from operations that PyTorch differentiates and transforms in every way'
)


class _FirstOrder(torch.autograd.Function):
    """A call as one node of autograd. ``run`` is :func:`values`, or :func:`_dispatch` if somebody watches."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Call], Result], call: Call, *tensors: Tensor | None) -> Result:
        ctx.save_for_backward(*tensors)
        ctx.how = call.r.eps if isinstance(call.r, Router) else None, call.backend, call.settings
        return run(call)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *more: Tensor) -> tuple[Tensor | None, ...]:
        q, k, u, v, gate, of_backward = ctx.saved_tensors
        if of_backward is not None:
            raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(way="a second derivative"))
        _, _, *needed, _ = ctx.needs_input_grad
        of_q, of_k, of_u, of_v, of_gate = needed
        eps, backend, (deterministic, _, activation) = ctx.how
        is_gated = eps is not None
        needs = of_q or (of_gate and not is_gated), of_k or of_u or of_v or (of_gate and is_gated)
        r, settings = Router(gate, eps) if is_gated else gate, Settings(deterministic, needs, activation)
        results = gradients(Call(q, (k, u, v), r, backend, settings, grad_out))
        return None, None, *(grad if need else None for grad, need in zip(results, needed, strict=True)), None


def gradients(call: Call) -> Result:
    """Run a call with ``grad_out``, past the dispatcher where nobody watches."""
    grad_out = call.grad_out
    watched = torch.is_grad_enabled() or torch_private.is_batched(grad_out) or torch_private.is_profiled()
    watched = watched or not is_direct(*_tensors(call)) or torch_private.autocasts(grad_out.device.type)
    return _dispatch(call) if watched else values(call)


def _tensors(call: Call) -> tuple[Tensor | None, ...]:
    q, networks, r, _, _, grad_out = call
    return q, *networks, r.w if isinstance(r, Router) else r, grad_out


def _above_autograd(call: Call) -> Result:
    if call.backend == REFERENCE:
        return values(call)
    tensors = _tensors(call)
    # torch.func.grad and forward mode would otherwise fail obscurely or drop the tangent silently
    if torch_private.differentiated_by_functorch(*tensors):
        raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(way="a torch.func transform (grad, vjp, jvp, ...)"))
    if torch_private.has_tangent(*tensors):
        raise NotImplementedError(_UNSUPPORTED_DERIVATIVE.format(way="forward mode (jvp)"))
    return _differentiable(values if is_direct(*tensors) else _dispatch_below, call, tensors)


def _differentiable(run: Callable[[Call], Result], call: Call, tensors: tuple[Tensor | None, ...]) -> Result:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return _FirstOrder.apply(run, call, *tensors)
    return run(call)


def _dispatch_below(call: Call) -> Result:
    with torch_private.below_autograd():
        return _dispatch(call)


_NETWORKS = "Tensor q, Tensor k, Tensor u, Tensor v"
_FORWARD = '*, bool? deterministic=None, str backend="auto", str activation="silu"'
_BACKWARD = 'bool deterministic=False, *, str backend="auto", bool[2] needs=[True, True], str activation="silu"'
_GRADS = "Tensor dq, Tensor dk, Tensor du, Tensor dv"
_RUN = (values, _fake, _in_graph, _above_autograd)
for _prefix, _gate, _of_gate, _tokens in (
    ("", "Tensor? r=None", "Tensor dr", (0, 4)), ("gated_", "Tensor w, float eps", "Tensor dw", (0,)),
):  # fmt: skip
    # Under autocast q, k, u and v go to its dtype; r and w keep theirs, or go to float32. In backward nothing is cast.
    define(f"{_prefix}forward", f"({_NETWORKS}, {_gate}, {_FORWARD}) -> Tensor", _describe, *_RUN, casts="qkuv")
    _signature = f"(Tensor grad_out, {_NETWORKS}, {_gate}, {_BACKWARD}) -> ({_GRADS}, {_of_gate})"
    define(f"{_prefix}backward", _signature, _describe_backward, *_RUN)
    register_vmap(f"{_prefix}forward", *_tokens)
    register_vmap(f"{_prefix}backward")
_PACKED = "Tensor q, Tensor k8, Tensor u8, Tensor v8, Tensor scales"
for _name, _gate, _tokens in (
    ("fp8_forward", "Tensor? r=None", (0, 5)), ("fp8_gated_forward", "Tensor w, float eps", (0,)),
):  # fmt: skip
    _signature = f'({_PACKED}, {_gate}, *, str backend="auto") -> Tensor'
    define(_name, _signature, _describe, values, _fake, _in_graph, casts="q")
    register_vmap(_name, *_tokens)


# What Python calls: the dispatcher's operators, or the definition without the dispatcher, as exporters want it


def _definition(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, activation: str) -> Tensor:
    if torch_private.autocasts(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, u, v = (cast(x, dtype) for x in (q, k, u, v))
        r = Router(widen(r.w, dtype), r.eps) if isinstance(r, Router) else widen(r, dtype)
        with torch.autocast(q.device.type, enabled=False):
            return _definition(q, k, u, v, r, activation)
    return values(Call(q, (k, u, v), r, REFERENCE, Settings(activation=activation)))


def flash_mhf(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None = None, *, backend: str = "auto",
    deterministic: bool | None = None, activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Compute S[t,h] = sum_e R[t,h,e] (SiLU(Q K_e^T) * (Q U_e^T)) V_e without the T x d_ff intermediate (paper, 3.2).

    Args:
        q: [..., H, d_h], any leading dimensions; bf16, fp16, fp32 or fp64 (see ``flashmhf.info``).
        k, u, v: [H_kv, E, d_e, d_h], contiguous, q's dtype. Head h of q takes head h // (H / H_kv).
        r: gate values [..., H, E], float32 or q's dtype; None stands for weights of 1.
        backend: "auto" (the first of hopper, triton, eager that supports the call), one of these, or "reference": the
            definition, which materialises T x d_ff and which PyTorch differentiates and transforms in every way.
        deterministic: whether gradients are bitwise equal from run to run; None follows
            ``torch.are_deterministic_algorithms_enabled()``, read now.
        activation: "silu" (the paper's), "gelu" (with erf), "relu" or "relu2" (its square); hopper has "silu" only.

    Returns [..., H, d_h] in q's dtype, contiguous; differentiable once (with "reference" any number of times). Raises
    TypeError (dtypes, non-tensors), ValueError (shapes, strides, devices, unknown back end), NotImplementedError (an
    explicit back end that cannot run), each naming the argument, what it got and what is supported.
    """
    checks.strided(q=q, k=k, u=u, v=v, **({} if r is None else {"r": r}))
    checks.instance("backend", backend, str)  # the dispatcher would raise a RuntimeError
    checks.instance("activation", activation, str)
    checks.instance("deterministic", deterministic, bool | None, "a bool or None")
    if backend == REFERENCE:
        return _definition(q, k, u, v, r, activation)
    how = {"deterministic": deterministic, "backend": backend, "activation": activation}
    return torch.ops.flashmhf.forward(q, k, u, v, r, **how)


def gated_flash_mhf(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, w: Tensor, eps: float, *, backend: str = "auto",
    deterministic: bool | None = None, activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Compute :func:`flash_mhf` with r = gate(q, w, eps), w [H, d_h, E]: on the hopper back end in the same kernel."""
    if backend == REFERENCE:
        return _definition(q, k, u, v, Router(w, eps), activation)
    how = {"deterministic": deterministic, "backend": backend, "activation": activation}
    watched = not is_direct(q, k, u, v, w) or torch_private.is_profiled() or torch_private.autocasts(q.device.type)
    if not watched:
        call = _describe(q, k=k, u=u, v=v, w=w, eps=eps, **how)
        return _differentiable(values, call, (q, k, u, v, w, None))
    return torch.ops.flashmhf.gated_forward(q, k, u, v, w, eps, **how)
