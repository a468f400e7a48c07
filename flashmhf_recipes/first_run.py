"""What this machine does: errors against float64, time and memory of the feed-forward networks; needs torch alone."""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import benchmark

import flashmhf
from flashmhf import backends, testing
from flashmhf.nn import MHFFN, FlashMHF, SwiGLU
from flashmhf.ops import mix as ops

NAMES = ("SwiGLU", "SwiGLU compiled", "naive MH-FFN", "FlashMHF")
FIGURES = {
    "forward_ms": "inference, ms", "forward_mib": "peak memory at inference, MiB", "step_ms": "training step, ms",
    "step_mib": "peak memory of a training step, MiB",
}  # fmt: skip
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


def default_setting(device: torch.device) -> Setting:
    """Return README's chart on a GPU, and on a CPU a layer of the smallest model in docs/guides/sizes.md."""
    if device.type == "cuda":
        lengths = 192, 384, 768, 1536, 2880, 4032
        return Setting(device, torch.bfloat16, 2048, 16, 22, 384, 8, lengths, 10, (20, 24))
    return Setting(device, torch.float32, 768, 6, 6, 384, 1, (256, 512, 1024, 2048, 4096), 1, (1, 1))


def headline(setting: Setting) -> str:
    """Return one line: version, machine, and the back end that runs there."""
    sizes = {"d_h": setting.d_model // setting.num_heads, "d_e": setting.subnet_dim}
    usable = (
        name for name, module in backends.BACKENDS.items() if not module.why_not(setting.device, setting.dtype, **sizes)
    )
    gpu = setting.device.type == "cuda"
    machine = torch.cuda.get_device_name(setting.device) if gpu else f"cpu, {torch.get_num_threads()} threads"
    return f"flashmhf {flashmhf.__version__} | {machine} | torch {torch.__version__} | back end {next(usable)}"


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

    @property
    def kind(self) -> str:
        return f"{self.backend} {str(self.dtype).removeprefix('torch.')}"


def check(device: torch.device, *, backend: str | None = None) -> Iterator[Accuracy]:
    """Yield errors of output and gradients, of every usable back end (or one) in every dtype, on fixed inputs."""
    for name in backends.BACKENDS if backend is None else (backend,):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if backends.BACKENDS[name].why_not(device, dtype, d_h=128, d_e=384) is not None:
                continue
            p = testing.problem(500, 2, 128, 3, 384, dtype, device, seed=0)
            (plain_out, exact_out), (plain_gradients, exact_gradients) = p.forward(), p.backward()
            leaves = tuple(x.requires_grad_() for x in (*p.operands, p.r))
            out = ops.flash_mhf(*leaves, backend=name)
            ours = (out.detach(), *torch.autograd.grad(out, leaves, p.grad_out))
            results = zip(ours, (plain_out, *plain_gradients), (exact_out, *exact_gradients), strict=True)
            for tensor, (actual, plain, exact) in zip(("out", "dq", "dk", "du", "dv", "dr"), results, strict=True):
                limit = testing.limit(plain, exact, dtype, fixed_limits=name != "eager")
                errors = testing.relative_l2(actual, exact), testing.relative_l2(plain, exact)
                yield Accuracy(name, dtype, tensor, *errors, limit)


# Time and memory


def modules(setting: Setting, **factory) -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    """Return layers and constructor of each network; SwiGLU and naive MH-FFN get the width of equal parameters."""
    d, width = setting.d_model, setting.num_subnets * setting.subnet_dim
    ours, theirs = setting.layers
    mixing = 3 * d * width + d * setting.num_subnets

    def of(parameters: float) -> int:
        return round(parameters / (3 * d) / WIDTH_MULTIPLE) * WIDTH_MULTIPLE

    def swiglu() -> nn.Module:
        return SwiGLU(d, of((2 * d * d + mixing) * ours / theirs), **factory)

    def compiled() -> nn.Module:
        torch.compiler.reset()  # every length is compiled for itself, within the limit of recompilations
        return torch.compile(swiglu(), dynamic=False)

    found = {"SwiGLU": (theirs, swiglu)}
    if setting.device.type == "cuda":
        found["SwiGLU compiled"] = (theirs, compiled)
    found["naive MH-FFN"] = (ours, lambda: MHFFN(d, setting.num_heads, of(mixing), backend="naive", **factory))
    sizes = d, setting.num_heads, setting.num_subnets, setting.subnet_dim
    return found | {"FlashMHF": (ours, lambda: FlashMHF(*sizes, **factory))}


@dataclass(frozen=True)
class Measurement:
    """Parameters and medians in ms of all layers, and the peak memory of one in MiB; nan if it ran out of memory."""

    module: str
    parameters: int
    tokens: int
    forward_ms: float
    step_ms: float
    forward_mib: float
    step_mib: float


def compare(setting: Setting) -> Iterator[Measurement]:
    """Measure every network at every length; all see the same input and upstream gradient."""
    for length in setting.lengths:
        generator = torch.Generator().manual_seed(length)
        shape = setting.batch, length, setting.d_model
        x, grad = (torch.randn(shape, generator=generator).to(setting.device, setting.dtype) for _ in range(2))
        x.requires_grad_()
        for name, (layers, construct) in modules(setting, device=setting.device, dtype=setting.dtype).items():
            if name == "naive MH-FFN" and setting.device.type == "cpu" and setting.batch * length > NAIVE_TOKENS:
                continue
            module = construct()
            parameters = layers * sum(p.numel() for p in module.parameters())
            try:
                times, peaks = _measure(module, x, grad, setting.repeats)
            except torch.OutOfMemoryError:
                times = peaks = (math.nan, math.nan)
                torch.cuda.empty_cache()
            yield Measurement(name, parameters, setting.batch * length, *(layers * t for t in times), *peaks)


def _measure(module: nn.Module, x: Tensor, grad: Tensor, repeats: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (ms, MiB) of inference and of a training step, as two tuples."""
    leaves, threads = [x, *module.parameters()], torch.get_num_threads()  # the timer's default is one

    def forward():
        with torch.no_grad():
            module(x)

    def step():
        torch.autograd.grad(module(x), leaves, grad)

    def median_ms(call: Callable[[], None]) -> float:
        timer = benchmark.Timer("call()", globals={"call": call}, num_threads=threads)
        return 1e3 * statistics.median(timer.timeit(1).median for _ in range(repeats))

    peaks, once = zip(*(_peak(call, x.device) for call in (forward, step)), strict=True)  # which warms up
    times = once if repeats == 1 else tuple(median_ms(call) for call in (forward, step))
    return times, tuple(peak / 2**20 for peak in peaks)


def _peak(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the bytes that a second ``run`` allocates at its peak, and its ms. On a CPU, the bytes by which it raises
    the process's resident memory; nan without Linux's resettable high-water mark."""

    def high_water() -> int:
        return 1024 * int(Path("/proc/self/status").read_text("utf-8").partition("VmHWM:")[2].split()[0])

    run()
    before = math.nan
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # else the run would reuse freed pages that are still counted
            Path("/proc/self/clear_refs").write_text("5", "utf-8")
            before = high_water()
    start = time.perf_counter()
    run()
    ms = 1e3 * (time.perf_counter() - start)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before, ms
    return math.nan if math.isnan(before) else high_water() - before, ms


# Table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return lines with the first column aligned to the left, the others to the right; an empty row is a blank one."""
    widths = [max(len(row[i]) for row in rows if row) for i in range(len(rows[0]))]
    lines = ((cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(row)) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def check_table(accuracies: Iterable[Accuracy]) -> str:
    """Return one row a tensor: its error, the error of PyTorch code in the same precision, the limit."""
    rows = [("back end, dtype", "tensor", "error", "PyTorch's", "limit", "")]
    for a in accuracies:
        figures = (f"{value:.2e}" for value in (a.error, a.plain, a.limit))
        rows.append((a.kind, a.tensor, *figures, "ok" if a.passed else "FAILED"))
    return _aligned(rows)


def table(setting: Setting, accuracies: Sequence[Accuracy] = (), measurements: Sequence[Measurement] = ()) -> str:
    """Return one column a network; blocks for errors, and for time and memory."""
    names = [name for name in NAMES if name in modules(setting)]
    rows: list[tuple[str, ...]] = [("", *names)]

    def add(title: str, values: dict[str, object], attribute: str) -> None:
        rows.append((title, *(_number(getattr(values.get(name), attribute, None)) for name in names)))

    for kind in dict.fromkeys(a.kind for a in accuracies):
        worst = max((a for a in accuracies if a.kind == kind), key=lambda a: a.error / a.limit)
        label = f"{kind}: largest error vs float64 ({worst.tensor}, limit {worst.limit:.1e})"
        rows.append((label, *["-"] * (len(names) - 1), f"{worst.error:.1e}{'' if worst.passed else ' FAILED'}"))
    if measurements:
        by_tokens = {m.tokens: {} for m in measurements}
        for m in measurements:
            by_tokens[m.tokens][m.module] = m
        ours, theirs = setting.layers
        layers = "one layer" if ours == theirs == 1 else f"{ours} layers, {theirs} of SwiGLU"
        dtype = str(setting.dtype).removeprefix("torch.")
        rows.append(())
        add(f"{layers}, d_model {setting.d_model}, {dtype}: parameters", next(iter(by_tokens.values())), "parameters")
        for attribute, title in FIGURES.items():
            each = f"{title} (one layer)" if attribute.endswith("mib") and ours > 1 else title
            for tokens, values in by_tokens.items():
                add(f"  {each}, {tokens:,} tokens", values, attribute)
    return headline(setting) + "\n\n" + _aligned(rows)
