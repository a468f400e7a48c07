"""Networks with packed weights, for inference."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import checks
from ..backends.contract import LayerWeights, ProjectionWeights
from ..backends.fp8_linear import quantise_rows
from ..nn.arguments import flag
from ..nn.flashmhf import FlashMHF
from ..nn.multihead import HeadRMSNorm, check_input, is_ordinary, is_plain, only_values_matter, plain_linear
from ..nn.network import Contiguous
from ..ops import layer
from .packing import LAYOUT, PackedWeights, check_layout, pack_fp8

_Module = TypeVar("_Module", bound="_Quantised")
METHOD = "flashmhf_fp8"  # quant_method in the configuration of a transformers model


class _Quantised(Contiguous):
    """Keeps the dtypes of quantised tensors where ``.to(dtype)``, ``.half()`` and their kin change those of others."""

    _fixed: tuple[str, ...] = ()

    def _apply(self: _Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Module:
        before = {name: getattr(self, name) for name in self._fixed}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            now = getattr(self, name)
            if now.dtype != tensor.dtype:
                setattr(self, name, tensor.to(now.device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Raises TypeError for a quantised tensor of another dtype, which ``copy_`` would round without its scale."""
        for name in self._fixed:
            stored, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(stored, Tensor) and stored.dtype != own.dtype:
                raise TypeError(f"{prefix}{name} has dtype {checks.name_of(stored.dtype)}; supported: {checks.name_of(own.dtype)}")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Fp8Linear(_Quantised):
    """x W^T + b with W in e4m3 and a scale for each row of W.

    x of at most 512 rows stays in its dtype; more rows are quantised, each with its scale, as they come. Their product is
    ``torch._scaled_mm`` where the device has e4m3 products (capability 8.9 and later) and the sizes are multiples of 16, which rounds to
    bf16; elsewhere the same values are multiplied in float32. A row of x that is not finite gives a row that is not.

    A call raises TypeError where x is of no floating dtype, ValueError where its last dimension is not K, NotImplementedError where an
    input requires a gradient and gradients are enabled.

    State: weight8 [N, K] e4m3, scale [N, 1] float32, bias [N] or None. The constructor raises TypeError for what is no tensor.
    """

    weight8: Tensor
    scale: Tensor
    bias: Tensor | None
    _fixed = ("weight8", "scale")

    def __init__(self, weight8: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        checks.tensors(weight8=weight8, scale=scale, **({} if bias is None else {"bias": bias}))
        super().__init__()
        self.register_buffer("weight8", weight8)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear) -> Fp8Linear:
        """The quantised weights of ``linear``, and a copy of its bias. Raises TypeError for what is no nn.Linear."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        weight8, scale = quantise_rows(linear.weight)
        return cls(weight8, scale, None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        return torch.ops.flashmhf.fp8_linear(x, self.weight8, self.scale, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight8.shape[1]}, out_features={self.weight8.shape[0]}, bias={self.bias is not None}"


def _projection(module: nn.Module | None) -> ProjectionWeights | None:
    """Return the weights of ``module`` if it is a plain linear projection; None if it is missing, replaced, patched or has hooks."""
    if type(module) is Fp8Linear:
        plain = "forward" not in module.__dict__ and not module._forward_pre_hooks and not module._forward_hooks
        return ProjectionWeights(module.weight8, module.bias, module.scale) if plain else None
    return plain_linear(module)


_PARTS = ("query", "_forward_parts")


class Fp8FlashMHF(_Quantised):
    """:class:`flashmhf.FlashMHF` for inference with K, U, V in e4m3; made by :func:`to_fp8`, whose errors the constructor raises.

    State: k8, u8, v8, scales and layout as in :class:`PackedWeights`, router [H, d_h, E], in_proj, out_proj (:class:`Fp8Linear` or
    linear layers), q_norm.weight where there is one.

    A call raises ValueError where the last dimension of x is not d_model, NotImplementedError where x requires a gradient and gradients
    are enabled.
    """

    k8: Tensor
    u8: Tensor
    v8: Tensor
    scales: Tensor
    layout: Tensor
    router: Tensor
    in_proj: nn.Module | None
    out_proj: nn.Module | None
    _fixed = ("k8", "u8", "v8", "scales", "layout")

    def __init__(self, network: FlashMHF, *, projections: bool = True) -> None:
        if not isinstance(network, FlashMHF):
            raise TypeError(f"network must be a flashmhf.FlashMHF, got {type(network).__name__}")
        if type(network).forward is not FlashMHF.forward:
            raise NotImplementedError(f"network is a {type(network).__name__} with a forward of its own; supported: FlashMHF's forward")
        activation = getattr(network, "activation", "silu")
        if activation != "silu":
            raise ValueError(f"activation is {activation!r}; supported in FP8: 'silu'")
        distributed = sys.modules.get("torch.distributed.tensor")  # only who imported it has DTensors
        if distributed is not None and any(isinstance(parameter, distributed.DTensor) for parameter in network.parameters()):
            raise NotImplementedError("network has DTensor parameters; supported: plain ones, before parallelize or fully_shard")
        super().__init__()
        self.d_model, self.num_heads, self.head_dim = network.d_model, network.num_heads, network.head_dim
        self.router_eps, self.backend = network.router_eps, "auto"
        packed = pack_fp8(*(weight.detach() for weight in network._weights()))
        for name, tensor in packed.state_dict().items():
            self.register_buffer(name, tensor.to(packed.k8.device))
        self.register_buffer("router", network.router.detach().clone())
        quantised = flag("projections", projections)

        def own(module: nn.Module | None) -> nn.Module | None:
            # A subclass that computes more than W x, such as an adapter, stays what it is.
            if quantised and isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
                return Fp8Linear.from_linear(module)
            return module if module is None else copy.deepcopy(module).requires_grad_(False)

        self.in_proj, self.out_proj, self.q_norm = own(network.in_proj), own(network.out_proj), own(network.q_norm)

    @property
    def packed(self) -> PackedWeights:
        return PackedWeights(self.k8, self.u8, self.v8, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> [..., d_model]."""
        check_input(x, self.d_model)
        weights = self._plain_weights() if only_values_matter(x) else None
        if weights is None:
            return self._forward_parts(x)
        if torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights.tensors())):
            return layer.call(x, weights, self.backend)  # refuses
        return layer.run(x, weights, self.backend)

    def _plain_weights(self) -> LayerWeights | None:
        """As that of :class:`flashmhf.FlashMHF`."""
        in_proj, out_proj, q_norm = _projection(self.in_proj), _projection(self.out_proj), self.q_norm
        if in_proj is None or out_proj is None or not (q_norm is None or is_plain(q_norm, HeadRMSNorm)):
            return None
        packed, router = (self.k8, self.u8, self.v8, self.scales), self.router
        if type(self) is not Fp8FlashMHF or any(name in self.__dict__ for name in _PARTS) or not all(map(is_ordinary, (*packed, router))):
            return None
        norm = (None, 0.0) if q_norm is None else (q_norm.weight, q_norm.eps)
        return LayerWeights(in_proj, packed, router, self.router_eps, out_proj, *norm)

    def query(self, x: Tensor) -> Tensor:
        """The operator's q [..., H, d_h] of x [..., d_model]."""
        q = (x if self.in_proj is None else self.in_proj(x)).unflatten(-1, (self.num_heads, self.head_dim))
        return q if self.q_norm is None else self.q_norm(q)

    def _forward_parts(self, x: Tensor) -> Tensor:
        q = self.query(x)
        mixed = torch.ops.flashmhf.fp8_gated_forward(q, *self.packed.tensors, self.router, self.router_eps, backend=self.backend)
        return mixed.flatten(-2) if self.out_proj is None else self.out_proj(mixed.flatten(-2))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}layout")
        if stored is not None and not (isinstance(stored, Tensor) and stored.is_meta):
            check_layout(stored)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        _, subnets, subnet_dim, _ = self.k8.shape
        return f"d_model={self.d_model}, num_heads={self.num_heads}, num_subnets={subnets}, subnet_dim={subnet_dim}, layout={LAYOUT}"


def to_fp8(network: FlashMHF, *, projections: bool = True) -> Fp8FlashMHF:
    """``network`` with K, U and V in e4m3, and with ``projections`` W_in and W_out, too; an inference module with weights of its own.

    ``projections=False`` has the smaller error and takes some percent less time for few tokens. docs/fp8.md has the figures.

    Raises TypeError for anything but a FlashMHF and for weights of other dtypes than floating ones, ValueError for d_e or d_h that are no
    multiples of 16 and for another activation than SiLU, NotImplementedError for a subclass with a forward of its own and for parameters
    that are DTensors.
    """
    return Fp8FlashMHF(network, projections=projections).eval()


def is_flashmhf(module: nn.Module, name: str = "") -> bool:
    """Whether ``module`` is a FlashMHF: a ``filter_fn`` of torchao's ``quantize_``. ``name`` is unused."""
    return isinstance(module, FlashMHF)


def quantize_(model: nn.Module, *, projections: bool = True) -> list[str]:
    """Replaces every FlashMHF in ``model`` by :func:`to_fp8` of it, in place; returns the names of the replaced modules.

    The configuration of a transformers model records it, so that ``from_pretrained`` loads what ``save_pretrained`` then stores, once
    ``flashmhf.models`` is imported. Raises TypeError for what is no module, and ValueError where ``model`` holds no FlashMHF or is one
    itself: take :func:`to_fp8`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, FlashMHF):
        raise ValueError("model is a FlashMHF, which cannot be replaced in place; supported: to_fp8(model)")
    found = {name: module for name, module in model.named_modules(remove_duplicate=False) if is_flashmhf(module)}
    if not found:
        raise ValueError("model holds no FlashMHF")
    converted = {id(module): to_fp8(module, projections=projections) for module in {id(each): each for each in found.values()}.values()}
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, converted[id(module)])
    if hasattr(model, "save_pretrained"):
        model.config.quantization_config = {"quant_method": METHOD, "projections": projections, "layout": LAYOUT}
    return list(found)
