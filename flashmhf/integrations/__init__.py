"""FlashMHF inside inference engines: the whole network as one operator, and layers that hold the heads of one rank.

``flashmhf.integrations.plugins`` is what the entry points of vLLM and SGLang call; ``flashmhf.integrations.vllm`` is the model class for
vLLM.
"""

from ..ops.layer import layer
from .fp8_shards import Fp8FlashMHFShard
from .shards import FlashMHFShard, MHFFNShard, ParametricKVShard, Rank, served_feed_forward

__all__ = ["FlashMHFShard", "Fp8FlashMHFShard", "MHFFNShard", "ParametricKVShard", "Rank", "layer", "served_feed_forward"]
