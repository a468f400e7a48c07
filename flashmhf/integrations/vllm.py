"""The model for vLLM: its Llama with this package's networks, whose heads are divided among tensor-parallel ranks.

vLLM's transformers back end would replace in_proj and out_proj, which ends the fused path, and replicate K, U, V and
the router. ``flashmhf.integrations.vllm_plugin`` registers this module's name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import Tensor, nn
from vllm import distributed
from vllm.config import VllmConfig
from vllm.model_executor.models import llama

from ..distributed import Rank
from ..models.modeling import check_complete
from .shards import served_feed_forward


class NoNorm(nn.Module):
    """Stand in, with the signature of vLLM's RMSNorm, for the feed-forward network's norm if there is none."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return residual, residual


class FlashMHFDecoderLayer(llama.LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", **kwargs) -> None:
        config = kwargs.pop("config", None) or vllm_config.model_config.hf_config
        as_llama = copy.copy(config)
        as_llama.hidden_act = "silu"  # its own network, which is replaced below, has no other
        super().__init__(vllm_config, prefix, config=as_llama, **kwargs)
        if config.ffn_type != "swiglu":
            rank = Rank(
                distributed.get_tensor_model_parallel_rank(), distributed.get_tensor_model_parallel_world_size(),
                distributed.tensor_model_parallel_all_reduce,
            )  # fmt: skip
            self.mlp = served_feed_forward(config, rank, f"{prefix}.mlp.")
        if not config.ffn_norm:
            self.post_attention_layernorm = NoNorm()


class FlashMHFForCausalLM(llama.LlamaForCausalLM):
    """vLLM's interface of :class:`flashmhf.models.FlashMHFForCausalLM`: FP8, parallelism, every ``ffn_type``."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=FlashMHFDecoderLayer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the checkpoint. Raises ValueError for missing tensors, for which vLLM itself does not look in a
        quantised one.
        """
        loaded = super().load_weights(weights)
        check_complete("the checkpoint", {name for name, _ in self.named_parameters()} - loaded)
        return loaded
