"""x W^T + b with W in e4m3 and a scale for each of its rows, in PyTorch operations on any device: what tests compare with.

Quantisation points: x of at most FEW_TOKENS rows stays as it is, and only W is quantised. Of more rows x is quantised row by row as it
comes. With few tokens the time is spent reading W, so that quantising x would save nothing and only add its error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_layout import E4M3_MAX, TINIEST_SCALE, to_e4m3

FEW_TOKENS = 512  # csrc/layer/op.cpp has the same number
SCALED_MM_CAPABILITY = (8, 9)
SCALED_MM_MULTIPLE = 16  # of the sizes of a product


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> (e4m3 [..., K], scale [..., 1] float32): the largest value of a row becomes 448."""
    scale = (x.abs().amax(-1, keepdim=True).float() / E4M3_MAX).clamp_min(TINIEST_SCALE)
    return to_e4m3(x.float() / scale), scale


def linear(x: Tensor, weight8: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], weight8 [N, K] e4m3, scale [N, 1] float32, bias [N] -> [T, N] in x's dtype."""
    if len(x) > FEW_TOKENS:
        return scaled_product(*quantise_rows(x), weight8, scale, bias, x.dtype)
    if x.is_cuda and x.element_size() == 2 and torch.version.hip is None:  # e4m3 values are exact in 16 bits, and sums are float32
        return _finish(torch.mm(x, weight8.to(x.dtype).t(), out_dtype=torch.float32) * scale.t(), bias, x.dtype)
    return _finish((x.float() @ weight8.float().t()) * scale.t(), bias, x.dtype)


def scaled_product(x8: Tensor, x_scale: Tensor, weight8: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(x_scale x8) (scale weight8)^T + bias in ``dtype``, for e4m3 x8 [T, K] with x_scale [T, 1].

    By ``torch._scaled_mm`` where the device has e4m3 products (capability 8.9 and later) and the sizes are multiples of 16, which rounds to
    bf16; elsewhere the same values are multiplied in float32.
    """
    if _has_scaled_mm(x8.device) and not (weight8.shape[0] % SCALED_MM_MULTIPLE or weight8.shape[1] % SCALED_MM_MULTIPLE):
        out = torch._scaled_mm(x8, weight8.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    else:
        out = (x8.float() @ weight8.float().t()) * x_scale * scale.t()
    return _finish(out, bias, dtype)


def _finish(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (out if bias is None else out + bias).to(dtype)


def _has_scaled_mm(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= SCALED_MM_CAPABILITY
