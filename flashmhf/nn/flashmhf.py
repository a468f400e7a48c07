"""The module FlashMHF: [..., d_model] -> [..., d_model], drop-in for a SwiGLU feed-forward network."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import checks
from ..backends import REFERENCE
from ..backends.contract import LayerWeights
from ..ops import layer
from ..ops.mix import gated_flash_mhf
from .arguments import backend_and_deterministic, epsilon, positive
from .multihead import GroupedHeads, check_input, plain_layer
from .network import constant


def default_num_heads(d_model: int) -> int:
    """Return H of heads of 128 (the paper's choice), or else of 64, 32 or 16; 1 if 16 does not divide d_model."""
    return d_model // next((size for size in (128, 64, 32, 16) if d_model % size == 0), d_model)


def default_subnet_dim(head_dim: int) -> int:
    """Return d_e = 8/3 d_h, rounded up to a multiple of 64 (paper, section 4): 192, 384, 704 for d_h 64, 128, 256.

    Raises TypeError if head_dim is not an integer, ValueError if it is below 1.
    """
    return -(-8 * positive("head_dim", head_dim) // (3 * 64)) * 64


def other_part(feed_forward: nn.Module) -> str | None:
    """Return the name of a module or function of a gated network that is not a linear layer, SiLU or dropout.

    None if there is none.
    """
    for name, part in {**vars(feed_forward), **feed_forward._modules}.items():
        known = isinstance(part, (nn.Linear, nn.SiLU, nn.Dropout, nn.Identity)) or part is nn.functional.silu
        known = known or type(part).__name__ == "SiLUActivation"
        # what Module.compile, accelerate and Liger set on the instance
        patched = hasattr(nn.Module, name) or name == "_old_forward"
        if callable(part) and not known and not patched:
            return name
    return None


_PARTS = ("split_heads", "normalise", "_mix", "_weights", "join_heads")


class FlashMHF(GroupedHeads):
    """Flash multi-head feed-forward network (paper, section 3.2): concat_H(sum_e R_e SwiGLU_e(Q)) W_out, Q = split_H(X
    W_in).

    Args:
        d_model: the width of the model, d_model = H d_h.
        num_heads: H, a divisor of d_model.
        num_subnets: E, the number of parallel SwiGLU sub-networks per head.
        subnet_dim: d_e, their width; None for 8/3 d_h rounded up to a multiple of 64.
        router_eps: the eps of the gate's normalisation.
        num_kv_heads: heads of K, U and V, a divisor of H; None for H. Head h takes head h // (H / num_kv_heads) of
            them; each head has its own router.
        q_norm: per-head RMS normalisation of Q (official setting; the paper's text has none).
        q_norm_eps: the eps of that normalisation.
        skip_linear: leave out W_in and W_out.
        activation: "silu", "gelu", "relu" or "relu2", as in :func:`flashmhf.flash_mhf`.
        bias: give in_proj and out_proj biases.
        backend: as in :func:`flashmhf.flash_mhf`.
        deterministic: as in :func:`flashmhf.flash_mhf`.

    State: in_proj.weight, k, u, v [num_kv_heads, E, d_e, d_h], router [H, d_h, E], out_proj.weight; q_norm.weight [H,
    d_h] when on.

    Raises TypeError for arguments of a wrong type, ValueError for sizes below 1, a d_model that H does not divide, an H
    that num_kv_heads does not divide, an eps that is negative or not finite, an unknown activation or backend, and a
    bias with skip_linear. A call raises ValueError if the last dimension of x is not d_model or x is on another device,
    TypeError if x has another dtype than the module.
    """

    num_subnets: int
    subnet_dim: int
    router_eps = constant("router_eps")
    backend: str
    deterministic: bool | None
    router: nn.Parameter

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_subnets: int,
        subnet_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        router_eps: float = 1e-20,
        q_norm: bool = False,
        q_norm_eps: float = 1e-5,
        skip_linear: bool = False,
        activation: str = "silu",
        bias: bool = False,
        backend: str = "auto",
        deterministic: bool | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        projections = {"bias": bias, "device": device, "dtype": dtype, "skip_linear": skip_linear}
        super().__init__(d_model, num_heads, num_kv_heads, q_norm, q_norm_eps, activation, **projections)
        self.num_subnets = positive("num_subnets", num_subnets)
        self.subnet_dim = (
            default_subnet_dim(self.head_dim) if subnet_dim is None else positive("subnet_dim", subnet_dim)
        )
        self.router_eps = epsilon("router_eps", router_eps)
        self.backend, self.deterministic = backend_and_deterministic(backend, deterministic)
        shape = self.weight_shape
        self.k, self.u, self.v = (nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for _ in range(3))
        self.router = nn.Parameter(
            torch.empty(self.num_heads, self.head_dim, self.num_subnets, device=device, dtype=dtype)
        )
        self._draw()

    @classmethod
    @torch.no_grad()
    def from_swiglu(cls, swiglu: nn.Module, num_subnets: int = 1, **kwargs: Any) -> FlashMHF:
        """Return a network of one head that computes what ``swiglu`` (gate_proj, up_proj, down_proj linear layers)
        does, to rounding.

        W_in = W_out = identity; K and U are the gate's and the up projection's weights, V the down projection's
        transposed. W_router = 0 makes every gate value sigma / (E sigma + eps) = 1 / (E + 2 eps), for sigma = 1/2; V
        carries the factor E + 2 eps. With one sub-network and the default eps, which vanishes beside sigma in float32,
        the gate stays 1 under training.

        Several heads have no exact start: a head sees d_h directions of x, a neuron of ``swiglu`` reads two of all
        d_model. The head dimension is d_model here, so back ends with a limit on d_h leave wide models to the eager
        one. Raises TypeError if one of the three is not a plain linear layer (an adapter is not), ValueError for
        another activation, biases in gate_proj or up_proj, hooks, other weights, factors and limits in ``swiglu``,
        shapes that do not fit each other, a width that num_subnets does not divide, q_norm=True, which has no exact
        start either, and bias=False where down_proj has one.
        """
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer = getattr(swiglu, name, None)
            # an adapter adds to its linear layer
            if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
                raise TypeError(
                    f"swiglu.{name} must be a torch.nn.Linear, got {'none' if layer is None else type(layer).__name__}"
                )
            if layer.bias is not None and name != "down_proj":
                raise ValueError(f"swiglu.{name} has a bias; supported: a bias in down_proj only")
        others = {name.partition(".")[0] for name in swiglu.state_dict()} - {"gate_proj", "up_proj", "down_proj"}
        if others:  # Inkling multiplies by a parameter, BitNet normalises
            raise ValueError(
                f"swiglu has weights in {', '.join(sorted(others))}; supported: gate_proj, up_proj and down_proj only"
            )
        for name, part in swiglu.named_modules():
            # accelerate's keeps the old one, and moves tensors
            patched = "forward" in vars(part) and "_old_forward" not in vars(part)
            if patched or part._forward_hooks or part._forward_pre_hooks:
                found = f"swiglu.{name}".rstrip(".")
                raise ValueError(
                    f"{found} has forward hooks or a forward of its own, which from_swiglu would lose; supported: without"
                )
        if name := other_part(swiglu):
            raise ValueError(
                f"swiglu.{name} is {getattr(swiglu, name)}; supported: SiLU and dropout beside the three linear layers"
            )
        # Falcon-H1 multiplies by some, DeepSeek-V4 cuts off at one; at inf nothing is cut off
        for name, value in vars(swiglu).items():
            number = isinstance(value, float) and "dropout" not in name or isinstance(value, int) and "limit" in name
            if number and value != math.inf:
                raise ValueError(
                    f"swiglu.{name} is {value}; supported: networks without factors and limits of their own"
                )
        weight, bias = swiglu.gate_proj.weight, swiglu.down_proj.bias
        width, d_model = weight.shape
        for name, shape in {"up_proj": (width, d_model), "down_proj": (d_model, width)}.items():
            checks.expect_shape(
                f"swiglu.{name}.weight", getattr(swiglu, name).weight, shape, f"gate_proj has {[width, d_model]}"
            )
        for name, value in {
            "q_norm": False,
            "activation": "silu",
            "bias": bias is not None or kwargs.get("bias", False),
        }.items():
            if kwargs.get(name, value) != value:
                raise ValueError(
                    f"{name} is {kwargs[name]!r}; from_swiglu supports {name}={value!r} only: it computes what swiglu does"
                )
        num_subnets = positive("num_subnets", num_subnets)
        if width % num_subnets:
            raise ValueError(f"num_subnets is {num_subnets}; it must divide the width {width}")
        settings = {"device": weight.device, "dtype": weight.dtype, "bias": bias is not None, **kwargs}
        module = cls(d_model, 1, num_subnets, width // num_subnets, **settings)
        for projection in () if module.skip_linear else (module.in_proj, module.out_proj):
            nn.init.eye_(projection.weight)
        if bias is not None:
            module.in_proj.bias.zero_()
            module.out_proj.bias.copy_(bias)
        module.k.copy_(weight.view(module.weight_shape))
        module.u.copy_(swiglu.up_proj.weight.view(module.weight_shape))
        module.v.copy_(swiglu.down_proj.weight.T.reshape(module.weight_shape)).mul_(num_subnets + 2 * module.router_eps)
        module.router.zero_()
        return module

    def _draw(self) -> None:
        self._draw_heads(self.subnet_dim / self.num_subnets)  # the gates are near 1 / E
        self.scheme.draw(self.router, "router", self.scheme.initializer_range)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Return the shape (H_kv, E, d_e, d_h) of k, u and v."""
        return self.num_kv_heads, self.num_subnets, self.subnet_dim, self.head_dim

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return k, u, v [H_kv, E, d_e, d_h], from parameters of four dimensions or of three
        (flashmhf.integrations.peft).
        """
        k, u, v = self.k, self.u, self.v
        if k.dim() != 4:
            k, u, v = (weight.view(self.weight_shape) for weight in (k, u, v))
        return k, u, v

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's result [..., d_model] for x [..., d_model], in x's dtype or autocast's."""
        check_input(x, self.d_model)
        weights = self._plain_weights()
        if weights is None or not layer.serves(x, weights):
            return self.join_heads(self._mix(self.split_heads(x)))
        return layer.run(x, weights, self.backend, self.activation)

    def _plain_weights(self) -> LayerWeights | None:
        """Return the weights if the module and its parts compute what their classes say, else None."""
        kind, own, parameters = type(self), self.__dict__, self._parameters
        for name in _PARTS:
            if name in own or (kind is not FlashMHF and getattr(kind, name) is not getattr(FlashMHF, name)):
                return None
        if self.backend == REFERENCE and torch.compiler.is_compiling():
            return None  # compiled graphs and exported programs of the definition consist of PyTorch's own operations
        k, u, v, router = parameters.get("k"), parameters.get("u"), parameters.get("v"), parameters.get("router")
        if k is None or u is None or v is None or router is None:
            return None  # computed, as pruning does
        return plain_layer(self, (k, u, v) if k.dim() == 4 else self._weights(), router)

    def _mix(self, q: Tensor) -> Tensor:
        """Return S for Q, both [..., H, d_h].

        The caller keeps no reference to Q: without gradients it is released before out_proj.
        """
        q = self.normalise(q)
        return gated_flash_mhf(
            q,
            *self._weights(),
            self.router,
            self.router_eps,
            deterministic=self.deterministic,
            backend=self.backend,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, num_heads={self.num_heads}, num_subnets={self.num_subnets}, subnet_dim={self.subnet_dim}"
        return sizes if self.num_kv_heads == self.num_heads else f"{sizes}, num_kv_heads={self.num_kv_heads}"
