"""How the modules draw their weights.

``init`` "normal" draws every weight from N(0, initializer_range); "official" takes the official code's settings: projections
xavier_uniform with gain 0.707, K U V normal 0.02, router truncated normal 0.02.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

INITIALIZER_RANGE = 0.02


def initialise(
    normal: Iterable[Tensor], projections: Iterable[nn.Linear], routers: Iterable[Tensor], init: str, initializer_range: float
) -> None:
    if not isinstance(init, str):
        raise TypeError(f"init must be a str, got {type(init).__name__}")
    if init not in ("normal", "official"):
        raise ValueError(f"init is {init!r}; supported: 'normal', 'official'")
    official = init == "official"
    for weight in normal:
        nn.init.normal_(weight, std=INITIALIZER_RANGE if official else initializer_range)
    for weight in routers:
        if official:
            nn.init.trunc_normal_(weight, std=INITIALIZER_RANGE, a=-2.0, b=2.0)
        else:
            nn.init.normal_(weight, std=initializer_range)
    for linear in projections:
        if official:
            nn.init.xavier_uniform_(linear.weight, gain=0.707)
        else:
            nn.init.normal_(linear.weight, std=initializer_range)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
