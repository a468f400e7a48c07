"""PyTorch's private interfaces that flashmhf needs, each in one place, with what it is needed for.

A name that this PyTorch lacks costs a feature at most: who asks whether somebody watches hears "somebody", and what
cannot be registered is named by one warning.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

try:
    from torch.utils._device import DeviceContext  # of torch.set_default_device
except ImportError:
    DeviceContext = None


def find(path: str, missing: Any = None) -> Any:
    """Return the object at ``path``, or ``missing`` if this PyTorch has none there."""
    return functools.reduce(lambda owner, name: getattr(owner, name, missing), path.split(".")[1:], torch)


@functools.cache
def warn_lost(feature: str, reason: str) -> None:
    """Warn once that this PyTorch's private interfaces are others than a ``feature`` of flashmhf needs."""
    warnings.warn(f"flashmhf does without {feature} on torch {torch.__version__}: {reason}", stacklevel=2)


def register(feature: str, registration: Callable[[], object]) -> None:
    """Register something with PyTorch for a ``feature``, which a private name that is gone costs, with a warning."""
    try:
        registration()
    except (AttributeError, ImportError, NameError, TypeError) as error:
        warn_lost(feature, str(error))


# Dispatch keys

_DEVICES = {"cpu": "CPU", "cuda": "CUDA", "hpu": "HPU", "mps": "MPS", "xpu": "XPU"}
_DEVICES[find("torch._C._get_privateuse1_backend_name", lambda: "privateuseone")()] = "PrivateUse1"
AUTOCAST_KEYS = {kind: f"Autocast{name}" for kind, name in _DEVICES.items()}
"""The dispatch keys of autocast by device type."""


def _excluding(*keys: str) -> Callable[[], AbstractContextManager] | None:
    exclude = find("torch._C._ExcludeDispatchKeyGuard")
    if exclude is None:
        return None
    excluded = functools.reduce(operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, k)) for k in keys))
    return lambda: exclude(excluded)


below_autograd: Callable[[], AbstractContextManager] = find(
    "torch._C._AutoDispatchBelowAutograd", _excluding("AutogradFunctionality")
)
"""Send operator calls inside to the kernels below autograd: what an autograd kernel calls itself by."""
_below_autocast = _excluding(*AUTOCAST_KEYS.values())


def below_autocast(device_type: str) -> AbstractContextManager:
    """Make operator calls inside skip the autocast kernels."""
    return torch.autocast(device_type, enabled=False) if _below_autocast is None else _below_autocast()


# Dynamo


def never_compiled(function: Callable) -> Callable:
    """Keep Dynamo out of ``function``, as torch.optim does; torch.compiler.disable would import Dynamo at once."""
    later = functools.wraps(function)(lambda *args, **kwargs: torch.compiler.disable(function)(*args, **kwargs))
    return find("torch._disable_dynamo", lambda _: later)(function)


def constant_in_graphs(method: Callable) -> Callable:
    """Make Dynamo call ``method`` while it traces: torch.compiler.assume_constant_result would import Dynamo now."""
    method._dynamo_marked_constant = True
    return method


# Who watches, or changes, single calls


def autocasts(device_type: str) -> bool:
    """Return whether autocast is enabled for a device type, some of which have none, such as meta."""
    # Dynamo of torch 2.10 cannot trace is_autocast_available().
    has_autocast = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)
    return has_autocast and torch.is_autocast_enabled(device_type)


# asked before :func:`autocasts`, which takes longer; it knows of GPUs and CPUs, but not of all devices, such as mps
any_autocast: Callable[[], bool] = find("torch._C._is_any_autocast_enabled", lambda: True)
transforms: Callable[[], bool] = find("torch._C._are_functorch_transforms_active", lambda: True)
function_modes: Callable[[], int] = find("torch._C._len_torch_function_stack", lambda: 1)
_mode_stack: Callable[[], list] | None = find("torch.overrides._get_current_function_mode_stack")
_is_traced: Callable[[], bool] = find("torch._C._is_tracing", torch.jit.is_tracing)
_dispatch_modes: Callable[[], int] = find("torch._C._len_torch_dispatch_stack", lambda: 1)
# by the operators' names
is_profiled: Callable[[], bool] = find("torch._C._autograd._profiler_enabled", lambda: True)
# of the vmap in which autograd takes batches of gradients; no question above sees it
is_batched: Callable[[Tensor], bool] = find("torch._C._functorch.is_legacy_batchedtensor", lambda _: True)
# without the name torch.vmap is refused, too
_is_differentiated: Callable[[Tensor], bool] = find("torch._C._functorch.is_gradtrackingtensor", lambda _: True)


def has_function_mode() -> bool:
    """Return whether one of the active TorchFunctionModes does more than place new tensors."""
    return _mode_stack is None or any(type(mode) is not DeviceContext for mode in _mode_stack())


def is_watched() -> bool:
    """Return whether torch.func, forward mode, torch.jit.trace or a mode sees or changes single operator calls."""
    return (
        _dispatch_modes() > 0
        or transforms()
        or _is_traced()
        or getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0
        or (function_modes() > 0 and has_function_mode())
    )


_module_hooks = torch.nn.modules.module


def has_global_hooks() -> bool:
    """Return whether hooks of every module's forward or backward are registered."""
    hooks = _module_hooks
    try:
        forward = hooks._global_forward_pre_hooks or hooks._global_forward_hooks
        return bool(forward or hooks._global_backward_pre_hooks or hooks._global_backward_hooks)
    except AttributeError:
        return True


def differentiated_by_functorch(*tensors: Tensor | None) -> bool:
    """Return whether a torch.func transform that differentiates (grad, vjp, jvp, hessian) wraps one of ``tensors``."""
    return transforms() and any(isinstance(x, Tensor) and _is_differentiated(x) for x in tensors)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether one of ``tensors`` is a dual tensor of forward-mode differentiation."""
    if getattr(torch.autograd.forward_ad, "_current_level", 0) < 0:
        return False
    unpack = torch.autograd.forward_ad.unpack_dual
    try:
        return any(isinstance(x, Tensor) and unpack(x).tangent is not None for x in tensors)
    except NameError:  # of the level, in PyTorch itself
        return False


# Tensors and operators in graphs


def decomposes_for_inductor(tracer: Any) -> bool:
    """Return whether ``tracer``, a ProxyTorchDispatchMode, decomposes operators as Inductor does, not torch.export."""
    before_2_12 = find("torch.fx.experimental.proxy_tensor.CURRENT_DECOMPOSITION_TABLE")
    if (table := getattr(tracer, "decomposition_table", before_2_12)) is None:
        warn_lost("the C++ operators in compiled graphs", "a tracer has no table of decompositions")
        return False
    return any(getattr(rule, "__module__", None) == "torch._inductor.decomposition" for rule in table.values())


def address(x: Tensor) -> int:
    """Return the address of ``x``; for a fake tensor its distance from the begin of an allocation, which is aligned."""
    return x.data_ptr() if type(x) in (Tensor, torch.nn.Parameter) else x.storage_offset() * x.element_size()


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing their module: only who has imported it has DTensors."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


_RULES: dict[tuple[str, str], tuple[str, Callable[[], Callable[..., Any] | None]]] = {}


def answer(feature: str, module: str, name: str, rule: Callable[[], Callable[..., Any] | None]) -> None:
    """Call ``rule`` when an operator's call meets the class ``name`` of ``module``, a dispatch mode or a tensor
    subclass that somebody has imported, or a subclass of it. ``rule`` returns a function that takes the call in place
    of the class's __torch_dispatch__, or None.
    """
    _RULES[module, name] = feature, rule


def ask_rules(op: torch._ops.OpOverload) -> None:
    """Have PyTorch ask the rules before a call of the operator ``op`` reaches a dispatch mode or a tensor subclass."""
    registry = torch._library.simple_registry

    class Holder(registry.GenericTorchDispatchRuleHolder):
        def find(self, torch_dispatch_class: type) -> Callable[..., Any] | None:
            for (where, name), (feature, rule) in _RULES.items():
                if (module := sys.modules.get(where)) is None:
                    continue
                if (met := getattr(module, name, None)) is None:
                    warn_lost(feature, f"{where} has no {name}")
                elif issubclass(torch_dispatch_class, met):
                    return rule() or super().find(torch_dispatch_class)
            return super().find(torch_dispatch_class)

    registry.singleton.find(op.__qualname__).torch_dispatch_rules = Holder(op.__qualname__)
