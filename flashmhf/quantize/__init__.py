"""FP8 inference: K, U and V in e4m3, activations quantised as they come, no calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from .modules import Fp8FlashMHF, is_flashmhf, quantize_, to_fp8
from .packing import LAYOUT, PackedWeights, operands, pack_fp8, unpack
from .saturation import check_saturation, count_saturated

__all__ = [
    "LAYOUT",
    "Fp8FlashMHF",
    "PackedWeights",
    "check_saturation",
    "count_saturated",
    "forward",
    "is_flashmhf",
    "pack_fp8",
    "quantize_",
    "to_fp8",
    "unpack",
]


def forward(q: Tensor, packed: PackedWeights, r: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Compute S [..., H, d_h] from q [..., H, d_h] and packed weights, in q's dtype. Works on every device and has no
    gradients.

    Args:
        q: any leading dimensions; bf16 and fp16 on the hopper back end, any floating dtype on the eager one.
        packed: the weights that :func:`pack_fp8` returned. H must be a multiple of their H_kv.
        r: gate values [..., H, E], float32 or q's dtype; None stands for weights of 1.
        backend: "auto" (the first that supports device, dtype and shape) or a name of
            ``flashmhf.backends.FP8_BACKENDS``.

    Raises TypeError, ValueError and NotImplementedError as :func:`flashmhf.flash_mhf` does, and NotImplementedError if
    an input requires a gradient.
    """
    checks.strided(q=q, **({} if r is None else {"r": r}))
    checks.instance("backend", backend, str)
    return torch.ops.flashmhf.fp8_forward(q, *operands(packed), r, backend=backend)
