"""Many GPUs: sharding rules of the operators for DTensor, and plans for PyTorch's tensor parallelism.

The first use of a name of this module imports DTensor, which takes half a second, and registers the rules. A program that shards by
hand, and uses none of them, writes ``import flashmhf.distributed.sharding``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .parallel import HeadParallel, parallelize, plan, shard_placement

__all__ = ["HeadParallel", "parallelize", "plan", "shard_placement"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import parallel

    return getattr(parallel, name)
