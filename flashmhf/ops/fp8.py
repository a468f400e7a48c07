"""``torch.ops.flashmhf.fp8_forward`` and ``fp8_gated_forward``: inference with K, U and V in e4m3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import backends, checks
from ..backends.contract import Gate, Router
from ..backends.fp8_layout import check_packed
from .library import define


def check_operands(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor) -> None:
    """Raise for operands of ``fp8_forward`` that do not belong together, by their names."""
    checks.tensors(q=q)
    check_packed(k8, u8, v8, scales)
    checks.floating("q", q)
    checks.expect_device("q", q, k8, of="k8")
    if q.dim() < 2 or q.shape[-2] < 1 or q.shape[-2] % k8.shape[0] or q.shape[-1] != k8.shape[3]:
        raise ValueError(
            f"q has shape {list(q.shape)}; expected [..., H, d_h] with H a multiple of H_kv = {k8.shape[0]} and d_h = {k8.shape[3]} from k8"
        )


def _check(q: Tensor, packed: tuple[Tensor, ...], r: Gate) -> None:
    check_operands(q, *packed)
    checks.gate(q, packed[0], r)


def _define(schema: str, gate: Callable[..., Gate]) -> None:
    def kernel(
        q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, *operands: Any, backend: str = "auto"
    ) -> Tensor:
        packed, r = (k8, u8, v8, scales), gate(*operands)
        _check(q, packed, r)
        chosen = backends.select_fp8(backend, q.device, q.dtype, k8.shape[3], k8.shape[2])
        return chosen.forward(q, *packed, r) if q.numel() else torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def fake(
        q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, *operands: Any, backend: str = "auto"
    ) -> Tensor:
        _check(q, (k8, u8, v8, scales), gate(*operands))
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)

    define(schema, kernel, fake, casts="q")


_OPERANDS = "Tensor q, Tensor k8, Tensor u8, Tensor v8, Tensor scales"
_define(f'fp8_forward({_OPERANDS}, Tensor? r=None, *, str backend="auto") -> Tensor', lambda r=None: r)
_define(f'fp8_gated_forward({_OPERANDS}, Tensor w, float eps, *, str backend="auto") -> Tensor', Router)
