"""The base classes of the multi-head networks: checked sizes, W_in, heads and W_out."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.types import Device

from .. import checks, reference, torch_private
from ..backends.contract import LayerWeights, ProjectionWeights
from ..checks import divisor, epsilon, flag, positive
from ..ops.layer import all_ordinary
from .init import GATED_VARIANCE
from .network import Network, constant

_FORWARD, _LINEAR = nn.Linear.forward, functional.linear  # as PyTorch has them: programs patch both


def check_input(x: Tensor, d_model: int) -> None:
    if type(x) is not Tensor or x.is_nested or x.layout != torch.strided:
        checks.strided(x=x)
    if x.dtype not in checks.FLOAT_DTYPES:
        checks.floating("x", x)
    if x.dim() < 1 or x.shape[-1] != d_model:
        raise ValueError(f"x has shape {list(x.shape)}; expected [..., d_model] with d_model = {d_model}")


def check_matches(x: Tensor, first: nn.Module | Tensor) -> None:
    """Refuse an x of another dtype or device than the weights it meets first: those of a linear layer, or a parameter.

    Weights that are not plain parameters, and layers that are hooked, patched or replaced, may convert x themselves.
    """
    weight = first
    if isinstance(first, nn.Module):
        if type(first).forward is not _FORWARD or "forward" in first.__dict__ or first._forward_pre_hooks:
            return
        weight = first._parameters.get("weight")
    if type(weight) is not nn.Parameter or type(x) not in (Tensor, nn.Parameter):
        return
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} but the module is on {weight.device}; move one of them with .to()")
    if x.dtype != weight.dtype and not torch_private.autocasts(x.device.type):
        found, supported = map(checks.name_of, (x.dtype, weight.dtype))
        advice = "module.to(x.dtype) changes it, torch.autocast takes any"
        raise TypeError(f"x has dtype {found}; supported: {supported}, the module's dtype; {advice}")


class HeadRMSNorm(nn.Module):
    """Normalise [..., H, d_h] over d_h (RMS, in fp32) with a weight per head (official setting for 370M and 1.3B)."""

    eps = constant("eps")

    def __init__(
        self, num_heads: int, head_dim: int, eps: float, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, q: Tensor) -> Tensor:
        return reference.normalise_heads(q, self.weight, self.eps)


_KINDS = {"in_proj": nn.Linear, "out_proj": nn.Linear, "q_norm": HeadRMSNorm}


def has_plain_parts(module: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Return whether no part of a layer is hooked, replaced, patched or computed, nor a weight a tensor subclass's."""
    modules = module._modules  # not attributes, each of which takes the host a microsecond
    if (nn.Linear.forward, functional.linear) != (_FORWARD, _LINEAR) or torch_private.has_global_hooks():
        return False
    for name, kind in _KINDS.items():
        part = modules.get(name)
        if part is None and kind is HeadRMSNorm:
            continue
        # A subclass that keeps the forward, such as Projection, computes what its base does.
        if getattr(type(part), "forward", None) is not kind.forward or "forward" in part.__dict__:
            return False
        if part._forward_pre_hooks or part._forward_hooks:
            return False
        # what a parametrisation, pruning or spectral_norm computes is no parameter
        held = part._parameters
        if held.get("weight") is None or (kind is nn.Linear and "bias" not in held):
            return False
        tensors = (*tensors, *held.values())
    return all_ordinary(tensors)


def stays_plain(module: nn.Module, methods: Iterable[str]) -> bool:
    """Return True, traced after :func:`has_plain_parts`: the graph then asks in every call what PyTorch's own compiled
    modules ask, whether an instance got a method of its own or linear was patched. Hooks and classes they do not ask.
    """
    for name in methods:
        if not isinstance(getattr(module, name), MethodType):
            return False
    for part in module._modules.values():
        if part is not None and not isinstance(part.forward, MethodType):
            return False
    return functional.linear is _LINEAR


def layer_weights(module: nn.Module, networks: tuple[Tensor, ...], router: Tensor) -> LayerWeights:
    """Return the weights of a layer that has plain parts."""
    modules = module._modules
    first, last, q_norm = modules["in_proj"]._parameters, modules["out_proj"]._parameters, modules.get("q_norm")
    ends = ProjectionWeights(first["weight"], first["bias"]), ProjectionWeights(last["weight"], last["bias"])
    norm = (None, 0.0) if q_norm is None else (q_norm._parameters["weight"], q_norm.eps)
    return LayerWeights(ends[0], networks, router, float(module._router_eps), ends[1], *norm)


class MultiHead(Network):
    """The base of FlashMHF, MHFFN and ParametricKV: W_in, heads, W_out. ``k`` and its siblings belong to the subclass.
    skip_linear leaves out W_in and W_out: the heads are slices of x and of the result.
    """

    # The dimension of each parameter along which its heads lie: tensor parallelism divides it. Others are whole.
    _ROWS = ("k", "u", "v", "router", "q_norm.weight", "in_proj.weight", "in_proj.bias")
    SHARDED: ClassVar[dict[str, int]] = dict.fromkeys(_ROWS, 0) | {"out_proj.weight": 1}
    in_proj: nn.Linear | None
    out_proj: nn.Linear | None

    def __init__(
        self, d_model: int, num_heads: int, bias: bool, device: Device, dtype: torch.dtype | None,
        skip_linear: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dtype)
        self.d_model, self.num_heads = positive("d_model", d_model), positive("num_heads", num_heads)
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model is {d_model}; it must be a multiple of num_heads = {num_heads}")
        self.head_dim = self.d_model // self.num_heads
        flag("bias", bias)
        if flag("skip_linear", skip_linear) and bias:
            raise ValueError("bias is True; in_proj and out_proj, whose biases they are, skip_linear=True leaves out")
        self.in_proj = self.out_proj = None
        for name in () if skip_linear else ("in_proj", "out_proj"):
            self._add_projection(name, (self.d_model, self.d_model), name, self.d_model, bias, device, dtype)

    @property
    def skip_linear(self) -> bool:
        return self.in_proj is None

    def split_heads(self, x: Tensor) -> Tensor:
        """Return Q = split_H(X W_in) [..., H, d_h] for x [..., d_model], a view of the projection's result. H is what
        in_proj gives: under tensor parallelism a rank has some of the heads.
        """
        check_input(x, self.d_model)
        check_matches(x, self.k if self.skip_linear else self.in_proj)
        return (x if self.skip_linear else self.in_proj(x)).unflatten(-1, (-1, self.head_dim))

    def join_heads(self, mixed: Tensor) -> Tensor:
        """Return concat_H(S) W_out [..., d_model] for S [..., H, d_h]."""
        return mixed.flatten(-2) if self.skip_linear else self.out_proj(mixed.flatten(-2))


class GroupedHeads(MultiHead):
    """The base of FlashMHF and MHFFN: q_norm, heads that share K, U and V, the activation."""

    k: nn.Parameter
    u: nn.Parameter
    v: nn.Parameter

    def __init__(
        self, d_model: int, num_heads: int, num_kv_heads: int | None, q_norm: bool, q_norm_eps: float, activation: str,
        **settings: Any,
    ) -> None:  # fmt: skip
        """``settings``: the arguments of :class:`MultiHead` beside its sizes."""
        super().__init__(d_model, num_heads, **settings)
        self.num_kv_heads = divisor("num_kv_heads", num_kv_heads, "num_heads", self.num_heads)
        checks.activation(activation)
        self.activation = activation
        sizes = (self.num_heads, self.head_dim, epsilon("q_norm_eps", q_norm_eps))
        factory = settings["device"], settings["dtype"]
        self.q_norm = HeadRMSNorm(*sizes, *factory) if flag("q_norm", q_norm) else None

    def _draw_heads(self, summed: float) -> None:
        """Draw k, u, v and q_norm. ``summed``: the number of products that S sums, times the gates' mean squared."""
        value = (GATED_VARIANCE[self.activation] * summed) ** -0.5
        value *= self.scheme.residual if self.skip_linear else 1.0  # without W_out the output's variance is V's
        for name, std in (("k", self.head_dim**-0.5), ("u", self.head_dim**-0.5), ("v", value)):
            self.scheme.draw(getattr(self, name), name, std)
        if self.q_norm is not None:
            self.q_norm.reset_parameters()

    def normalise(self, q: Tensor) -> Tensor:
        """Return q_norm(Q), or Q if it is off; [..., H, d_h]."""
        return q if self.q_norm is None else self.q_norm(q)
