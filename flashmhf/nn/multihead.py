"""What the multi-head modules share: checked sizes, W_in, heads and W_out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device


def check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} must be an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")


def head_dim_of(d_model: int, num_heads: int) -> int:
    check_positive(d_model=d_model, num_heads=num_heads)
    if d_model % num_heads:
        raise ValueError(f"d_model is {d_model}; it must be a multiple of num_heads = {num_heads}")
    return d_model // num_heads


def check_input(x: Tensor, d_model: int) -> None:
    if x.dim() < 1 or x.shape[-1] != d_model:
        raise ValueError(f"x has shape {list(x.shape)}; expected [..., d_model] with d_model = {d_model}")


class MultiHead(nn.Module):
    """W_in, heads, W_out: what FlashMHF, MHFFN and ParametricKV share. ``k`` and its siblings are the subclass's."""

    d_model: int
    num_heads: int
    head_dim: int

    def __init__(self, d_model: int, num_heads: int, bias: bool, device: Device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, head_dim_of(d_model, num_heads)
        self.in_proj = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)

    def split_heads(self, x: Tensor) -> Tensor:
        """Q = split_H(X W_in): [..., d_model] -> [..., H, d_h], a view of the projection's result."""
        check_input(x, self.d_model)
        return self.in_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
