"""Sharding rules of the operators ``torch.ops.flashmhf.*`` for DTensor, registered when this module is imported.

The only module that uses DTensor's private interfaces.

On one mesh dimension an operator runs in one of three ways; on a mesh of several dimensions each takes one of them.

==========  ==============================  ==========  ======================  ========================
way         q, out, dq, grad_out, r, dr     k u v w     dk du dv dw             communication
==========  ==============================  ==========  ======================  ========================
heads       Shard(the dimension H)          Shard(0)    Shard(0)                none
tokens      Shard(any leading dimension)    Replicate   Partial(sum)            none before the optimizer
replicate   Replicate                       Replicate   Replicate               none
==========  ==============================  ==========  ======================  ========================

Operands in other placements are redistributed to the cheapest of the three. Unequal numbers of heads are refused. The
heads of q that share a head of k are on one rank: the first way needs a mesh size that divides H_kv.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

try:
    from torch.distributed.tensor._ops.registration import register_op_strategy  # torch 2.10
except ImportError:
    from torch.distributed.tensor._ops.utils import register_op_strategy

_DISPATCHER = DTensor._op_dispatcher
# What a call below needs: a name that has gone fails now, and costs the rules alone
_DISPATCHER.unwrap_to_op_info, _DISPATCHER.sharding_propagator.propagate, OpSchema._recompute_comparison_key  # noqa: B018
_DISPATCHER.redistribute_local_args, _DISPATCHER.wrap  # noqa: B018
_WEIGHTS = ("k", "u", "v", "w")  # the dimension H comes first; all other operands are [..., H, d]


def _ranks(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> int:
    """Return the number of ranks over which dimension ``dim`` is sharded."""
    return math.prod(size for size, at in zip(mesh.shape, placements, strict=True) if at.is_shard(dim))


def _check_even(name: str, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Refuse unequal parts of heads and of weights, which DTensor gathers as views; it wraps all but this error."""
    weight = name in _WEIGHTS
    head_dim = 0 if weight else len(shape) - 2
    for dim in range(len(shape)) if weight else (head_dim,):
        ranks = _ranks(mesh, placements, dim)
        if shape[dim] % ranks:
            what = f"its heads, H = {shape[dim]}," if dim == head_dim else f"dimension {dim} of size {shape[dim]}"
            found = f"{name} is sharded over {what} on a mesh of size {ranks}"
            raise NotImplementedError(f"{found}; supported: sizes that divide {shape[dim]}")


def _strategy(schema: OpSchema) -> OpStrategy:
    given = zip(schema.op._schema.arguments, schema.args_schema, strict=False)
    operands = {argument.name: operand for argument, operand in given if isinstance(operand, OpStrategy)}
    for name, operand in operands.items():
        _check_even(name, operand.shape, operand.mesh, operand.strategies[0].output_spec.placements)
    token_ndim = operands["q"].ndim
    ways: list[tuple[Placement, Placement, Placement]] = [
        (Replicate(), Replicate(), Replicate()),
        (Shard(token_ndim - 2), Shard(0), Shard(0)),
        *((Shard(dim), Replicate(), Partial()) for dim in range(token_ndim - 2)),
    ]
    columns = [_placements(schema, operands, *way) for way in ways]
    outputs = len(columns[0]) - len(operands)
    strategy = expand_to_full_mesh_op_strategy(operands["q"].mesh, schema, columns, input_index=outputs)
    k, kv_heads = list(operands).index("k"), operands["k"].shape[0]
    # a rank has whole groups: the ranks that shard k's first dimension divide its heads
    specs = ((way, way.input_specs[k]) for way in strategy.strategies)
    strategy.strategies = [way for way, spec in specs if kv_heads % _ranks(spec.mesh, spec.placements, 0) == 0]
    return strategy


def _placements(
    schema: OpSchema, operands: dict[str, OpStrategy], tokens: Placement, weights: Placement, weight_grads: Placement
) -> list[Placement]:
    """Return the placements of the results, then of the operands, on one mesh dimension."""
    inputs = [weights if name in _WEIGHTS else tokens for name in operands]
    if "grad_out" not in operands:
        return [tokens, *inputs]
    needs_tokens, needs_weights = schema.kwargs_schema.get("needs", (True, True))
    # A result that is left out is an empty tensor, which nothing can be sharded over.
    of_tokens, of_weights = (tokens if needs_tokens else Replicate()), (weight_grads if needs_weights else Replicate())
    last = of_weights if "w" in operands else of_tokens if "r" in operands else Replicate()
    return [of_tokens, of_weights, of_weights, of_weights, last, *inputs]


def _dispatch(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Do what DTensor's dispatcher does, with two corrections before the decision.

    ``needs`` is a tuple in its key: torch before 2.13 cannot hash a list there. The operands' dtypes are those of their
    shards: FSDP2's mixed precision hands out 16-bit shards of weights whose specification says float32.
    """
    info = _DISPATCHER.unwrap_to_op_info(op, args, kwargs)
    if "needs" in kwargs:
        info.schema.kwargs_schema["needs"] = tuple(kwargs["needs"])
    specs = list(info.schema.args_schema)
    for index, (spec, local) in enumerate(zip(specs, info.local_args, strict=True)):
        if isinstance(spec, DTensorSpec) and spec.tensor_meta.dtype != local.dtype:
            meta = spec.tensor_meta._replace(dtype=local.dtype)
            specs[index] = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    info.schema.args_schema = tuple(specs)
    info.schema._recompute_comparison_key()
    _DISPATCHER.sharding_propagator.propagate(info)
    sharding = info.output_sharding
    if sharding.needs_redistribute:
        how = sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        _DISPATCHER.redistribute_local_args(info, *how)
    local = info.local_args
    if info.args_tree_spec:
        local = torch.utils._pytree.tree_unflatten(local, info.args_tree_spec)
    return _DISPATCHER.wrap(op(*local, **info.local_kwargs), sharding.output_spec)


# ``needs`` decides which results are empty, so it is part of a decision's key.
_INFORMATION = RuntimeSchemaInfo(static_kwargkey=["needs"], needs_pytree=True)
for _name in ("forward", "gated_forward", "backward", "gated_backward"):
    _op = getattr(torch.ops.flashmhf, _name).default
    register_op_strategy(_op, _INFORMATION)(_strategy)
    _DISPATCHER._custom_op_handlers[_op] = _dispatch
