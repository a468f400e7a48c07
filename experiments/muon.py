"""Muon for the networks of compare.py: every matrix of a stack of matrices is one matrix of its own.

``torch.optim.Muon`` takes two-dimensional parameters only; K, U and V are [H, E, d_e, d_h], a matrix a sub-network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in torch.optim.Muon
STEPS = 5
RMS = 0.2  # of an update, what AdamW's updates have: both optimizers then share learning rates


def orthogonalise(matrices: Tensor) -> Tensor:
    """[N, rows, columns] -> about U V^T of each matrix's singular value decomposition, by Newton-Schulz iterations in bf16."""
    a, b, c = COEFFICIENTS
    wide = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if wide else matrices).bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return x.mT if wide else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay as in AdamW. Parameters have two dimensions or more."""

    def __init__(self, params: Iterable[dict[str, object]], momentum: float = 0.95):
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                shapes[tuple(parameter.shape)].append(parameter)
            for shape, parameters in shapes.items():
                self._step(group, shape, parameters)

    def _step(self, group: dict, shape: tuple[int, ...], parameters: list[Tensor]) -> None:
        """Parameters of one shape, all their matrices in one batch."""
        gradients = [parameter.grad for parameter in parameters]
        momenta = [self.state[parameter].setdefault("momentum", torch.zeros_like(parameter)) for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"])
        rows, columns = shape[-2:]
        updates = orthogonalise(torch.stack(directions).view(-1, rows, columns)).view(len(parameters), *shape)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        scale = -group["lr"] * RMS * max(rows, columns) ** 0.5
        torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype).unbind()), alpha=scale)
