"""``backend="reference"``: the definition (``flashmhf.reference``) as a back end. It materialises the T x d_ff intermediate per head.

``backend="auto"`` never selects it. ``flashmhf.ops.mix`` calls these functions above autograd. They consist of operations that PyTorch
differentiates any number of times, transforms (torch.func) and exports.
"""

from __future__ import annotations

from torch import Tensor

from .. import reference
from .contract import Gate, Gradients, Router, Settings, Sums, layer, why_not  # noqa: F401  (layer and why_not are this back end's too)


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings) -> Tensor:
    """Return S [..., H, d_h] in q's dtype, contiguous (paper, section 3.2)."""
    r = reference.gate(q, *r) if isinstance(r, Router) else r
    return reference.forward(q, k, u, v, r, activation=settings.activation).contiguous()


def backward(grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings, into: Sums = None) -> Gradients:
    values = reference.gate(q, *r) if isinstance(r, Router) else r
    dq, dk, du, dv, dr = reference.backward(grad_out, q, k, u, v, values, activation=settings.activation)
    if isinstance(r, Router):
        dq_gate, dw = reference.gate_backward(dr, q, *r)
        return _select(q, settings.needs, ((dq + dq_gate).to(q.dtype),), (dk, du, dv, dw.to(r.w.dtype)))
    results = _select(q, settings.needs, (dq, dr), (dk, du, dv))
    if into is None or not settings.needs[1]:
        return results
    for total, grad in zip(into, results[1:4], strict=True):
        total += grad
    return results[0], *into, results[4]


def _select(q: Tensor, needs: tuple[bool, bool], tokens: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the first of ``tokens``, ``weights``, the rest of ``tokens``; contiguous, and empty where not needed."""
    none = q.new_empty(0)
    first, *rest = (x.contiguous() if needs[0] else none for x in tokens)
    return (first, *(x.contiguous() if needs[1] else none for x in weights), *rest)
