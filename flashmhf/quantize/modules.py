"""Networks with packed weights, for inference."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import checks, extras, torch_private
from ..backends.contract import LayerWeights
from ..nn.flashmhf import FlashMHF
from ..nn.multihead import check_input, plain_layer
from ..nn.network import Contiguous, FixedDtypes, constant
from ..ops import layer
from .packing import LAYOUT, PackedWeights, check_layout, pack_fp8

METHOD = "flashmhf_fp8"  # quant_method in the configuration of a transformers model
_PARTS = ("query", "_forward_parts")


class Fp8FlashMHF(FixedDtypes, Contiguous):
    """Run FlashMHF for inference with K, U and V in e4m3. :func:`to_fp8` makes it, and the constructor raises what that
    raises.

    State: k8, u8, v8, scales and layout as in :class:`PackedWeights`, router [H, d_h, E], in_proj and out_proj as they
    were, q_norm.weight if there is one. ``.to(dtype)``, ``.half()`` and ``.float()`` do not change the packed weights.

    A call raises ValueError if the last dimension of x is not d_model, NotImplementedError if x requires a gradient and
    gradients are enabled.
    """

    fixed = ("k8", "u8", "v8", "scales", "layout")
    SHARDED: ClassVar[dict[str, int]] = FlashMHF.SHARDED | {"k8": 0, "u8": 0, "v8": 0, "scales": 1}
    k8: Tensor
    u8: Tensor
    v8: Tensor
    scales: Tensor
    layout: Tensor
    router: Tensor
    router_eps = constant("router_eps")
    in_proj: nn.Module | None
    out_proj: nn.Module | None

    def __init__(self, network: FlashMHF) -> None:
        checks.instance("network", network, FlashMHF, "a flashmhf.FlashMHF")
        # this package's own subclasses compute the same
        for name in ("forward", "split_heads", "normalise", "_mix", "join_heads"):
            if not getattr(network, name).__module__.startswith(__package__.removesuffix("quantize")):
                raise NotImplementedError(
                    f"network is a {type(network).__name__} with a {name} of its own; supported: FlashMHF's {name}"
                )
        if network.activation != "silu":
            raise ValueError(f"activation is {network.activation!r}; supported in FP8: 'silu'")
        if any(map(torch_private.is_dtensor, network.parameters())):
            raise NotImplementedError(
                "network has DTensor parameters; supported: plain ones, before parallelize or fully_shard"
            )
        # such as the all-reduce of flashmhf.distributed.shard
        if network._forward_hooks or network._forward_pre_hooks:
            raise NotImplementedError(
                "network has forward hooks, which its FP8 module would lose; supported: hooks registered afterwards"
            )
        super().__init__()
        self.d_model, self.num_heads, self.head_dim = network.d_model, network.num_heads, network.head_dim
        self.router_eps, self.backend = network.router_eps, "auto"
        packed = pack_fp8(*(weight.detach() for weight in network._weights()))
        for name, tensor in packed.state_dict().items():
            self.register_buffer(name, tensor.to(packed.k8.device))
        self.register_buffer("router", network.router.detach().clone())
        for name in ("in_proj", "out_proj", "q_norm"):
            module = getattr(network, name)
            setattr(self, name, module if module is None else copy.deepcopy(module).requires_grad_(False))

    @property
    def packed(self) -> PackedWeights:
        return PackedWeights(self.k8, self.u8, self.v8, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's result [..., d_model] for x [..., d_model], in x's dtype or autocast's."""
        check_input(x, self.d_model)
        weights = self._plain_weights()
        if weights is None or not layer.serves(x, weights):
            return self._forward_parts(x)  # the operator within refuses a q that requires a gradient
        return layer.run(x, weights, self.backend)

    def _plain_weights(self) -> LayerWeights | None:
        """Return the weights if the module is what its class says, else None."""
        if type(self) is not Fp8FlashMHF or any(name in self.__dict__ for name in _PARTS):
            return None
        return plain_layer(self, (self.k8, self.u8, self.v8, self.scales), self.router)

    def query(self, x: Tensor) -> Tensor:
        """Return the operator's q [..., H, d_h] for x [..., d_model]."""
        q = (x if self.in_proj is None else self.in_proj(x)).unflatten(-1, (self.num_heads, self.head_dim))
        return q if self.q_norm is None else self.q_norm(q)

    def _forward_parts(self, x: Tensor) -> Tensor:
        q = self.query(x)
        mixed = torch.ops.flashmhf.fp8_gated_forward(
            q, *self.packed.tensors, self.router, self.router_eps, backend=self.backend
        )
        return mixed.flatten(-2) if self.out_proj is None else self.out_proj(mixed.flatten(-2))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as PyTorch does.

        Raises TypeError for packed weights of another dtype, which ``copy_`` would round without their scale, and
        ValueError for another layout.
        """
        for name in self.fixed:
            stored, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(stored, Tensor) and stored.dtype != own.dtype:
                raise TypeError(
                    f"{prefix}{name} has dtype {checks.name_of(stored.dtype)}; supported: {checks.name_of(own.dtype)}"
                )
        stored = state_dict.get(f"{prefix}layout")
        if stored is not None and not (isinstance(stored, Tensor) and stored.is_meta):
            check_layout(stored)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        _, subnets, subnet_dim, _ = self.k8.shape
        return f"d_model={self.d_model}, num_heads={self.num_heads}, num_subnets={subnets}, subnet_dim={subnet_dim}, layout={LAYOUT}"


def to_fp8(network: FlashMHF) -> Fp8FlashMHF:
    """Return ``network`` with K, U and V in e4m3, an inference module with weights of its own. W_in and W_out keep
    their dtype.

    Raises TypeError if ``network`` is not a FlashMHF or its weights are not floating, ValueError if d_e or d_h is not a
    multiple of 16 or the activation is not SiLU, NotImplementedError for a network with methods of its own or hooks and
    for parameters that are DTensors.
    """
    return Fp8FlashMHF(network).eval()


def is_flashmhf(module: nn.Module, name: str = "") -> bool:
    """Return whether ``module`` is a FlashMHF: a ``filter_fn`` of torchao's ``quantize_``. ``name`` is unused."""
    return isinstance(module, FlashMHF)


def quantize_(model: nn.Module) -> list[str]:
    """Replace every FlashMHF in ``model``, in place, by its FP8 module (:func:`to_fp8`) and return their names.

    The configuration of a transformers model, ``model`` or a part of it, records it, so that ``from_pretrained`` loads
    what
    ``save_pretrained`` then stores, once ``flashmhf.models`` is imported. Raises TypeError if ``model`` is not a
    module, ValueError if it holds no FlashMHF or is one itself (use :func:`to_fp8`).
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    if isinstance(model, FlashMHF):
        raise ValueError("model is a FlashMHF, which cannot be replaced in place; supported: to_fp8(model)")
    found = {name: module for name, module in model.named_modules(remove_duplicate=False) if is_flashmhf(module)}
    if not found:
        raise ValueError("model holds no FlashMHF")
    converted = {id(module): to_fp8(module) for module in {id(each): each for each in found.values()}.values()}
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, converted[id(module)])
    for part in extras.pretrained_models(model, Fp8FlashMHF):
        part.config.quantization_config = {"quant_method": METHOD, "layout": LAYOUT}
    return list(found)
