"""The plugin that vLLM loads by its entry point ``vllm.general_plugins`` in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ..models import FlashMHFFp8Config
from ..quantize.modules import METHOD

ARCHITECTURE = "FlashMHFForCausalLM"


def register() -> None:
    """Register the model class by its name. Importing this module has registered the rest."""
    ModelRegistry.register_model(ARCHITECTURE, f"{__package__}.vllm:{ARCHITECTURE}")


@register_quantization_config(METHOD)
class FlashMHFFp8(QuantizationConfig):
    """Answer what vLLM asks of a checkpoint's ``quantization_config``: all but the FlashMHF networks is loaded as it
    is. Raises ValueError if the checkpoint has none: ``--quantization flashmhf`` quantises nothing by itself.
    """

    def __init__(self, stored: dict[str, Any] | None = None) -> None:
        if stored is None:
            raise ValueError(
                f"quantization is {METHOD!r}, but the checkpoint has no packed weights; supported: a directory that "
                "`flashmhf quantize` wrote, which needs no such option"
            )
        FlashMHFFp8Config.from_dict(stored)  # refuses another layout
        super().__init__()

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # the eager back end runs everywhere, vLLM on older GPUs without bf16

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FlashMHFFp8:
        return cls(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # needs a chosen platform

        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
