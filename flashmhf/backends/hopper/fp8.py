"""FP8 forward by the kernels of ``csrc/forward``, and the whole layer by one operator, ``csrc/layer``."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import hopper
from ..contract import Gate, LayerWeights, Router
from ..hopper import why_not

__all__ = ["forward", "layer", "why_not"]


def forward(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Gate) -> Tensor:
    r, w, eps = (None, *r) if isinstance(r, Router) else (r, None, 0.0)
    hopper.check_layout(q, r, k8=k8, u8=u8, v8=v8)
    return torch.ops.flashmhf_hopper.fp8_forward(q, k8, u8, v8, scales, r, w, eps)


def layer(x: Tensor, weights: LayerWeights) -> Tensor | None:
    """As :func:`flashmhf.backends.hopper.layer`, with K, U and V in e4m3."""
    (in_w, in_bias), packed, router, eps, (out_w, out_bias), q_norm, q_norm_eps = weights
    if router is None:
        return None
    return torch.ops.flashmhf_hopper.fp8_layer(x, in_w, in_bias, q_norm, q_norm_eps, *packed, router, eps, out_w, out_bias)
