"""Muon for networks with stacked matrices: momentum whose singular values are made equal, a matrix at a time.

``torch.optim.Muon`` takes two-dimensional parameters only. K, U and V of FlashMHF are [H, E, d_e, d_h]: a matrix a sub-network.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..checks import FLOAT_DTYPES, name_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in torch.optim.Muon
STEPS = 5
RMS = 0.2  # of an update's elements, about what AdamW's updates have: both share learning rates


def orthogonalise(matrices: Tensor) -> Tensor:
    """[N, rows, columns] -> U V^T, approximately, of each matrix's singular value decomposition U S V^T: Newton-Schulz steps in bf16."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon (K. Jordan, 2024) for groups with ``muon=True``, AdamW for the others. :func:`flashmhf.param_groups` makes the groups.

    An update of a matrix is its Nesterov momentum, orthogonalised, with elements of root mean square 0.2, so that learning rates and weight
    decay mean what they mean for AdamW. A parameter of more than two dimensions is a stack of matrices, each one by itself.

    Args:
        params: parameters or groups. A group's ``muon`` (False) selects the rule; its parameters then have two dimensions or more.
        lr, weight_decay: of both rules; weight decay is decoupled.
        momentum: of Muon.
        betas, eps: of AdamW.
        fused: whether AdamW's fused kernel runs; None: where all parameters are on a GPU.

    Raises ValueError for a Muon group with a vector, TypeError for one with a complex parameter, and NotImplementedError for DTensor
    parameters: an update needs whole matrices.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
    ):
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must not be negative")
        for name, value in (("momentum", momentum), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; it must be in [0, 1)")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps, "fused": fused, "muon": False}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except (NotImplementedError, TypeError, ValueError):
            del self.param_groups[-1]
            raise

    @staticmethod
    def _check(group: dict[str, Any]) -> None:
        distributed = sys.modules.get("torch.distributed.tensor")
        for parameter in group["params"]:
            if distributed is not None and isinstance(parameter, distributed.DTensor):
                raise NotImplementedError("params holds a DTensor; supported: plain parameters, whose matrices are whole on each process")
            if group["muon"] and parameter.dim() < 2:
                raise ValueError(f"params: a group with muon=True holds a parameter of shape {list(parameter.shape)}; supported: matrices")
            if group["muon"] and not parameter.is_floating_point():
                supported = ", ".join(map(name_of, FLOAT_DTYPES))
                raise TypeError(f"params: a group with muon=True holds a {name_of(parameter.dtype)} parameter; supported: {supported}")
        if group["fused"] is None:
            group["fused"] = all(parameter.is_cuda for parameter in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["muon"]:
                self._adamw(group, parameters)
                continue
            alike: dict[tuple, list[Tensor]] = defaultdict(list)
            for parameter in parameters:
                alike[parameter.shape, parameter.dtype, parameter.device].append(parameter)
            for chosen in alike.values():
                self._muon(group, chosen)
        return loss

    def _muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Parameters of one shape: all their matrices are one batch."""
        gradients, states = [parameter.grad for parameter in parameters], [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
        momenta = [state["momentum"] for state in states]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"])
        shape = parameters[0].shape
        updates = orthogonalise(torch.stack(directions).flatten(0, -3)).view(len(parameters), *shape)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        scale = -group["lr"] * RMS * max(shape[-2:]) ** 0.5
        torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype).unbind()), alpha=scale)

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=not group["fused"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
