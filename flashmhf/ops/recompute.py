"""S of a layer's heads with a backward that computes Q = q_norm(in_proj(x)) again: autograd keeps x in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import reference, torch_private
from ..backends.contract import LayerWeights, Router, Settings
from .layer import contiguous
from .library import OWN_TYPES, cast, widen
from .networks import Call, gated_flash_mhf, gradients


def _query(
    x: Tensor, in_w: Tensor, in_bias: Tensor | None, q_norm: Tensor | None, q_norm_eps: float, head_dim: int
) -> Tensor:
    q = functional.linear(x, in_w, in_bias).unflatten(-1, (-1, head_dim))
    return q if q_norm is None else reference.normalise_heads(q, q_norm, q_norm_eps)


class _KeepsX(torch.autograd.Function):
    """``tensors``: x, in_proj's weight and bias, q_norm's weight, k, u, v, the router's weight."""

    @staticmethod
    def forward(ctx: Any, q_norm_eps: float, eps: float, how: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        *ends, k, u, v, w = tensors
        ctx.save_for_backward(*tensors)
        ctx.how = q_norm_eps, eps, how
        return gated_flash_mhf(_query(*ends, q_norm_eps, k.shape[3]), k, u, v, w, eps, **how)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *ends, k, u, v, w = ctx.saved_tensors
        q_norm_eps, eps, how = ctx.how
        _, _, _, *needed = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # a graph of the gradients is wanted
        with torch.enable_grad():
            # others than the tensors themselves, whose hooks would run here, too
            ends = [end if end is None else end.view_as(end) if again else end.detach() for end in ends]
            for end, need in zip(ends, needed, strict=False):
                if need and not again:
                    end.requires_grad_()
            q = _query(*ends, q_norm_eps, k.shape[3])
        settings = Settings(how["deterministic"], (any(needed[:4]), any(needed[4:])), how["activation"])
        query = q if again else q.detach()
        dq, *of_weights = gradients(Call(query, (k, u, v), Router(w, eps), how["backend"], settings, grad_out))
        inputs = [end for end, need in zip(ends, needed, strict=False) if need]
        of_ends = iter(torch.autograd.grad(q, inputs, dq, create_graph=again) if inputs else ())
        results = [next(of_ends) if need else None for need in needed[:4]]
        results += [grad if need else None for grad, need in zip(of_weights, needed[4:], strict=True)]
        return None, None, None, *results


def heads(x: Tensor, weights: LayerWeights, backend: str, deterministic: bool | None, activation: str) -> Tensor | None:
    """Return S [..., H, d_h] for x [..., d_model]; autograd keeps x and weights, in autocast's dtype where it is on.
    Return None in graphs, where somebody watches the calls of the parts, and for tensors of other classes, which may
    compute in_proj themselves.
    """
    if torch.compiler.is_compiling() or torch_private.is_watched():
        return None
    given = x, weights.in_w, weights.in_bias, *weights.networks, weights.router, weights.q_norm
    if not all(type(tensor) in OWN_TYPES or torch_private.is_dtensor(tensor) for tensor in given):
        return None
    in_w, in_bias, networks, router, eps, _, _, q_norm, q_norm_eps = contiguous(weights)
    tensors = [x, in_w, in_bias, *networks]
    if torch_private.autocasts(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        tensors, router = [cast(tensor, dtype) for tensor in tensors], widen(router, dtype)
    x, in_w, in_bias, *networks = tensors
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    how = {"backend": backend, "deterministic": deterministic, "activation": activation}
    return _KeepsX.apply(q_norm_eps, eps, how, x, in_w, in_bias, q_norm, *networks, router)
