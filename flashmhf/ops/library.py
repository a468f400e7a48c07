"""The library ``torch.ops.flashmhf`` and what every operator in it needs: fakes, autograd, autocast, vmap."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import checks, torch_private
from ..backends.tokens import collapse
from ..torch_private import register

LIBRARY = torch.library.Library("flashmhf", "DEF")
ORDINARY = (Tensor, torch.nn.Parameter)  # the types of PyTorch's own tensors
OWN_TYPES = frozenset((*ORDINARY, type(None)))
C = TypeVar("C")
R = TypeVar("R")


def define(
    name: str, signature: str, describe: Callable[..., C], values: Callable[[C], R], fake: Callable[[C], R],
    in_graph: Callable[[C], R | None], autograd: Callable[[C], R] | None = None, casts: Collection[str] = (),
) -> None:  # fmt: skip
    """Define the operator ``torch.ops.flashmhf.NAME`` with a dispatcher's ``signature``.

    Args:
        describe: takes the arguments by name and returns the call that they make, which the others take. The
            dispatcher leaves out arguments that have their default values.
        values, fake: run it on every device, with the same checks as returning tensors of the results' shapes.
        in_graph: runs it on fake tensors by a back end's operator, which Inductor calls without Python, or gives None.
        autograd: runs above autograd; None for an operator of inference, which refuses inputs that require a gradient.
        casts: the tensor arguments that autocast casts. Nothing inside the operator is cast again.
    """
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    op, qualname = getattr(torch.ops.flashmhf, name), f"flashmhf::{name}"
    names = [argument.name for argument in op.default._schema.arguments]

    def kernel(run: Callable[[C], R]) -> Callable[..., R]:
        return lambda *args, **kwargs: run(describe(**dict(zip(names, args, strict=False)), **kwargs))

    LIBRARY.impl(name, kernel(values), "CompositeExplicitAutograd")
    abstract = kernel(fake)
    register("fake tensors, as in graphs", lambda: torch.library.register_fake(qualname, abstract, lib=LIBRARY))
    register("C++ in graphs, DTensor and counts of operations", lambda: torch_private.ask_rules(op.default))
    _IN_GRAPHS[op.default] = kernel(in_graph)
    LIBRARY.impl(name, kernel(autograd) if autograd else _without_gradients(name, op), "Autograd")
    rules = {argument: cast if argument in casts else widen for argument in names}
    for device_type, key in torch_private.AUTOCAST_KEYS.items():
        LIBRARY.impl(name, _autocast(op, device_type, rules if casts else {}), key)


_IN_GRAPHS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def _trace(
    tracer: Any, op: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Take a call that is written into a graph: for Inductor, the back end's operator is."""
    if torch_private.decomposes_for_inductor(tracer):
        with tracer:
            result = _IN_GRAPHS[op](*args, **(kwargs or {}))
        if result is not None:
            return result
    return tracer.__torch_dispatch__(op, types, args, kwargs)


_TRACER = ("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode")
torch_private.answer("the C++ operators in compiled graphs", *_TRACER, lambda: _trace)


def is_direct(*tensors: Tensor | None) -> bool:
    """Return whether a call may go past the dispatcher: nobody watches, and the tensors are PyTorch's own."""
    if not OWN_TYPES.issuperset(map(type, tensors)):
        return False
    return not (tensors[0] is None or tensors[0].is_meta or torch.compiler.is_compiling() or torch_private.is_watched())


def _without_gradients(name: str, op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Refuse inputs that require a gradient or are transformed by torch.func."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [x for x in args if isinstance(x, Tensor)]
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if differentiated or torch_private.differentiated_by_functorch(*tensors) or torch_private.has_tangent(*tensors):
            raise NotImplementedError(f"{name}: an input requires a gradient; supported: inference, torch.no_grad()")
        with torch_private.below_autograd():
            return op(*args, **kwargs)

    return call


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Return an operand as autocast to ``dtype`` makes it; float64 and tensors that are not floating stay."""
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in checks.FLOAT_DTYPES[:3] else x


def widen(x: Any, dtype: torch.dtype) -> Any:
    """Return an operand that autocast to ``dtype`` leaves; the other 16-bit dtype, which nothing mixes, as float32."""
    return x.float() if isinstance(x, Tensor) and x.dtype in checks.FLOAT_DTYPES[:2] and x.dtype != dtype else x


def _autocast(op: Callable, device_type: str, rules: dict[str, Callable[[Any, torch.dtype], Any]]) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        if rules:
            args = tuple(rule(x, dtype) for x, rule in zip(args, rules.values(), strict=False))
            kwargs = {name: rules[name](x, dtype) for name, x in kwargs.items()}
        with torch_private.below_autocast(device_type):
            return op(*args, **kwargs)

    return call


# vmap: a batch over tokens joins the leading dimensions; a batch over weights is one call per entry


def register_vmap(name: str, *tokens: int) -> None:
    """Register the vmap rule of an operator whose operands at the places ``tokens`` have leading dimensions."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **settings: Any) -> tuple[Any, Any]:
        op = getattr(torch.ops.flashmhf, name)
        if any(dim is not None for place, dim in enumerate(in_dims) if place not in tokens):
            return _one_by_one(op, info.batch_size, in_dims, args, settings)
        places = enumerate(zip(args, in_dims, strict=True))
        args = [_leading_batch(x, dim, info.batch_size) if place in tokens else x for place, (x, dim) in places]
        return op(*args, **settings), 0

    register("torch.vmap", lambda: torch.library.register_vmap(f"flashmhf::{name}", rule, lib=LIBRARY))


def _leading_batch(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Return the batch as the first dimension, copied where tokens would lie at more strides than is read in place."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x if dim is not None and len(collapse(x)) <= 2 else x.contiguous()


def _one_by_one(
    op: Callable, size: int, in_dims: tuple[int | None, ...], args: Sequence[Any], settings: dict[str, Any]
) -> tuple[Any, Any]:
    def entry(i: int) -> tuple[Tensor, ...]:
        places = zip(args, in_dims, strict=True)
        result = op(*(x if dim is None else x.select(dim, i).contiguous() for x, dim in places), **settings)
        return (result,) if isinstance(result, Tensor) else result

    if size:
        results = [torch.stack(x) for x in zip(*map(entry, range(size)), strict=True)]
    else:  # one entry of zeros shows the results' shapes
        args = [
            x if dim is None else x.new_zeros((*x.shape[:dim], 1, *x.shape[dim:][1:]))
            for x, dim in zip(args, in_dims, strict=True)
        ]
        results = [x.new_empty((0, *x.shape)) for x in entry(0)]
    return (results[0], 0) if len(results) == 1 else (tuple(results), (0,) * len(results))
