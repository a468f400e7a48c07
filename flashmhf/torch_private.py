"""PyTorch's private interfaces that flashmhf needs, each in one place, with what it is needed for."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def below_autograd() -> AbstractContextManager:
    """Operator calls inside go to the kernels below autograd: what an autograd kernel calls itself by."""
    return torch._C._AutoDispatchBelowAutograd()


def below_autocast() -> AbstractContextManager:
    """Operator calls inside skip the autocast kernels of CPU and CUDA."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def autocasts(device_type: str) -> bool:
    """Whether autocast is enabled for a device type; is_autocast_enabled() alone raises for those without autocast, such as meta."""
    # Dynamo of torch 2.10 cannot trace is_autocast_available().
    has_autocast = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)
    return has_autocast and torch.is_autocast_enabled(device_type)


def differentiated_by_functorch(*tensors: Tensor | None) -> bool:
    """Whether a torch.func transform that differentiates (grad, vjp, jvp, hessian) wraps one of ``tensors``."""
    return torch._C._are_functorch_transforms_active() and any(
        isinstance(x, Tensor) and torch._C._functorch.is_gradtrackingtensor(x) for x in tensors
    )


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether one of ``tensors`` is a dual tensor of forward-mode differentiation."""
    return torch.autograd.forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def is_observed() -> bool:
    """Whether a torch.func transform, forward-mode differentiation or a dispatch mode (FlopCounterMode, fake tensors) follows each call."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
    )
