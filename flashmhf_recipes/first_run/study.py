"""What the bare command measures: errors against float64, and time and memory of the feed-forward modules at equal parameters."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import benchmark

import flashmhf
from flashmhf import backends, testing
from flashmhf.nn import MHFFN, FlashMHF, SwiGLU
from flashmhf.ops import mix as ops

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
    seconds: float  # after this time no further length starts


def default_setting(device: torch.device) -> Setting:
    """GPU: the paper's efficiency table. CPU: a layer of its 128M model, for half a minute on two cores."""
    if device.type == "cuda":
        return Setting(device, torch.bfloat16, 2048, 16, 22, 384, 8, (192, 384, 768, 1536, 2880, 4032), 10, 60.0)
    return Setting(device, torch.float32, 768, 6, 8, 256, 1, (256, 512, 1024, 2048, 4096), 3, 30.0)


def headline(setting: Setting) -> str:
    """Return one line: version, machine, and the back end that runs there."""
    sizes = {"d_h": setting.d_model // setting.num_heads, "d_e": setting.subnet_dim}
    usable = (name for name, module in backends.BACKENDS.items() if module.why_not(setting.device, setting.dtype, **sizes) is None)
    gpu = setting.device.type == "cuda"
    machine = torch.cuda.get_device_name(setting.device) if gpu else f"cpu, {torch.get_num_threads()} threads"
    return f"flashmhf {flashmhf.__version__} | {machine} | torch {torch.__version__} | back end {next(usable)}"


def shows(device: torch.device) -> str:
    """Return what a run on ``device`` can show and what it cannot, for people."""
    if device.type == "cuda":
        return "This shows whether results are right here, and time and memory of a layer of the paper's size on this GPU."
    return (
        "A run on a CPU shows whether results are right, how much memory a layer needs, and that its models learn. It says nothing of\n"
        "the speed on a GPU: the fused kernels are for CUDA GPUs, and here PyTorch's own operators compute FlashMHF in blocks. One model\n"
        "this small, of one seed, does not tell which network learns better; docs/quality.md has the runs that do."
    )


# Errors


@dataclass(frozen=True)
class Accuracy:
    """Relative L2 errors against float64 of one tensor; ``plain`` is that of PyTorch code in the same precision."""

    backend: str
    dtype: torch.dtype
    tensor: str
    error: float
    plain: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # false for nan


def check(device: torch.device, *, backend: str | None = None) -> Iterator[Accuracy]:
    """Forward and gradients of every usable back end (or one) in every dtype it supports there, on fixed random inputs."""
    for name in backends.BACKENDS if backend is None else (backend,):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if backends.BACKENDS[name].why_not(device, dtype, d_h=128, d_e=384) is None:
                yield from _check_one(name, testing.problem(500, 2, 128, 3, 384, dtype, device, seed=0))


def _check_one(backend: str, p: testing.Problem) -> Iterator[Accuracy]:
    (plain_out, exact_out), (plain_gradients, exact_gradients) = p.forward(), p.backward()
    leaves = tuple(x.requires_grad_() for x in (*p.operands, p.r))
    out = ops.flash_mhf(*leaves, backend=backend)
    ours = (out.detach(), *torch.autograd.grad(out, leaves, p.grad_out))
    plain, exact = (plain_out, *plain_gradients), (exact_out, *exact_gradients)
    for name, actual, same_precision, truth in zip(("out", "dq", "dk", "du", "dv", "dr"), ours, plain, exact, strict=True):
        limit = testing.limit(same_precision, truth, actual.dtype, fixed_limits=backend != "eager")
        error, baseline = (testing.relative_l2(x, truth) for x in (actual, same_precision))
        yield Accuracy(backend, p.operands[0].dtype, name, error, baseline, limit)


# Time and memory


def equal_parameter_modules(
    d_model: int, num_heads: int, num_subnets: int, subnet_dim: int, **factory
) -> dict[str, Callable[[], nn.Module]]:
    """Constructors of SwiGLU, naive MH-FFN and FlashMHF, the first two with the width of equal parameter counts."""
    mixing, router = 3 * d_model * num_subnets * subnet_dim, d_model * num_subnets
    projections = 2 * d_model * d_model

    def width(parameters: int) -> int:
        return round(parameters / (3 * d_model) / WIDTH_MULTIPLE) * WIDTH_MULTIPLE

    return {
        "SwiGLU": lambda: SwiGLU(d_model, width(projections + mixing + router), **factory),
        "naive MH-FFN": lambda: MHFFN(d_model, num_heads, width(mixing + router), backend="naive", **factory),
        "FlashMHF": lambda: FlashMHF(d_model, num_heads, num_subnets, subnet_dim, **factory),
    }


@dataclass(frozen=True)
class Measurement:
    """Medians in ms and the peak memory of a training step in MiB; nan if it ran out of memory."""

    module: str
    parameters: int
    length: int
    forward_ms: float
    step_ms: float
    peak_mib: float


def compare(setting: Setting) -> Iterator[Measurement]:
    """Measures every module at every length; all see the same input and upstream gradient."""
    modules = equal_parameter_modules(
        setting.d_model, setting.num_heads, setting.num_subnets, setting.subnet_dim, device=setting.device, dtype=setting.dtype
    )
    start = time.perf_counter()
    for length in setting.lengths:
        if time.perf_counter() - start > setting.seconds:
            return
        generator = torch.Generator().manual_seed(length)
        x, grad = (
            torch.randn(setting.batch, length, setting.d_model, generator=generator).to(setting.device, setting.dtype) for _ in range(2)
        )
        x.requires_grad_()
        for name, construct in modules.items():
            module = construct()
            parameters = sum(p.numel() for p in module.parameters())
            try:
                figures = _measure(module, x, grad, setting.repeats)
            except torch.OutOfMemoryError:
                figures = (float("nan"),) * 3
                torch.cuda.empty_cache()
            yield Measurement(name, parameters, length, *figures)


def _measure(module: nn.Module, x: Tensor, grad: Tensor, repeats: int) -> tuple[float, float, float]:
    leaves = [x, *module.parameters()]

    def forward():
        with torch.no_grad():
            module(x)

    def step():
        torch.autograd.grad(module(x), leaves, grad)

    def median_ms(call: Callable[[], None]) -> float:
        threads = torch.get_num_threads()  # the timer's default is one
        timer = benchmark.Timer("call()", globals={"call": call}, num_threads=threads)
        timer.timeit(1)
        return 1e3 * statistics.median(timer.timeit(1).median for _ in range(repeats))

    peak = _peak_allocated(step, x.device) if x.device.type == "cuda" else _peak_resident(step)
    return median_ms(forward), median_ms(step), peak / 2**20


def _peak_allocated(run: Callable[[], None], device: torch.device) -> int:
    """Return the bytes that a second ``run`` allocates at its peak on a CUDA device."""
    run()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _peak_resident(run: Callable[[], None]) -> float:
    """Return the bytes by which a second ``run`` raises the process's resident memory; nan without Linux's resettable high-water mark."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

    run()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else the run would reuse freed pages that are still counted
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS:")
    except (OSError, AttributeError):
        return float("nan")
    run()
    return status("VmHWM:") - before
