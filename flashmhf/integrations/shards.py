"""The network that a configuration names, with the heads of one tensor-parallel rank: what an engine builds."""

from __future__ import annotations

import torch
from torch import nn

from ..distributed.shards import Rank, shard
from ..quantize import Fp8FlashMHF
from ..quantize.modules import METHOD


def served_feed_forward(config, rank: Rank = Rank(), prefix: str = "") -> nn.Module:  # noqa: B008  frozen
    """Return the multi-head network, empty, that a FlashMHFConfig names (in FP8 if recorded), with ``rank``'s heads.

    Raises NotImplementedError as :func:`shard` does, and for "swiglu", which engines build themselves, ValueError for
    heads that the ranks do not divide.
    """
    from ..models.modeling import feed_forward  # not above: transformers is optional
    from ..models.quantization import FlashMHFFp8Config
    from ..models.record import NETWORKS

    if config.ffn_type == "swiglu":
        supported = "flashmhf, mh_ffn; swiglu as the engine's own network"
        raise NotImplementedError(f"ffn_type is {config.ffn_type!r}; supported: {supported}")
    with torch.device("meta"):
        network = feed_forward(config)
    stored = dict(getattr(config, "quantization_config", None) or {})
    packed = stored.get("quant_method") == METHOD
    # from_dict refuses what this version does not load
    if getattr(config, NETWORKS, None) or (packed and FlashMHFFp8Config.from_dict(stored).fp8 is not True):
        raise NotImplementedError("networks of other sizes or partly in FP8; supported: all as configured")
    if packed:
        network = Fp8FlashMHF(network)
    return shard(network, rank, prefix)
