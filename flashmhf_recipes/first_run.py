"""The bare command: errors against float64, time and memory of the feed-forward modules, small language models; a
table, a picture.

Everything is compared at equal parameters. The language models read bytes of real text and are trained by the recipe
with the settings with which both networks learn best in docs/quality.md: Muon, warm-up, FlashMHF's projections at 0.3
of the learning rate. They need the extra ``flashmhf[lm]``; the rest needs torch alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import statistics
import sys
import sysconfig
import tempfile
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

from .errors import DataError
from .plots import draw

COLORS = {"SwiGLU": "tab:orange", "naive MH-FFN": "tab:gray", "FlashMHF": "tab:blue"}
FIGURES = {"forward_ms": "forward, ms", "step_ms": "training step, ms", "peak_mib": "peak memory of a step, MiB"}
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
    usable = (
        name
        for name, module in backends.BACKENDS.items()
        if module.why_not(setting.device, setting.dtype, **sizes) is None
    )
    gpu = setting.device.type == "cuda"
    machine = torch.cuda.get_device_name(setting.device) if gpu else f"cpu, {torch.get_num_threads()} threads"
    return f"flashmhf {flashmhf.__version__} | {machine} | torch {torch.__version__} | back end {next(usable)}"


def shows(device: torch.device) -> str:
    """Return what a run on ``device`` can show and what it cannot, for people."""
    if device.type == "cuda":
        return (
            "This shows whether results are right here, and time and memory of a layer of the paper's size on this GPU."
        )
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
                p = testing.problem(500, 2, 128, 3, 384, dtype, device, seed=0)
                (plain_out, exact_out), (plain_gradients, exact_gradients) = p.forward(), p.backward()
                leaves = tuple(x.requires_grad_() for x in (*p.operands, p.r))
                out = ops.flash_mhf(*leaves, backend=name)
                ours = (out.detach(), *torch.autograd.grad(out, leaves, p.grad_out))
                names = ("out", "dq", "dk", "du", "dv", "dr")
                results = zip(names, ours, (plain_out, *plain_gradients), (exact_out, *exact_gradients), strict=True)
                for tensor, actual, plain, exact in results:
                    limit = testing.limit(plain, exact, dtype, fixed_limits=name != "eager")
                    yield Accuracy(
                        name,
                        dtype,
                        tensor,
                        testing.relative_l2(actual, exact),
                        testing.relative_l2(plain, exact),
                        limit,
                    )


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
        setting.d_model,
        setting.num_heads,
        setting.num_subnets,
        setting.subnet_dim,
        device=setting.device,
        dtype=setting.dtype,
    )
    start = time.perf_counter()
    for length in setting.lengths:
        if time.perf_counter() - start > setting.seconds:
            return
        generator = torch.Generator().manual_seed(length)
        x, grad = (
            torch.randn(setting.batch, length, setting.d_model, generator=generator).to(setting.device, setting.dtype)
            for _ in range(2)
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

    return median_ms(forward), median_ms(step), _peak(step, x.device) / 2**20


def _peak(run: Callable[[], None], device: torch.device) -> float:
    """Return the bytes that a second ``run`` allocates at its peak; on a CPU, by which it raises the process's resident
    memory.

    nan on a CPU without Linux's resettable high-water mark.
    """

    def high_water() -> int:
        return 1024 * int(Path("/proc/self/status").read_text("utf-8").partition("VmHWM:")[2].split()[0])

    run()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else the run would reuse freed pages that are still counted
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
        before = high_water()
    except (OSError, AttributeError):
        return float("nan")
    run()
    return high_water() - before


# Language models

HELD_OUT = 0.1  # the end of the text
MINIMUM_BYTES, MAXIMUM_BYTES = 50_000, 32 << 20


# The settings of FlashMHF's model and of its run, by the kind of device.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "ffn_num_heads",
    "ffn_num_subnets",
    "intermediate_size",
)
RECIPES = {
    "cpu": (dict(zip(SIZES, (128, 4, 2, 2, 2, 352), strict=True)), {"length": 128, "batch": 8, "steps": 320}),
    "cuda": (dict(zip(SIZES, (512, 6, 4, 4, 4, 1536), strict=True)), {"length": 512, "batch": 32, "steps": 400}),
}


@dataclass(frozen=True)
class Trained:
    """A model's parameters, the loss of every step and the held-out loss (nats a byte)."""

    parameters: int
    losses: list[float]
    held_out: float


def training_text(path: str | None) -> bytes:
    """Return the bytes of a text file, or of the Python standard library's own source.

    Raises OSError where it cannot be read, DataError for one that is binary or too short.
    """
    data = _standard_library() if path is None else Path(path).read_bytes()
    if b"\0" in data:
        raise DataError(
            f"{path} has NUL bytes and looks like a binary file; plain text in an 8-bit encoding such as UTF-8 is needed"
        )
    if len(data) < MINIMUM_BYTES:
        raise DataError(
            f"{path or 'the standard library'} has {len(data):,} bytes; training and holding out need {MINIMUM_BYTES:,}"
        )
    return data[:MAXIMUM_BYTES]


def _standard_library() -> bytes:
    """Its modules in a fixed shuffled order, so that the held-out end is like the rest."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = [path for path in sorted(root.rglob("*.py")) if left_out.isdisjoint(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"{root} has no Python sources here; name a text with --text FILE")
    random.Random(0).shuffle(files)
    return b"\n".join(path.read_bytes() for path in files)


def train(text: bytes, device: torch.device, steps: int | None = None, bar: bool = False) -> dict[str, Trained]:
    """Train a model with each of the networks on the same batches.

    Raises ModuleNotFoundError without the extra flashmhf[lm].
    """
    from transformers.utils import logging

    from . import metrics, tokenizer, training

    logging.disable_progress_bar()
    ours, budget = RECIPES[device.type]
    budget = budget | {"steps": steps or budget["steps"]}
    heads, subnets, width = (ours[name] for name in SIZES[-3:])
    modules = equal_parameter_modules(ours["hidden_size"], heads, subnets, width // subnets, device="meta")
    swiglu = {name: value for name, value in ours.items() if not name.startswith("ffn_")}
    swiglu["intermediate_size"] = modules["SwiGLU"]().intermediate_dim
    trained = {}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "text.txt"
        wanted = int(math.prod(budget.values()) / (1 - HELD_OUT)) + budget["length"]  # more would only be tokenised
        file.write_text(text[:wanted].decode(errors="replace"), "utf-8")
        for name, sizes in (("SwiGLU", swiglu), ("FlashMHF", ours)):
            # The paper's initializer_range of 0.02 belongs to models six to sixteen times as wide.
            model = sizes | {
                "max_position_embeddings": budget["length"],
                "initializer_range": sizes["hidden_size"] ** -0.5,
            }
            options = training.Options(
                output=str(Path(scratch) / name),
                preset="tiny",
                ffn=name.lower(),
                model=model,
                data=file,
                vocab_size=tokenizer.SMALLEST,  # no merges: a token a byte
                micro_batch=budget["batch"],
                optimizer="muon",
                weight_decay=0.3,
                learning_rate=8e-3,
                min_learning_rate=8e-4,
                warmup=min(60, max(1, budget["steps"] // 4)),
                eval_fraction=HELD_OUT,
                eval_every=budget["steps"],
                log_every=1,
                device="cpu" if device.type == "cpu" else "auto",
                arguments={"report_to": [], "save_strategy": "no"},
                **budget,
            )
            with contextlib.redirect_stdout(sys.stderr):  # what a run says of itself is no part of the table
                result = training.start(options, bar=bar)
            losses = [row["loss"] for row in metrics.read_rows(result.output) if "loss" in row]
            trained[name] = Trained(result.parameters, losses, result.eval_loss)
    return trained


# Table and picture


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Aligns the first column to the left and the others to the right. An empty row becomes a blank line."""
    widths = [max(len(row[i]) for row in rows if row) for i in range(len(rows[0]))]
    lines = ((cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(row)) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def check_table(accuracies: Iterable[Accuracy]) -> str:
    """One row a tensor: its error, the error of PyTorch code in the same precision, the limit."""
    rows = [("back end", "dtype", "tensor", "error", "PyTorch's", "limit", "")]
    for a in accuracies:
        figures = (f"{value:.2e}" for value in (a.error, a.plain, a.limit))
        rows.append(
            (a.backend, str(a.dtype).removeprefix("torch."), a.tensor, *figures, "ok" if a.passed else "FAILED")
        )
    return _aligned(rows)


def table(
    setting: Setting,
    accuracies: Sequence[Accuracy],
    measurements: Sequence[Measurement],
    trained: dict[str, Trained],
    text: str = "",
) -> str:
    """One column a module;

    blocks for errors, time and memory, and the language models on ``text``. Empty parts are left out.
    """
    rows: list[tuple[str, ...]] = [("", *COLORS)]

    def add(title: str, value: Callable[[str], float | None]) -> None:
        rows.append((title, *(_number(value(name)) for name in COLORS)))

    for backend, dtype in dict.fromkeys((a.backend, a.dtype) for a in accuracies):
        worst = max(
            (a for a in accuracies if (a.backend, a.dtype) == (backend, dtype)), key=lambda a: a.error / a.limit
        )
        label = f"{backend} {str(dtype).removeprefix('torch.')}: largest error vs float64 ({worst.tensor}, limit {worst.limit:.1e})"
        rows.append((label, "-", "-", f"{worst.error:.1e}{'' if worst.passed else ' FAILED'}"))
    if measurements:
        by_place = {(m.module, m.length): m for m in measurements}
        first, dtype = measurements[0].length, str(setting.dtype).removeprefix("torch.")
        rows.append(())
        add(
            f"one layer, d_model {setting.d_model}, batch {setting.batch}, {dtype}: parameters",
            lambda name: by_place[name, first].parameters,
        )
        for attribute, title in FIGURES.items():
            for length in dict.fromkeys(m.length for m in measurements):
                add(
                    f"  {title}, length {length}",
                    lambda name, at=length, of=attribute: getattr(by_place.get((name, at)), of, None),
                )
    if trained:
        steps = len(trained["FlashMHF"].losses)
        rows.append(())
        add(f"language model on {text}: parameters", lambda name: getattr(trained.get(name), "parameters", None))
        add(
            f"  held-out loss after {steps} steps, nats/byte", lambda name: getattr(trained.get(name), "held_out", None)
        )
    return headline(setting) + "\n\n" + _aligned(rows)


def picture(path: Path, setting: Setting, measurements: Sequence[Measurement], trained: dict[str, Trained]) -> bool:
    """Draw time and memory over length, and the training curves; return whether the PNG was written."""

    def paint(figure) -> None:
        *axes, loss_axis = figure.subplots(1, 3)
        lengths = sorted({m.length for m in measurements})
        for axis, attribute in zip(axes, ("step_ms", "peak_mib"), strict=True):
            for name, color in COLORS.items():
                found = [m for m in measurements if m.module == name]
                axis.plot(
                    [m.length for m in found], [getattr(m, attribute) for m in found], "o-", color=color, label=name
                )
            axis.set(title=FIGURES[attribute], xlabel=f"length (batch {setting.batch})", xscale="log", yscale="log")
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.set_xticks([], minor=True)
            axis.yaxis.set_major_formatter("{x:,.0f}")
            axis.yaxis.set_minor_formatter("{x:,.0f}")
        for name, model in trained.items():
            smoothed = [
                statistics.fmean(model.losses[max(0, step - 9) : step + 1]) for step in range(len(model.losses))
            ]
            loss_axis.plot(smoothed, color=COLORS[name], label=f"{name}, held out {_number(model.held_out)}")
            loss_axis.plot(len(smoothed) - 1, model.held_out, "o", color=COLORS[name])
        loss_axis.set(title="language model: loss (nats/byte)", xlabel="step")
        for axis in (*axes, loss_axis):
            axis.grid(True, which="both", alpha=0.3)
            if axis.lines:
                axis.legend()
        figure.suptitle(headline(setting))

    return draw(path, (15, 4.5), paint, dpi=110)
