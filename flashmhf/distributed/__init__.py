"""Many GPUs: sharding rules of the operators for DTensor, and plans for PyTorch's tensor parallelism.

``import flashmhf`` imports this module, and nothing of DTensor: the rules are registered once something imports it.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..imports import when_imported

if TYPE_CHECKING:
    from .parallel import HeadParallel, parallelize, plan, shard_placement

__all__ = ["HeadParallel", "parallelize", "plan", "shard_placement"]


def register() -> None:
    """Registers the sharding rules, now or when something imports DTensor."""
    if torch.distributed.is_available():
        when_imported("torch.distributed.tensor", _register_rules)


def _register_rules(_: ModuleType) -> None:
    try:
        from . import sharding
    except ImportError as error:  # private interfaces of DTensor have moved; all else works
        warnings.warn(f"flashmhf has no sharding rules for DTensor of torch {torch.__version__}: {error}", stacklevel=2)
        return
    sharding.register()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import parallel

    return getattr(parallel, name)
