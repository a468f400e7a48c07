"""FlashMHF in torchtitan 0.3: overrides of its feed-forward networks and of its optimizer's groups.

    torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b --override.imports \\
        'flashmhf.integrations.torchtitan.feed_forward={"num_layers": 32}' \\
        flashmhf.integrations.torchtitan.param_groups

The first replaces every ``feed_forward`` of a Llama-3 recipe by a FlashMHF network of about the same width.
``num_layers``, the number of the model's layers, keeps what the stack adds at the start as small as one layer's output.
FSDP2, tensor and sequence parallelism, activation checkpointing, per-block compilation and checkpoints are torchtitan's
own. Needs the extra ``flashmhf[titan]`` and Python 3.11.

Do not set ``--checkpoint.last_save_in_hf`` with it: torchtitan's conversion of a Llama leaves out unknown weights.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from .. import extras

extras.require("flashmhf.integrations.torchtitan", "torchtitan")

import spmd_types as spmd  # noqa: E402  (the line above says what is missing)
from torch import nn  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.config import override  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.common.decoder_sharding import colwise_config, dense_param_placement  # noqa: E402
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402

from ..checks import divisor, epsilon, flag, positive  # noqa: E402
from ..distributed.parallel import check_heads  # noqa: E402
from ..nn.flashmhf import FlashMHF, default_num_heads, default_subnet_dim  # noqa: E402
from ..nn.init import Scheme  # noqa: E402
from ..nn.multihead import HeadRMSNorm  # noqa: E402
from ..nn.optim import ADAMW_PROJECTION_RATE  # noqa: E402

__all__ = ["TitanFlashMHF", "TitanHeadRMSNorm", "feed_forward", "param_groups"]


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
    """FlashMHF with torchtitan's protocol. Under its default SPMD backend a rank has its heads as ordinary tensors."""

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
        """Shard the network. Raises ValueError if the tensor-parallel degree does not divide H."""
        check_heads("feed_forward", self, parallel_dims.tp)
        super().parallelize(parallel_dims)

    def _init_self_parameters(self) -> None:
        """Draw the weights after the children have drawn theirs: the projections take part in "balanced"."""
        self.reset_parameters(self.config.init, num_layers=self.config.num_layers)


@override(target=FeedForward.Config, fqns=["*.feed_forward"], description="FlashMHF for SwiGLU", exact=True)
def feed_forward(
    cfg: FeedForward.Config, *, num_heads: int | None = None, num_subnets: int | None = None,
    subnet_dim: int | None = None, q_norm: bool = False, num_layers: int = 1, init: str = "balanced",
) -> TitanFlashMHF.Config:  # fmt: skip
    """Return the configuration of a FlashMHF network in place of the SwiGLU ``cfg``, of about its width.

    num_heads: as in :func:`flashmhf.replace_ffn`. subnet_dim: None for 8/3 d_h rounded up to a multiple of 64. q_norm,
    init: as in :class:`flashmhf.FlashMHF`. num_layers: the model's number of layers. Raises TypeError for values of
    another type, ValueError for sizes below 1, another init and a num_heads that does not divide the model's dimension.
    """
    flag("q_norm", q_norm)
    Scheme(init, num_layers=num_layers)
    d_model, width = cfg.w1.in_features, cfg.w1.out_features
    num_heads = default_num_heads(d_model) if num_heads is None else num_heads
    num_heads = divisor("num_heads", num_heads, "the model's dimension", d_model)
    head_dim = d_model // num_heads
    subnet_dim = default_subnet_dim(head_dim) if subnet_dim is None else positive("subnet_dim", subnet_dim)
    num_subnets = positive("num_subnets", max(1, round(width / subnet_dim)) if num_subnets is None else num_subnets)
    ones = {"weight": nn.init.ones_}
    norm = TitanHeadRMSNorm.Config(num_heads=num_heads, head_dim=head_dim, eps=1e-5, param_init=ones)
    network = TitanFlashMHF.Config(
        in_proj=Linear.Config(in_features=d_model, out_features=d_model),
        out_proj=Linear.Config(in_features=d_model, out_features=d_model), q_norm=norm if q_norm else None,
        num_heads=num_heads, num_subnets=num_subnets, subnet_dim=subnet_dim, num_layers=num_layers, init=init,
    )  # fmt: skip
    if cfg.sharding_config is not None:  # torchtitan has set the stock network's before
        _shard(network, cfg)
    return network


@override(target=OptimizersContainer.Config, description="a rate of their own for FlashMHF's projections")
def param_groups(
    cfg: OptimizersContainer.Config, *, projection_rate: float = ADAMW_PROJECTION_RATE
) -> OptimizersContainer.Config:
    """Return ``cfg`` with a group of FlashMHF's projections, as :func:`flashmhf.param_groups` makes it for AdamW.

    Raises TypeError if projection_rate is not a number, ValueError unless it is above 0 and if the projections are in
    a group of another optimizer than Adam and AdamW.
    """
    if not epsilon("projection_rate", projection_rate) > 0:
        raise ValueError(f"projection_rate is {projection_rate}; it must be above 0")
    name = "layers.0.feed_forward.in_proj.weight"
    group = next((group for group in cfg.param_groups if re.search(group.pattern, name)), None)
    if group is None or group.optimizer_name not in ("Adam", "AdamW"):
        found = "no group" if group is None else f"a group of {group.optimizer_name}"
        raise ValueError(f"optimizer has {name} in {found}; supported: AdamW, Adam")
    settings = dict(group.optimizer_kwargs)
    settings["lr"] *= projection_rate
    if "weight_decay" in settings:
        settings["weight_decay"] /= projection_rate
    pattern = r"feed_forward\.(.*\.)?(in|out)_proj\.weight$"
    projections = ParamGroupConfig(pattern=pattern, optimizer_name=group.optimizer_name, optimizer_kwargs=settings)
    return dataclasses.replace(cfg, param_groups=[projections, *cfg.param_groups])


def _shard(network: TitanFlashMHF.Config, cfg: FeedForward.Config) -> None:
    """Shard K, U, V and the router by heads, in_proj by columns, out_proj by rows; x and result lie as for ``cfg``."""
    placed = {name: dense_param_placement(tp=spmd.S(dim)) for name, dim in FlashMHF.SHARDED.items()}
    own = {name: placement for name, placement in placed.items() if "." not in name}
    inputs = {name: getattr(cfg.sharding_config, name) for name in ("in_src_shardings", "in_dst_shardings")}
    network.sharding_config = ShardingConfig(state_shardings=own, **inputs)
    network.in_proj.sharding_config = colwise_config()
    network.out_proj.sharding_config = cfg.w2.sharding_config
    if network.q_norm is not None:
        network.q_norm.sharding_config = ShardingConfig(state_shardings={"weight": placed["q_norm.weight"]})
