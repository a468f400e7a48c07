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
Needs = Sequence[bool]  # whether gradients of the tokens and of the weights are needed
_COUNTER = "torch.utils.flop_counter"


def product(q: Shape, k: Shape) -> int:
    """Count one product of Q [..., H, d_h] with a weight [H_kv, E, d_e, d_h]."""
    return 2 * math.prod(q) * k[1] * k[2]


def router_product(q: Shape, k: Shape) -> int:
    """Count P = Q W of the router [H, d_h, E]."""
    return 2 * math.prod(q) * k[1]


def forward(q: Shape, k: Shape, *_: object, gated: bool = False, **kwargs: object) -> int:
    """Count Q K^T, Q U^T and the product with V: 6 T H d_h E d_e; with a router 2 T H d_h E more."""
    return 3 * product(q, k) + gated * router_product(q, k)


def backward(
    grad_out: Shape, q: Shape, k: Shape, *_: object, needs: Needs = (True, True), gated: bool = False, **kwargs: object
) -> int:
    """Count 16 T H d_h E d_e, less what ``needs`` = (tokens, weights) spares; with a router up to 6 T H d_h E more.

    Of eight products three are for any gradient, two for the tokens', three for the weights'; of the router's each one.
    """
    tokens, weights = needs
    some = tokens or weights
    of_networks, of_router = 3 * some + 2 * tokens + 3 * weights, some + tokens + weights
    return of_networks * product(q, k) + gated * of_router * router_product(q, k)


def projection(x: Shape, w: Shape, *args: object, **kwargs: object) -> int:
    """Count x W^T of x [..., K] and w [N, K]."""
    return 2 * math.prod(x) * w[0]


def layer(x: Shape, in_w: Shape, in_bias: object, k: Shape, *rest: Any, fp8: bool = False, **kwargs: object) -> int:
    """Count :func:`forward` and both projections; ``fp8``: with scales among the operands."""
    w, _, out_w = rest[3:6] if fp8 else rest[2:5]
    q = (*x[:-1], in_w[0])  # its heads side by side: only the product of the sizes counts
    return projection(x, in_w) + forward(q, k, gated=w is not None) + projection(q, out_w)


_gated_forward = functools.partial(forward, gated=True)
_FORMULAE: dict[str, Callable[..., int]] = {
    "forward": forward, "gated_forward": _gated_forward, "fp8_forward": forward, "fp8_gated_forward": _gated_forward,
    "backward": backward, "gated_backward": functools.partial(backward, gated=True), "layer": layer,
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


torch_private.answer("counts of operations", _COUNTER, "_FlopCounterMode", lambda: _count)
