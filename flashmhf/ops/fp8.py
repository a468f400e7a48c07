"""The operators ``torch.ops.flashmhf.fp8_forward`` and ``fp8_gated_forward``: schemas, checks, back-end dispatch, fake kernels, autocast.

They serve inference: an input that requires a gradient is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from .. import checks, torch_private
from ..backends import check_name
from ..backends.eager import fp8 as eager
from ..backends.hopper import fp8 as hopper
from ..backends.triton import fp8 as triton
from ..quantize.packing import check_packed

# In the order in which "auto" takes them.
BACKENDS: dict[str, ModuleType] = {"hopper": hopper, "triton": triton, "eager": eager}
NAMES = ("auto", *BACKENDS)
_OPERANDS = "Tensor q, Tensor k8, Tensor u8, Tensor v8, Tensor scales"
_library = torch.library.Library("flashmhf", "FRAGMENT")
for _schema in (
    f'fp8_forward({_OPERANDS}, Tensor? r=None, *, str backend="auto") -> Tensor',
    f'fp8_gated_forward({_OPERANDS}, Tensor w, float eps, *, str backend="auto") -> Tensor',
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@functools.cache
def select(backend: str, device: torch.device, dtype: torch.dtype, d_h: int, d_e: int) -> ModuleType:
    """The back end for this device, dtype of q and shape.

    Raises ValueError for an unknown name and NotImplementedError for an explicit back end that cannot run, with the reason.
    """
    check_name(backend, names=NAMES)
    for name, candidate in BACKENDS.items():
        if backend not in ("auto", name):
            continue
        reason = candidate.why_not(device, dtype, d_h=d_h, d_e=d_e)
        if reason is None:
            return candidate
        if backend == name:
            raise NotImplementedError(f"backend={backend!r} cannot run: {reason}")
    raise AssertionError("the eager back end supports everything")


def check_operands(q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor) -> None:
    checks.tensors(q=q)
    check_packed(k8, u8, v8, scales)
    checks.floating("q", q)
    if q.device != k8.device:
        raise ValueError(f"q is on {q.device} but k8 is on {k8.device}; all tensors must be on one device")
    if q.dim() < 2 or q.shape[-2] < 1 or q.shape[-2] % k8.shape[0] or q.shape[-1] != k8.shape[3]:
        raise ValueError(
            f"q has shape {list(q.shape)}; expected [..., H, d_h] with H a multiple of H_kv = {k8.shape[0]} and d_h = {k8.shape[3]} from k8"
        )


def _check_forward(q, k8, u8, v8, scales, r):
    check_operands(q, k8, u8, v8, scales)
    checks.weights(q, k8, r)


def _check_gated(q, k8, u8, v8, scales, w, eps):
    check_operands(q, k8, u8, v8, scales)
    checks.router(q, w, eps, k8)


def _forward(q, k8, u8, v8, scales, r=None, *, backend="auto"):
    _check_forward(q, k8, u8, v8, scales, r)
    module = select(backend, q.device, q.dtype, k8.shape[3], k8.shape[2])
    return module.forward(q, k8, u8, v8, scales, r) if q.numel() else torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _gated_forward(q, k8, u8, v8, scales, w, eps, *, backend="auto"):
    _check_gated(q, k8, u8, v8, scales, w, eps)
    module = select(backend, q.device, q.dtype, k8.shape[3], k8.shape[2])
    return module.gated_forward(q, k8, u8, v8, scales, w, eps) if q.numel() else torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_forward(q, k8, u8, v8, scales, r=None, *, backend="auto"):
    _check_forward(q, k8, u8, v8, scales, r)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_gated_forward(q, k8, u8, v8, scales, w, eps, *, backend="auto"):
    _check_gated(q, k8, u8, v8, scales, w, eps)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _without_gradients(name: str):
    op = getattr(torch.ops.flashmhf, name)

    def call(*args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if differentiated or torch_private.differentiated_by_functorch(*tensors) or torch_private.has_tangent(*tensors):
            raise NotImplementedError(f"{name}: an input requires a gradient; FP8 serves inference: supported under torch.no_grad()")
        with torch_private.below_autograd():
            return op(*args, **kwargs)

    return call


def _autocast(name: str, device_type: str):
    op = getattr(torch.ops.flashmhf, name)

    def call(q, *args, **kwargs):
        if isinstance(q, Tensor) and q.dtype in checks.FLOAT_DTYPES[:3]:
            q = q.to(torch.get_autocast_dtype(device_type))
        with torch_private.below_autocast():
            return op(q, *args, **kwargs)

    return call


def register(name: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """An operator of inference: its kernel on CPU and CUDA, its fake kernel, and the refusal of gradients."""
    _library.impl(name, kernel, "CPU")
    _library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"flashmhf::{name}", fake, lib=_library)
    _library.impl(name, _without_gradients(name), "Autograd")


for _name, _kernel, _fake in (
    ("fp8_forward", _forward, _fake_forward),
    ("fp8_gated_forward", _gated_forward, _fake_gated_forward),
):
    register(_name, _kernel, _fake)
    _library.impl(_name, _autocast(_name, "cpu"), "AutocastCPU")
    _library.impl(_name, _autocast(_name, "cuda"), "AutocastCUDA")
