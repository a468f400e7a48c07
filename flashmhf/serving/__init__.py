"""FlashMHF inside inference engines: the whole network as one operator, and layers that hold the heads of one rank.

``flashmhf.serving.plugins`` is what the entry points of vLLM and SGLang call; ``flashmhf.serving.vllm`` is the model class for vLLM.
"""

from .fp8 import Fp8FlashMHFShard
from .layers import FlashMHFShard, MHFFNShard, ParametricKVShard, Rank, served_feed_forward
from .operator import layer

__all__ = ["FlashMHFShard", "Fp8FlashMHFShard", "MHFFNShard", "ParametricKVShard", "Rank", "layer", "served_feed_forward"]
