"""How a run lies over its processes: replicas, shards of the parameters (FSDP2) and heads (tensor parallelism).

PyTorch does the sharding, here rather than through accelerate: accelerate's FSDP2 plugin needs GPUs, and pads the first dimension of K, U
and V. Checkpoints hold whole tensors, the same files for any layout, so a run resumes on any number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from .errors import OptionError

_LAUNCHER = dict(os.environ)  # as the launcher set it: forget_accelerate changes it
REPLICATE, SHARD, HEADS = "dp_replicate", "dp_shard", "tp"


@dataclass(frozen=True)
class Layout:
    """``replicas`` times ``shards`` processes with sequences of their own, each ``tp`` processes that share the heads.

    Rank = (replica * shards + shard) * tp + index of the heads: the processes with the heads of one sequence are neighbours.
    """

    replicas: int
    shards: int
    tp: int

    @property
    def processes(self) -> int:
        return self.replicas * self.shards * self.tp

    @property
    def data_processes(self) -> int:
        """The number of processes that see different sequences."""
        return self.replicas * self.shards

    @property
    def sharded(self) -> bool:
        return self.shards > 1 or self.tp > 1

    def data_index(self, rank: int) -> int:
        return rank // self.tp

    def check(self, model: PreTrainedModel) -> None:
        """Raises OptionError for a model whose heads ``tp`` processes cannot share. Its parameters may be on the meta device."""
        from flashmhf.distributed import plan

        try:
            if self.tp > 1:
                plan(model, self.tp)
        except ValueError as error:
            raise OptionError("{tp} is {value}: {error}", value=self.tp, error=error) from error

    def shard(self, model: PreTrainedModel, device_type: str, compile_blocks: bool) -> None:
        """Shards ``model`` in place: heads, then compiled blocks, then parameters. All processes hold the same weights before."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from flashmhf.distributed import parallelize, shard_placement

        mesh = init_device_mesh(device_type, (self.replicas, self.shards, self.tp), mesh_dim_names=(REPLICATE, SHARD, HEADS))
        if self.tp > 1:
            parallelize(model, mesh[HEADS])
        data = mesh[SHARD] if self.replicas == 1 else mesh[REPLICATE, SHARD]
        blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        for module in (*blocks, model):
            if compile_blocks and module is not model:
                module.compile()
            if self.shards > 1:
                fully_shard(module, mesh=data, shard_placement_fn=shard_placement(self.shards))


def layout_of(tp: int | None, dp_shard: int | None, processes: int, environment: Mapping[str, str] = _LAUNCHER) -> Layout:
    """The layout of ``processes``; None stands for the layout of ``accelerate launch``, else for no sharding, or, with ``tp``, for all.

    Raises OptionError where the sizes do not divide the processes.
    """
    if tp is None and environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        tp = int(environment.get("PARALLELISM_CONFIG_TP_SIZE", "1"))
        dp_shard = int(environment.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")) if dp_shard is None else dp_shard
    tp = tp or 1
    if processes % tp:
        raise OptionError("{tp} is {value}; it must divide the {processes} processes", value=tp, processes=processes)
    if dp_shard is None:
        dp_shard = processes // tp if tp > 1 or environment.get("ACCELERATE_USE_FSDP") == "true" else 1
    if processes // tp % dp_shard:
        raise OptionError(
            "{dp_shard} is {value}; it must divide the {groups} groups of {tp} processes ({processes} in all)",
            value=dp_shard,
            groups=processes // tp,
            processes=processes,
        )
    if tp > 1 and dp_shard == 1 and processes > tp:
        raise OptionError("{dp_shard} is 1 with {tp} = {value} on {processes} processes; shard over more", value=tp, processes=processes)
    return Layout(processes // (tp * dp_shard), dp_shard, tp)


def whole(state: Any, keep: bool) -> Any:
    """``state`` with ordinary CPU tensors for DTensors where ``keep``, else None. A collective: every process calls this alike."""
    from torch.distributed.tensor import DTensor

    def gather(value: object) -> object:
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor()
        return full.cpu() if keep else None

    gathered = tree_map(gather, state)
    return gathered if keep else None


def placed_like(parameters: list[nn.Parameter], state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state`` of whole tensors, each placed like its parameter. Every process has read the same file."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    def place(parameter: nn.Parameter) -> Callable[[object], object]:
        def of(value: object) -> object:
            if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape):
                return value
            local = value.to(parameter.device)
            return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)

        return of

    return state | {"state": {index: tree_map(place(parameters[index]), values) for index, values in state["state"].items()}}


def forget_accelerate() -> None:
    """accelerate would shard the model a second time, and refuses to without GPUs."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        os.environ.pop(name, None)


def load_mapped(path: str) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
