"""FlashMHF in torchtitan 0.3: an override of its feed-forward networks, and a recipe for FlashMHF-1.3B.

    torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b \\
        --override.imports 'flashmhf.integrations.torchtitan.feed_forward={"num_layers": 32}'

The override replaces every ``feed_forward`` of a Llama-3 recipe by a FlashMHF network of about the same width.
``num_layers``, the number of the model's layers, keeps what the stack adds at the start as small as one layer's output.
FSDP2, tensor and sequence parallelism, activation checkpointing, per-block compilation and checkpoints are torchtitan's
own. Needs the extra ``flashmhf[titan]`` and Python 3.11.

Do not set ``--checkpoint.last_save_in_hf`` with the override: torchtitan's conversion of a Llama leaves out weights
that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from .. import extras

extras.require("flashmhf.integrations.torchtitan", "torchtitan")

import spmd_types as spmd  # noqa: E402  (the line above says what is missing)
from torch import nn  # noqa: E402
from torchtitan.config import override  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.common.decoder_sharding import colwise_config, dense_param_placement  # noqa: E402
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from ..checks import divisor, positive  # noqa: E402
from ..distributed.parallel import check_heads  # noqa: E402
from ..nn.flashmhf import FlashMHF, default_num_heads, default_subnet_dim  # noqa: E402
from ..nn.multihead import HeadRMSNorm  # noqa: E402

__all__ = ["TitanFlashMHF", "TitanHeadRMSNorm", "feed_forward", "flashmhf_1_3b"]


class TitanHeadRMSNorm(HeadRMSNorm, Module):
    """The normalisation of Q with torchtitan's protocol. Its weight [H, d_h] is sharded by heads."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_heads: int
        head_dim: int
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__(config.num_heads, config.head_dim, config.eps)


class TitanFlashMHF(FlashMHF, Module):
    """FlashMHF with torchtitan's protocol: built from a configuration, sharded and initialised by it.

    ``num_layers`` is the number of the model's layers, for the "balanced" initialisation. Under torchtitan's default
    SPMD backend a rank holds the weights of its own heads as ordinary tensors. The network takes their number from
    them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_proj: Linear.Config
        out_proj: Linear.Config
        q_norm: TitanHeadRMSNorm.Config | None
        num_heads: int
        num_subnets: int
        subnet_dim: int
        num_layers: int
        init: str

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_proj.in_features, config.num_heads, config.num_subnets, config.subnet_dim)
        self.in_proj, self.out_proj = config.in_proj.build(), config.out_proj.build()
        self.q_norm = None if config.q_norm is None else config.q_norm.build()
        self.config = config

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shard the network.

        Raises ValueError if the tensor-parallel degree does not divide H; torchtitan would fail in forward.
        """
        check_heads("feed_forward", self, parallel_dims.tp)
        super().parallelize(parallel_dims)

    def _init_self_parameters(self) -> None:
        """Draw the weights after the children have drawn theirs: the projections take part in the balanced
        initialisation.
        """
        self.reset_parameters(self.config.init, num_layers=self.config.num_layers)


@override(target=FeedForward.Config, fqns=["*.feed_forward"], description="FlashMHF for SwiGLU", exact=True)
def feed_forward(
    cfg: FeedForward.Config, *, num_heads: int | None = None, num_subnets: int | None = None,
    subnet_dim: int | None = None, q_norm: bool = False, num_layers: int = 1, init: str = "balanced",
) -> TitanFlashMHF.Config:  # fmt: skip
    """Return the configuration of a FlashMHF network in place of the SwiGLU ``cfg``.

    Args:
        num_heads: H; None as in :func:`flashmhf.replace_ffn`.
        subnet_dim: d_e; None for 8/3 d_h rounded up to a multiple of 64.
        num_subnets: E; None for about the width of ``cfg``.
        q_norm, init: as in :class:`flashmhf.FlashMHF` and its ``reset_parameters``.
        num_layers: the number of the model's layers, for the "balanced" initialisation.

    Raises TypeError for sizes that are not integers, ValueError for sizes below 1 and for a num_heads that does not
    divide the model's dimension.
    """
    d_model, width = cfg.w1.in_features, cfg.w1.out_features
    num_heads = divisor(
        "num_heads", default_num_heads(d_model) if num_heads is None else num_heads, "the model's dimension", d_model
    )
    head_dim = d_model // num_heads
    subnet_dim = default_subnet_dim(head_dim) if subnet_dim is None else positive("subnet_dim", subnet_dim)
    if num_subnets is None:
        num_subnets = max(1, round(width / subnet_dim))
    norm = TitanHeadRMSNorm.Config(
        num_heads=num_heads, head_dim=head_dim, eps=1e-5, param_init={"weight": nn.init.ones_}
    )
    network = TitanFlashMHF.Config(
        in_proj=Linear.Config(in_features=d_model, out_features=d_model),
        out_proj=Linear.Config(in_features=d_model, out_features=d_model),
        q_norm=norm if q_norm else None,
        num_heads=num_heads,
        num_subnets=positive("num_subnets", num_subnets),
        subnet_dim=subnet_dim,
        num_layers=num_layers,
        init=init,
    )
    if cfg.sharding_config is not None:  # torchtitan has set the stock network's before
        _shard(network, cfg)
    return network


def _shard(network: TitanFlashMHF.Config, cfg: FeedForward.Config) -> None:
    """Shard K, U, V and the router by heads, in_proj by columns, out_proj by rows; x and the result lie as those of
    ``cfg``.
    """
    placed = {name: dense_param_placement(tp=spmd.S(dim)) for name, dim in FlashMHF.SHARDED.items()}
    network.sharding_config = ShardingConfig(
        state_shardings={name: placement for name, placement in placed.items() if "." not in name},
        in_src_shardings=cfg.sharding_config.in_src_shardings,
        in_dst_shardings=cfg.sharding_config.in_dst_shardings,
    )
    network.in_proj.sharding_config = colwise_config()
    network.out_proj.sharding_config = cfg.w2.sharding_config
    if network.q_norm is not None:
        network.q_norm.sharding_config = ShardingConfig(state_shardings={"weight": placed["q_norm.weight"]})


def flashmhf_1_3b() -> Trainer.Config:
    """Return the recipe of FlashMHF-1.3B as the paper trains it, for ``--module flashmhf.integrations.torchtitan
    --config flashmhf_1_3b``.

    20 layers, d_model 2048, 32 heads of attention, 16 heads of FlashMHF with 15 sub-networks of width 384; 409,000
    steps of 64 sequences of 4096 tokens at a peak rate of 1e-3. The vocabulary is padded to 50,432; name the tokenizer
    by ``--hf-assets-path`` and the data by ``--dataloader.dataset``.
    """
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.config.override import OverrideConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("1B")  # the one public way to torchtitan's functions for a Llama 3; the model is another
    model = _llama(layers=20, dim=2048, heads=32, hidden=5760, vocabulary=50_432)
    # Without an adapter torchtitan refuses to save in Hugging Face's format. Llama's would leave out FlashMHF's weights
    # and say nothing.
    spec = replace(spec, flavor="flashmhf-1.3b", model=model, state_dict_adapter=None)
    network = {"num_heads": 16, "num_subnets": 15, "subnet_dim": 384, "num_layers": 20}
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=50_432)),
        hf_assets_path="./assets/tokenizer",
        model_spec=spec,
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=6135, decay_type="cosine", min_lr_factor=0.01),
        training=TrainingConfig(local_batch_size=8, global_batch_size=64, seq_len=4096, steps=409_000),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        override=OverrideConfig(imports=[("flashmhf.integrations.torchtitan.feed_forward", network)]),
    )


def _llama(*, layers: int, dim: int, heads: int, hidden: int, vocabulary: int):
    """Return the configuration of a Llama 3 of these sizes, with rotary embeddings of base 10,000 and weights of N(0,
    0.02).
    """
    from torchtitan.models.common import ComplexRoPE, Embedding, RMSNorm
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    normal = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
    norm = RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_})
    attention = {
        "wqkv_param_init": normal,
        "wo_param_init": normal,
        "inner_attention": get_attention_config("flex"),
        "rope": ComplexRoPE.Config(dim=dim // heads, max_seq_len=4096, theta=10_000),
    }
    block = lambda: Llama3TransformerBlock.Config(  # noqa: E731
        attention_norm=norm,
        ffn_norm=norm,
        attention=make_gqa_config(dim=dim, n_heads=heads, **attention),
        feed_forward=make_ffn_config(dim=dim, hidden_dim=hidden, w1_param_init=normal, w2w3_param_init=normal),
    )
    return Llama3Model.Config(
        dim=dim,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=normal),
        norm=norm,
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=normal),
        layers=[block() for _ in range(layers)],
    )
