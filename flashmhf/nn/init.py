"""How the modules draw their weights.

``init`` "normal" draws every weight from N(0, initializer_range); "official" takes the official code's settings: projections
xavier_uniform with gain 0.707, K U V normal 0.02, router truncated normal 0.02.

"balanced", the default of all networks but ParametricKV, is ours, not the paper's. It keeps the variance of a unit-variance input:
Q = X W_in, M = Q K^T and N = Q U^T start at variance 1, the sum over sub-networks too, and the network's output at 1 / (2 num_layers),
so that the residual stream of a model of num_layers blocks grows by 1 over its depth. At N(0, 0.02) the output of FlashMHF starts some
300 times smaller than SwiGLU's: it is a product of five weights, against SwiGLU's three, and the gate divides by E. Routers stay
N(0, initializer_range): gates near 1/E.
docs/quality.md has the trainings that compare the two.

ParametricKV's default is "normal": its softmax averages num_kv values, so unit variance needs V of std sqrt(num_kv / e), 24 for 1584
keys. An Adam step moves a weight by about the learning rate whatever its size, so values so large keep their random start for
hundreds of steps, and decoupled weight decay dominates what they learn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from .arguments import epsilon, flag, positive

INITIALIZER_RANGE = 0.02
INITS = ("normal", "official", "balanced")
DEFAULT_INIT = "balanced"
SWIGLU_VARIANCE = 0.35578  # E[silu(m)^2] E[n^2] for independent m, n of N(0, 1)
GATED_VARIANCE = {"silu": SWIGLU_VARIANCE, "gelu": 0.42522, "relu": 0.5, "relu2": 1.5}  # the same for other activations


@dataclass(frozen=True)
class OfficialInit:
    """Gains of the official initialisation; the defaults are those of its shipped mixtures (``configs/mhffnmoe``).

    in_proj, out_proj: of xavier_uniform; k, u, v, router: factors of the standard deviation. identity: W_in and W_out begin as identities.
    Raises TypeError for gains that are no numbers and an identity that is no bool, ValueError for gains that are negative or not finite.
    """

    in_proj: float = 0.707
    out_proj: float = 0.707
    k: float = 1.0
    u: float = 1.0
    v: float = 1.0
    router: float = 1.0
    identity: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            (flag if name == "identity" else epsilon)(name, value)


def residual_std(fan_in: float, num_layers: int) -> float:
    """Of a last projection from ``fan_in`` unit-variance inputs: output variance 1 / (2 num_layers)."""
    return 1 / math.sqrt(2 * positive("num_layers", num_layers) * fan_in)


def initialise(
    normal: Iterable[tuple[Tensor, float]],
    projections: Iterable[tuple[nn.Linear, float]],
    routers: Iterable[Tensor],
    init: str,
    initializer_range: float,
    gains: OfficialInit | None = None,
) -> None:
    """Draws the weights; with each comes its standard deviation under "balanced".

    ``normal`` are K, U and V, or K and V; ``projections`` are W_in and W_out, or the linear layers of a network without heads.
    """
    if not isinstance(init, str):
        raise TypeError(f"init must be a str, got {type(init).__name__}")
    if init not in INITS:
        raise ValueError(f"init is {init!r}; supported: {', '.join(map(repr, INITS))}")
    epsilon("initializer_range", initializer_range)
    official, balanced = init == "official", init == "balanced"
    gains = gains or OfficialInit()
    normal = tuple(normal)
    for (weight, std), gain in zip(normal, (gains.k, gains.u, gains.v) if len(normal) == 3 else (gains.k, gains.v), strict=False):
        nn.init.normal_(weight, std=std if balanced else INITIALIZER_RANGE * gain if official else initializer_range)
    for weight in routers:
        if official:
            nn.init.trunc_normal_(weight, std=INITIALIZER_RANGE * gains.router, a=-2.0, b=2.0)
        else:
            nn.init.normal_(weight, std=initializer_range)
    for i, (linear, std) in enumerate(projections):
        if official and gains.identity:
            nn.init.eye_(linear.weight)
        elif official:
            nn.init.xavier_uniform_(linear.weight, gain=gains.out_proj if i else gains.in_proj)
        else:
            nn.init.normal_(linear.weight, std=std if balanced else initializer_range)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
