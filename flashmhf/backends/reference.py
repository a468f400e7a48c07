"""``backend="reference"``: the definition (``flashmhf.reference``) as a back end. It materialises the T x d_ff intermediate per head.

``backend="auto"`` never selects it. ``flashmhf.ops.mix`` calls these functions above autograd. They consist of operations that PyTorch
differentiates any number of times, transforms (torch.func) and exports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from .contract import layer  # noqa: F401  (this back end has no operator for the whole layer)


def why_not(device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int, activation: str = "silu") -> str | None:
    """Every device, floating dtype, size and activation is supported."""
    return None


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, *, deterministic: bool, activation: str = "silu") -> Tensor:
    """S [..., H, d_h] in q's dtype, contiguous (paper, section 3.2)."""
    return reference.forward(q, k, u, v, r, activation=activation).contiguous()


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    r: Tensor | None,
    *,
    deterministic: bool,
    needs: tuple[bool, bool],
    activation: str = "silu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, du, dv, dr); what ``needs`` = (tokens, weights) leaves out is an empty tensor."""
    dq, dk, du, dv, dr = reference.backward(grad_out, q, k, u, v, r, activation=activation)
    return _select(q, needs, (dq, dr), (dk, du, dv))


def _select(q: Tensor, needs: tuple[bool, bool], tokens: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The first of ``tokens``, ``weights``, the rest of ``tokens``; contiguous, and empty where not needed."""
    none = q.new_empty(0)
    first, *rest = (x.contiguous() if needs[0] else none for x in tokens)
    return (first, *(x.contiguous() if needs[1] else none for x in weights), *rest)


def backward_accumulate_(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    r: Tensor | None,
    dk: Tensor,
    du: Tensor,
    dv: Tensor,
    *,
    deterministic: bool,
    needs: tuple[bool, bool],
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """(dq, dr); the weight gradients are added to the fp32 buffers dk, du, dv."""
    dq, *weight_grads, dr = backward(grad_out, q, k, u, v, r, deterministic=deterministic, needs=needs, activation=activation)
    if needs[1]:
        for buffer, grad in zip((dk, du, dv), weight_grads, strict=True):
            buffer += grad
    return dq, dr


def gated_forward(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, w: Tensor, eps: float, *, deterministic: bool, activation: str = "silu"
) -> Tensor:
    """:func:`forward` with R = gate(q, w, eps)."""
    return forward(q, k, u, v, reference.gate(q, w, eps), deterministic=deterministic, activation=activation)


def gated_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    w: Tensor,
    eps: float,
    *,
    deterministic: bool,
    needs: tuple[bool, bool],
    activation: str = "silu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, du, dv, dw); dq includes the gradient through the router."""
    dq, dk, du, dv, dr = reference.backward(grad_out, q, k, u, v, reference.gate(q, w, eps), activation=activation)
    dq_gate, dw = reference.gate_backward(dr, q, w, eps)
    return _select(q, needs, ((dq + dq_gate).to(q.dtype),), (dk, du, dv, dw.to(w.dtype)))
