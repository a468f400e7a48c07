"""``torch.ops.flashmhf.fp8_forward`` and ``fp8_gated_forward``: inference with K, U and V in e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, checks
from ..backends.contract import Fp8Backend
from ..backends.fp8_layout import check_packed
from .library import define

_OPERANDS = "Tensor q, Tensor k8, Tensor u8, Tensor v8, Tensor scales"


def check_operands(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor) -> None:
    """Raise for operands of ``fp8_forward`` that do not belong together, by their names."""
    checks.tensors(q=q)
    check_packed(k8, u8, v8, scales)
    checks.floating("q", q)
    if q.device != k8.device:
        raise ValueError(f"q is on {q.device} but k8 is on {k8.device}; all tensors must be on one device")
    if q.dim() < 2 or q.shape[-2] < 1 or q.shape[-2] % k8.shape[0] or q.shape[-1] != k8.shape[3]:
        raise ValueError(
            f"q has shape {list(q.shape)}; expected [..., H, d_h] with H a multiple of H_kv = {k8.shape[0]} and d_h = {k8.shape[3]} from k8"
        )


def _back_end(q: Tensor, k8: Tensor, backend: str) -> Fp8Backend:
    return backends.select_fp8(backend, q.device, q.dtype, k8.shape[3], k8.shape[2])


def _forward(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    check_operands(q, k8, u8, v8, scales)
    checks.weights(q, k8, r)
    chosen = _back_end(q, k8, backend)
    return chosen.forward(q, k8, u8, v8, scales, r) if q.numel() else torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_forward(
    q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    check_operands(q, k8, u8, v8, scales)
    checks.weights(q, k8, r)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def gated_forward(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, w: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """Run the kernel of ``fp8_gated_forward``: the operator without the dispatcher."""
    check_operands(q, k8, u8, v8, scales)
    checks.router(q, w, eps, k8)
    chosen = _back_end(q, k8, backend)
    return chosen.gated_forward(q, k8, u8, v8, scales, w, eps) if q.numel() else torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_gated_forward(
    q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, w: Tensor, eps: float, *, backend: str = "auto"
) -> Tensor:
    check_operands(q, k8, u8, v8, scales)
    checks.router(q, w, eps, k8)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


define(f'fp8_forward({_OPERANDS}, Tensor? r=None, *, str backend="auto") -> Tensor', _forward, _fake_forward, casts="q")
define(
    f'fp8_gated_forward({_OPERANDS}, Tensor w, float eps, *, str backend="auto") -> Tensor', gated_forward, _fake_gated_forward, casts="q"
)
