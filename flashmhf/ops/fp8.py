"""``torch.ops.flashmhf.fp8_forward``, ``fp8_gated_forward`` and ``fp8_linear``: inference with weights in e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, checks
from ..backends.contract import Fp8Backend
from ..backends.fp8_layout import E4M3, check_packed
from .library import define

_OPERANDS = "Tensor q, Tensor k8, Tensor u8, Tensor v8, Tensor scales"
_ANY_SIZES = {"d_h": 64, "d_e": 16}  # a projection has neither: sizes that every back end takes


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


def check_linear(
    x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, names: tuple[str, str, str] = ("weight8", "scale", "bias")
) -> None:
    """Raise for operands of ``fp8_linear`` that do not belong together; ``names``: those of w, scale and bias."""
    weight_name, scale_name, bias_name = names
    given = {"x": x, weight_name: w, scale_name: scale} | ({} if bias is None else {bias_name: bias})
    checks.tensors(**given)
    checks.floating("x", x)
    dtypes = dict(zip(names, (E4M3, torch.float32, x.dtype), strict=True))
    for name, tensor in given.items():
        if name != "x" and tensor.dtype != dtypes[name]:
            raise TypeError(f"{name} has dtype {checks.name_of(tensor.dtype)}; supported: {checks.name_of(dtypes[name])}")
    for name, tensor in given.items():
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}; all tensors must be on one device")
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {list(x.shape)} and {weight_name} {list(w.shape)}; expected [..., K] and [N, K]")
    for name, shape in ((scale_name, (w.shape[0], 1)), (bias_name, (w.shape[0],))):
        if name in given and tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(given[name].shape)}; expected {list(shape)} from the rows of {weight_name}")
    for name in (weight_name, scale_name):
        if not given[name].is_contiguous():
            raise ValueError(f"{name} has strides {list(given[name].stride())} for shape {list(given[name].shape)}; it must be contiguous")


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


def linear(x: Tensor, weight8: Tensor, scale: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Run the kernel of ``fp8_linear``: the operator without the dispatcher."""
    check_linear(x, weight8, scale, bias)
    chosen = backends.select_fp8(backend, x.device, x.dtype, **_ANY_SIZES)
    shape = *x.shape[:-1], weight8.shape[0]
    rows = x.reshape(-1, x.shape[-1])
    return chosen.linear(rows, weight8, scale, bias).view(shape) if rows.numel() else x.new_empty(shape)


def _fake_linear(x: Tensor, weight8: Tensor, scale: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    check_linear(x, weight8, scale, bias)
    return x.new_empty((*x.shape[:-1], weight8.shape[0]))


define(f'fp8_forward({_OPERANDS}, Tensor? r=None, *, str backend="auto") -> Tensor', _forward, _fake_forward, casts="q")
define(
    f'fp8_gated_forward({_OPERANDS}, Tensor w, float eps, *, str backend="auto") -> Tensor', gated_forward, _fake_gated_forward, casts="q"
)
define(
    'fp8_linear(Tensor x, Tensor weight8, Tensor scale, Tensor? bias=None, *, str backend="auto") -> Tensor',
    linear,
    _fake_linear,
    casts=("x", "bias"),
)
