"""A user's code with every public name: pyright reads it in strict mode, and it runs (test_types.py)."""

import torch
from torch import Tensor, nn

import flashmhf

x: Tensor = torch.ones(2, 8, 128)
ffn = flashmhf.FlashMHF(
    128, 2, 3, 64, q_norm=True, backend="auto", deterministic=True, device="cpu", dtype=torch.float32
)
y: Tensor = ffn(x)
z: Tensor = ffn.forward(x)
weights: tuple[nn.Parameter, nn.Parameter] = (ffn.k, ffn.router)
q = torch.ones(8, 2, 64)
k = torch.ones(2, 3, 64, 64)
r: Tensor = flashmhf.gate(q, ffn.router)
out: Tensor = flashmhf.flash_mhf(q, k, k, k, r, backend="eager", deterministic=False)
chosen: str | None = flashmhf.info(q, k).chosen
reasons: dict[str, str | None] = flashmhf.info().reasons
others: list[nn.Module] = [flashmhf.MHFFN(128, 2, 256), flashmhf.SwiGLU(128, 256)]
others += [flashmhf.ParametricKV(128, 2, 64), flashmhf.DenseMoE(128, 2, 64)]
expected: Tensor = flashmhf.reference.forward(q, k, k, k, r)
state: dict[str, Tensor] = flashmhf.convert.to_official(ffn.state_dict())
ffn.load_state_dict(flashmhf.convert.from_official(state, num_heads=2, num_subnets=3))
names: list[str] = flashmhf.replace_ffn(nn.Sequential(flashmhf.SwiGLU(128, 256)), num_heads=2)
trained: flashmhf.FlashMHF = flashmhf.FlashMHF(128, 2, 3)
trained.reset_parameters("official")
optimizer = torch.optim.AdamW(flashmhf.param_groups(trained, 1e-3, weight_decay=0.1))
muon: torch.optim.Optimizer = flashmhf.Muon(
    flashmhf.param_groups(trained, 1e-3, weight_decay=0.1, muon=True), momentum=0.9
)
packed: flashmhf.quantize.PackedWeights = flashmhf.quantize.pack_fp8(k, k, k)
served: flashmhf.quantize.Fp8FlashMHF = flashmhf.quantize.to_fp8(flashmhf.FlashMHF(128, 2, 3, 64))
low: Tensor = flashmhf.quantize.forward(q, packed)
version: str = flashmhf.__version__
