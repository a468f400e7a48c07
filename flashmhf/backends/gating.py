"""The router for back ends without a fused one, over blocks of tokens, which bound the fp32 copy of Q."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import reference
from .contract import Gate, Gradients, Router, Settings
from .tokens import TokenRows, token_count

TOKENS = 4096


def _blocks(tokens: int) -> list[slice]:
    return [slice(start, min(start + TOKENS, tokens)) for start in range(0, tokens, TOKENS)]


def gate(q: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return R [..., H, E] in the accumulation dtype, without autograd."""
    r = torch.empty((*q.shape[:-1], w.shape[2]), dtype=reference.accumulate_dtype(q.dtype), device=q.device)
    rows, r_rows = TokenRows(q), r.view(-1, *r.shape[-2:])
    for block in _blocks(token_count(q)):
        r_rows[block] = reference.gate(rows[block], w, eps)
    return r


def gate_backward(grad_r: Tensor, q: Tensor, w: Tensor, eps: float, dq: Tensor, needs_weights: bool) -> Tensor:
    """Add the router's part into dq [..., H, d_h] (contiguous); return dw in w's dtype, or an empty tensor in q's."""
    rows, grad_rows, dq_rows = TokenRows(q), grad_r.view(-1, *grad_r.shape[-2:]), dq.view(-1, *dq.shape[-2:])
    total = torch.zeros(w.shape, dtype=reference.accumulate_dtype(q.dtype), device=w.device)
    for block in _blocks(token_count(q)):
        dq_gate, dw = reference.gate_backward(grad_rows[block], rows[block], w, eps)
        dq_rows[block] += dq_gate
        total += dw
    return total.to(w.dtype) if needs_weights else q.new_empty(0)


def values(q: Tensor, r: Gate) -> Tensor | None:
    """Return R, computed if the gate is a router."""
    return gate(q, *r) if isinstance(r, Router) else r


def through_router(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Return ``backward`` from one that takes R: dr feeds dw and dq, which is rounded to q's dtype once, at the end."""

    def routed(grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings) -> Gradients:
        if not isinstance(r, Router):
            return backward(grad_out, q, k, u, v, r, settings, q.dtype)
        needs_tokens, needs_weights = settings.needs
        settings, dq_dtype = settings._replace(needs=(True, needs_weights)), reference.accumulate_dtype(q.dtype)
        dq, dk, du, dv, dr = backward(grad_out, q, k, u, v, gate(q, *r), settings, dq_dtype)
        dw = gate_backward(dr, q, *r, dq, needs_weights)
        return dq.to(q.dtype) if needs_tokens else q.new_empty(0), dk, du, dv, dw

    return routed
