"""Time and memory of FlashMHF, naive MH-FFN and SwiGLU at equal parameters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flashmhf.nn import MHFFN, FlashMHF, SwiGLU

from .. import timing

WIDTH_MULTIPLE = 8  # elements; rows of 16 bytes, so that cuBLAS takes its fast kernels for SwiGLU


@dataclass(frozen=True)
class Setting:
    """Device, dtype and sizes of one machine's run."""

    device: torch.device
    dtype: torch.dtype
    d_model: int
    num_heads: int
    num_subnets: int
    subnet_dim: int
    batch: int
    lengths: tuple[int, ...]
    repeats: int
    layers: tuple[int, int]  # of FlashMHF and of SwiGLU, with equal parameters in all


def setting_of(device: torch.device) -> Setting:
    """Return README's layers on a GPU, and on a CPU one of the smallest model in docs/guides/sizes.md."""
    if device.type == "cuda":
        lengths = 192, 768, 2880, 4032  # each is compiled for itself, which takes most of the time
        return Setting(device, torch.bfloat16, 2048, 16, 22, 384, 8, lengths, 10, (20, 24))
    return Setting(device, torch.float32, 768, 6, 6, 384, 1, (256, 512, 1024, 2048), 3, (1, 1))


def modules(setting: Setting, **factory) -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    """Return layers and constructor of each network; SwiGLU and naive MH-FFN get the width of equal parameters."""
    d, width = setting.d_model, setting.num_subnets * setting.subnet_dim
    ours, theirs = setting.layers
    mixing = 3 * d * width + d * setting.num_subnets

    def wide(parameters: float) -> int:
        return round(parameters / (3 * d) / WIDTH_MULTIPLE) * WIDTH_MULTIPLE

    swiglu = partial(SwiGLU, d, wide((2 * d * d + mixing) * ours / theirs), **factory)
    naive = partial(MHFFN, d, setting.num_heads, wide(mixing), backend="naive", **factory)
    flash = partial(FlashMHF, d, setting.num_heads, setting.num_subnets, setting.subnet_dim, **factory)
    compiled = {"SwiGLU compiled": (theirs, lambda: _compiled(swiglu()))} if setting.device.type == "cuda" else {}
    return {"SwiGLU": (theirs, swiglu), **compiled, "naive MH-FFN": (ours, naive), "FlashMHF": (ours, flash)}


def _compiled(module: nn.Module) -> nn.Module:
    torch.compiler.reset()  # every length is compiled for itself, within the limit of recompilations
    return torch.compile(module, dynamic=False)


@dataclass(frozen=True)
class Measurement:
    """Parameters and medians in ms of all layers, and the peak memory of one in MiB; nan if it ran out of memory."""

    module: str
    parameters: int
    tokens: int
    forward_ms: float
    forward_mib: float
    step_ms: float
    step_mib: float


def compare(setting: Setting) -> Iterator[Measurement]:
    """Measure every network at every length; all see the same input and upstream gradient."""
    for length in setting.lengths:
        tokens, shape = setting.batch * length, (setting.batch, length, setting.d_model)
        generator = torch.Generator().manual_seed(length)
        x, grad = (torch.randn(shape, generator=generator).to(setting.device, setting.dtype) for _ in range(2))
        x.requires_grad_()
        for name, (layers, construct) in modules(setting, device=setting.device, dtype=setting.dtype).items():
            module = construct()
            parameters = layers * sum(p.numel() for p in module.parameters())
            forward, forward_mib, step, step_mib = _measure(module, x, grad, setting.repeats)
            yield Measurement(name, parameters, tokens, layers * forward, forward_mib, layers * step, step_mib)


def _measure(module: nn.Module, x: Tensor, grad: Tensor, repeats: int) -> list[float]:
    """Return median ms and peak MiB of inference, then of a training step; nan for all if memory does not suffice."""
    leaves = [x, *module.parameters()]
    figures, timer = [], timing.timer_for(x.device)
    try:
        for run in (torch.no_grad()(lambda: module(x)), lambda: torch.autograd.grad(module(x), leaves, grad)):
            peak = timing.peak_memory(run, x.device) if x.is_cuda else timing.peak_tensor_bytes(run)  # also the warm-up
            figures += [1e3 * statistics.median(timer.window(run, repeats)), peak / 2**20]
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return [math.nan] * 4
    return figures
