"""The definition: FlashMHF's forward, router and all gradients, materialised, in any floating dtype.

Everything else in the package is tested against these formulae in float64. In a lower precision the same code is the
"same-precision materialising PyTorch code" of the numeric rule: it stores the intermediate of T x d_ff per head.

Legend: T tokens (any leading dimensions), H heads, E sub-networks, J = d_e width of a sub-network, D = d_h head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _scores(q: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("...hd,hejd->...hej", q, weight)


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None = None) -> Tensor:
    """S[t,h] = sum_e R[t,h,e] (SiLU(Q K_e^T) * (Q U_e^T)) V_e (paper, section 3.2).

    q [..., H, D]; k, u, v [H, E, J, D]; r [..., H, E] or None (weights 1). Returns [..., H, D] in q's dtype.
    """
    activation = torch.nn.functional.silu(_scores(q, k)) * _scores(q, u)
    if r is not None:
        activation = (activation * r[..., None]).to(q.dtype)
    return torch.einsum("...hej,hejd->...hd", activation, v)


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward` written out (paper, appendix on the backward pass).

    Returns dq, dk, du, dv in q's dtype and dr in r's dtype (an empty tensor when r is None).
    """
    m, n, g = _scores(q, k), _scores(q, u), _scores(grad_out, v)
    s = torch.sigmoid(m)
    a = m * s
    weight = 1 if r is None else r[..., None]
    dn = (g * a * weight).to(q.dtype)
    dm = (g * n * (s + a * (1 - s)) * weight).to(q.dtype)
    p = (a * n * weight).to(q.dtype)
    dq = torch.einsum("...hej,hejd->...hd", dm, k) + torch.einsum("...hej,hejd->...hd", dn, u)
    dk = torch.einsum("...hej,...hd->hejd", dm, q)
    du = torch.einsum("...hej,...hd->hejd", dn, q)
    dv = torch.einsum("...hej,...hd->hejd", p, grad_out)
    dr = q.new_empty(0) if r is None else (g * a * n).sum(-1, dtype=torch.promote_types(r.dtype, torch.float32)).to(r.dtype)
    return dq, dk, du, dv, dr


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the router and all sums are formed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gate(q: Tensor, w: Tensor, eps: float = 1e-20) -> Tensor:
    """R[t,h,e] = sigmoid(P) / (sum_e sigmoid(P) + eps), P = Q_h W_h (paper, equation for the gating weights).

    q [..., H, D], w [H, D, E]. Returns [..., H, E] in float32 (float64 for float64 inputs).
    """
    dtype = accumulate_dtype(q.dtype)
    score = torch.sigmoid(torch.einsum("...hd,hde->...he", q.to(dtype), w.to(dtype)))
    return score / (score.sum(-1, keepdim=True) + eps)


def gate_backward(grad_r: Tensor, q: Tensor, w: Tensor, eps: float = 1e-20) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`gate`: (dq [..., H, D], dw [H, D, E]), both in the accumulation dtype."""
    dtype = accumulate_dtype(q.dtype)
    score = torch.sigmoid(torch.einsum("...hd,hde->...he", q.to(dtype), w.to(dtype)))
    total = score.sum(-1, keepdim=True) + eps
    grad_r = grad_r.to(dtype)
    grad_score = (grad_r - (grad_r * score).sum(-1, keepdim=True) / total) / total
    grad_p = grad_score * score * (1 - score)
    dq = torch.einsum("...he,hde->...hd", grad_p, w.to(dtype))
    dw = torch.einsum("...he,...hd->hde", grad_p, q.to(dtype))
    return dq, dw
