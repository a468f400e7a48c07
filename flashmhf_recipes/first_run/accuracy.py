"""Errors of the operator's output and gradients against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flashmhf import backends, testing
from flashmhf.ops import mix as ops


class Accuracy(NamedTuple):
    """Relative L2 errors against float64 of one tensor; ``plain`` is that of PyTorch code in the same precision."""

    kind: str  # back end and dtype
    tensor: str
    error: float
    plain: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # false for nan


def check(device: torch.device) -> Iterator[Accuracy]:
    """Yield errors of output and gradients, of every usable back end in every dtype, on fixed inputs."""
    for name in backends.BACKENDS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if backends.BACKENDS[name].why_not(device, dtype, d_h=128, d_e=384) is not None:
                continue
            precision = str(dtype).removeprefix("torch.")
            p = testing.problem(500, 2, 128, 3, 384, dtype, device, seed=0)
            (plain_out, exact_out), (plain_gradients, exact_gradients) = p.forward(), p.backward()
            leaves = tuple(x.requires_grad_() for x in (*p.operands, p.r))
            out = ops.flash_mhf(*leaves, backend=name)
            ours = (out.detach(), *torch.autograd.grad(out, leaves, p.grad_out))
            results = zip(ours, (plain_out, *plain_gradients), (exact_out, *exact_gradients), strict=True)
            for tensor, (actual, plain, exact) in zip(("out", "dq", "dk", "du", "dv", "dr"), results, strict=True):
                limit = testing.limit(plain, exact, dtype, fixed_limits=name != "eager")
                errors = testing.relative_l2(actual, exact), testing.relative_l2(plain, exact)
                yield Accuracy(f"{name} {precision}", tensor, *errors, limit)
