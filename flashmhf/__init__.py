"""Flash Multi-Head Feed-Forward Networks (arXiv 2512.06989) for PyTorch."""

from . import distributed, flops, quantize, reference  # noqa: F401  (distributed and flops answer DTensor and FlopCounterMode)
from .backends import info
from .nn import MHFFN, DenseMoE, FlashMHF, Muon, ParametricKV, SwiGLU, convert, param_groups
from .ops.gate import gate
from .ops.networks import flash_mhf
from .swap import replace_ffn
from .version import __version__ as __version__

__all__ = [
    "DenseMoE", "FlashMHF", "MHFFN", "Muon", "ParametricKV", "SwiGLU", "convert", "flash_mhf", "gate", "info",
    "param_groups", "quantize", "reference", "replace_ffn",
]  # fmt: skip
