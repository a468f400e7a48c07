"""The feed-forward networks that the paper compares FlashMHF with; all map [..., d_model] to [..., d_model]."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import reference
from ..backends import NAMES, check_name
from ..checks import epsilon, flag, instance, positive
from ..ops.gate import gate
from ..ops.networks import flash_mhf
from .init import SWIGLU_VARIANCE, Scheme
from .multihead import GroupedHeads, MultiHead, check_input, check_matches
from .network import Network


class MHFFN(GroupedHeads):
    """Naive multi-head feed-forward network (paper, section 3.1): the same operator with one sub-network and no gate.

    backend="naive" materialises the H intermediates [T, intermediate_dim], as the paper's comparison does; all else is
    as in :class:`flashmhf.FlashMHF`. State: in_proj.weight, k, u, v [num_kv_heads, intermediate_dim, d_h],
    out_proj.weight; q_norm.weight [H, d_h] when on. Raises TypeError and ValueError as FlashMHF does.
    """

    def __init__(
        self, d_model: int, num_heads: int, intermediate_dim: int, *, num_kv_heads: int | None = None,
        q_norm: bool = False, q_norm_eps: float = 1e-5, skip_linear: bool = False, activation: str = "silu",
        bias: bool = False, backend: str = "auto", deterministic: bool | None = None, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        projections = {"bias": bias, "device": device, "dtype": dtype, "skip_linear": skip_linear}
        super().__init__(d_model, num_heads, num_kv_heads, q_norm, q_norm_eps, activation, **projections)
        self.intermediate_dim = positive("intermediate_dim", intermediate_dim)
        self.backend = check_name(backend, names=(*NAMES, "naive"))
        self.deterministic = instance("deterministic", deterministic, bool | None, "a bool or None")
        shape = (self.num_kv_heads, self.intermediate_dim, self.head_dim)
        self.k, self.u, self.v = (nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for _ in range(3))
        self._draw()

    def _draw(self) -> None:
        self._draw_heads(self.intermediate_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's result [..., d_model] for x [..., d_model], in x's dtype or autocast's."""
        check_input(x, self.d_model)
        return self.join_heads(self._run_networks(self.query(x)))

    def _run_networks(self, q: Tensor) -> Tensor:
        k, u, v = (weight.contiguous().unsqueeze(1) for weight in (self.k, self.u, self.v))
        if self.backend == "naive":
            return reference.forward(q, k, u, v, activation=self.activation)
        return flash_mhf(q, k, u, v, deterministic=self.deterministic, backend=self.backend, activation=self.activation)


class SwiGLU(Network):
    """Compute W_down(SiLU(W_gate x) * W_up x), the baseline of the paper.

    State: gate_proj.weight, up_proj.weight [intermediate_dim, d_model], down_proj.weight [d_model, intermediate_dim].
    Raises TypeError for arguments of a wrong type, ValueError for sizes below 1. A call raises ValueError if the last
    dimension of x is not d_model, or if x is on another device, TypeError if x has another dtype than the module.
    """

    def __init__(
        self, d_model: int, intermediate_dim: int, *, bias: bool = False, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dtype)
        self.d_model = positive("d_model", d_model)
        self.intermediate_dim = positive("intermediate_dim", intermediate_dim)
        settings = (flag("bias", bias), device, dtype)
        for name in ("gate_proj", "up_proj"):
            self._add_projection(name, (self.d_model, self.intermediate_dim), "in_proj", self.d_model, *settings)
        fan_in = SWIGLU_VARIANCE * self.intermediate_dim
        self._add_projection("down_proj", (self.intermediate_dim, self.d_model), "out_proj", fan_in, *settings)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's result [..., d_model] for x [..., d_model], in x's dtype or autocast's."""
        check_input(x, self.d_model)
        check_matches(x, self.gate_proj)
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class ParametricKV(MultiHead):
    """Multi-head attention over learnable keys and values (paper, section 4, "PKV").

    State: in_proj.weight, k, v [H, num_kv, d_h], out_proj.weight. Initialised by "normal" (flashmhf.nn.init). Raises
    TypeError and ValueError as :class:`flashmhf.FlashMHF` and a call of :class:`flashmhf.SwiGLU` do.
    """

    scheme = Scheme("normal")

    def __init__(
        self, d_model: int, num_heads: int, num_kv: int, *, bias: bool = False, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, num_heads, bias, device, dtype)
        self.num_kv = positive("num_kv", num_kv)
        shape = (self.num_heads, self.num_kv, self.head_dim)
        self.k, self.v = (nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for _ in range(2))
        self._draw()

    def _draw(self) -> None:
        self.scheme.draw(self.k, "k", 1.0)
        # Logits of N(0, 1): the squares of num_kv softmax weights sum to E[e^2z] / E[e^z]^2 / num_kv = e / num_kv.
        self.scheme.draw(self.v, "v", math.sqrt(self.num_kv / math.e))

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's result [..., d_model] for x [..., d_model], in x's dtype or autocast's."""
        check_input(x, self.d_model)
        q = self.split_heads(x)
        by_head = q.unsqueeze(0).flatten(0, -3).transpose(0, 1)
        k, v = (weight.unsqueeze(0).to(q.dtype) for weight in (self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(by_head.unsqueeze(0), k, v)
        return self.join_heads(attended.squeeze(0).transpose(0, 1).reshape(q.shape))


class DenseMoE(Network):
    """Gated parallel SwiGLU sub-networks without heads (paper, section 4, "Dense-MoE": H = 1, no W_in and W_out).

    State: gate_proj.weight, up_proj.weight [E * subnet_dim, d_model], down_proj.weight [d_model, E * subnet_dim],
    router [d_model, E]. Raises TypeError and ValueError as FlashMHF and a call of :class:`flashmhf.SwiGLU` do.
    """

    def __init__(
        self, d_model: int, num_subnets: int, subnet_dim: int, *, router_eps: float = 1e-20, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dtype)
        self.d_model, self.num_subnets = positive("d_model", d_model), positive("num_subnets", num_subnets)
        self.subnet_dim, self.router_eps = positive("subnet_dim", subnet_dim), epsilon("router_eps", router_eps)
        width = self.num_subnets * self.subnet_dim
        for name in ("gate_proj", "up_proj"):
            self._add_projection(name, (self.d_model, width), "in_proj", self.d_model, False, device, dtype)
        # The gates are near 1 / E, so the sum over E sub-networks has 1 / E of their variance.
        fan_in = SWIGLU_VARIANCE * self.subnet_dim / self.num_subnets
        self._add_projection("down_proj", (width, self.d_model), "out_proj", fan_in, False, device, dtype)
        self.router = nn.Parameter(torch.empty(self.d_model, self.num_subnets, device=device, dtype=dtype))
        self._draw()

    def _draw(self) -> None:
        self.scheme.draw(self.router, "router", self.scheme.initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's result [..., d_model] for x [..., d_model], in x's dtype or autocast's."""
        check_input(x, self.d_model)
        check_matches(x, self.gate_proj)
        r = gate(x.unsqueeze(-2), self.router.contiguous().unsqueeze(0), self.router_eps).squeeze(-2)
        activation = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        weighted = activation.unflatten(-1, (self.num_subnets, self.subnet_dim)) * r[..., None].to(activation.dtype)
        return self.down_proj(weighted.flatten(-2))
