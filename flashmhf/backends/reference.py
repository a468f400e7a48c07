"""``backend="reference"``: the definition, materialised, as a back end, which ``ops.networks`` calls above autograd."""

from __future__ import annotations

from torch import Tensor

from .. import reference
from .contract import Gate, Gradients, Router, Settings, layer, why_not  # noqa: F401  (layer and why_not are this back end's too)


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings) -> Tensor:
    """Return S [..., H, d_h] in q's dtype, contiguous (paper, section 3.2)."""
    r = reference.gate(q, *r) if isinstance(r, Router) else r
    return reference.forward(q, k, u, v, r, activation=settings.activation).contiguous()


def backward(grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings) -> Gradients:
    values = reference.gate(q, *r) if isinstance(r, Router) else r
    dq, dk, du, dv, of_gate = reference.backward(grad_out, q, k, u, v, values, activation=settings.activation)
    tokens, weights = settings.needs
    needs = (tokens, weights, weights, weights, weights if isinstance(r, Router) else tokens)
    if isinstance(r, Router):
        dq_gate, dw = reference.gate_backward(of_gate, q, *r)
        dq, of_gate = (dq + dq_gate).to(q.dtype), dw.to(r.w.dtype)
    results = (dq, dk, du, dv, of_gate)
    return tuple(x.contiguous() if need else q.new_empty(0) for x, need in zip(results, needs, strict=True))
