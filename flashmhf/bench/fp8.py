"""The FP8 baseline of the benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..nn import SwiGLU
from ..quantize import Fp8Linear


class Fp8SwiGLU(nn.Module):
    """SwiGLU with all weights in e4m3 and scales for rows: two products of ``torch._scaled_mm``, as gate and up projection are one."""

    @torch.no_grad()
    def __init__(self, plain: SwiGLU) -> None:
        super().__init__()
        both = nn.Linear(plain.d_model, 2 * plain.intermediate_dim, bias=False, device="meta")
        both.weight = nn.Parameter(torch.cat([plain.gate_proj.weight, plain.up_proj.weight]))
        self.into, self.down = Fp8Linear.from_linear(both), Fp8Linear.from_linear(plain.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> [..., d_model]."""
        gate, up = self.into(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)
