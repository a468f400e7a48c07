"""FP8 inference: K, U and V in e4m3, activations quantised as they come, no calibration."""

from __future__ import annotations

import importlib
from typing import Any

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

_OF_TORCHAO = "Fp8Config"  # imported when it is asked for: torchao is no dependency


def __getattr__(name: str) -> Any:
    if name != _OF_TORCHAO:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(".torchao", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchao":
            raise
        raise ModuleNotFoundError(
            f"flashmhf.quantize.{name} needs torchao: pip install torchao", name=error.name
        ) from None


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
