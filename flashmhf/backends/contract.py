"""What a back end provides. A back end is a module; :class:`Backend` is the type that every such module satisfies.

The operators of ``flashmhf.ops.mix`` check their arguments, select a back end and call it with tensors on one device. A back end reads no
global state but the current stream, and neither copies q nor synchronises with the device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

Projection = tuple[Tensor, Tensor | None]
"""Weight [N, K] and bias [N] of a linear layer."""
Norm = tuple[Tensor, float]
"""Weight [H, d_h] and eps of the RMS normalisation of Q."""


class Backend(Protocol):
    """Shapes, dtypes and strides are those of ``torch.ops.flashmhf.*``; ``needs`` is (tokens, weights).

    ``backends.gating`` composes ``gated_forward`` and ``gated_backward`` from ``forward`` and ``backward`` for a back end without a fused
    router. This module's :func:`refuse_projection`, :func:`project` and :func:`layer` serve a back end without these kernels.
    """

    PROJECT_TOKENS: int
    """The most tokens that ``project`` takes; 0 for a back end without such a kernel."""

    def why_not(self, device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int, activation: str = "silu") -> str | None:
        """None where the back end can run; else the reason, naming the argument, what it got and what is supported."""
        ...

    def forward(self, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, *, deterministic: bool, activation: str) -> Tensor:
        """S [..., H, d_h] in q's dtype, contiguous."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        v: Tensor,
        r: Tensor | None,
        *,
        deterministic: bool,
        needs: tuple[bool, bool],
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(dq, dk, du, dv, dr); an empty tensor for what ``needs`` leaves out, and for dr where r is None."""
        ...

    def gated_forward(
        self, q: Tensor, k: Tensor, u: Tensor, v: Tensor, w: Tensor, eps: float, *, deterministic: bool, activation: str
    ) -> Tensor:
        """``forward`` with R = gate(q, w, eps)."""
        ...

    def gated_backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        v: Tensor,
        w: Tensor,
        eps: float,
        *,
        deterministic: bool,
        needs: tuple[bool, bool],
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(dq, dk, du, dv, dw); dq includes the gradient through the router."""
        ...

    def backward_accumulate_(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        v: Tensor,
        r: Tensor | None,
        dk: Tensor,
        du: Tensor,
        dv: Tensor,
        *,
        deterministic: bool,
        needs: tuple[bool, bool],
        activation: str,
    ) -> tuple[Tensor, Tensor]:
        """(dq, dr); adds the weight gradients into dk, du, dv, which are fp32 (fp64 for fp64 operands)."""
        ...

    def refuse_projection(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Exception | None:
        """Why ``project`` does not take x [T, K], w [N, K] and bias [N]; None where it does."""
        ...

    def project(self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, weights_ready: bool = False) -> Tensor:
        """x W^T + bias [T, N] without autograd; ``weights_ready`` as in ``hopper.project``."""
        ...

    def layer(
        self,
        x: Tensor,
        in_proj: Projection,
        q_norm: Norm | None,
        k: Tensor,
        u: Tensor,
        v: Tensor,
        w: Tensor,
        eps: float,
        out_proj: Projection,
    ) -> Tensor | None:
        """The module's values at inference, [..., d_model] -> [..., d_model], queued by one call without autograd:
        out_proj(S(q_norm(in_proj(x)))).

        None where the back end has no such operator or does not take these tensors as they are; the module then calls its parts.
        """
        ...


PROJECT_TOKENS = 0


def refuse_projection(x: Tensor, w: Tensor, bias: Tensor | None) -> NotImplementedError:
    """For a back end without a projection kernel."""
    return NotImplementedError("project has a kernel on the hopper back end only; supported elsewhere: torch.nn.functional.linear")


def project(x: Tensor, w: Tensor, bias: Tensor | None = None, *, weights_ready: bool = False) -> Tensor:
    """For a back end without a projection kernel."""
    raise refuse_projection(x, w, bias)


def layer(
    x: Tensor,
    in_proj: Projection,
    q_norm: Norm | None,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    w: Tensor,
    eps: float,
    out_proj: Projection,
) -> Tensor | None:
    """For a back end without an operator for the whole module."""
    return None
