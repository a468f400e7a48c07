"""transformers' tensor parallelism (``tp_plan="auto"``) for the multi-head networks: styles of ours in transformers'
table.

transformers' own column style shards dimension -2 of K, which is d_e; heads are dimension 0. Importing this module
registers the styles.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

_STYLE = "flashmhf_network"  # of the network; with a part's name behind it, of the part


def network_plan(q_norm: bool, skip_linear: bool) -> dict[str, str]:
    """Return the entries of ``base_model_tp_plan`` for FlashMHF and MHFFN as ``layers.*.mlp``."""
    parts = ["", *(() if skip_linear else (".in_proj", ".out_proj")), *((".q_norm",) if q_norm else ())]
    return {f"layers.*.mlp{part}": _STYLE + part.replace(".", "_") for part in parts}


class _Part(TensorParallelLayer):
    """Parameters of ``part``, such as "in_proj.", placed as the network's class says.

    transformers takes a parameter's style from its own module's entry. A part's input and output are the network's,
    DTensors already.
    """

    def __init__(self, part: str) -> None:
        self.part = part

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        from torch.distributed.tensor import distribute_tensor

        from ..distributed.parallel import placement_of

        value = module._parameters[param]
        placed = distribute_tensor(value, mesh, [placement_of(self.part + param)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(placed, requires_grad=value.requires_grad)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        return module


class _Network(_Part):
    """The network: its input is equal on every process, and so is the output, the sum of the heads."""

    def validate_param(self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        from ..distributed.parallel import check_heads

        check_heads(parameter_name or param, module, mesh.size())

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import Replicate

        from ..distributed.parallel import check_sharded, wrap_forward

        # transformers quantises, as torchao's FP8 does, after this and leaves ordinary tensors on each process
        module.register_forward_pre_hook(check_sharded)
        wrap_forward(module, mesh, Replicate(), Replicate(), Replicate(), use_local_output=True)
        return module


ALL_PARALLEL_STYLES.register(_STYLE, _Network(""))
for _part in ("in_proj", "out_proj", "q_norm"):
    ALL_PARALLEL_STYLES.register(f"{_STYLE}_{_part}", _Part(f"{_part}."))
