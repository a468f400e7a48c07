"""The library ``torch.ops.flashmhf`` and what every operator in it needs: kernels for all devices, fakes, autograd,
autocast.

A call is check -> select the back end -> run it on the current stream, without synchronising and without copying q.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from .. import checks, torch_private

LIBRARY = torch.library.Library("flashmhf", "DEF")


def define(
    schema: str, kernel: Callable, fake: Callable, autograd: Callable | None = None, casts: Collection[str] = ()
) -> None:
    """Define an operator.

    Args:
        schema: its signature in the dispatcher's language.
        kernel: runs on every device. It and ``fake`` take the schema's arguments and do the same checks.
        fake: returns tensors of the results' shapes and dtypes.
        autograd: runs above autograd; None for an operator of inference, which refuses inputs that require a gradient.
        casts: the tensor arguments that autocast casts. Nothing inside the operator is cast again.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashmhf::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.flashmhf, name)
    torch_private.DispatchRules.install(op.default)
    LIBRARY.impl(name, autograd or _without_gradients(name, op), "Autograd")
    rules = {argument.name: cast if argument.name in casts else widen for argument in op.default._schema.arguments}
    for device_type, key in torch_private.AUTOCAST_KEYS.items():
        LIBRARY.impl(name, _autocast(op, device_type, rules if casts else {}), key)


def _without_gradients(name: str, op: Callable) -> Callable:
    """Refuse inputs that require a gradient or are transformed by torch.func."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        if differentiated or torch_private.differentiated_by_functorch(*given) or torch_private.has_tangent(*given):
            raise NotImplementedError(
                f"{name}: an input requires a gradient, and it has no gradient; supported: inference, under torch.no_grad()"
            )
        with torch_private.below_autograd():
            return op(*args, **kwargs)

    return call


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Return an operand as autocast to ``dtype`` makes it:

    float64 and tensors that are not floating stay as they are.
    """
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in checks.FLOAT_DTYPES[:3] else x


def widen(x: Any, dtype: torch.dtype) -> Any:
    """Return an operand that autocast to ``dtype`` does not cast.

    The other 16-bit dtype becomes float32: no operator mixes the two.
    """
    return x.float() if isinstance(x, Tensor) and x.dtype in checks.FLOAT_DTYPES[:2] and x.dtype != dtype else x


def _autocast(op: Callable, device_type: str, rules: dict[str, Callable[[Any, torch.dtype], Any]]) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        if rules:
            args = tuple(rule(x, dtype) for x, rule in zip(args, rules.values(), strict=False))
            kwargs = {name: rules[name](x, dtype) for name, x in kwargs.items()}
        with torch_private.below_autocast():
            return op(*args, **kwargs)

    return call
