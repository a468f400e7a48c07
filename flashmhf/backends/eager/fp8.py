"""FP8 forward in PyTorch operations on any device, which tests compare with: the kernels' quantisation, sums in fp32.

With the unit of a token and head, q8 = e4m3(q / unit), m = q8 k8 and n = q8 u8:

    a8  = e4m3(m (1 + tanh(unit k_scale m / 2)) n)
    out = sum_e r_e (unit^2 / 2) k_scale u_scale_e v_scale_e (a8 v8)

The unit makes the largest of q8 a power of two and the norm of q8 more than 2 and at most 4, so that the root mean
square of a8 is 4 to 16 whatever the size of q. The gate multiplies sums, so a8 does not depend on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference
from ..contract import Gate, Router, layer, why_not
from ..fp8_layout import permutation, to_e4m3
from ..tokens import token_count

__all__ = ["forward", "layer", "why_not"]
Q_NORM = 4.0  # of q8, at most
TINIEST = 1e-18  # instead of max |q| of a row of zeros
BLOCK_ELEMENTS = 1 << 22  # of a block's intermediate [tokens, d_e]


def quantise_q(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (q8 in ``dtype``, unit [..., 1] float32) for q [..., d_h]."""
    q = q.float()
    largest = q.abs().amax(-1, keepdim=True).clamp_min(TINIEST)
    norm = (q / largest).square().sum(-1, keepdim=True).clamp_min(1.0).sqrt()
    _, exponent = torch.frexp(1 / norm)  # 1 / norm is in [2^(exponent - 1), 2^exponent)
    unit = torch.ldexp(largest, 1 - exponent) / Q_NORM
    return to_e4m3(q / unit).to(dtype), unit


def inter(q8: Tensor, unit: Tensor, k: Tensor, u: Tensor, k_scale: Tensor) -> Tensor:
    """Return A before its rounding to e4m3 [T, d_e], for q8 [T, d_h] and the values k, u [d_e, d_h] of k8 and u8."""
    m, n = q8 @ k.T, q8 @ u.T
    return m * (1 + torch.tanh(0.5 * unit * k_scale * m)) * n


def forward(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Gate) -> Tensor:
    """Return S [..., H, d_h] in q's dtype."""
    gates = reference.gate(q, *r) if isinstance(r, Router) else r
    return _forward(q, k8, u8, v8, scales, gates, torch.float32).to(q.dtype)


def _forward(
    q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Tensor | None, dtype: torch.dtype
) -> Tensor:
    tokens, heads = token_count(q), q.shape[-2]
    group, (_, subnets, subnet_dim, head_dim) = heads // k8.shape[0], k8.shape
    over_heads, over_inter = (permutation(size, q.device).argsort() for size in (head_dim, subnet_dim))
    rows = q.reshape(tokens, heads, head_dim)
    gates = None if r is None else r.reshape(tokens, heads, subnets)
    out = torch.zeros(tokens, heads, head_dim, dtype=dtype, device=q.device)
    step = max(1, BLOCK_ELEMENTS // subnet_dim)
    for head in range(heads):
        for e in range(subnets):
            at = head // group, e
            k, u, v = k8[at].to(dtype)[:, over_heads], u8[at].to(dtype)[:, over_heads], v8[at].to(dtype)[:, over_inter]
            k_scale, u_scale, v_scale = scales[(slice(None), *at)].unbind()
            for low in range(0, tokens, step):
                block = slice(low, low + step)
                q8, unit = quantise_q(rows[block, head], dtype)
                a = inter(q8, unit, k, u, k_scale)
                factor = (unit.to(dtype) ** 2 / 2) * (k_scale * u_scale * v_scale).to(dtype)
                if gates is not None:
                    factor = factor * gates[block, head, e, None].to(dtype)
                out[block, head] += factor * (to_e4m3(a).to(dtype) @ v.T)
    return out.view(q.shape)
