"""The bare command: errors against float64, time and memory beside SwiGLU; a table and a picture. It needs torch alone,
and for the picture matplotlib of the extra ``flashmhf[lm]``."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import flashmhf
from flashmhf import backends, ops, testing
from flashmhf.nn import MHFFN, FlashMHF, SwiGLU

from . import timing

WIDTH_MULTIPLE = 8  # elements; rows of 16 bytes, so that cuBLAS takes its fast kernels for SwiGLU
COLORS = {"SwiGLU": "tab:orange", "SwiGLU compiled": "tab:red", "naive MH-FFN": "tab:gray", "FlashMHF": "tab:blue"}
FIGURES = {
    "forward_ms": "inference, ms",
    "forward_mib": "peak memory of a layer at inference, MiB",
    "step_ms": "training step, ms",
    "step_mib": "peak memory of a layer's training step, MiB",
}

logger = logging.getLogger(__name__)


class Accuracy(NamedTuple):
    """Relative L2 error against float64 of one tensor, and what rounding in the same precision allows."""

    kind: str  # back end and dtype
    tensor: str
    error: float
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
                yield Accuracy(f"{name} {precision}", tensor, testing.relative_l2(actual, exact), limit)


class Setting(NamedTuple):
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


class Measurement(NamedTuple):
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
    figures, timer = [], timing.Timer(x.device)
    try:
        for run in (torch.no_grad()(lambda: module(x)), lambda: torch.autograd.grad(module(x), leaves, grad)):
            peak = timing.peak_memory(run, x.device) if x.is_cuda else timing.peak_tensor_bytes(run)  # also the warm-up
            figures += [1e3 * statistics.median(timer.window(run, repeats)), peak / 2**20]
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return [math.nan] * 4
    return figures


def headline(setting: Setting) -> str:
    """Return one line: version, machine, and the back end that runs there."""
    device, dtype = setting.device, setting.dtype
    sizes = {"d_h": setting.d_model // setting.num_heads, "d_e": setting.subnet_dim}
    usable = (name for name, backend in backends.BACKENDS.items() if not backend.why_not(device, dtype, **sizes))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return f"flashmhf {flashmhf.__version__} | {machine} | torch {torch.__version__} | back end {next(usable)}"


def table(setting: Setting, accuracies: Sequence[Accuracy] = (), measurements: Sequence[Measurement] = ()) -> str:
    """Return the largest errors, then one column per network: parameters, time and memory."""
    lines = [headline(setting), ""]
    for kind, tensors in groupby(accuracies, key=lambda each: each.kind):
        worst = max(tensors, key=lambda each: each.error / each.limit)
        what = f"{kind}: largest error vs float64 {worst.error:.1e} ({worst.tensor}, limit {worst.limit:.1e})"
        lines.append(what if worst.passed else f"{what} FAILED")
    ours, theirs = setting.layers
    layers = "one layer" if ours == theirs == 1 else f"{ours} layers, {theirs} of SwiGLU"
    names = [name for name in COLORS if any(m.module == name for m in measurements)]
    rows = [(f"{layers}, d_model {setting.d_model}, {str(setting.dtype).removeprefix('torch.')}", names)]
    for attribute, title in FIGURES.items():
        for tokens in dict.fromkeys(m.tokens for m in measurements):
            values = {m.module: getattr(m, attribute) for m in measurements if m.tokens == tokens}
            digits = {name: 0 if value >= 100 else 1 if value >= 10 else 3 for name, value in values.items()}
            rows.append((f"  {title}, {tokens:,} tokens", [f"{values[name]:,.{digits[name]}f}" for name in names]))
    parameters = {m.module: f"{m.parameters:,}" for m in measurements}
    rows.insert(1, ("  parameters", [parameters[name] for name in names]))
    width = max(len(title) for title, _ in rows)
    return "\n".join(
        [*lines, "", *(title.ljust(width) + "".join(f"{cell:>17}" for cell in cells) for title, cells in rows)]
    )


def meaning(setting: Setting, accuracies: Sequence[Accuracy], measurements: Sequence[Measurement]) -> str:
    """Return in three sentences what the table shows."""
    failed, tokens = sum(not a.passed for a in accuracies), max(m.tokens for m in measurements)
    longest = {m.module: m for m in measurements if m.tokens == tokens}
    ours, theirs = longest["FlashMHF"], longest["SwiGLU"]
    found = f"{failed} of {len(accuracies)} are outside" if failed else f"all {len(accuracies)} are within"
    time = {name: getattr(ours, name) / getattr(theirs, name) for name in ("step_ms", "forward_ms")}
    where = {"cuda": "GPU", "cpu": "CPU (README.md has GPUs, where fused kernels run)"}[setting.device.type]
    return f"""\
Errors against float64: {found} their limits, which rounding in the same precision sets.
A training step on {tokens:,} tokens needs {ours.step_mib / theirs.step_mib:.2f} of SwiGLU's memory at equal parameters.
It takes {time["step_ms"]:.2f} of SwiGLU's time, inference {time["forward_ms"]:.2f}, on this {where}."""


def picture(path: Path, setting: Setting, measurements: Sequence[Measurement]) -> bool:
    """Draw memory and time of a training step, on a GPU of inference, too; return whether the PNG was written. One that
    cannot be drawn is a warning: the table has it all."""
    lengths = sorted({m.tokens for m in measurements})
    panels = ["step_mib", "step_ms"] + ["forward_mib", "forward_ms"] * (setting.device.type == "cuda")
    try:
        from matplotlib.figure import Figure  # without pyplot, which would need a display
        from matplotlib.ticker import LogLocator

        figure = Figure(figsize=(5.5 * len(panels), 4.8), layout="constrained")
        for axis, attribute in zip(figure.subplots(1, len(panels)), panels, strict=True):
            for name, color in COLORS.items():
                if points := [(m.tokens, getattr(m, attribute)) for m in measurements if m.module == name]:
                    axis.plot(*zip(*points, strict=True), "o-", color=color, label=name)
            axis.set(title=FIGURES[attribute], xlabel="tokens", xscale="log", yscale="log")
            axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
            axis.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:,.0f}")
            axis.minorticks_off()
            axis.grid(True, alpha=0.3)
            axis.legend(fontsize=9)
        figure.suptitle(headline(setting))
        partial_path = path.with_name(path.name + ".partial")  # a full disk leaves no half of a picture
        try:
            figure.savefig(partial_path, dpi=110, format="png")
            partial_path.replace(path)
        finally:
            with suppress(OSError):
                partial_path.unlink()
    except Exception as error:  # fonts, caches, disks: matplotlib raises whatever they do
        logger.warning("%s was not drawn: %s: %s", path, type(error).__name__, " ".join(str(error).split()))
        return False
    return True
