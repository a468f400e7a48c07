"""FP8 inference: K, U and V in e4m3, activations quantised as they come, no calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from .modules import Fp8FlashMHF, quantize_, to_fp8
from .packing import LAYOUT, PackedWeights, operands, pack_fp8, unpack

__all__ = ["LAYOUT", "Fp8FlashMHF", "PackedWeights", "forward", "pack_fp8", "quantize_", "to_fp8", "unpack"]


def forward(q: Tensor, packed: PackedWeights, r: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Compute S [..., H, d_h] from q [..., H, d_h] and packed weights, in q's dtype, without gradients.

    r: gate values [..., H, E], float32 or q's dtype, or None. backend: "auto", "hopper", "triton" or "eager". Raises
    what :func:`flashmhf.flash_mhf` does, and NotImplementedError if an input requires a gradient.
    """
    checks.strided(q=q, **({} if r is None else {"r": r}))
    checks.instance("backend", backend, str)
    return torch.ops.flashmhf.fp8_forward(q, *operands(packed), r, backend=backend)
