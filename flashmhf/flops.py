"""Floating-point operations of the operators, for ``torch.utils.flop_counter.FlopCounterMode``. A product of [m, k] and
[k, n] is 2 m k n operations; elementwise work is not counted, what backward recomputes is.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from . import torch_private

_COUNTER = "torch.utils.flop_counter"
_OPERATORS = "forward gated_forward backward gated_backward layer fp8_forward fp8_gated_forward fp8_layer".split()


def operations(arguments: dict[str, Any]) -> int:
    """Count the operations of a call from its arguments by name, tensors by their shapes.

    Forward is 6 T H d_h E d_e; with a router 2 T H d_h E more; a layer has both projections, too. Of backward's eight
    products, 16 T H d_h E d_e, three are for any gradient, two for the tokens' and three for the weights', as ``needs``
    says; of the router's, up to 6 T H d_h E, each one.
    """
    total, products, routers = 0, 3, 1
    if "x" in arguments:
        *tokens, d_model = arguments["x"]
        inner = arguments["in_w"][0]
        q = *tokens, inner  # its heads side by side: only the product of the sizes counts
        total = 2 * math.prod(tokens) * inner * (d_model + arguments["out_w"][0])
    else:
        q = arguments["q"]
    if "grad_out" in arguments:
        of_tokens, of_weights = arguments.get("needs", (True, True))
        some = of_tokens or of_weights
        products, routers = 3 * some + 2 * of_tokens + 3 * of_weights, some + of_tokens + of_weights
    _, subnets, subnet_dim, _ = arguments["k8" if "k8" in arguments else "k"]
    if arguments.get("w") is None:
        routers = 0
    return total + 2 * math.prod(q) * subnets * (products * subnet_dim + routers)


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
    for name in _OPERATORS:
        packet = getattr(torch.ops.flashmhf, name)
        if packet not in counter.flop_registry:
            names = [argument.name for argument in packet.default._schema.arguments]
            counter.register_flop_formula(packet)(partial(_formula, names))


def _formula(names: list[str], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return operations(dict(zip(names, args, strict=False)) | kwargs)


torch_private.answer("counts of operations", _COUNTER, "_FlopCounterMode", lambda: _count)
