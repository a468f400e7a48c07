"""Many GPUs: sharding rules of the operators for DTensor, and plans for PyTorch's tensor parallelism. ``import
flashmhf`` imports nothing of DTensor: the rules are registered when one first reaches an operator.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from .. import torch_private

if TYPE_CHECKING:
    from .parallel import HeadParallel, parallelize, plan, shard_placement
    from .shards import Rank, shard

__all__ = ["HeadParallel", "Rank", "parallelize", "plan", "shard", "shard_placement"]


@functools.cache
def _register_rules() -> None:
    try:
        from . import sharding  # noqa: F401  (registers them)
    except ImportError as error:  # private interfaces of DTensor have moved; all else works
        warnings.warn(f"flashmhf has no sharding rules for DTensor of torch {torch.__version__}: {error}", stacklevel=2)


torch_private.answer("sharding rules", "torch.distributed.tensor", "DTensor", _register_rules)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "shards" if name in ("Rank", "shard") else "parallel"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
