"""Triton back end: the paper's three kernels on NVIDIA GPUs, and on the CPU under TRITON_INTERPRET=1. Results are
bitwise repeatable for given tensors; ``deterministic`` makes them independent of addresses, too.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ...checks import name_of
from .. import gating
from ..contract import DEFAULTS, Gate, Gradients, Settings, layer  # noqa: F401  (layer is this back end's too)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
SUBNET_DIM_MULTIPLE = 16
MIN_CAPABILITY = {torch.bfloat16: (8, 0), torch.float16: (7, 5), torch.float32: (7, 5)}


def why_not(device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int, activation: str = "silu") -> str | None:
    """Return None if the Triton kernels can run, else why not: the argument, its value and what is supported."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    if device.type != "cuda" and not (device.type == "cpu" and interpreted):
        supported = "an NVIDIA GPU (the CPU under Triton's interpreter, TRITON_INTERPRET=1)"
        return f"device is {device.type}; supported: {supported}"
    if device.type == "cuda" and torch.version.hip is not None:
        return "device is an AMD GPU, where these kernels are untested; supported: an NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; supported: Triton 3.4 or later (pip install triton)"
    if dtype not in DTYPES:
        return f"dtype is {name_of(dtype)}; supported: {', '.join(map(name_of, DTYPES))}"
    if interpreted and dtype == torch.bfloat16:
        return "dtype is bfloat16, whose product Triton's interpreter gets wrong; supported there: float16, float32"
    if device.type == "cuda":
        (major, minor), least = torch.cuda.get_device_capability(device), MIN_CAPABILITY[dtype]
        if (major, minor) < least:
            supported = f"{least[0]}.{least[1]} or later"
            return f"device has compute capability {major}.{minor}; supported for {name_of(dtype)}: {supported}"
    if d_h not in HEAD_DIMS:
        return f"d_h is {d_h}; supported: {', '.join(map(str, HEAD_DIMS))}"
    if d_e % SUBNET_DIM_MULTIPLE:
        return f"d_e is {d_e}; supported: multiples of {SUBNET_DIM_MULTIPLE}"
    return None


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings = DEFAULTS) -> Tensor:
    """Return S [..., H, d_h] in q's dtype, contiguous (paper, section 3.2 and appendix A)."""
    from . import launch  # imports Triton, which need not be installed

    return launch.forward(q, k, u, v, gating.values(q, r), settings.activation)


@gating.through_router
def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, settings: Settings,
    dq_dtype: torch.dtype,
) -> Gradients:  # fmt: skip
    from . import launch

    dq, dr = launch.token_grads(grad_out, q, k, u, v, r, settings, dq_dtype)
    if settings.needs[1]:
        return dq, *launch.weight_grads(grad_out, q, k, u, v, r, settings.activation), dr
    return dq, *(q.new_empty(0) for _ in range(3)), dr
