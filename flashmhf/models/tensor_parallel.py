"""transformers' tensor parallelism (``tp_plan="auto"``) for the multi-head networks: styles of ours in transformers'
table.

transformers' own column style shards dimension -2 of K, which is d_e; heads are dimension 0. Importing this module
registers the styles.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

HEADS, BY_OUTPUT, BY_INPUT = "flashmhf_heads", "flashmhf_by_output", "flashmhf_by_input"
# Of one block's network. transformers takes a parameter's style from its own module's entry.
_PROJECTIONS = {".in_proj": BY_OUTPUT, ".out_proj": BY_INPUT}


def network_plan(q_norm: bool, skip_linear: bool) -> dict[str, str]:
    """Return the entries of ``base_model_tp_plan`` for FlashMHF and MHFFN as ``layers.*.mlp``."""
    modules = {"": HEADS} | ({} if skip_linear else _PROJECTIONS) | ({".q_norm": BY_OUTPUT} if q_norm else {})
    return {f"layers.*.mlp{name}": style for name, style in modules.items()}


class _Sharded(TensorParallelLayer):
    """Parameters in one placement; the module's input and output are the network's, DTensors already."""

    def __init__(self, dim: int, replicated: tuple[str, ...] = ()) -> None:
        self.dim, self.replicated = dim, replicated

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        value = module._parameters[param]
        placement = Replicate() if param in self.replicated else Shard(self.dim)
        placed = distribute_tensor(value, mesh, [placement], src_data_rank=None)
        module._parameters[param] = nn.Parameter(placed, requires_grad=value.requires_grad)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        return module


class _Heads(_Sharded):
    """The network:

    K, U, V and the router by heads; the input is equal on every process, and so is the output, the sum of the heads.
    """

    def validate_param(self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        from ..distributed.parallel import check_heads

        check_heads(parameter_name or param, module, mesh.size())

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import Replicate

        from ..distributed.parallel import wrap_forward

        wrap_forward(module, mesh, Replicate(), Replicate(), Replicate(), use_local_output=True)
        return module


ALL_PARALLEL_STYLES.register(HEADS, _Heads(0))
ALL_PARALLEL_STYLES.register(BY_OUTPUT, _Sharded(0))
ALL_PARALLEL_STYLES.register(BY_INPUT, _Sharded(1, replicated=("bias",)))
