"""FP8 forward by the Triton kernel of ``fp8_kernels``: GPUs with e4m3 products, and Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import gating
from .. import triton as plain
from ..contract import Gate, layer

__all__ = ["HEAD_DIMS", "MIN_CAPABILITY", "forward", "layer", "why_not"]

HEAD_DIMS = tuple(size for size in plain.HEAD_DIMS if size >= 32)  # a product of e4m3 operands sums at least 32 terms
MIN_CAPABILITY = (8, 9)


def why_not(device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int, activation: str = "silu") -> str | None:
    """Return None if the Triton kernel can run, else why not: the argument, its value and what is supported."""
    if d_h not in HEAD_DIMS:
        return f"d_h is {d_h}; supported: {', '.join(map(str, HEAD_DIMS))}"
    reason = plain.why_not(device, dtype, d_h=d_h, d_e=d_e)
    if reason is not None or device.type != "cuda":
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY:
        return f"device has compute capability {major}.{minor}; supported for e4m3 products: 8.9 or later"
    return None


def forward(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Gate) -> Tensor:
    """Return S [..., H, d_h] in q's dtype, contiguous."""
    from . import fp8_kernels as fp8  # imports Triton, which need not be installed

    return fp8.forward(q, k8, u8, v8, scales, gating.values(q, r))
