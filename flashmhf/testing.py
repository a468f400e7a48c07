"""The tools that every check of a result shares.

The one numeric rule: the relative L2 error against float64 is at most that of the materialising PyTorch code in the
same precision and, on the fused GPU back ends, at most LIMITS. An error below FLOOR always passes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from . import reference

LIMITS = {torch.bfloat16: 2.6e-3, torch.float16: 3.5e-4, torch.float32: 1e-5}
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}
SMALL, SMALL_FACTOR = 4096, 1.5  # tensors of fewer elements: their errors scatter
# Of so few elements the materialising error is chance and sums can cancel: these limits only reject wrong results.
TINY, TINY_FACTOR = 256, 4.0
TINY_LIMITS = {torch.bfloat16: 0.065, torch.float16: 0.009, torch.float32: 2.5e-4, torch.float64: 1e-11}


def relative_l2(actual: Tensor, exact: Tensor) -> float:
    """Return ||actual - exact|| / ||exact|| in float64; infinite for anything not finite or of another shape."""
    if actual.shape != exact.shape or not torch.isfinite(actual).all():
        return math.inf
    difference, norm = (actual.double() - exact).norm().item(), exact.norm().item()
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def limit(
    baseline: Tensor, exact: Tensor, dtype: torch.dtype, *, fixed_limits: bool, few_tokens: bool = False
) -> float:
    """Return the largest relative L2 error that passes for a result of this dtype.

    baseline: the materialising result; exact: that in float64. fixed_limits: LIMITS apply, too (fused GPU back ends).
    few_tokens: a weight gradient of few tokens, so its errors scatter.
    """
    allowed = max(relative_l2(baseline, exact), FLOOR[dtype])
    if exact.numel() < TINY:
        return max(TINY_FACTOR * allowed, TINY_LIMITS[dtype])
    if few_tokens:
        return TINY_FACTOR * allowed
    if fixed_limits and dtype in LIMITS:
        allowed = min(allowed, LIMITS[dtype])
    return allowed * (SMALL_FACTOR if exact.numel() < SMALL else 1.0)


def fixed_limit(elements: int, dtype: torch.dtype, *, few_tokens: bool = False) -> float:
    """Return the largest error of a fused GPU back end for a tensor of so many elements, without a baseline."""
    if elements < TINY:
        return TINY_LIMITS[dtype]
    return LIMITS[dtype] * (TINY_FACTOR if few_tokens else SMALL_FACTOR if elements < SMALL else 1.0)


def assert_accurate(
    name: str, actual: Tensor, baseline: Tensor, exact: Tensor, *, fixed_limits: bool, few_tokens: bool = False
) -> None:
    """Raise AssertionError if ``actual`` exceeds :func:`limit`."""
    allowed = limit(baseline, exact, actual.dtype, fixed_limits=fixed_limits, few_tokens=few_tokens)
    error = relative_l2(actual, exact)
    if not error <= allowed:  # an assert statement would pass under python -O
        found = f"{name}: relative L2 error {error:.3e} exceeds {allowed:.3e}"
        raise AssertionError(f"{found} ({actual.dtype}, shape {list(actual.shape)})")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make uninitialised tensors, those of C++ included, start as NaN: an element that no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if not torch.utils.deterministic.fill_uninitialized_memory:
            raise RuntimeError("torch.utils.deterministic.fill_uninitialized_memory is off: memory is not poisoned")
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclass
class Problem:
    """Hold inputs of the operator with the exact (float64) and the materialising same-precision results.

    q, grad_out [..., H, d_h]; k, u, v [H_kv, E, d_e, d_h]; r [..., H, E] or None; w [H, d_h, E], the router's weights;
    eps, the router's; activation, a name of ``reference.ACTIVATIONS``.
    """

    q: Tensor
    k: Tensor
    u: Tensor
    v: Tensor
    r: Tensor | None
    w: Tensor
    grad_out: Tensor
    eps: float
    activation: str = "silu"

    @property
    def group(self) -> int:
        """Return H / H_kv, the heads that share a head of K, U and V."""
        return self.q.shape[-2] // self.k.shape[0]

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.u, self.v

    def _evaluate(self, function: Callable, *tensors) -> tuple:
        """Return (materialising result in the inputs' precision, exact result in float64) of a reference function."""
        function = partial(function, activation=self.activation)
        exact = function(*(x.double() if isinstance(x, Tensor) else x for x in tensors))
        return function(*tensors), exact

    def forward(self):
        return self._evaluate(reference.forward, *self.operands, self.r)

    def backward(self):
        return self._evaluate(reference.backward, self.grad_out, *self.operands, self.r)

    def exact_forward(self, rows: Tensor) -> Tensor:
        """Return the float64 output [rows, H, d_h] of some tokens, one head at a time: long inputs fit."""
        q, r = self.q.flatten(0, -3)[rows], None if self.r is None else self.r.flatten(0, -3)[rows]
        heads = []
        for head in range(q.shape[1]):
            one, kv = slice(head, head + 1), slice(head // self.group, head // self.group + 1)
            gate = None if r is None else r[:, one].double()
            operands = q[:, one].double(), *(x[kv].double() for x in (self.k, self.u, self.v)), gate
            heads.append(reference.forward(*operands, activation=self.activation))
        return torch.cat(heads, 1)

    def exact_backward(self, head: int) -> tuple[Tensor, ...]:
        """Return float64 dq [..., d_h], dk, du, dv [E, d_e, d_h], dr [..., E] of a head (H_kv = H); long inputs fit."""
        one = slice(head, head + 1)
        grad_out, q = self.grad_out[..., one, :].double(), self.q[..., one, :].double()
        parts = []
        for e in range(self.k.shape[1]):
            gate = None if self.r is None else self.r[..., one, e : e + 1].double()
            operands = q, *(x[one, e : e + 1].double() for x in (self.k, self.u, self.v)), gate
            parts.append(reference.backward(grad_out, *operands, activation=self.activation))
        dq, dk, du, dv, dr = zip(*parts, strict=True)
        weights = (torch.cat(x, 1)[0] for x in (dk, du, dv))
        return sum(dq)[..., 0, :], *weights, dr[0] if self.r is None else torch.cat(dr, -1)[..., 0, :]

    def routed(self) -> Problem:
        """Return the same problem with r by the router's definition from q and w, in float64."""
        return replace(self, r=reference.gate(self.q.double(), self.w.double(), self.eps))

    def exact_gated_backward(self, head: int) -> tuple[Tensor, ...]:
        """Return what :meth:`exact_backward` does, with the router's part in dq, and dw [d_h, E] in place of dr."""
        one = slice(head, head + 1)
        dq, dk, du, dv, dr = self.routed().exact_backward(head)
        q, w = self.q[..., one, :].double(), self.w[one].double()
        dq_gate, dw = reference.gate_backward(dr[..., None, :], q, w, self.eps)
        return dq + dq_gate[..., 0, :], dk, du, dv, dw[0]

    def gated_forward(self):
        return self._evaluate(gated_forward, *self.operands, self.w, self.eps)

    def gated_backward(self):
        return self._evaluate(gated_backward, self.grad_out, *self.operands, self.w, self.eps)


def gated_forward(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, w: Tensor, eps: float, *, activation: str = "silu"
) -> Tensor:
    """Compute router and operator, materialised, in the inputs' precision."""
    return reference.forward(q, k, u, v, reference.gate(q, w, eps), activation=activation)


def gated_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, w: Tensor, eps: float, *, activation: str = "silu"
) -> tuple[Tensor, ...]:
    """Return dq, dk, du, dv, dw of :func:`gated_forward`."""
    r = reference.gate(q, w, eps)
    dq, dk, du, dv, dr = reference.backward(grad_out, q, k, u, v, r, activation=activation)
    dq_gate, dw = reference.gate_backward(dr, q, w, eps)
    return dq + dq_gate.to(dq.dtype), dk, du, dv, dw.to(w.dtype)


def problem(
    leading: tuple[int, ...] | int, heads: int, head_dim: int, subnets: int, subnet_dim: int, dtype: torch.dtype,
    device: str | torch.device = "cpu", *, gate: str | None = "float32", scale: float = 1.0, mean_score: float = 0.0,
    seed: int = 0, num_kv_heads: int | None = None,
) -> Problem:  # fmt: skip
    """Draw random inputs: scores q.k of standard deviation ``scale`` around ``mean_score``.

    leading: q's dimensions before the heads, or the number of tokens. gate: r's and w's dtype, "float32" or "same" as
    q; None: no r. num_kv_heads: H_kv; None for ``heads``.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    leading = (leading,) if isinstance(leading, int) else leading

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64) * std

    q = normal(*leading, heads, head_dim, std=scale)
    shape = (num_kv_heads or heads, subnets, subnet_dim, head_dim)
    k, u = (normal(*shape, std=head_dim**-0.5) for _ in range(2))
    v = normal(*shape, std=(subnets * subnet_dim) ** -0.5)
    if mean_score:
        direction = torch.nn.functional.normalize(normal(head_dim), dim=0)
        shift = abs(mean_score) ** 0.5 * direction
        q, k = q + shift, k + math.copysign(1.0, mean_score) * shift
    w = normal(heads, head_dim, subnets, std=head_dim**-0.5)
    gate_dtype = {None: None, "float32": torch.float32 if dtype != torch.float64 else dtype, "same": dtype}[gate]
    r = None if gate_dtype is None else reference.gate(q, w).to(gate_dtype)
    q, k, u, v, grad_out = (x.to(dtype) for x in (q, k, u, v, normal(*leading, heads, head_dim)))
    # One sub-network under eps = 0 has weight 1 whatever w is, and dw = 0 has no relative error.
    return Problem(q, k, u, v, r, w.to(gate_dtype or dtype), grad_out, eps=0.25 if subnets == 1 else 1e-20)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture as torch.cuda.graph does, without the garbage collector: a graph that it resets ends the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        if enabled:
            gc.enable()
