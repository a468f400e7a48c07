"""The definition: FlashMHF's forward, router and all gradients, materialised, in any floating dtype.

Everything else is tested against these formulae in float64; in a lower precision they are the "same-precision
materialising PyTorch code" of the numeric rule.

Legend: T tokens (any leading dimensions), H heads, E sub-networks, J = d_e, D = d_h. K, U and V have H_kv heads: heads
of q with equal h // (H / H_kv) share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _silu(m: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(m)
    a = m * s
    return a, s + a * (1 - s)


def _gelu(m: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(m * math.sqrt(0.5)))
    return m * cdf, cdf + m * torch.exp(-0.5 * m * m) * (1 / math.sqrt(2 * math.pi))


def _relu(m: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(m), (m > 0).to(m.dtype)


def _relu2(m: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.relu(m)
    return a * a, 2 * a


# name -> (the function, the function with its slope). 0 maps to 0 in all of them: units of zero weights add nothing.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "silu": (torch.nn.functional.silu, _silu), "gelu": (torch.nn.functional.gelu, _gelu), "relu": (torch.relu, _relu),
    "relu2": (lambda m: torch.relu(m).square(), _relu2),
}  # fmt: skip


def _by_group(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., H, c] as [..., H_kv, g, c], for the heads H_kv of ``weight``."""
    return x.unflatten(-2, (weight.shape[0], -1))


def _scores(q: Tensor, weight: Tensor) -> Tensor:
    """Return the scores [..., H_kv, g, E, J] for q [..., H_kv, g, D]."""
    return torch.einsum("...hgd,hejd->...hgej", q, weight)


def _sum_over_units(activation: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over the units [..., H, D] for an activation [..., H_kv, g, E, J]."""
    return torch.einsum("...hgej,hejd->...hgd", activation, weight).flatten(-3, -2)


def _sum_over_tokens(activation: Tensor, x: Tensor) -> Tensor:
    """Return the sum over tokens and the heads of a group, [H_kv, E, J, D], for x [..., H_kv, g, D]."""
    return torch.einsum("...hgej,...hgd->hejd", activation, x)


def normalise_heads(q: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise q [..., H, D] over D (RMS) with weight [H, D], in fp32 (fp64 for fp64), into q's dtype."""
    if weight.shape != q.shape[-2:]:  # it might be broadcast
        raise ValueError(f"q_norm has shape {list(weight.shape)}; expected {list(q.shape[-2:])} ([H, d_h])")
    x = q.to(accumulate_dtype(q.dtype))
    return (torch.rms_norm(x, x.shape[-1:], eps=eps) * weight.to(x.dtype)).to(q.dtype)


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    """Compute S[t,h] = sum_e R[t,h,e] (SiLU(Q K_e^T) * (Q U_e^T)) V_e (paper, section 3.2).

    q [..., H, D]; k, u, v [H_kv, E, J, D]; r [..., H, E], or None, which stands for weights of 1. Returns [..., H, D]
    in q's dtype. activation: a name of ACTIVATIONS in place of SiLU.
    """
    q = _by_group(q, k)
    p = ACTIVATIONS[activation][0](_scores(q, k)) * _scores(q, u)
    if r is not None:
        p = (p * _by_group(r, k)[..., None]).to(q.dtype)
    return _sum_over_units(p, v)


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None = None, *, activation: str = "silu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return :func:`forward`'s gradients (paper, appendix): dq, dk, du, dv in q's dtype, dr in r's (empty for None)."""
    q, grad_out = _by_group(q, k), _by_group(grad_out, k)
    m, n, g = _scores(q, k), _scores(q, u), _scores(grad_out, v)
    a, slope = ACTIVATIONS[activation][1](m)
    weight = 1 if r is None else _by_group(r, k)[..., None]
    dn = (g * a * weight).to(q.dtype)
    dm = (g * n * slope * weight).to(q.dtype)
    p = (a * n * weight).to(q.dtype)
    dq = _sum_over_units(dm, k) + _sum_over_units(dn, u)
    dk, du, dv = _sum_over_tokens(dm, q), _sum_over_tokens(dn, q), _sum_over_tokens(p, grad_out)
    if r is None:
        return dq, dk, du, dv, q.new_empty(0)
    dr = (g * a * n).sum(-1, dtype=torch.promote_types(r.dtype, torch.float32)).to(r.dtype)
    return dq, dk, du, dv, dr.flatten(-3, -2)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the router and all sums are formed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _gate_terms(q: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return sigmoid(P) [..., H, E] and its sum over the sub-networks plus eps, in the accumulation dtype."""
    dtype = accumulate_dtype(q.dtype)
    score = torch.sigmoid(torch.einsum("...hd,hde->...he", q.to(dtype), w.to(dtype)))
    return score, score.sum(-1, keepdim=True) + eps


def gate(q: Tensor, w: Tensor, eps: float = 1e-20) -> Tensor:
    """Compute R[t,h,e] = sigmoid(P) / (sum_e sigmoid(P) + eps), P = Q_h W_h (paper, equation for the gating weights). q
    [..., H, D], w [H, D, E]. Returns [..., H, E] in float32 (float64 for float64 inputs).
    """
    score, total = _gate_terms(q, w, eps)
    return score / total


def gate_backward(grad_r: Tensor, q: Tensor, w: Tensor, eps: float = 1e-20) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`gate`: (dq [..., H, D], dw [H, D, E]), both in the accumulation dtype."""
    score, total = _gate_terms(q, w, eps)
    grad_r = grad_r.to(score.dtype)
    grad_score = (grad_r - (grad_r * score).sum(-1, keepdim=True) / total) / total
    grad_p = grad_score * score * (1 - score)
    dq = torch.einsum("...he,hde->...hd", grad_p, w.to(score.dtype))
    dw = torch.einsum("...he,...hd->hde", grad_p, q.to(score.dtype))
    return dq, dw
