"""Feed-forward networks that hold the heads of one tensor-parallel rank, with loaders that take whole checkpoint tensors.

They need no engine: an engine's model class gives them the rank and the all-reduce. Parameter names are those of ``flashmhf.nn``, so a
checkpoint of the whole network loads into every rank. Inference only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..nn.arguments import activation as checked_activation
from ..nn.arguments import divisor, epsilon, positive
from ..nn.multihead import check_input
from ..ops.layer import layer
from ..quantize.modules import METHOD


@dataclass(frozen=True)
class Rank:
    """The place of a process among ``size`` tensor-parallel ones; ``all_reduce`` sums a tensor over them and returns the sum."""

    index: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"index is {self.index}; supported: 0 to size - 1 = {self.size - 1}")
        if self.size > 1 and self.all_reduce is None:
            raise ValueError(f"all_reduce is None; size {self.size} needs a function that sums a tensor over the ranks")

    def of(self, name: str, count: int) -> int:
        """What this rank holds of ``count``. Raises ValueError where the ranks do not divide it."""
        if count % self.size:
            raise ValueError(f"{name} is {count}; supported: multiples of the tensor-parallel size {self.size}")
        return count // self.size


def _load(parameter: nn.Parameter, whole: Tensor, *, dim: int | None, rank: Rank) -> None:
    """Copies this rank's part of a checkpoint's tensor along ``dim`` (None: all of it). Raises ValueError for another shape."""
    expected = list(parameter.shape)
    if dim is not None:
        expected[dim] *= rank.size
    if list(whole.shape) != expected:
        raise ValueError(f"the checkpoint's tensor has shape {list(whole.shape)}; expected {expected}")
    with torch.no_grad():
        parameter.copy_(whole if dim is None else whole.tensor_split(rank.size, dim)[rank.index])


def loadable(parameter: nn.Parameter, dim: int | None, rank: Rank) -> nn.Parameter:
    """``parameter`` with the attribute that engines load it by: ``weight_loader(parameter, whole tensor)``."""
    parameter.requires_grad_(False)
    parameter.weight_loader = lambda target, whole: _load(target, whole, dim=dim, rank=rank)
    return parameter


class Shard(nn.Module):
    """What the networks of one rank share: their heads, the sum over the ranks, and loading a whole state dict."""

    def __init__(self, d_model: int, num_heads: int, rank: Rank) -> None:
        super().__init__()
        self.d_model, self.num_heads = positive("d_model", d_model), positive("num_heads", num_heads)
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model is {d_model}; it must be a multiple of num_heads = {num_heads}")
        self.rank, self.head_dim = rank, self.d_model // self.num_heads
        self.local_heads = rank.of("num_heads", self.num_heads)

    def reduce(self, y: Tensor) -> Tensor:
        return y if self.rank.size == 1 else self.rank.all_reduce(y)

    def load(self, whole: dict[str, Tensor]) -> None:
        """Loads the state dict of the whole network. Raises ValueError for missing, unknown and misshapen tensors."""
        parameters = dict(self.named_parameters())
        if parameters.keys() != whole.keys():
            raise ValueError(f"the state dict has {sorted(whole)}; expected {sorted(parameters)}")
        for name, parameter in parameters.items():
            parameter.weight_loader(parameter, whole[name])


def check_loaded(model: nn.Module, loaded: set[str]) -> None:
    """Raises ValueError where a network of ``model`` has parameters that are not among the ``loaded`` names."""
    shards = ((name, module) for name, module in model.named_modules() if isinstance(module, Shard))
    missing = [f"{name}.{key}" for name, shard in shards for key, _ in shard.named_parameters() if f"{name}.{key}" not in loaded]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} weights of its networks: {', '.join(missing[:3])}")


class _HeadShard(Shard):
    """in_proj by columns, the heads of this rank, out_proj by rows; out_proj's bias enters the sum over the ranks once."""

    def __init__(self, d_model: int, num_heads: int, bias: bool, rank: Rank, device, dtype) -> None:
        super().__init__(d_model, num_heads, rank)
        inner = self.local_heads * self.head_dim
        self.in_proj = nn.Linear(self.d_model, inner, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(inner, self.d_model, bias=bias, device=device, dtype=dtype)
        for parameter, dim in ((self.in_proj.weight, 0), (self.in_proj.bias, 0), (self.out_proj.weight, 1), (self.out_proj.bias, None)):
            if parameter is not None:
                loadable(parameter, dim, rank)

    def _weight(self, *shape: int, device, dtype) -> nn.Parameter:
        return loadable(nn.Parameter(torch.empty(shape, device=device, dtype=dtype)), 0, self.rank)

    @property
    def out_bias(self) -> Tensor | None:
        return self.out_proj.bias if self.rank.index == 0 else None


class _OperatorShard(_HeadShard):
    """A shard whose forward is the operator ``flashmhf::layer``; ``_operands`` gives k, u, v and the router."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None,
        q_norm: bool,
        q_norm_eps: float,
        activation: str,
        bias: bool,
        backend: str,
        rank: Rank,
        device,
        dtype,
    ) -> None:
        super().__init__(d_model, num_heads, bias, rank, device, dtype)
        self.local_kv_heads = rank.of("num_kv_heads", divisor("num_kv_heads", num_kv_heads, "num_heads", self.num_heads))
        self.q_norm_eps, self.activation, self.backend = epsilon("q_norm_eps", q_norm_eps), checked_activation(activation), backend
        weight = self._weight(self.local_heads, self.head_dim, device=device, dtype=dtype) if q_norm else None
        self.q_norm = None if weight is None else nn.ParameterDict({"weight": weight})

    def _operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> [..., d_model], equal on every rank."""
        check_input(x, self.d_model)
        y = layer(
            x,
            (self.in_proj.weight, self.in_proj.bias),
            *self._operands(),
            (self.out_proj.weight, self.out_bias),
            q_norm=None if self.q_norm is None else self.q_norm["weight"],
            q_norm_eps=self.q_norm_eps,
            backend=self.backend,
            activation=self.activation,
        )
        return self.reduce(y)


class FlashMHFShard(_OperatorShard):
    """:class:`flashmhf.FlashMHF` with H / size heads, as one operator ``flashmhf::layer`` and one all-reduce.

    Args:
        d_model, num_heads, num_subnets, subnet_dim, num_kv_heads, router_eps, q_norm, q_norm_eps, activation, bias, backend: of the whole
            network.
        rank: this process's; its size must divide num_kv_heads.

    Every number of tokens takes the fused kernels, compiled or not, and captures in CUDA graphs. Raises ValueError for sizes that do not
    divide. ``load`` or the parameters' ``weight_loader`` fill it; it has no initialisation.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_subnets: int,
        subnet_dim: int,
        *,
        num_kv_heads: int | None = None,
        router_eps: float = 1e-20,
        q_norm: bool = False,
        q_norm_eps: float = 1e-5,
        activation: str = "silu",
        bias: bool = False,
        backend: str = "auto",
        rank: Rank = Rank(),  # noqa: B008  frozen
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads, q_norm, q_norm_eps, activation, bias, backend, rank, device, dtype)
        self.router_eps = epsilon("router_eps", router_eps)
        subnets, width = positive("num_subnets", num_subnets), positive("subnet_dim", subnet_dim)
        place = {"device": device, "dtype": dtype}
        self.k, self.u, self.v = (self._weight(self.local_kv_heads, subnets, width, self.head_dim, **place) for _ in range(3))
        self.router = self._weight(self.local_heads, self.head_dim, subnets, **place)

    def _operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
        return self.k, self.u, self.v, self.router, self.router_eps


class MHFFNShard(_OperatorShard):
    """:class:`flashmhf.MHFFN` with H / size heads, by the same operator without a gate. Arguments as there and in FlashMHFShard."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        intermediate_dim: int,
        *,
        num_kv_heads: int | None = None,
        q_norm: bool = False,
        q_norm_eps: float = 1e-5,
        activation: str = "silu",
        bias: bool = False,
        backend: str = "auto",
        rank: Rank = Rank(),  # noqa: B008  frozen
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        backend = "reference" if backend == "naive" else backend
        super().__init__(d_model, num_heads, num_kv_heads, q_norm, q_norm_eps, activation, bias, backend, rank, device, dtype)
        shape = (self.local_kv_heads, positive("intermediate_dim", intermediate_dim), self.head_dim)
        self.k, self.u, self.v = (self._weight(*shape, device=device, dtype=dtype) for _ in range(3))

    def _operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
        return self.k.unsqueeze(1), self.u.unsqueeze(1), self.v.unsqueeze(1), None, 0.0


class ParametricKVShard(_HeadShard):
    """:class:`flashmhf.ParametricKV` with H / size heads. Arguments as there and in FlashMHFShard."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv: int,
        *,
        bias: bool = False,
        rank: Rank = Rank(),  # noqa: B008  frozen
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, bias, rank, device, dtype)
        shape = (self.local_heads, positive("num_kv", num_kv), self.head_dim)
        self.k, self.v = (self._weight(*shape, device=device, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> [..., d_model], equal on every rank."""
        check_input(x, self.d_model)
        q = self.in_proj(x.reshape(-1, self.d_model)).unflatten(-1, (self.local_heads, self.head_dim))
        mixed = nn.functional.scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), self.k.unsqueeze(0), self.v.unsqueeze(0))
        heads = mixed.squeeze(0).transpose(0, 1).reshape(*x.shape[:-1], -1)
        return self.reduce(nn.functional.linear(heads, self.out_proj.weight, self.out_bias))


def served_feed_forward(config, rank: Rank = Rank()) -> nn.Module:  # noqa: B008  frozen
    """The multi-head network that a :class:`flashmhf.models.FlashMHFConfig` names, with the heads of ``rank``, empty.

    With a ``quantization_config`` of :class:`flashmhf.models.FlashMHFFp8Config` it is a :class:`Fp8FlashMHFShard`. Raises
    NotImplementedError for ffn_skip_linear=True, whose ranks would have nothing to add up, and for "swiglu" and "dense_moe", which engines
    build from their own linear layers.
    """
    if config.ffn_skip_linear:
        raise NotImplementedError("ffn_skip_linear is True; supported: False")
    sizes, shared = (config.hidden_size, config.ffn_num_heads), {"bias": config.mlp_bias, "rank": rank}
    if config.ffn_type == "pkv":
        return ParametricKVShard(*sizes, config.intermediate_size, **shared)
    shared |= {
        "num_kv_heads": config.ffn_num_kv_heads,
        "q_norm": config.ffn_q_norm,
        "q_norm_eps": config.rms_norm_eps,
        "activation": config.hidden_act,
        "backend": config.ffn_backend,
    }
    if config.ffn_type == "mh_ffn":
        return MHFFNShard(*sizes, config.intermediate_size, **shared)
    if config.ffn_type == "flashmhf":
        sizes, shared = (*sizes, config.ffn_num_subnets, config.ffn_subnet_dim), shared | {"router_eps": config.ffn_router_eps}
        stored = dict(getattr(config, "quantization_config", None) or {})
        if stored.get("quant_method") != METHOD:
            return FlashMHFShard(*sizes, **shared)
        from .fp8_shards import Fp8FlashMHFShard  # imports this module

        del shared["activation"]  # SiLU: no other network is quantised
        return Fp8FlashMHFShard(*sizes, projections=stored["projections"], **shared)
    raise NotImplementedError(f"ffn_type is {config.ffn_type!r}; supported: flashmhf, mh_ffn, pkv")
