"""Networks with packed weights, for inference."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import checks, torch_private
from ..backends import FP8_BACKENDS, check_name
from ..nn.flashmhf import FlashMHF
from ..nn.multihead import RoutedHeads
from ..nn.network import Contiguous, FixedDtypes
from ..nn.weights import check_held, check_not_compiled, hooks_of
from .packing import LAYOUT, PackedWeights, check_layout, pack_fp8

METHOD = "flashmhf"  # quant_method in the configuration of a transformers model
_STATE = ("k", "u", "v", "router", "in_proj", "out_proj", "q_norm")


def own_method(network: nn.Module) -> str | None:
    """Return the name of a method, not this package's, with which ``network`` may compute something else, or None."""
    package = __package__.removesuffix("quantize")
    found = (name for name in ("forward", *FlashMHF.METHODS) if hasattr(network, name))
    return next((name for name in found if not getattr(network, name).__module__.startswith(package)), None)


class Fp8FlashMHF(FixedDtypes, Contiguous, RoutedHeads):
    """Run FlashMHF for inference with K, U and V in e4m3; :func:`to_fp8` makes it.

    State: k8, u8, v8, scales and layout as in :class:`PackedWeights`, which ``.to(dtype)`` leaves alone, and router,
    in_proj, out_proj, q_norm as they were. A call raises ValueError for a wrong last dimension of x,
    NotImplementedError if x requires a gradient and gradients are enabled.
    """

    placed = False  # as of a FlashMHF
    TENSORS = ("k8", "u8", "v8", "scales", "router")
    fixed = ("k8", "u8", "v8", "scales", "layout")
    SHARDED: ClassVar[dict[str, int]] = FlashMHF.SHARDED | {"k8": 0, "u8": 0, "v8": 0, "scales": 1}
    k8: Tensor
    u8: Tensor
    v8: Tensor
    scales: Tensor
    layout: Tensor
    router: Tensor

    def __init__(self, network: FlashMHF) -> None:
        checks.instance("network", network, FlashMHF, "a flashmhf.FlashMHF")
        if name := own_method(network):
            found = f"network is a {type(network).__name__} with a {name} of its own"
            raise NotImplementedError(f"{found}; supported: FlashMHF's {name}")
        check_name(network.backend, names=("auto", *FP8_BACKENDS))
        if network.activation != "silu":
            raise ValueError(f"activation is {network.activation!r}; supported in FP8: 'silu'")
        if any(map(torch_private.is_dtensor, network.parameters())):
            raise NotImplementedError("network has DTensors; supported: networks before parallelize or fully_shard")
        if hooks := hooks_of(network):  # such as the all-reduce of flashmhf.distributed.shard
            raise NotImplementedError(f"network has {hooks}, which would be lost; supported: hooks set afterwards")
        for name, weight in network.named_parameters(recurse=False):
            own = (key for key in vars(weight) if key[0] != "_")  # such as the weight_loader of an engine
            if more := hooks_of(weight) or next(own, None):
                found = f"{name} has {more}, which would be lost"
                raise NotImplementedError(f"{found}; supported: weights without, whose FP8 module gets it afterwards")
        state = network._parameters | network._buffers | network._modules
        if more := [name for name in state if name not in _STATE]:
            raise NotImplementedError(f"network holds {more[0]}, which would be lost; supported: FlashMHF's own state")
        if network._compiled_call_impl is not None:
            raise NotImplementedError("network is compiled; supported: compile() of the result")
        super().__init__()
        own = vars(self).keys() | {"scheme", "_drawn_projections", "forward"}
        self.__dict__ |= {name: value for name, value in vars(network).items() if name not in own}
        packed = pack_fp8(*(weight.detach() for weight in network._networks()))
        for name, tensor in zip(self.fixed, packed.tensors, strict=False):
            self.register_buffer(name, tensor)
        self.register_buffer("layout", torch.tensor([LAYOUT], dtype=torch.uint8, device=packed.k8.device))
        self.register_buffer("router", network.router.detach().clone(memory_format=torch.contiguous_format))
        for name in ("in_proj", "out_proj", "q_norm"):
            module = copy.deepcopy(getattr(network, name))
            setattr(self, name, None if module is None else module.requires_grad_(False))

    @property
    def packed(self) -> PackedWeights:
        return PackedWeights(self.k8, self.u8, self.v8, self.scales)

    def _networks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tuple(tensor.contiguous() for tensor in self.packed.tensors)

    def _run_networks(self, q: Tensor) -> Tensor:  # by an operator that refuses a q which requires a gradient
        gate = (self.router.contiguous(), self.router_eps)
        return torch.ops.flashmhf.fp8_gated_forward(q, *self._networks(), *gate, backend=self.backend)

    def _adapt(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Raise TypeError for packed weights of another dtype, ValueError for another layout."""
        for name in self.fixed:
            stored, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(stored, Tensor) and stored.dtype != own.dtype:
                found, supported = map(checks.name_of, (stored.dtype, own.dtype))
                raise TypeError(f"{prefix}{name} has dtype {found}; supported: {supported}")
        stored = state_dict.get(f"{prefix}layout")
        if stored is not None and not (isinstance(stored, Tensor) and stored.is_meta):
            check_layout(stored)
        super()._adapt(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layout={LAYOUT}"


Fp8FlashMHF.define()


def to_fp8(network: FlashMHF) -> Fp8FlashMHF:
    """Return ``network`` with K, U and V in e4m3, an inference module with weights of its own.

    Raises TypeError if ``network`` is not a FlashMHF or its weights are not floating; ValueError if d_e or d_h is not a
    multiple of 16, the activation is not SiLU, the back end is "reference", and for weights that are offloaded, on the
    meta device or parametrised; NotImplementedError for methods of its own, hooks, and DTensors.
    """
    checks.instance("network", network, FlashMHF, "a flashmhf.FlashMHF")
    check_held("", network)
    return Fp8FlashMHF(network).eval()


def quantize_(model: nn.Module) -> list[str]:
    """Replace every FlashMHF in ``model``, in place, by its FP8 module (:func:`to_fp8`) and return their names.

    ``save_pretrained`` records it. Raises TypeError unless ``model`` is a module, ValueError if it holds no FlashMHF,
    is one itself or an adapter holds one, and what :func:`to_fp8` raises; the model is then as it was.
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    if isinstance(model, FlashMHF):
        raise ValueError("model is a FlashMHF, which cannot be replaced in place; supported: to_fp8(model)")
    found = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, FlashMHF)]
    if not found:
        raise ValueError("model holds no FlashMHF")
    for name in found:
        check_held(name, model.get_submodule(name))
        check_not_compiled(name)
    quantise_named(model, found)
    return found


def quantise_named(model: nn.Module, names: list[str]) -> None:
    """Replace the networks of these names by their FP8 modules; empty ones by empty ones."""
    networks = [model.get_submodule(name) for name in names]
    packed = {id(network): Fp8FlashMHF(network).eval() for network in {id(each): each for each in networks}.values()}
    for name, network in zip(names, networks, strict=True):
        model.set_submodule(name, packed[id(network)])
