"""Triton back end: the paper's three kernels on NVIDIA GPUs, and on the CPU under TRITON_INTERPRET=1. Results are
bitwise repeatable for given tensors; ``deterministic`` makes them independent of addresses, too.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ...checks import name_of
from ..contract import DEFAULTS, Gate, Gradients, Router, Settings, layer  # noqa: F401  (layer is this back end's too)
from . import configs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
SUBNET_DIM_MULTIPLE = 16
MIN_CAPABILITY = (8, 0)  # Triton computes on the tensor cores of no earlier GPU


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
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < MIN_CAPABILITY:
            return f"device has compute capability {major}.{minor}; supported: 8.0 or later"
    if d_h not in HEAD_DIMS:
        return f"d_h is {d_h}; supported: {', '.join(map(str, HEAD_DIMS))}"
    if d_e % SUBNET_DIM_MULTIPLE:
        return f"d_e is {d_e}; supported: multiples of {SUBNET_DIM_MULTIPLE}"
    return None


def untimed(device: torch.device) -> str | None:
    """Return None if the block shapes were timed on such a GPU, else what a user may do about it."""
    how = configs.HOW_CHOSEN.get(configs.row_of(torch.cuda.get_device_capability(device)))
    if how is None:
        return None
    return f"block shapes not timed on this GPU ({how}); in a checkout, python -m benchmarks.tune_triton times them"


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings = DEFAULTS) -> Tensor:
    """Return S [..., H, d_h] in q's dtype, contiguous (paper, section 3.2 and appendix A)."""
    from . import gate_kernels, launch  # they import Triton, which need not be installed

    if isinstance(r, Router):
        r = gate_kernels.gate(q, r)
    return launch.Call(q, k, u, v, r, settings.activation).forward()


def backward(grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings) -> Gradients:
    """Return (dq, dk, du, dv, dr), or dw in place of dr for a router, whose part dq then includes."""
    from . import gate_kernels, launch

    if not any(settings.needs):
        return tuple(q.new_empty(0) for _ in range(5))
    values = gate_kernels.gate(q, r) if isinstance(r, Router) else r
    call = launch.Call(q, k, u, v, values, settings.activation, grad_out)
    if isinstance(r, Router):  # dr feeds dw as well as dq, whose parts are added before the one rounding to q's dtype
        dq, dr = call.token_grads(torch.float32, settings.deterministic)
        dq, of_gate = gate_kernels.gate_backward(dr, q, r, dq, settings.needs)
    elif settings.needs[0]:
        dq, of_gate = call.token_grads(q.dtype, settings.deterministic)
    else:
        dq, of_gate = q.new_empty(0), q.new_empty(0)
    weights = call.weight_grads() if settings.needs[1] else (q.new_empty(0) for _ in range(3))
    return dq, *weights, of_gate
