"""The public router function (paper, equation for the gating weights)."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from .. import checks, reference, torch_private
from .library import widen


def gate(q: Tensor, w: Tensor, eps: float = 1e-20) -> Tensor:
    """Compute R = sigmoid(P) / (sum_e sigmoid(P) + eps) with P = Q_h W_h, differentiable.

    q: [..., H, d_h]; w, the router's weights: [H, d_h, E], float32 or q's dtype; eps: the default agrees with the paper
    and with the official ``sum.clamp(min=1e-20)``. Returns [..., H, E] in float32 (float64 for float64 inputs). Raises
    TypeError for dtypes and non-tensors, ValueError for shapes, strides, devices and an eps that is negative or not
    finite.
    """
    checks.strided(q=q, w=w)
    checks.instance("eps", eps, Real, "a float")
    checks.floating("q", q)
    if q.dim() < 2:
        raise ValueError(f"q has shape {list(q.shape)}; expected at least two dimensions [..., H, d_h]")
    if torch_private.autocasts(q.device.type):  # torch.autocast refuses devices that have none, such as meta
        with torch.autocast(q.device.type, enabled=False):
            return gate(q, widen(w, q.dtype), eps)
    checks.router(q, w, eps)
    return reference.gate(q, w, eps)
