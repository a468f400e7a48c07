"""The module FlashMHF: [..., d_model] -> [..., d_model], drop-in for a SwiGLU feed-forward network."""

from __future__ import annotations

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.types import Device
from torch.utils.checkpoint import checkpoint

from ..backends import REFERENCE, check_name
from ..checks import epsilon, flag, instance, positive
from ..ops import recompute
from ..ops.library import cast
from ..ops.networks import gated_flash_mhf
from .multihead import GroupedHeads, RoutedHeads, check_matches


def default_num_heads(d_model: int) -> int:
    """Return H for heads of 128 (the paper's choice), or else 64, 96, 32 or 16; 1 if 16 does not divide d_model."""
    return d_model // next((size for size in (128, 64, 96, 32, 16) if d_model % size == 0), d_model)


def default_subnet_dim(head_dim: int) -> int:
    """Return d_e = 8/3 d_h, rounded up to a multiple of 64 (paper, section 4): 192, 384, 704 for d_h 64, 128, 256.
    Raises TypeError if head_dim is not an integer, ValueError if it is below 1.
    """
    return -(-8 * positive("head_dim", head_dim) // (3 * 64)) * 64


class FlashMHF(RoutedHeads, GroupedHeads):
    """Flash multi-head feed-forward network (paper, 3.2): concat_H(sum_e R_e SwiGLU_e(Q)) W_out, Q = split_H(X W_in).

    Args:
        d_model: the width of the model, d_model = H d_h. num_heads: H, a divisor of d_model.
        num_subnets: E, the parallel SwiGLU sub-networks per head. router_eps: the eps of their gate's normalisation.
        subnet_dim: d_e, their width; None for 8/3 d_h rounded up to a multiple of 64.
        num_kv_heads: H_kv, the heads of K, U and V, a divisor of H; None for H. Head h takes head h // (H / H_kv).
        q_norm, q_norm_eps: per-head RMS normalisation of Q (official setting; the paper's text has none), and its eps.
        skip_linear: leave out W_in and W_out. bias: give them biases.
        backend, deterministic, activation: as in :func:`flashmhf.flash_mhf`.
        recompute_q: compute Q again in the backward: training keeps x and S of a layer, 2 T d_model instead of 3, for
            one product of d_model^2 more. Where in_proj or q_norm is hooked, replaced or patched, or a weight is of a
            class of its own, Q is kept.

    State: in_proj.weight, k, u, v [H_kv, E, d_e, d_h], router [H, d_h, E], out_proj.weight; q_norm.weight [H, d_h].

    Raises TypeError for arguments of a wrong type, ValueError for sizes below 1 or that do not divide, an eps that is
    negative or not finite, an unknown activation or back end, and a bias with skip_linear. A call raises ValueError if
    the last dimension of x is not d_model or x is on another device, TypeError if x has another dtype than the module.
    """

    TENSORS = ("k", "u", "v", "router")
    router: nn.Parameter
    recompute_q = False  # also of a module that an earlier version has pickled

    def __init__(
        self, d_model: int, num_heads: int, num_subnets: int, subnet_dim: int | None = None, *,
        num_kv_heads: int | None = None, router_eps: float = 1e-20, q_norm: bool = False, q_norm_eps: float = 1e-5,
        skip_linear: bool = False, activation: str = "silu", bias: bool = False, backend: str = "auto",
        deterministic: bool | None = None, recompute_q: bool = False, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        projections = {"bias": bias, "device": device, "dtype": dtype, "skip_linear": skip_linear}
        super().__init__(d_model, num_heads, num_kv_heads, q_norm, q_norm_eps, activation, **projections)
        self.num_subnets = positive("num_subnets", num_subnets)
        subnet_dim = default_subnet_dim(self.head_dim) if subnet_dim is None else subnet_dim
        self.subnet_dim = positive("subnet_dim", subnet_dim)
        self.router_eps = epsilon("router_eps", router_eps)
        self.backend = check_name(backend)
        self.deterministic = instance("deterministic", deterministic, bool | None, "a bool or None")
        if flag("recompute_q", recompute_q) and skip_linear:
            raise ValueError("recompute_q is True; in_proj, which makes Q, skip_linear=True leaves out")
        self.recompute_q = recompute_q
        shape, factory = self.weight_shape, {"device": device, "dtype": dtype}
        self.k, self.u, self.v = (nn.Parameter(torch.empty(shape, **factory)) for _ in range(3))
        self.router = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.num_subnets, **factory))
        self._draw()

    def _draw(self) -> None:
        self._draw_heads(self.subnet_dim / self.num_subnets)  # the gates are near 1 / E
        self.scheme.draw(self.router, "router", self.scheme.initializer_range)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Return the shape (H_kv, E, d_e, d_h) of k, u and v."""
        return self.num_kv_heads, self.num_subnets, self.subnet_dim, self.head_dim

    def _networks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return k, u, v [H_kv, E, d_e, d_h], also of parameters of three dimensions (flashmhf.integrations.peft) and,
        in a copy, of those to which an optimizer or a parametrisation has given other strides.
        """
        k, u, v = self.k.contiguous(), self.u.contiguous(), self.v.contiguous()
        if k.dim() != 4:
            k, u, v = (weight.view(self.weight_shape) for weight in (k, u, v))
        return k, u, v

    def _heads(self, x: Tensor) -> Tensor:
        # exported programs hold no checkpoints
        if not self.recompute_q or not is_grad_enabled() or self.backend == REFERENCE or is_exporting():
            return super()._heads(x)
        if is_dynamo_compiling() and self._is_plain():
            if is_autocast_enabled(x.device.type):
                x = cast(x, get_autocast_dtype(x.device.type))  # what is kept, as in_proj alone would keep it
            return self._run_networks(checkpoint(self.query, x, use_reentrant=False))
        weights, s = self._plain_weights(), None
        if weights is not None:
            check_matches(x, self.in_proj)
            s = recompute.heads(x, weights, self.backend, self.deterministic, self.activation)
        return super()._heads(x) if s is None else s

    def _run_networks(self, q: Tensor) -> Tensor:
        how = {"deterministic": self.deterministic, "backend": self.backend, "activation": self.activation}
        return gated_flash_mhf(q, *self._networks(), self.router.contiguous(), self.router_eps, **how)


FlashMHF.define()
