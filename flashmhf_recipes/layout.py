"""How a run lies over its processes: replicas, shards of the parameters (FSDP2) and heads (tensor parallelism). PyTorch
shards, not accelerate, whose FSDP2 needs GPUs and pads K, U and V. Checkpoints hold whole tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from flashmhf.distributed import parallelize, plan, shard_placement

from .errors import OptionError, refuse


@dataclass(frozen=True)
class Layout:
    """Groups of ``tp`` neighbours that share heads: rank = (replica * shards + shard) * tp + index of the heads."""

    replicas: int
    shards: int
    tp: int

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
        """Raise OptionError for a model whose heads ``tp`` processes cannot share; it may be on the meta device."""
        try:
            if self.tp > 1:
                plan(model, self.tp)
        except ValueError as error:
            raise OptionError(f"tp is {self.tp}: {error}") from error

    def shard(self, model: PreTrainedModel, device_type: str, compile_blocks: bool) -> None:
        """Shard ``model`` in place: heads, then compiled blocks, then parameters."""
        sizes, names = (self.replicas, self.shards, self.tp), ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        if self.tp > 1:
            parallelize(model, mesh["tp"])
        data = mesh["dp_shard"] if self.replicas == 1 else mesh["dp_replicate", "dp_shard"]
        blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        for module in (*blocks, model):
            if compile_blocks and module is not model:
                module.compile()
            if self.shards > 1:
                fully_shard(module, mesh=data, shard_placement_fn=shard_placement(self.shards))


def layout_of(tp: int | None, dp_shard: int | None, processes: int) -> Layout:
    """Return the layout, by default unsharded, or, with ``tp``, sharded over all. Raises OptionError for others."""
    tp = tp or 1
    refuse(processes % tp, f"tp is {tp}; it must divide the {processes} processes")
    groups = processes // tp
    dp_shard = dp_shard or (groups if tp > 1 else 1)
    refuse(groups % dp_shard, f"dp_shard is {dp_shard}; it must divide the {groups} groups of tp processes")
    whole = tp > 1 and dp_shard == 1 and groups > 1
    refuse(whole, f"dp_shard is 1 with tp = {tp} on {processes} processes; shard over more")
    return Layout(processes // (tp * dp_shard), dp_shard, tp)


# tensors on the CPU of process 0; others get nothing
WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what ``optimizer.state_dict()`` of an unsharded run holds, on process 0. Every process calls this."""
    state = state_dict.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    number = {name: index for index, name in enumerate(_names(model, optimizer))}
    groups = [group | {"params": sorted(map(number.get, group["params"]))} for group in state.get("param_groups", ())]
    return {"state": {number[name]: values for name, values in state.get("state", {}).items()}, "param_groups": groups}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`whole_optimizer` returned, or an unsharded run's state, on every process."""
    names = _names(model, optimizer)
    groups = [group | {"params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    named = {"state": {names[index]: values for index, values in state["state"].items()}, "param_groups": groups}
    state_dict.set_optimizer_state_dict(model, optimizer, named, options=WHOLE)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in the order in which its state numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
