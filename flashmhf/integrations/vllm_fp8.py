"""The quantisation method "flashmhf_fp8" for vLLM, which asks for it before it imports a model class."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ..models import FlashMHFFp8Config
from ..quantize.modules import METHOD


@register_quantization_config(METHOD)
class FlashMHFFp8(QuantizationConfig):
    """What vLLM asks of the checkpoint's ``quantization_config``: everything but the FlashMHF networks is loaded as it is."""

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
        """Raises ValueError for another layout of packed weights."""
        FlashMHFFp8Config.from_dict(config)
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # needs a chosen platform

        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
