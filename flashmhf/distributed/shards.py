"""Networks that hold the heads of one tensor-parallel rank and take whole checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .. import checks
from ..nn import MHFFN, FlashMHF
from ..nn.weights import check_held, check_whole
from ..quantize import Fp8FlashMHF
from ..quantize.packing import E4M3, check_layout

_NETWORKS = FlashMHF, MHFFN, Fp8FlashMHF


@dataclass(frozen=True)
class Rank:
    """The place of a process among ``size``; ``all_reduce`` returns the sum of a tensor over them. Raises TypeError
    for other types, ValueError for an index outside of 0 to size - 1, and a size above 1 without ``all_reduce``.
    """

    index: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if not 0 <= checks.instance("index", self.index, int, "an int") < checks.positive("size", self.size):
            raise ValueError(f"index is {self.index}; supported: 0 to size - 1 = {self.size - 1}")
        if self.size > 1 and self.all_reduce is None:
            raise ValueError(f"all_reduce is None; size {self.size} needs a function that sums a tensor over the ranks")

    def of(self, name: str, count: int) -> int:
        """Return what this rank holds of ``count``. Raises ValueError if the ranks do not divide it."""
        if count % self.size:
            raise ValueError(f"{name} is {count}; supported: multiples of the tensor-parallel size {self.size}")
        return count // self.size


def _part(name: str, rank: Rank, sharded: dict[str, int], whole: Tensor) -> Tensor:
    if name == "out_proj.bias" and rank.index:
        return torch.zeros_like(whole)  # it enters the sum over the ranks once
    return whole.tensor_split(rank.size, sharded[name])[rank.index] if name in sharded else whole


def _load(name: str, part: Callable[[Tensor], Tensor], shape: torch.Size, target: nn.Parameter, whole: Tensor) -> None:
    """Load this rank's ``part`` of a tensor of ``shape`` into ``target``. Raises, by ``name``, ValueError for another
    shape, TypeError for e4m3 or integers in place of other weights or the reverse: their scales are elsewhere.
    """
    if whole.shape != shape:
        raise ValueError(f"{name} has shape {list(whole.shape)} in the checkpoint; expected {list(shape)}")
    if whole.dtype != target.dtype and (E4M3 in (whole.dtype, target.dtype) or not whole.is_floating_point()):
        raise TypeError(f"{name} has dtype {whole.dtype} in the checkpoint; expected {target.dtype}")
    if name.rpartition(".")[2] == "layout":
        check_layout(whole)
    with torch.no_grad():
        target.copy_(part(whole))


def shard(network: nn.Module, rank: Rank, prefix: str = "") -> nn.Module:
    """Leave one rank's heads in ``network``, in place, for inference; sum its result over the ranks. Return it.

    ``network`` is a FlashMHF, MHFFN or Fp8FlashMHF; one on the meta device gets empty weights on the default device.
    ``prefix`` stands before names in messages. Parameters are divided as ``SHARDED`` of the class says,
    buffers become parameters, and all get a ``weight_loader(parameter, whole)``, which takes a checkpoint's tensors.

    Raises ValueError if the ranks do not divide the heads and for weights that are sharded already, offloaded,
    parametrised or held by an adapter, TypeError for another network, NotImplementedError for skip_linear=True.
    """
    checks.instance("rank", rank, Rank)
    if not isinstance(network, _NETWORKS):
        raise TypeError(f"network is a {type(network).__name__}; supported: FlashMHF, MHFFN, Fp8FlashMHF")
    if network.in_proj is None:
        raise NotImplementedError("skip_linear is True; supported: False")
    check_held("", network, empty=True)
    check_whole("", network)
    if any(hasattr(parameter, "weight_loader") for parameter in network.parameters()):
        raise ValueError("network is one rank's part already; supported: whole networks, such as a copy for each rank")
    heads, kv_heads = (rank.of(name, getattr(network, name)) for name in ("num_heads", "num_kv_heads"))
    network.num_heads, network.num_kv_heads = heads, kv_heads
    for name, whole in [*network.named_parameters(), *network.named_buffers()]:
        part = partial(_part, name, rank, network.SHARDED)
        own = part(whole.detach())
        local = torch.empty(own.shape, dtype=own.dtype) if whole.is_meta else own.clone()
        parent, _, attribute = name.rpartition(".")
        owner = network.get_submodule(parent)
        delattr(owner, attribute)
        parameter = nn.Parameter(local, requires_grad=False)
        parameter.weight_loader = partial(_load, prefix + name, part, whole.shape)  # by which engines load it
        owner.register_parameter(attribute, parameter)
    if rank.size > 1:
        network.register_forward_hook(lambda module, args, y: rank.all_reduce(y), prepend=True)  # others see the sum
    return network
