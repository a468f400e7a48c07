"""Floating-point operations of the operators, for ``torch.utils.flop_counter.FlopCounterMode``. A product of [m, k] and
[k, n] is 2 m k n operations; elementwise work is not counted, what backward recomputes is.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import torch_private

Shape = Sequence[int]
_COUNTER = "torch.utils.flop_counter"


def product(q: Shape, k: Shape) -> int:
    """Count one product of Q [..., H, d_h] with a weight [H_kv, E, d_e, d_h]."""
    return 2 * math.prod(q) * k[1] * k[2]


def router_product(q: Shape, k: Shape) -> int:
    """Count P = Q W of the router [H, d_h, E]."""
    return 2 * math.prod(q) * k[1]


def forward(q: Shape, k: Shape, *args: object, **kwargs: object) -> int:
    """Count Q K^T, Q U^T and the product with V: 6 T H d_h E d_e."""
    return 3 * product(q, k)


def gated_forward(q: Shape, k: Shape, *args: object, **kwargs: object) -> int:
    """Count :func:`forward` and the router: 2 T H d_h E more."""
    return 3 * product(q, k) + router_product(q, k)


def _products_of_backward(needs: Sequence[bool]) -> int:
    """Count the products, of eight: three for any gradient, two for the tokens', three for the weights'."""
    tokens, weights = needs
    return 3 * (tokens or weights) + 2 * tokens + 3 * weights


def backward(
    grad_out: Shape, q: Shape, k: Shape, *args: object, needs: Sequence[bool] = (True, True), **kwargs: object
) -> int:
    """Count 16 T H d_h E d_e, less what ``needs`` = (tokens, weights) spares."""
    return _products_of_backward(needs) * product(q, k)


def gated_backward(
    grad_out: Shape, q: Shape, k: Shape, *args: object, needs: Sequence[bool] = (True, True), **kwargs: object
) -> int:
    """Count :func:`backward`, the router's product again, and one product for each of its gradients."""
    tokens, weights = needs
    router_products = (tokens or weights) + tokens + weights
    return _products_of_backward(needs) * product(q, k) + router_products * router_product(q, k)


def projection(x: Shape, w: Shape, *args: object, **kwargs: object) -> int:
    """Count x W^T of x [..., K] and w [N, K]."""
    return 2 * math.prod(x) * w[0]


def layer(x: Shape, in_w: Shape, in_bias: object, k: Shape, *rest: Any, fp8: bool = False, **kwargs: object) -> int:
    """Count :func:`gated_forward` (:func:`forward` without a router) and both projections. ``fp8``: of ``fp8_layer``."""
    w, _, out_w = rest[3:6] if fp8 else rest[2:5]
    q = (*x[:-1], in_w[0])  # its heads side by side: only the product of the sizes counts
    mixed = forward(q, k) if w is None else gated_forward(q, k)
    return projection(x, in_w) + mixed + projection(q, out_w)


_FORMULAE: dict[str, Callable[..., int]] = {
    "forward": forward, "gated_forward": gated_forward, "backward": backward, "gated_backward": gated_backward,
    "fp8_forward": forward, "fp8_gated_forward": gated_forward, "layer": layer,
    "fp8_layer": functools.partial(layer, fp8=True),
}  # fmt: skip


def _count(
    mode: Any, op: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Take a call that FlopCounterMode sees. Each counter gets the formulae: it copies PyTorch's registry when made."""
    registry, packet = mode.counter.flop_registry, op._overloadpacket
    if packet not in registry:
        register()
        registry[packet] = sys.modules[_COUNTER].flop_registry[packet]
    return mode.__torch_dispatch__(op, types, args, kwargs)


def register() -> None:
    """Register the formulae with PyTorch, for tools that read its registry. Imports Triton where it is installed."""
    counter = importlib.import_module(_COUNTER)
    for name, formula in _FORMULAE.items():
        packet = getattr(torch.ops.flashmhf, name)
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet)(formula)


torch_private.DispatchRules.answer(_COUNTER, "_FlopCounterMode", lambda: _count)
