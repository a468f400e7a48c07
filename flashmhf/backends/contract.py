"""The interface of a back end, a module of the type :class:`Backend`.

The operators check their arguments, select a back end and call it with tensors on one device. It reads no global state
but the current stream, and neither copies q nor synchronises with the device.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class LayerWeights(NamedTuple):
    """The weights of a whole layer: out_proj(S(q_norm(in_proj(x)))), in the order of the operators' operands.

    in_w [H d_h, d_model], out_w [d_model, H d_h] and biases in x's dtype. networks: k, u, v [H_kv, E, d_e, d_h] in x's
    dtype, or k8, u8, v8 and scales as in :class:`flashmhf.quantize.PackedWeights`. router [H, d_h, E], or None for a
    network without gate; q_norm [H, d_h].
    """

    in_w: Tensor
    in_bias: Tensor | None
    networks: tuple[Tensor, ...]
    router: Tensor | None
    eps: float
    out_w: Tensor
    out_bias: Tensor | None
    q_norm: Tensor | None = None
    q_norm_eps: float = 0.0


class Router(NamedTuple):
    """A gate by its weights: R = gate(Q, w, eps) with w [H, d_h, E] in float32 or q's dtype."""

    w: Tensor
    eps: float


Gate = Tensor | Router | None  # R [..., H, E] itself, what it follows from, or None, which stands for weights of 1


class Settings(NamedTuple):
    """How a back end computes: ``deterministic``, bitwise equal results from run to run; ``needs``, whether gradients
    of the tokens and of the weights are; ``activation``, of ``reference.ACTIVATIONS``.
    """

    deterministic: bool = False
    needs: tuple[bool, bool] = (True, True)
    activation: str = "silu"


DEFAULTS = Settings()
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class AnyBackend(Protocol):
    """The functions that 16-bit and FP8 back ends have in common."""

    def why_not(
        self, device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int, activation: str = "silu"
    ) -> str | None:
        """Return None if the back end can run, else why not: the argument, what it got and what is supported."""
        ...

    def layer(self, x: Tensor, weights: LayerWeights) -> Tensor | None:
        """Return the whole layer at inference by one call, [..., d_model] for x [..., d_model], without autograd; None
        if it has no such operator or cannot read these tensors as they are: the caller runs the parts.
        """
        ...


class Backend(AnyBackend, Protocol):
    """Shapes, dtypes and strides are those of ``torch.ops.flashmhf.*``; R may come from ``backends.gating``."""

    def forward(self, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings) -> Tensor:
        """Return S [..., H, d_h] in q's dtype, contiguous."""
        ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings
    ) -> Gradients:
        """Return (dq, dk, du, dv, dr), or dw in place of dr for a router, whose part dq then includes. An empty tensor
        stands for what ``settings.needs`` leaves out, and for dr where r is None.
        """
        ...


class Fp8Backend(AnyBackend, Protocol):
    """A back end for K, U and V in e4m3, with SiLU. Shapes and dtypes are those of ``torch.ops.flashmhf.fp8_*``."""

    def forward(self, q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Gate) -> Tensor:
        """Return S [..., H, d_h] in q's dtype, contiguous."""
        ...


def layer(x: Tensor, weights: LayerWeights) -> None:
    """Return None, for a back end without an operator for the whole layer: the caller runs its parts."""


def why_not(device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int, activation: str = "silu") -> None:
    """Return None, for a back end that runs on every device, with every floating dtype, size and activation."""
