"""What the C++ operators return for fake tensors: compiled graphs hold them, and no Python runs there."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ... import torch_private


def _forward(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _layer(x: Tensor, *operands: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], operands[-2].shape[0]))  # out_w


def _backward(grad_out: Tensor, q: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    k, u, v, gate, *eps, _, needs_tokens, needs_weights = operands

    def gradient(x: Tensor | None, needed: bool) -> Tensor:
        return x.new_empty(x.shape) if needed and x is not None else q.new_empty(0)

    of_gate = gradient(gate, needs_weights if eps else needs_tokens)
    return gradient(q, needs_tokens), *(gradient(x, needs_weights) for x in (k, u, v)), of_gate


FAKES = {
    "forward": _forward, "gated_forward": _forward, "fp8_forward": _forward, "backward": _backward,
    "gated_backward": _backward, "graph_layer": _layer, "graph_fp8_layer": _layer,
}  # fmt: skip


@functools.cache
def register() -> None:
    """Register them with PyTorch, which takes them once, after the library that has the operators is loaded."""

    def registration() -> None:
        for name, fake in FAKES.items():
            torch.library.register_fake(f"flashmhf_hopper::{name}", fake)

    torch_private.register("the C++ operators in compiled graphs", registration)
