"""A user's code with every public name: pyright reads it in strict mode, and it runs (test_types.py)."""

import torch
from torch import Tensor, nn

import flashmhf
from flashmhf import (
    MHFFN,
    DenseMoE,
    FlashMHF,
    Muon,
    ParametricKV,
    SwiGLU,
    convert,
    flash_mhf,
    gate,
    info,
    param_groups,
    quantize,
    reference,
    replace_ffn,
)

x: Tensor = torch.ones(2, 8, 128)
ffn = FlashMHF(128, 2, 3, 64, q_norm=True, backend="auto", deterministic=True, device="cpu", dtype=torch.float32)
y: Tensor = ffn(x)
z: Tensor = ffn.forward(x)
weights: tuple[nn.Parameter, nn.Parameter] = (ffn.k, ffn.router)
q = torch.ones(8, 2, 64)
k = torch.ones(2, 3, 64, 64)
r: Tensor = gate(q, ffn.router)
out: Tensor = flash_mhf(q, k, k, k, r, backend="eager", deterministic=False)
chosen: str | None = info(q, k).chosen
reasons: dict[str, str | None] = info().reasons
others: list[nn.Module] = [MHFFN(128, 2, 256), SwiGLU(128, 256), ParametricKV(128, 2, 64), DenseMoE(128, 2, 64)]
expected: Tensor = reference.forward(q, k, k, k, r)
state: dict[str, Tensor] = convert.to_official(ffn.state_dict())
ffn.load_state_dict(convert.from_official(state, num_heads=2, num_subnets=3))
names: list[str] = replace_ffn(nn.Sequential(SwiGLU(128, 256)), num_heads=2)
trained: FlashMHF = FlashMHF.from_swiglu(SwiGLU(128, 256))
trained.reset_parameters("official")
optimizer = torch.optim.AdamW(param_groups(trained, 1e-3, weight_decay=0.1))
muon: torch.optim.Optimizer = Muon(param_groups(trained, 1e-3, weight_decay=0.1, muon=True), momentum=0.9)
packed: quantize.PackedWeights = quantize.pack_fp8(k, k, k)
served: quantize.Fp8FlashMHF = quantize.to_fp8(FlashMHF(128, 2, 3, 64))
low: Tensor = quantize.forward(q, packed)
version: str = flashmhf.__version__
