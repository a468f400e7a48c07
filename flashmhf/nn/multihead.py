"""What the multi-head modules share: checked sizes, W_in, heads and W_out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import checks
from .arguments import flag, positive
from .init import residual_std


def check_input(x: Tensor, d_model: int) -> None:
    checks.tensors(x=x)
    if x.dim() < 1 or x.shape[-1] != d_model:
        raise ValueError(f"x has shape {list(x.shape)}; expected [..., d_model] with d_model = {d_model}")


class MultiHead(nn.Module):
    """W_in, heads, W_out: what FlashMHF, MHFFN and ParametricKV share. ``k`` and its siblings are the subclass's."""

    d_model: int
    num_heads: int
    head_dim: int

    def __init__(self, d_model: int, num_heads: int, bias: bool, device: Device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.d_model, self.num_heads = positive("d_model", d_model), positive("num_heads", num_heads)
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model is {d_model}; it must be a multiple of num_heads = {num_heads}")
        self.head_dim = self.d_model // self.num_heads
        flag("bias", bias)
        self.in_proj = nn.Linear(self.d_model, self.d_model, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(self.d_model, self.d_model, bias=bias, device=device, dtype=dtype)

    def balanced_projections(self, num_layers: int) -> tuple[tuple[nn.Linear, float], ...]:
        return (self.in_proj, self.d_model**-0.5), (self.out_proj, residual_std(self.d_model, num_layers))

    def split_heads(self, x: Tensor) -> Tensor:
        """Q = split_H(X W_in): [..., d_model] -> [..., H, d_h], a view of the projection's result.

        H is what in_proj gives: under tensor parallelism a rank has some of the heads.
        """
        check_input(x, self.d_model)
        return self.in_proj(x).unflatten(-1, (-1, self.head_dim))
