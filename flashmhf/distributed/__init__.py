"""Many GPUs: sharding rules of the operators for DTensor, and plans for PyTorch's tensor parallelism. ``import
flashmhf`` imports nothing of DTensor: the rules are registered when one first reaches an operator.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from .. import torch_private

if TYPE_CHECKING:
    from .parallel import HeadParallel, parallelize, plan, shard_placement
    from .shards import Rank, shard

__all__ = ["HeadParallel", "Rank", "parallelize", "plan", "shard", "shard_placement"]


@functools.cache
def _register_rules() -> None:
    torch_private.register("sharding rules", lambda: importlib.import_module(f"{__name__}.sharding"))


torch_private.answer("sharding rules", "torch.distributed.tensor", "DTensor", _register_rules)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "shards" if name in ("Rank", "shard") else "parallel"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
