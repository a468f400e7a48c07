"""Weight gradients that are added into fp32 ``main_grad`` buffers, as Megatron-LM and Transformer Engine keep them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import torch_private
from ..nn import FlashMHF
from ..ops.gate import gate
from ..reference import accumulate_dtype


class _MainGradForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, u, v, r, backend, deterministic, activation):
        if torch_private.autocasts(q.device.type):  # in backward nothing casts
            q = q if q.dtype == torch.float64 else q.to(torch.get_autocast_dtype(q.device.type))
        ctx.save_for_backward(q, r)
        ctx.parameters = (k, u, v)
        ctx.backend, ctx.activation = backend, activation
        ctx.deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        return torch.ops.flashmhf.forward(
            q, k, u, v, r, deterministic=ctx.deterministic, backend=backend, activation=activation
        )

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
        weights = [
            _signal_accumulated(p) if needed else None for p, needed in zip(ctx.parameters, trained, strict=True)
        ]
        return (
            dq if ctx.needs_input_grad[0] else None,
            *weights,
            dr if ctx.needs_input_grad[4] else None,
            None,
            None,
            None,
        )


def _signal_accumulated(parameter: Tensor) -> Tensor | None:
    """Mark parameters whose hooks must still fire, as Megatron does:

    they get the flag and a gradient without storage of its own.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return parameter.new_zeros(()).expand(parameter.shape)


class MainGradFlashMHF(FlashMHF):
    """A :class:`flashmhf.FlashMHF` whose backward adds the gradients of k, u and v into ``main_grad`` and returns none
    for them.

    Each of the three that is trained needs a tensor ``main_grad`` of its shape: float32, or float64 for float64
    weights; a DTensor placed like the parameter under tensor parallelism. A call with gradients enabled raises
    ValueError if one is missing.
    """

    def _mix(self, q: Tensor) -> Tensor:
        weights = {"k": self.k, "u": self.u, "v": self.v}
        if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in weights.values()):
            return super()._mix(q)
        for name, weight in weights.items():
            if weight.requires_grad and not isinstance(getattr(weight, "main_grad", None), Tensor):
                raise ValueError(
                    f"{name}.main_grad is missing; MainGradFlashMHF needs a float32 tensor of {name}'s shape there"
                )
        q = self.normalise(q)
        r = gate(q, self.router, self.router_eps)
        return _MainGradForward.apply(q, *weights.values(), r, self.backend, self.deterministic, self.activation)


def accumulate_main_grad(model: nn.Module) -> nn.Module:
    """Make every FlashMHF of ``model`` a :class:`MainGradFlashMHF`, in place, and return the model.

    Megatron-LM's data parallelism sums ``main_grad`` over the processes. PyTorch's DDP does not: it sums ``grad``,
    which K, U and V do not get. Raises ValueError if the model has no FlashMHF.
    """
    networks = [module for module in model.modules() if type(module) is FlashMHF]
    if not networks:
        raise ValueError(f"model is a {type(model).__name__} without a FlashMHF network")
    for network in networks:
        network.__class__ = MainGradFlashMHF
    return model
