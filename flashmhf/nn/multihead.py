"""The base classes of the multi-head networks: checked sizes, W_in, heads and W_out."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.types import Device

from .. import checks, reference, torch_private
from ..backends import REFERENCE
from ..backends.contract import LayerWeights
from ..checks import divisor, epsilon, flag, positive
from ..ops import layer
from .init import GATED_VARIANCE
from .network import Network, constant
from .plain import LINEAR, Kind, is_plain, stays_plain


def check_input(x: Tensor, d_model: int) -> None:
    if type(x) is not Tensor or x.is_nested or x.layout != torch.strided:
        if isinstance(x, torch.fx.Proxy):
            found = "x is a Proxy of torch.fx, whose tracer cannot look into this network"
            supported = "the network as a leaf (a torch.fx.Tracer whose is_leaf_module says so), or torch.export"
            raise TypeError(f"{found}; supported: {supported}")
        checks.strided(x=x)
    if x.dtype not in checks.FLOAT_DTYPES:
        checks.floating("x", x)
    if x.dim() < 1 or x.shape[-1] != d_model:
        raise ValueError(f"x has shape {list(x.shape)}; expected [..., d_model] with d_model = {d_model}")


def check_matches(x: Tensor, first: nn.Module | Tensor | None, name: str = "x") -> None:
    """Refuse an x of another dtype or device than the weights it meets: those of a linear layer, or a parameter; and a
    layer's bias of another shape.

    Weights that are not plain parameters, and layers that are hooked, patched or replaced, may convert x themselves.
    """
    weight, bias = first, None
    if isinstance(first, nn.Module):
        if type(first).forward is not nn.Linear.forward or "forward" in first.__dict__ or first._forward_pre_hooks:
            return
        weight, bias = first._parameters.get("weight"), first._parameters.get("bias")
    if type(weight) is not nn.Parameter or type(x) not in (Tensor, nn.Parameter):
        return
    if bias is not None and bias.shape != weight.shape[:1]:  # it might be broadcast
        found = f"the bias of the layer that takes {name} has shape {list(bias.shape)}"
        raise ValueError(f"{found}; expected {list(weight.shape[:1])} (the rows of its weight)")
    if x.device != weight.device:
        raise ValueError(f"{name} is on {x.device} but the module is on {weight.device}; move one of them with .to()")
    if x.dtype != weight.dtype and not torch_private.autocasts(x.device.type):
        found, supported = map(checks.name_of, (x.dtype, weight.dtype))
        advice = "module.to(x.dtype) changes it, torch.autocast takes any"
        raise TypeError(f"{name} has dtype {found}; supported: {supported}, the module's dtype; {advice}")


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


_PARTS = {"in_proj": LINEAR, "out_proj": LINEAR, "q_norm": Kind(HeadRMSNorm)}


class Heads(nn.Module):
    """The ends of a multi-head network: in_proj, heads, q_norm, out_proj; projections and q_norm may be None."""

    d_model: int
    head_dim: int
    in_proj: nn.Linear | None
    out_proj: nn.Linear | None
    q_norm: HeadRMSNorm | None

    @property
    def skip_linear(self) -> bool:
        return self.in_proj is None

    def gate_proj(self, *_: object) -> None:
        """Refuse the forward of a SwiGLU network, which Liger and others put on every network of a Llama they know."""
        found = f"a {type(self).__name__} was given the forward of a SwiGLU network"
        supported = "its own, as with liger_kernel_config={'swiglu': False} beside use_liger_kernel=True"
        raise NotImplementedError(f"{found}; supported: {supported}")

    up_proj = down_proj = gate_proj

    def split_heads(self, x: Tensor) -> Tensor:
        """Return split_H(X W_in) [..., H, d_h] for x [..., d_model]; a tensor-parallel rank has some heads."""
        in_proj = self.in_proj
        check_matches(x, self._parameters.get("k") if in_proj is None else in_proj)
        return (x if in_proj is None else in_proj(x)).unflatten(-1, (-1, self.head_dim))

    def normalise(self, q: Tensor) -> Tensor:
        """Return q_norm(Q), or Q if it is off; [..., H, d_h]."""
        return q if self.q_norm is None else self.q_norm(q)

    def query(self, x: Tensor) -> Tensor:
        """Return Q [..., H, d_h], which meets the heads' networks, for x [..., d_model]."""
        return self.normalise(self.split_heads(x))

    def join_heads(self, summed: Tensor) -> Tensor:
        """Return concat_H(S) W_out [..., d_model] for S [..., H, d_h]."""
        summed = summed.flatten(-2)
        if self.out_proj is None:
            return summed
        check_matches(summed, self.out_proj, "the input of out_proj")
        return self.out_proj(summed)


class RoutedHeads(Heads):
    """The base of the networks with a router, in 16 bits and in FP8: a call is one operator where nobody would notice,
    or else the calls of its parts. A subclass says which tensors its heads' networks are, and how S follows from Q.
    """

    TENSORS: ClassVar[tuple[str, ...]]  # of the heads' networks, then of the router
    METHODS: ClassVar[tuple[str, ...]] = (
        "_heads", "query", "split_heads", "normalise", "_run_networks", "_networks", "join_heads",
    )  # fmt: skip
    KINDS: ClassVar[dict[str, Kind]]  # of the class itself, "", and of its parts
    router_eps = constant("router_eps")
    backend: str
    activation: str

    @classmethod
    def define(cls) -> None:
        """Hold the class as it is, before a program can change it."""
        methods = ("__call__", "_call_impl", "__getattr__", "router_eps", *cls.METHODS)
        held = (*cls.TENSORS, *_PARTS)
        own = ("_call_impl", "in_proj", "out_proj", *cls.TENSORS, *cls.METHODS)  # q_norm may be None there
        cls.KINDS = {"": Kind(cls, methods, held, own)} | _PARTS

    def _networks(self) -> tuple[Tensor, ...]:
        """Return the tensors of the heads' networks, [H_kv, E, ...]."""
        raise NotImplementedError

    def _run_networks(self, q: Tensor) -> Tensor:
        """Return S for Q, both [..., H, d_h]. The caller keeps no Q: without gradients it is freed before out_proj."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's result [..., d_model] for x [..., d_model], in x's dtype or autocast's."""
        check_input(x, self.d_model)
        k = self._parameters.get("k")
        # In training nothing more is asked, and a compiled graph has no guards on it.
        if not (is_grad_enabled() and k is not None and k.requires_grad):
            weights = self._plain_weights()
            y = None if weights is None else layer.run(x, weights, self.backend, self.activation)
            if y is not None:
                return y
        return self.join_heads(self._heads(x))

    def _heads(self, x: Tensor) -> Tensor:
        """Return S [..., H, d_h] for x [..., d_model]."""
        return self._run_networks(self.query(x))

    def _plain_weights(self) -> LayerWeights | None:
        """Return the weights if the module and its parts compute what their classes say, else None."""
        if self.backend == REFERENCE and is_compiling():
            return None  # compiled graphs and exported programs of the definition consist of PyTorch's own operations
        if not self._is_plain() or (is_dynamo_compiling() and not stays_plain(self, self.METHODS)):
            return None
        modules, own = self._modules, self._parameters or self._buffers  # attributes take the host a microsecond each
        try:
            first, last, q_norm = modules["in_proj"]._parameters, modules["out_proj"]._parameters, modules.get("q_norm")
            tensors = tuple(map(own.__getitem__, self.TENSORS))
        except (AttributeError, KeyError):
            return None  # one of them has been deleted, or set to None
        if tensors[-1] is None:  # which the operator takes for a network without gate
            return None
        networks = tensors[:-1] if tensors[0].dim() == 4 else self._networks()
        norm = (None, 0.0) if q_norm is None else (q_norm._parameters["weight"], q_norm.eps)
        return LayerWeights(
            first["weight"], first["bias"], networks, tensors[-1], float(self._router_eps), last["weight"],
            last["bias"], *norm,
        )  # fmt: skip

    @torch_private.constant_in_graphs
    def _is_plain(self) -> bool:
        """Return whether that holds now; a compiled graph holds the answer of when it was made."""
        # deleted, or a function, which is no part
        if "q_norm" not in self._modules and self.__dict__.get("q_norm", "deleted") is not None:
            return False
        return is_plain(self, self.KINDS)

    def extra_repr(self) -> str:
        shares = ("num_kv_heads",) if self.num_kv_heads != self.num_heads else ()
        names = ("d_model", "num_heads", "num_subnets", "subnet_dim", *shares)
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class MultiHead(Heads, Network):
    """The base of FlashMHF, MHFFN and ParametricKV: W_in, heads, W_out. ``k`` and its siblings belong to the subclass.
    skip_linear leaves out W_in and W_out: the heads are slices of x and of the result.
    """

    # The dimension of each parameter along which its heads lie: tensor parallelism divides it. Others are whole.
    _ROWS = ("k", "u", "v", "router", "q_norm.weight", "in_proj.weight", "in_proj.bias")
    SHARDED: ClassVar[dict[str, int]] = dict.fromkeys(_ROWS, 0) | {"out_proj.weight": 1}

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

    def _parts(self) -> dict[str, type[nn.Module]]:
        return super()._parts() | {"q_norm": HeadRMSNorm}

    def _draw_heads(self, summed: float) -> None:
        """Draw k, u, v and q_norm. ``summed``: the number of products that S sums, times the gates' mean squared."""
        value = (GATED_VARIANCE[self.activation] * summed) ** -0.5
        value *= self.scheme.residual if self.skip_linear else 1.0  # without W_out the output's variance is V's
        for name, std in (("k", self.head_dim**-0.5), ("u", self.head_dim**-0.5), ("v", value)):
            self.scheme.draw(getattr(self, name), name, std)
        if self.q_norm is not None:
            self.q_norm.reset_parameters()
