"""The package's FP8 as a configuration of torchao's ``quantize_``. Importing this module imports torchao."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from ..nn.flashmhf import FlashMHF
from ..quantize.modules import to_fp8


@dataclass
class Fp8Config(AOBaseConfig):
    """Put FlashMHF networks in FP8, by ``torchao.quantization.quantize_(model, Fp8Config(), filter_fn=is_flashmhf)``.

    torchao's own ``filter_fn`` chooses linear layers, which this configuration does not quantise by themselves: they
    raise ValueError.
    """


@register_quantize_module_handler(Fp8Config)
def _quantise(module: nn.Module, config: Fp8Config) -> nn.Module:
    if not isinstance(module, FlashMHF):
        using = "quantize_(model, Fp8Config(), filter_fn=quantize.is_flashmhf)"
        raise ValueError(f"Fp8Config got a {type(module).__name__}; supported: FlashMHF, by {using}")
    return to_fp8(module)
