"""The initialisation of the modules.

``init`` "normal" draws every weight from N(0, initializer_range); "official" takes the official code's settings:
projections xavier_uniform with gain 0.707, K U V normal 0.02, router truncated normal 0.02.

"balanced", the default of all networks but ParametricKV, is ours, not the paper's. For an input of unit variance Q, M =
Q K^T, N = Q U^T and the sum over sub-networks start at variance 1, and the output at 1 / (2 num_layers): the residual
stream grows by 1 over the depth. At N(0, 0.02) the output of FlashMHF starts hundreds of times smaller than SwiGLU's.
Routers stay N(0, initializer_range): gates near 1/E. docs/quality.md compares the two.

ParametricKV's default is "normal": unit variance would need V of std sqrt(num_kv / e), values so large that they keep
their random start for hundreds of Adam steps.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import checks
from ..checks import epsilon, flag, positive

INITIALIZER_RANGE = 0.02
INITS = ("normal", "official", "balanced")
DEFAULT_INIT = "balanced"
SWIGLU_VARIANCE = 0.35578  # E[silu(m)^2] E[n^2] for independent m, n of N(0, 1)
GATED_VARIANCE = {"silu": SWIGLU_VARIANCE, "gelu": 0.42522, "relu": 0.5, "relu2": 1.5}  # the same for other activations


@dataclass(frozen=True)
class OfficialInit:
    """Hold the gains of the official initialisation; the defaults are those of its shipped mixtures.

    in_proj, out_proj: gains of xavier_uniform. k, u, v, router: factors of the standard deviation. identity: W_in and
    W_out begin as identities. Raises TypeError for wrong types, ValueError if a gain is negative or not finite.
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


@dataclass(frozen=True)
class Scheme:
    """Hold how the weights of a network are drawn: the arguments of its ``reset_parameters``."""

    init: str = DEFAULT_INIT
    initializer_range: float = INITIALIZER_RANGE
    num_layers: int = 1
    official: OfficialInit = OfficialInit()

    def __post_init__(self) -> None:
        checks.choice("init", self.init, INITS)
        checks.instance("official", self.official, OfficialInit, "an OfficialInit")
        epsilon("initializer_range", self.initializer_range)
        positive("num_layers", self.num_layers)

    @property
    def residual(self) -> float:
        """Return the standard deviation of a network's output under "balanced"."""
        return 1 / math.sqrt(2 * self.num_layers)

    def draw(self, weight: Tensor, role: str, std: float) -> None:
        """Draw ``weight`` in place. ``role``: its gain in OfficialInit; ``std``: its deviation under "balanced"."""
        gain = getattr(self.official, role)
        if self.init != "official":
            nn.init.normal_(weight, std=std if self.init == "balanced" else self.initializer_range)
        elif role in ("in_proj", "out_proj"):
            nn.init.eye_(weight) if self.official.identity else nn.init.xavier_uniform_(weight, gain=gain)
        elif role == "router" and gain:  # trunc_normal_ divides by the standard deviation
            nn.init.trunc_normal_(weight, std=INITIALIZER_RANGE * gain, a=-2.0, b=2.0)
        else:
            nn.init.normal_(weight, std=INITIALIZER_RANGE * gain)

    def draw_projection(self, linear: nn.Linear, role: str, fan_in: float) -> None:
        """Draw the weight of a projection from ``fan_in`` inputs of unit variance, and make its bias zero."""
        self.draw(linear.weight, role, (self.residual if role == "out_proj" else 1.0) * fan_in**-0.5)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


def projection(*sizes: int, role: str, fan_in: float, scheme: Scheme, **settings: Any) -> nn.Linear:
    """Return a linear layer whose own ``reset_parameters`` is :meth:`Scheme.draw_projection`, as its network documents.

    FSDP and ``to_empty`` recipes call that of every module in an order of their own, and ``deepspeed.zero.Init`` takes
    the weights away when the layer's constructor ends. No subclass: many tools ask ``type(module) is nn.Linear``.
    """
    linear = nn.Linear.__new__(nn.Linear)
    set_reset(linear, role, fan_in, scheme)  # which the constructor calls
    linear.__init__(*sizes, **settings)
    return linear


def set_reset(linear: nn.Linear, role: str, fan_in: float, scheme: Scheme) -> None:
    """Set what ``reset_parameters`` of a projection draws."""
    linear.__dict__["reset_parameters"] = functools.partial(Scheme.draw_projection, scheme, linear, role, fan_in)


def draws_itself(module: nn.Module) -> bool:
    """Return whether ``module`` is one of :func:`projection`, and not a layer that has replaced it."""
    return "reset_parameters" in module.__dict__
