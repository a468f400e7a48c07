"""The module FlashMHF: [..., d_model] -> [..., d_model], drop-in for a SwiGLU feed-forward network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import torch_private
from ..backends.contract import Projection
from ..ops import gate as router
from ..ops import mix as ops
from ..reference import accumulate_dtype
from .arguments import backend_and_deterministic, epsilon, flag, positive
from .multihead import GroupedHeads, HeadRMSNorm, check_input, is_unobserved

WEIGHTS = ("k", "u", "v")
SUBNET_MULTIPLE = 16  # of d_e, for the kernels
CHUNK_TOKENS = 16384  # FlashMHF's inference forward takes more tokens than this in equal chunks of at most this many


def default_subnet_dim(head_dim: int) -> int:
    """d_e = 8/3 d_h rounded up to a multiple of 64 (paper, section 4): 192, 384, 704 for d_h 64, 128, 256.

    Raises TypeError for a head_dim that is no integer, ValueError for one below 1.
    """
    return -(-8 * positive("head_dim", head_dim) // (3 * 64)) * 64


def uses_silu(feed_forward: nn.Module) -> bool:
    """Whether a gated network of another library, with its activation in ``act_fn``, is a SwiGLU."""
    activation = getattr(feed_forward, "act_fn", None)
    return (
        activation is None
        or isinstance(activation, nn.SiLU)
        or activation is nn.functional.silu
        or type(activation).__name__ == "SiLUActivation"
    )


class _MainGradForward(torch.autograd.Function):
    """The operator whose backward adds the weight gradients into fp32 ``main_grad`` buffers (Megatron, Transformer Engine)."""

    @staticmethod
    def forward(ctx, q, k, u, v, r, backend, deterministic, activation):
        if torch_private.autocasts(q.device.type):  # in backward nothing casts
            (q,) = ops.cast((q,), torch.get_autocast_dtype(q.device.type))
        ctx.save_for_backward(q, r)
        ctx.parameters = (k, u, v)
        ctx.backend, ctx.activation = backend, activation
        ctx.deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        return torch.ops.flashmhf.forward(q, k, u, v, r, deterministic=ctx.deterministic, backend=backend, activation=activation)

    @staticmethod
    def backward(ctx, grad_out):
        q, r = ctx.saved_tensors
        trained = ctx.needs_input_grad[1:4]
        needs_tokens = ctx.needs_input_grad[0] or ctx.needs_input_grad[4]
        # The operator computes the three gradients together: that of a frozen weight goes where nobody reads it.
        buffers = [
            p.main_grad if needed else torch.zeros_like(p, dtype=accumulate_dtype(p.dtype))
            for p, needed in zip(ctx.parameters, trained, strict=True)
        ]
        dq, dr = torch.ops.flashmhf.backward_accumulate_(
            grad_out,
            q,
            *(p.to(q.dtype) for p in ctx.parameters),
            r,
            *buffers,
            ctx.deterministic,
            backend=ctx.backend,
            needs=[needs_tokens, True],
            activation=ctx.activation,
        )
        weights = [_signal_accumulated(p) if needed else None for p, needed in zip(ctx.parameters, trained, strict=True)]
        return dq if ctx.needs_input_grad[0] else None, *weights, dr if ctx.needs_input_grad[4] else None, None, None, None


def _signal_accumulated(parameter: Tensor) -> Tensor | None:
    """Megatron marks parameters whose hooks must still fire: they get the flag and a gradient without storage of its own."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return parameter.new_zeros(()).expand(parameter.shape)


def _is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Exactly what ``kind`` computes over ordinary tensors: not replaced, wrapped, patched, hooked or distributed."""
    if type(module).forward is not kind.forward:  # a subclass that computes what ``kind`` does, such as Projection, is plain
        return False
    # Not .weight: a microsecond of the host. Pruning and spectral_norm leave no parameter of that name.
    if type(module._parameters.get("weight")) is not nn.Parameter:
        return False
    return "forward" not in vars(module) and not module._forward_pre_hooks and not module._forward_hooks


def _projection(linear: nn.Module) -> Projection:
    return linear._parameters["weight"], linear._parameters["bias"]


def _project(linear: nn.Linear, x: Tensor, out: Tensor) -> Tensor:
    """linear(x) written into ``out``."""
    if linear.bias is None:
        return torch.mm(x, linear.weight.t(), out=out)
    return torch.addmm(linear.bias, x, linear.weight.t(), out=out)


class FlashMHF(GroupedHeads):
    """Flash multi-head feed-forward network (paper, section 3.2): concat_H(sum_e R_e SwiGLU_e(Q)) W_out, Q = split_H(X W_in).

    Args:
        d_model, num_heads: d_model = H d_h; H must divide it.
        num_subnets: E parallel SwiGLU sub-networks a head.
        subnet_dim: d_e, their width; None for 8/3 d_h rounded up to a multiple of 64.
        router_eps: the eps of the gate's normalisation.
        num_kv_heads: heads of K, U and V, a divisor of H; None for H. Head h takes head h // (H / num_kv_heads) of them; each head has
            its own router.
        q_norm, q_norm_eps: per-head RMS normalisation of Q (official setting; the paper's text has none).
        skip_linear: no W_in and W_out.
        activation: "silu", "gelu", "relu" or "relu2", as in :func:`flashmhf.flash_mhf`.
        pad_subnets: store k, u and v with zero rows up to the next multiple of 16 of d_e, which hopper and triton need. The rows get zero
            gradients, so optimizers leave them zero. State dicts have d_e rows.
        bias: biases in in_proj and out_proj.
        backend, deterministic: as in :func:`flashmhf.flash_mhf`.
        accumulate_main_grad: add the gradients of k, u, v into their fp32 ``main_grad`` buffers instead of returning them.

    State: in_proj.weight, k, u, v [num_kv_heads, E, d_e, d_h], router [H, d_h, E], out_proj.weight; q_norm.weight [H, d_h] when on.

    Raises TypeError for arguments of other types, ValueError for sizes below 1, a d_model that H does not divide, an H that num_kv_heads
    does not divide, an eps that is negative or not finite, an unknown activation or backend, and a bias with skip_linear. A call raises
    ValueError where the last dimension of x is not d_model.
    """

    num_subnets: int
    subnet_dim: int
    pad_subnets: bool
    router_eps: float
    backend: str
    deterministic: bool | None
    accumulate_main_grad: bool
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
        pad_subnets: bool = False,
        bias: bool = False,
        backend: str = "auto",
        deterministic: bool | None = None,
        accumulate_main_grad: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads, q_norm, q_norm_eps, skip_linear, activation, bias, device, dtype)
        self.num_subnets = positive("num_subnets", num_subnets)
        self.subnet_dim = default_subnet_dim(self.head_dim) if subnet_dim is None else positive("subnet_dim", subnet_dim)
        self.pad_subnets = flag("pad_subnets", pad_subnets)
        self.router_eps = epsilon("router_eps", router_eps)
        self.backend, self.deterministic = backend_and_deterministic(backend, deterministic)
        self.accumulate_main_grad = flag("accumulate_main_grad", accumulate_main_grad)
        shape = self.weight_shape
        self.k, self.u, self.v = (nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for _ in range(3))
        self.router = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.num_subnets, device=device, dtype=dtype))
        self._draw()

    @classmethod
    @torch.no_grad()
    def from_swiglu(cls, swiglu: nn.Module, num_subnets: int = 1, **kwargs: Any) -> FlashMHF:
        """One head that computes the same function as ``swiglu`` (gate_proj, up_proj, down_proj linear layers), to rounding.

        W_in = W_out = identity; K and U are the gate's and the up projection's weights, V the down projection's transposed. W_router =
        0 makes every gate value sigma / (E sigma + eps) = 1/E, exactly 1 for E = 1 since eps vanishes beside sigma = 1/2 in float32;
        for E > 1 V carries the factor E. With one sub-network the gate stays 1 under training.

        Several heads have no exact start: a head sees d_h directions of x, a neuron of ``swiglu`` reads two of all d_model. The head
        dimension is d_model here, so back ends with a limit on d_h leave wide models to the eager one.
        Raises TypeError where one of the three is no plain linear layer (an adapter is none), ValueError for another activation, biases in
        gate_proj or up_proj, a width that num_subnets does not divide, and q_norm=True, which has no exact start either.
        """
        if kwargs.get("q_norm"):
            raise ValueError("q_norm is True; a SwiGLU does not normalise its input, so from_swiglu supports q_norm=False only")
        if kwargs.get("activation", "silu") != "silu":
            raise ValueError(f"activation is {kwargs['activation']!r}; a SwiGLU has SiLU, so from_swiglu supports 'silu' only")
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer = getattr(swiglu, name, None)
            if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:  # an adapter adds to its linear layer
                raise TypeError(f"swiglu.{name} must be a torch.nn.Linear, got {'none' if layer is None else type(layer).__name__}")
        if not uses_silu(swiglu):
            raise ValueError(f"act_fn is {type(swiglu.act_fn).__name__}; a SwiGLU has SiLU")
        for name in ("gate_proj", "up_proj"):
            if getattr(swiglu, name).bias is not None:
                raise ValueError(f"{name} has a bias; FlashMHF has none there")
        (width, d_model), bias = swiglu.gate_proj.weight.shape, swiglu.down_proj.bias
        num_subnets = positive("num_subnets", num_subnets)
        if width % num_subnets:
            raise ValueError(f"num_subnets is {num_subnets}; it must divide the width {width}")
        weight = swiglu.gate_proj.weight
        settings = {"device": weight.device, "dtype": weight.dtype, "bias": bias is not None, **kwargs}
        module = cls(d_model, 1, num_subnets, width // num_subnets, **settings)
        for projection in () if module.skip_linear else (module.in_proj, module.out_proj):
            nn.init.eye_(projection.weight)
        if bias is not None:
            module.in_proj.bias.zero_()
            module.out_proj.bias.copy_(bias)
        shape = (1, num_subnets, width // num_subnets, d_model)
        for parameter, value in (
            (module.k, swiglu.gate_proj.weight.view(shape)),
            (module.u, swiglu.up_proj.weight.view(shape)),
            (module.v, num_subnets * swiglu.down_proj.weight.T.reshape(shape)),
        ):
            parameter[:, :, : shape[2]] = value
        module.router.zero_()
        return module

    def _draw(self) -> None:
        self._draw_heads(self.subnet_dim / self.num_subnets)  # the gates are near 1 / E
        self.scheme.draw(self.router, "router", self.scheme.initializer_range)
        if self.weight_shape[2] != self.subnet_dim:
            with torch.no_grad():
                for weight in (self.k, self.u, self.v):
                    # Not by a slice: one of a DTensor that is sharded over d_e is a copy. A negative dimension here would count each
                    # rank's rows from 1.
                    row = torch.ones_like(weight, dtype=torch.int32).cumsum(weight.dim() - 2)
                    weight.masked_fill_(row > self.subnet_dim, 0)

    def stack_weights(self, stacked: bool = True) -> FlashMHF:
        """Stores k, u and v as parameters [H_kv E, d_e, d_h] (True) or [H_kv, E, d_e, d_h] (False) over the same memory.

        Returns the module.

        For tools that adapt parameters of two or three dimensions only, such as LoRA in PEFT (docs/lora.md). State dicts hold four
        dimensions in either case. The parameters are new objects: call this before an optimizer takes them. Raises ValueError for a
        module with accumulate_main_grad=True, whose buffers belong to the parameters of four dimensions.
        """
        if flag("stacked", stacked) and self.accumulate_main_grad:
            raise ValueError("accumulate_main_grad is True; stack_weights supports False only")
        shape = self.weight_shape
        for name in WEIGHTS:
            weight = getattr(self, name)
            stored = weight.detach().view(-1, *shape[2:]) if stacked else weight.detach().view(shape)
            setattr(self, name, nn.Parameter(stored, requires_grad=weight.requires_grad))
        return self

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """(H_kv, E, d_e, d_h) of k, u and v; d_e with the zero rows of pad_subnets."""
        width = -(-self.subnet_dim // SUBNET_MULTIPLE) * SUBNET_MULTIPLE if self.pad_subnets else self.subnet_dim
        return self.num_kv_heads, self.num_subnets, width, self.head_dim

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """k, u, v [H_kv, E, d_e, d_h], however they are stored."""
        shape = self.weight_shape
        k, u, v = (weight if weight.dim() == 4 else weight.view(shape) for weight in (self.k, self.u, self.v))
        return k, u, v

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._reshape(destination, prefix, self.weight_shape)
        if self.weight_shape[2] != self.subnet_dim:
            for name in WEIGHTS:
                destination[prefix + name] = destination[prefix + name][:, :, : self.subnet_dim].contiguous()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in WEIGHTS:
            value, padding = state_dict.get(prefix + name), self.weight_shape[2] - self.subnet_dim
            if padding and isinstance(value, Tensor) and value.dim() in (3, 4):
                if value.shape[-2] == self.subnet_dim:
                    state_dict[prefix + name] = nn.functional.pad(value, (0, 0, 0, padding))
                elif value.shape[-2] == self.weight_shape[2]:  # the one other width that PyTorch would load
                    error_msgs: list[str] = args[-1]
                    width = f"a width of {value.shape[-2]}, the module has subnet_dim {self.subnet_dim}"
                    error_msgs.append(f"size mismatch for {prefix}{name}: the state dict has {width}")
            self._reshape(state_dict, prefix, getattr(self, name).shape, (name,))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _reshape(self, state: dict[str, Any], prefix: str, shape: Sequence[int], names: Sequence[str] = WEIGHTS) -> None:
        """Gives k, u, v of ``state`` ``shape`` where they are stored with other dimensions but hold as many elements."""
        for name in names:
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.dim() in (3, 4) and value.dim() != len(shape) and value.numel() == math.prod(shape):
                state[prefix + name] = value.reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> [..., d_model]."""
        check_input(x, self.d_model)
        y = self._forward_inference(x) if self._is_plain_inference(x) else None
        return self.join_heads(self._mix(self.split_heads(x))) if y is None else y

    def _is_plain_inference(self, x: Tensor) -> bool:
        """Whether only the values of the result matter: eager, no gradient, autocast, transform or dispatch mode, ordinary tensors, and
        projections that are just products.

        Compiled and exported graphs keep the linear layers: a choice by the number of tokens would be a guard on that number.
        """
        k = self._parameters.get("k")  # not self.k, which takes the host a microsecond; a parametrised weight is no parameter
        if torch.compiler.is_compiling() or k is None or x.dtype != k.dtype or not x.numel():
            return False
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return False
        if self.skip_linear or not is_unobserved(x):
            return False
        modules = self._modules
        plain = type(k) is nn.Parameter and _is_plain(modules["in_proj"], nn.Linear) and _is_plain(modules["out_proj"], nn.Linear)
        return plain and len(modules["in_proj"]._parameters["weight"]) == self.d_model  # else the heads of one rank

    def _forward_inference(self, x: Tensor) -> Tensor | None:
        """The result by the fewest calls and the least memory; None where the parts' ordinary calls are what remains."""
        if x.numel() > CHUNK_TOKENS * self.d_model:
            return self._forward_chunks(x)
        in_proj, out_proj = _projection(self._modules["in_proj"]), _projection(self._modules["out_proj"])
        q_norm = self._modules.get("q_norm")
        if q_norm is None or _is_plain(q_norm, HeadRMSNorm):
            norm = None if q_norm is None else (q_norm._parameters["weight"], q_norm.eps)
            y = ops.inference_layer(
                x, in_proj, norm, *self._weights(), self.router, self.router_eps, out_proj, self.backend, self.activation
            )
            if y is not None:
                return y
        if x.numel() > ops.PROJECT_TOKENS * self.d_model:
            return None
        rows = x.reshape(-1, self.d_model)
        project = ops.few_token_projection(rows, self._weights()[0], (in_proj, out_proj), self.backend, self.activation)
        return None if project is None else self._forward_few_tokens(project, rows, x.shape)

    def _forward_few_tokens(self, project: Callable[..., Tensor], rows: Tensor, shape: torch.Size) -> Tensor:
        q = project(rows, self.in_proj.weight, self.in_proj.bias)
        mixed = self._mix(q.view(*shape[:-1], self.num_heads, self.head_dim))
        # The last kernel of _mix is the forward operator's, and views launch none, so out_proj's weights are ready. Any kernel may stand
        # before in_proj.
        return project(mixed.view(-1, self.d_model), self.out_proj.weight, self.out_proj.bias, weights_ready=True).view(shape)

    def _forward_chunks(self, x: Tensor) -> Tensor:
        """Peak memory: the result and one chunk of S. Q of a chunk lies where its result will be."""
        rows = x.flatten(0, -2)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        chunks = -(-len(rows) // CHUNK_TOKENS)
        for x_chunk, out_chunk in zip(rows.tensor_split(chunks), out.view(rows.shape).tensor_split(chunks), strict=True):
            q = _project(self.in_proj, x_chunk, out_chunk).unflatten(-1, (self.num_heads, self.head_dim))
            _project(self.out_proj, self._mix(q).flatten(-2), out_chunk)
        return out

    def _mix(self, q: Tensor) -> Tensor:
        """Q -> S, both [..., H, d_h]. The caller keeps no reference to Q, so it is released before out_proj where no gradient needs it."""
        q = self.normalise(q)
        if self.accumulate_main_grad and torch.is_grad_enabled() and any(weight.requires_grad for weight in (self.k, self.u, self.v)):
            return self._mix_into_main_grad(q)
        return ops.gated_flash_mhf(
            q,
            *self._weights(),
            self.router,
            self.router_eps,
            deterministic=self.deterministic,
            backend=self.backend,
            activation=self.activation,
        )

    def _mix_into_main_grad(self, q: Tensor) -> Tensor:
        for name, parameter in (("k", self.k), ("u", self.u), ("v", self.v)):
            if parameter.requires_grad and not isinstance(getattr(parameter, "main_grad", None), Tensor):
                raise ValueError(f"{name}.main_grad is missing; accumulate_main_grad=True needs a float32 tensor of {name}'s shape there")
        r = router.gate(q, self.router, self.router_eps)
        return _MainGradForward.apply(q, self.k, self.u, self.v, r, self.backend, self.deterministic, self.activation)

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, num_heads={self.num_heads}, num_subnets={self.num_subnets}, subnet_dim={self.subnet_dim}"
        return sizes if self.num_kv_heads == self.num_heads else f"{sizes}, num_kv_heads={self.num_kv_heads}"
