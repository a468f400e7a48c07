"""FP8 forward by the kernels of ``csrc/forward``; the whole layer is one operator, as in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import hopper
from ..contract import Gate, Router
from ..hopper import layer, why_not

__all__ = ["forward", "layer", "why_not"]


def forward(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Gate) -> Tensor:
    gate = (None, *r) if isinstance(r, Router) else (r, None, 0.0)
    op = torch.ops.flashmhf_hopper.fp8_forward
    return hopper.call(op, (q, k8, u8, v8, scales, *gate), q, r, k8, u8, v8, scales)
