"""Whether modules compute what their classes say, so that an operator may read their weights in place of their calls.

Programs put hooks on modules, replace parts or their methods on an instance or for a whole class, compute weights, and
patch PyTorch, some of them before they import this package. Each counts: the parts then run by their own calls.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, MethodType

from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional

from ..torch_private import has_global_hooks

_LINEAR = functional.linear
_METHODS = ("forward", "__call__", "_call_impl", "__getattr__")


class Kind:
    """A class as it was defined: what is made before a program can change it knows when one has.

    methods: those by which an instance computes. held: what an instance holds, and a subclass may compute. own: what
    an instance may have instead of its class, by name.
    """

    def __init__(
        self, cls: type[nn.Module], methods: Sequence[str] = _METHODS, held: Sequence[str] = ("weight", "bias"),
        own: Sequence[str] = ("forward", "_call_impl", "_compiled_call_impl", "weight", "bias"),
    ) -> None:  # fmt: skip
        self.cls, self.held, self.own = cls, held, own
        self.methods_of = operator.attrgetter(*methods)
        self.methods = self.methods_of(cls)


def _is_of(package: str, method: object) -> bool:
    return getattr(method, "__globals__", {}).get("__name__", "").startswith(package)


LINEAR = Kind(nn.Linear)
_PATCHED_BEFORE = type(_LINEAR) is not BuiltinFunctionType or not all(
    _is_of("torch.nn.modules.", method) for method in LINEAR.methods
)


def _are_traced(methods: tuple[object, ...], defined: tuple[object, ...]) -> bool:
    """Return whether ``methods`` differ from those ``defined`` by what torch.export puts around every module."""
    pairs = zip(methods, defined, strict=True)
    return is_compiling() and all(method is own or _is_of("torch.", method) for method, own in pairs)


def is_plain(network: nn.Module, kinds: Mapping[str, Kind]) -> bool:
    """Return whether ``network``, whose kind is named "", and its parts, which may be None, compute what their classes
    say from parameters.
    """
    if _PATCHED_BEFORE or functional.linear is not _LINEAR or has_global_hooks():
        return False
    modules = network._modules
    for name, kind in kinds.items():
        module = modules.get(name) if name else network
        if module is None:
            continue
        cls, own = type(module), module.__dict__  # attributes of a module take the host twice as long
        if (methods := kind.methods_of(cls)) != kind.methods and not _are_traced(methods, kind.methods):
            return False
        if cls is not kind.cls:  # properties of a subclass
            if cls.__getattribute__ is not object.__getattribute__ or any(hasattr(cls, held) for held in kind.held):
                return False
        if not own.keys().isdisjoint(kind.own):
            return False
        if not name:
            continue  # hooks of the network run in its own call
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]:
            return False
        # what a parametrisation, pruning or spectral_norm computes is no parameter
        parameters = own["_parameters"]
        if parameters.get("weight") is None or (kind is LINEAR and "bias" not in parameters):
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
