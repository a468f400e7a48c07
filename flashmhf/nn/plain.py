"""Whether modules compute what their classes say, so that an operator may read their weights in place of their calls.

Programs put hooks on modules, replace parts or their methods on an instance or for a whole class, compute weights, and
patch PyTorch, some of them before they import this package. Each counts: the parts then run by their own calls.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, MethodType

from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional

from ..torch_private import has_global_hooks

_LINEAR = functional.linear
_METHODS = ("forward", "__call__", "_call_impl", "__getattr__")
_methods = operator.attrgetter(*_METHODS)
_DATA = ("weight", "bias")
_OWN = ("forward", "_call_impl", "_compiled_call_impl", *_DATA)  # what an instance may have instead of its class
_DEFINED: dict[type[nn.Module], tuple[object, ...]] = {}  # the methods of a part's class as it was defined


def _is_of(package: str, method: object) -> bool:
    return getattr(method, "__globals__", {}).get("__name__", "").startswith(package)


_PATCHED_BEFORE = type(_LINEAR) is not BuiltinFunctionType or not all(
    _is_of("torch.nn.modules.", method) for method in _methods(nn.Linear)
)


def define(kind: type[nn.Module]) -> type[nn.Module]:
    """Remember the methods of a part's class, before a program can change them."""
    _DEFINED[kind] = _methods(kind)
    return kind


def are_traced(methods: tuple[object, ...], defined: tuple[object, ...]) -> bool:
    """Return whether ``methods`` differ from those ``defined`` by what torch.export puts around every module."""
    pairs = zip(methods, defined, strict=True)
    return is_compiling() and all(method is own or _is_of("torch.", method) for method, own in pairs)


def computes(kind: type[nn.Module], names: Iterable[str]) -> bool:
    """Return whether a subclass has properties in place of what its instances hold by these ``names``."""
    return kind.__getattribute__ is not object.__getattribute__ or any(hasattr(kind, name) for name in names)


define(nn.Linear)


def are_plain(modules: Mapping[str, nn.Module | None], kinds: Mapping[str, type[nn.Module]]) -> bool:
    """Return whether the parts among ``modules``, of ``kinds`` or None, compute what these do from parameters."""
    if _PATCHED_BEFORE or functional.linear is not _LINEAR or has_global_hooks():
        return False
    for name, kind in kinds.items():
        part = modules.get(name)
        if part is None:
            continue
        cls, defined = type(part), _DEFINED[kind]
        if (methods := _methods(cls)) != defined and not are_traced(methods, defined):
            return False
        if cls not in _DEFINED and computes(cls, _DATA):
            return False
        own = part.__dict__  # attributes of a module take the host twice as long
        if not own.keys().isdisjoint(_OWN):
            return False
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]:
            return False
        # what a parametrisation, pruning or spectral_norm computes is no parameter
        parameters = own["_parameters"]
        if parameters.get("weight") is None or (kind is nn.Linear and "bias" not in parameters):
            return False
    return True


def stays_plain(module: nn.Module, methods: tuple[str, ...]) -> bool:
    """Return True, traced for a module that is plain: the graph then asks in every call what PyTorch's own compiled
    modules ask, whether an instance got a method of its own or linear was patched. Hooks and classes they do not ask.
    """
    for name in methods:
        if not isinstance(getattr(module, name), MethodType):
            return False
    for part in module._modules.values():
        if part is not None and not isinstance(part.forward, MethodType):
            return False
    return functional.linear is _LINEAR
