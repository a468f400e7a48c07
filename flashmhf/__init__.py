"""Flash Multi-Head Feed-Forward Networks (arXiv 2512.06989) for PyTorch."""

from . import distributed as distributed  # its names without an import of their own
from . import flops, quantize, reference
from .backends import info
from .nn import MHFFN, DenseMoE, FlashMHF, Muon, ParametricKV, SwiGLU, convert, param_groups
from .ops.gate import gate
from .ops.mix import flash_mhf
from .swap import replace_ffn
from .version import __version__ as __version__

flops.register()

__all__ = [
    "DenseMoE",
    "FlashMHF",
    "MHFFN",
    "Muon",
    "ParametricKV",
    "SwiGLU",
    "convert",
    "flash_mhf",
    "gate",
    "info",
    "param_groups",
    "quantize",
    "reference",
    "replace_ffn",
]
