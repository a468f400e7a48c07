"""Time and memory of FlashMHF, naive MH-FFN and SwiGLU at equal parameters."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from flashmhf.nn import MHFFN, FlashMHF, SwiGLU

WIDTH_MULTIPLE = 8  # elements; rows of 16 bytes, so that cuBLAS takes its fast kernels for SwiGLU
NAIVE_TOKENS = 2048  # on a CPU: more would take gigabytes


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
    """Return README's chart on a GPU, and on a CPU a layer of the smallest model in docs/guides/sizes.md."""
    if device.type == "cuda":
        lengths = 192, 384, 768, 1536, 2880, 4032
        return Setting(device, torch.bfloat16, 2048, 16, 22, 384, 8, lengths, 10, (20, 24))
    return Setting(device, torch.float32, 768, 6, 6, 384, 1, (256, 512, 1024, 2048, 4096), 1, (1, 1))


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


def compare(setting: Setting, end: float, left_out: list[str]) -> Iterator[Measurement]:
    """Measure every network at every length; all see the same input and upstream gradient. Lengths that would not be
    done at ``end`` (by time.monotonic) are named in ``left_out``."""
    took, growth = 0.0, 2.2 if setting.device.type == "cpu" else 1.2  # a GPU's time is mostly compiling
    for length in setting.lengths:
        start, tokens = time.monotonic(), setting.batch * length
        if end - start < growth * took:
            left_out.append(f"lengths from {length:,} on")
            return
        generator = torch.Generator().manual_seed(length)
        shape = setting.batch, length, setting.d_model
        x, grad = (torch.randn(shape, generator=generator).to(setting.device, setting.dtype) for _ in range(2))
        x.requires_grad_()
        for name, (layers, construct) in modules(setting, device=setting.device, dtype=setting.dtype).items():
            if name == "naive MH-FFN" and setting.device.type == "cpu" and tokens > NAIVE_TOKENS:
                continue
            module = construct()
            parameters = layers * sum(p.numel() for p in module.parameters())
            forward, forward_mib, step, step_mib = _measure(module, x, grad, setting.repeats)
            yield Measurement(name, parameters, tokens, layers * forward, forward_mib, layers * step, step_mib)
        took = time.monotonic() - start


def _measure(module: nn.Module, x: Tensor, grad: Tensor, repeats: int) -> list[float]:
    """Return ms and MiB of inference, then those of a training step; nan for all if memory does not suffice."""
    leaves = [x, *module.parameters()]
    ways = torch.no_grad()(lambda: module(x)), lambda: torch.autograd.grad(module(x), leaves, grad)
    try:
        return [figure for run in ways for figure in _median_and_peak(run, x.device, repeats)]
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return [math.nan] * 4


def _median_and_peak(run: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the median ms of ``run`` after a first one, and the MiB that it allocates at its peak. On a CPU, those by
    which it raises the process's resident memory; nan without Linux's resettable high-water mark."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    run()
    wait()
    before, times = _high_water(device, reset=True), []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), (_high_water(device) - before) / 2**20


def _high_water(device: torch.device, reset: bool = False) -> float:
    """Return the most bytes in use since the last reset."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    try:
        if reset:
            ctypes.CDLL(None).malloc_trim(0)  # else the run would reuse freed pages that are still counted
            Path("/proc/self/clear_refs").write_text("5", "utf-8")
        return 1024 * int(Path("/proc/self/status").read_text("utf-8").partition("VmHWM:")[2].split()[0])
    except (OSError, AttributeError):
        return math.nan
