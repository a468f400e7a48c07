"""FP8 forward by the kernels of ``csrc/forward``, projections and the whole layer by those of ``csrc/project`` and ``csrc/layer``."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import fp8_linear as definition
from .. import hopper
from ..contract import LayerWeights


def why_not(device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int, activation: str = "silu") -> str | None:
    """None when the Hopper kernels can run, else the reason, naming the argument, its value and what is supported."""
    return hopper.why_not(device, dtype, d_h=d_h, d_e=d_e)


def forward(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Tensor | None) -> Tensor:
    hopper.check_layout(q, r, k8=k8, u8=u8, v8=v8)
    return torch.ops.flashmhf_hopper.fp8_forward(q, k8, u8, v8, scales, r, None, 0.0)


def gated_forward(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, w: Tensor, eps: float) -> Tensor:
    """The kernel computes the gate itself."""
    hopper.check_layout(q, None, k8=k8, u8=u8, v8=v8)
    return torch.ops.flashmhf_hopper.fp8_forward(q, k8, u8, v8, scales, None, w, eps)


def _readable(rows: Tensor) -> bool:
    """Whether the kernels read rows [T, K] where they lie."""
    size = rows.element_size()
    strided = len(rows) <= 1 or (rows.stride(0) > 0 and rows.stride(0) * size % hopper.TMA_ALIGNMENT == 0)
    return rows.stride(1) == 1 and strided and rows.data_ptr() % hopper.TMA_ALIGNMENT == 0


def linear(x: Tensor, weight8: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Many tokens by quantised rows and ``torch._scaled_mm``; few tokens, and sizes that it does not take, by the definition."""
    features, inner = weight8.shape
    multiple = definition.SCALED_MM_MULTIPLE
    if len(x) <= definition.FEW_TOKENS or features % multiple or inner % multiple:
        return definition.linear(x, weight8, scale, bias)
    if weight8.data_ptr() % hopper.TMA_ALIGNMENT:
        raise ValueError(f"weight8 has storage offset {weight8.storage_offset()}; the hopper back end supports multiples of 16 bytes")
    rows = x if _readable(x) else x.clone(memory_format=torch.contiguous_format)
    return definition.scaled_product(*torch.ops.flashmhf_hopper.quantise_rows(rows), weight8, scale, bias, x.dtype)


def layer(x: Tensor, weights: LayerWeights) -> Tensor | None:
    """As :func:`flashmhf.backends.hopper.layer`, with K, U and V in e4m3 and projections in either type."""
    (in_w, in_bias, in_scale), packed, router, eps, (out_w, out_bias, out_scale), q_norm, q_norm_eps = weights
    if router is None:
        return None
    return torch.ops.flashmhf_hopper.fp8_layer(
        x, in_w, in_scale, in_bias, q_norm, q_norm_eps, *packed, router, eps, out_w, out_scale, out_bias
    )
