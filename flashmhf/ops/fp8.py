"""``torch.ops.flashmhf.fp8_forward`` and ``fp8_gated_forward``: inference with K, U and V in e4m3."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends, checks
from ..backends.contract import Gate, Router
from ..backends.fp8_layout import check_packed
from ..backends.hopper import fp8 as hopper_fp8
from .library import define


class Call(NamedTuple):
    """One call of an operator: the operands of a back end's ``forward``."""

    q: Tensor
    packed: tuple[Tensor, Tensor, Tensor, Tensor]  # k8, u8, v8, scales
    r: Gate
    backend: str


def _forward(
    q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Tensor | None = None, *, backend: str = "auto"
) -> Call:
    return Call(q, (k8, u8, v8, scales), r, backend)


def _gated_forward(
    q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, w: Tensor, eps: float, *, backend: str = "auto"
) -> Call:
    return Call(q, (k8, u8, v8, scales), Router(w, eps), backend)


def check_operands(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor) -> None:
    """Raise for operands of ``fp8_forward`` that do not belong together, by their names."""
    checks.tensors(q=q)
    check_packed(k8, u8, v8, scales)
    checks.floating("q", q)
    checks.expect_device("q", q, k8, of="k8")
    if q.dim() < 2 or q.shape[-2] < 1 or q.shape[-2] % k8.shape[0] or q.shape[-1] != k8.shape[3]:
        expected = f"H a multiple of H_kv = {k8.shape[0]} and d_h = {k8.shape[3]} from k8"
        raise ValueError(f"q has shape {list(q.shape)}; expected [..., H, d_h] with {expected}")


def _fake(call: Call) -> Tensor:
    check_operands(call.q, *call.packed)
    checks.gate(call.q, call.packed[0], call.r)
    backends.hopper.load_for(call.q)
    return torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)


def values(call: Call) -> Tensor:
    """Check the call, run its back end and return the result."""
    q, packed, r, backend = call
    check_operands(q, *packed)
    checks.gate(q, packed[0], r)
    _, _, d_e, d_h = packed[0].shape
    chosen = backends.select_fp8(backend, q.device, q.dtype, d_h, d_e)
    return chosen.forward(q, *packed, r) if q.numel() else torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _in_graph(call: Call) -> Tensor | None:
    q, packed, r, backend = call
    k8, u8, v8, _ = packed
    if not backends.chooses_hopper(backend, q.device, q.dtype, k8.shape[3], k8.shape[2]):
        return None
    return hopper_fp8.forward(q, *packed, r) if backends.hopper.reads(q, r, k8=k8, u8=u8, v8=v8) else None


_OPERANDS = "Tensor q, Tensor k8, Tensor u8, Tensor v8, Tensor scales"
_SETTINGS = '*, str backend="auto"'
_PLAIN, _GATED = (f"({_OPERANDS}, {gate}, {_SETTINGS}) -> Tensor" for gate in ("Tensor? r=None", "Tensor w, float eps"))
define("fp8_forward", _PLAIN, _forward, values, _fake, _in_graph, casts="q")
define("fp8_gated_forward", _GATED, _gated_forward, values, _fake, _in_graph, casts="q")
