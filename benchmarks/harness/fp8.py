"""The FP8 baseline of the benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashmhf.nn import SwiGLU
from flashmhf.quantize import Fp8Linear
from flashmhf.quantize.linear import quantise_rows, scaled_product


class ScaledLinear(Fp8Linear):
    """The product of e4m3 rows for any number of tokens, in operations that a compiler fuses with what stands before them."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = scaled_product(*quantise_rows(rows), self.weight8, self.scale, self.bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])


class Fp8SwiGLU(nn.Module):
    """SwiGLU with all weights in e4m3 and scales for rows: two products of ``torch._scaled_mm``, as gate and up projection are one."""

    @torch.no_grad()
    def __init__(self, plain: SwiGLU) -> None:
        super().__init__()
        both = nn.Linear(plain.d_model, 2 * plain.intermediate_dim, bias=False, device="meta")
        both.weight = nn.Parameter(torch.cat([plain.gate_proj.weight, plain.up_proj.weight]))
        self.into, self.down = ScaledLinear.from_linear(both), ScaledLinear.from_linear(plain.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> [..., d_model]."""
        gate, up = self.into(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)
