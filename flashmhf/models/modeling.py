"""transformers' Llama with a network of :mod:`flashmhf.nn`: x + ffn(RMSNorm(x)) after each block's attention."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from transformers import GenerationMixin, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers import modeling_layers as layers
from transformers.models.llama import modeling_llama as llama

from ..nn import MHFFN, FlashMHF, SwiGLU
from ..nn.init import Scheme, draws_itself
from ..nn.multihead import HeadRMSNorm
from ..nn.network import FixedDtypes, Network
from ..nn.weights import partitioned
from .configuration import FlashMHFConfig


def feed_forward(config: FlashMHFConfig) -> Network:
    """Return the feed-forward network that ``config`` names, [..., hidden_size] -> [..., hidden_size]."""
    d_model, width, heads = config.hidden_size, config.intermediate_size, config.ffn_num_heads
    operator = {
        "num_kv_heads": config.ffn_num_kv_heads, "q_norm": config.ffn_q_norm, "q_norm_eps": config.rms_norm_eps,
        "skip_linear": config.ffn_skip_linear, "activation": config.hidden_act, "bias": config.mlp_bias,
        "backend": config.ffn_backend, "deterministic": config.ffn_deterministic,
    }  # fmt: skip
    match config.ffn_type:
        case "swiglu":
            return SwiGLU(d_model, width, bias=config.mlp_bias)
        case "mh_ffn":
            return MHFFN(d_model, heads, width, **operator)
        case "flashmhf":
            sizes = heads, config.ffn_num_subnets, config.ffn_subnet_dim
            alone = {"router_eps": config.ffn_router_eps, "recompute_q": config.ffn_recompute_q}
            return FlashMHF(d_model, *sizes, **alone, **operator)


def gathered(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which no parameter is partitioned (ZeRO stage 3): every rank takes what the first draws."""
    if not (parameters := partitioned(module)):
        return nullcontext()
    from deepspeed import zero

    return zero.GatheredParameters(parameters, modifier_rank=0)


def check_complete(source: object, missing: Iterable[str]) -> None:
    """Raise ValueError that counts and names the ``missing`` weights of ``source``, if there are any."""
    if names := sorted(missing):
        shown = ", ".join(names[:3]) + (", …" if names[3:] else "")
        raise ValueError(f"{source} lacks {len(names):,} weights of its model: {shown}")


class FlashMHFRotaryEmbedding(FixedDtypes, llama.LlamaRotaryEmbedding):
    """Llama's with frequencies that stay float32: bf16's put angles of positions above 2048 wrong by over a radian."""

    fixed = property(lambda self: tuple(self._buffers))


class FlashMHFDecoderLayer(llama.LlamaDecoderLayer):
    def __init__(self, config: FlashMHFConfig, layer_idx: int):
        layers.GradientCheckpointingLayer.__init__(self)  # LlamaDecoderLayer's own would allocate a SwiGLU first
        self.hidden_size = config.hidden_size
        self.self_attn = llama.LlamaAttention(config, layer_idx)
        self.mlp = feed_forward(config)
        scheme = Scheme(config.ffn_init, config.initializer_range, config.num_hidden_layers, config.official_init)
        self.mlp.set_scheme(scheme)  # for whichever of its weights a checkpoint leaves out
        self.input_layernorm = llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        norm = llama.LlamaRMSNorm if config.ffn_norm else nn.Identity
        self.post_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)


class FlashMHFPreTrainedModel(LlamaPreTrainedModel):
    """Base of the models: configuration, initialisation, loading and saving."""

    config_class = FlashMHFConfig
    config: FlashMHFConfig
    _no_split_modules = ["FlashMHFDecoderLayer"]
    _can_record_outputs = {"hidden_states": FlashMHFDecoderLayer, "attentions": llama.LlamaAttention}

    def _init_weights(self, module):
        """Have our networks draw themselves; transformers has torch.nn.init leave loaded tensors alone."""
        if isinstance(module, (Network, HeadRMSNorm)) or draws_itself(module):
            with gathered(module):
                module.reset_parameters()
        else:
            super()._init_weights(module)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Do nothing, as :meth:`FlashMHFConfig.register_for_auto_class`."""


class FlashMHFModel(FlashMHFPreTrainedModel, LlamaModel):
    """The layers without a head: input_ids [B, L] int64 -> last_hidden_state [B, L, hidden_size]."""

    def __init__(self, config: FlashMHFConfig):
        LlamaPreTrainedModel.__init__(self, config)
        config.validate()  # settings may have been changed since it was made
        # An embedding has no gradient at its padding index: end-of-text would not be learnt where it is the padding.
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        self.padding_idx = None if config.pad_token_id in ends else config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(FlashMHFDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = FlashMHFRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class FlashMHFForCausalLM(FlashMHFPreTrainedModel, LlamaForCausalLM, GenerationMixin):
    """Predict the next token: input_ids [B, L] int64 -> logits [B, L, vocab_size], with labels also the loss."""

    def __init__(self, config: FlashMHFConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.model = FlashMHFModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _valid_auto_compile_criteria(self, *given) -> bool:
        """Refuse to compile for a static cache if rotary frequencies follow the positions: no CUDA graph serves all."""
        varies = self.model.rotary_emb.rope_type in ("dynamic", "longrope")
        return not varies and super()._valid_auto_compile_criteria(*given)


class FlashMHFForSequenceClassification(layers.GenericForSequenceClassification, FlashMHFPreTrainedModel):
    """Label a whole sequence from its last token (transformers' head)."""


class FlashMHFForTokenClassification(layers.GenericForTokenClassification, FlashMHFPreTrainedModel):
    """Label every token (transformers' head)."""


class FlashMHFForQuestionAnswering(layers.GenericForQuestionAnswering, FlashMHFPreTrainedModel):
    """Find start and end of an answer within the sequence (transformers' head)."""
