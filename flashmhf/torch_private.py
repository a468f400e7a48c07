"""PyTorch's private interfaces that flashmhf needs, each in one place, with what it is needed for."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack as function_modes
from torch._library import simple_registry
from torch._library.simple_registry import GenericTorchDispatchRuleHolder
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module
from torch.utils._device import DeviceContext

_DEVICES = {"cpu": "CPU", "cuda": "CUDA", "hpu": "HPU", "mps": "MPS", "xpu": "XPU"}
_DEVICES[torch._C._get_privateuse1_backend_name()] = "PrivateUse1"
AUTOCAST_KEYS = {kind: f"Autocast{name}" for kind, name in _DEVICES.items()}
AUTOCAST_KEYS = {kind: key for kind, key in AUTOCAST_KEYS.items() if hasattr(torch._C.DispatchKey, key)}
"""The dispatch keys of autocast by device type."""
_AUTOCAST = functools.reduce(
    operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in AUTOCAST_KEYS.values())
)


def never_compiled(function: Callable) -> Callable:
    """Keep Dynamo out of ``function``, as torch.optim does; torch.compiler.disable would import Dynamo at once."""
    return torch._disable_dynamo(function)


def constant_in_graphs(method: Callable) -> Callable:
    """Make Dynamo call ``method`` while it traces and hold the answer: torch.compiler.assume_constant_result would
    import Dynamo at once.
    """
    method._dynamo_marked_constant = True
    return method


def below_autograd() -> AbstractContextManager:
    """Send operator calls inside to the kernels below autograd: what an autograd kernel calls itself by."""
    return torch._C._AutoDispatchBelowAutograd()


def below_autocast() -> AbstractContextManager:
    """Make operator calls inside skip the autocast kernels."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def autocasts(device_type: str) -> bool:
    """Return whether autocast is enabled for a device type, some of which have none, such as meta."""
    # Dynamo of torch 2.10 cannot trace is_autocast_available().
    has_autocast = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)
    return has_autocast and torch.is_autocast_enabled(device_type)


def differentiated_by_functorch(*tensors: Tensor | None) -> bool:
    """Return whether a torch.func transform that differentiates (grad, vjp, jvp, hessian) wraps one of ``tensors``."""
    return torch._C._are_functorch_transforms_active() and any(
        isinstance(x, Tensor) and torch._C._functorch.is_gradtrackingtensor(x) for x in tensors
    )


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether one of ``tensors`` is a dual tensor of forward-mode differentiation."""
    return torch.autograd.forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def is_observed(device_type: str) -> bool:
    """Return whether something sees or changes single calls of a network's parts on this device type: autocast,
    torch.func, forward mode, torch.jit.trace, a dispatch or function mode other than torch.compile's own.
    """
    if torch.compiler.is_compiling():
        return autocasts(device_type)
    return (
        autocasts(device_type)
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or (function_modes() > 0 and has_function_mode())
    )


def has_global_hooks() -> bool:
    """Return whether hooks of every module's forward are registered."""
    return bool(module._global_forward_pre_hooks or module._global_forward_hooks)


def has_function_mode() -> bool:
    """Return whether one of the active TorchFunctionModes does more than place new tensors."""
    return any(type(mode) is not DeviceContext for mode in torch.overrides._get_current_function_mode_stack())


def decomposes_for_inductor(tracer: Any) -> bool:
    """Return whether ``tracer``, a ProxyTorchDispatchMode, decomposes operators as Inductor does, not torch.export."""
    table = getattr(tracer, "decomposition_table", None)  # before torch 2.12 a global
    if table is None:
        table = proxy_tensor.CURRENT_DECOMPOSITION_TABLE
    return any(getattr(rule, "__module__", None) == "torch._inductor.decomposition" for rule in table.values())


def address(x: Tensor) -> int:
    """Return the address of ``x``; for a fake tensor its distance from the begin of an allocation, which is aligned."""
    return x.storage_offset() * x.element_size() if isinstance(x, FakeTensor) else x.data_ptr()


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing their module: only who has imported it has DTensors."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


class DispatchRules(GenericTorchDispatchRuleHolder):
    """Answer PyTorch before an operator's call reaches a dispatch mode or a tensor subclass that is imported."""

    _answers: dict[tuple[str, str], Callable[[], Callable[..., Any] | None]] = {}

    @classmethod
    def answer(cls, module: str, name: str, rule: Callable[[], Callable[..., Any] | None]) -> None:
        """Call ``rule`` when a call meets the class ``name`` of ``module`` or a subclass of it. ``rule`` returns a
        function that takes the call in place of the class's __torch_dispatch__, or None.
        """
        cls._answers[module, name] = rule

    @classmethod
    def install(cls, op: torch._ops.OpOverload) -> None:
        """Let the operator ``op`` ask."""
        qualname = op.__qualname__
        simple_registry.singleton.find(qualname).torch_dispatch_rules = cls(qualname)

    def find(self, torch_dispatch_class: type) -> Callable[..., Any] | None:
        for (where, name), rule in self._answers.items():
            met = getattr(sys.modules.get(where), name, None)
            if met is not None and issubclass(torch_dispatch_class, met):
                return rule() or super().find(torch_dispatch_class)
        return super().find(torch_dispatch_class)
