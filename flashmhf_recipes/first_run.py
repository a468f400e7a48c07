"""The bare command: errors against float64, time and memory, small language models; a table and a picture.

It ends within three minutes on any machine: steps are timed, and what would not be done in time is left out and named.
The language models need the extra ``flashmhf[lm]``; the rest needs torch alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import flashmhf
from flashmhf import backends, testing
from flashmhf.nn import MHFFN, FlashMHF, SwiGLU
from flashmhf.ops import mix as ops

from .errors import DataError

logger = logging.getLogger(__name__)

COLORS = {"SwiGLU": "tab:orange", "SwiGLU compiled": "tab:red", "naive MH-FFN": "tab:gray", "FlashMHF": "tab:blue"}
FIGURES = {
    "forward_ms": "inference, ms",
    "forward_mib": "peak memory at inference, MiB",
    "step_ms": "training step, ms",
    "step_mib": "peak memory of a training step, MiB",
}
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


def headline(setting: Setting) -> str:
    """Return one line: version, machine, and the back end that runs there."""
    sizes = {"d_h": setting.d_model // setting.num_heads, "d_e": setting.subnet_dim}
    usable = (
        name for name, module in backends.BACKENDS.items() if not module.why_not(setting.device, setting.dtype, **sizes)
    )
    gpu = setting.device.type == "cuda"
    machine = torch.cuda.get_device_name(setting.device) if gpu else f"cpu, {torch.get_num_threads()} threads"
    return f"flashmhf {flashmhf.__version__} | {machine} | torch {torch.__version__} | back end {next(usable)}"


def shows(device: torch.device) -> str:
    """Return what a run on ``device`` can show and what it cannot, for people."""
    shown = "This shows whether results are right here, and time and memory of README's layers on this GPU."
    if device.type == "cpu":
        shown = """\
A run on a CPU shows whether results are right, how the memory of a training step grows, and models learn.
It says nothing of the speed on a GPU, which README.md has: the fused kernels are for CUDA GPUs, and here
PyTorch's own operators compute FlashMHF in blocks."""
    return f"""{shown}
Models this small, trained so shortly, do not tell which network learns better; docs/quality.md has runs that do."""


class Clock:
    """The seconds that a run may take, since ``start``, and what it has left out."""

    def __init__(self, limit: float = math.inf, start: float | None = None):
        self.limit, self.start = limit, time.monotonic() if start is None else start
        self.left_out: list[str] = []

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until ``share`` of the limit."""
        return self.limit * share - (time.monotonic() - self.start)


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


def check(device: torch.device, *, backend: str | None = None, clock: Clock | None = None) -> Iterator[Accuracy]:
    """Yield errors of output and gradients, of every usable back end (or one) in every dtype, on fixed inputs."""
    for name in backends.BACKENDS if backend is None else (backend,):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if backends.BACKENDS[name].why_not(device, dtype, d_h=128, d_e=384) is not None:
                continue
            if clock and clock.left(0.25) < 0:
                clock.left_out.append(f"the check of {name} in {str(dtype).removeprefix('torch.')}")
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
    forward_mib: float
    step_ms: float
    step_mib: float


def compare(setting: Setting, clock: Clock | None = None) -> Iterator[Measurement]:
    """Measure every network at every length; all see the same input and upstream gradient."""
    took = 0.0
    for length in setting.lengths:
        start = time.monotonic()
        if clock and clock.left(0.45) < 2.2 * took:  # the next length has about twice the tokens
            clock.left_out.append(f"lengths from {length:,} on")
            return
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
                forward, forward_mib, step, step_mib = _measure(module, x, grad, setting.repeats)
            except torch.OutOfMemoryError:
                forward, forward_mib, step, step_mib = [math.nan] * 4
                torch.cuda.empty_cache()
            figures = layers * forward, forward_mib, layers * step, step_mib
            yield Measurement(name, parameters, setting.batch * length, *figures)
        took = time.monotonic() - start


def _measure(module: nn.Module, x: Tensor, grad: Tensor, repeats: int) -> list[float]:
    """Return ms and MiB of inference, then those of a training step."""
    leaves = [x, *module.parameters()]
    ways = torch.no_grad()(lambda: module(x)), lambda: torch.autograd.grad(module(x), leaves, grad)
    return [figure for run in ways for figure in _median_and_peak(run, x.device, repeats)]


def _median_and_peak(run: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the median ms of ``run`` after a first one, and the MiB that it allocates at its peak. On a CPU, those by
    which it raises the process's resident memory; nan without Linux's resettable high-water mark."""

    def high_water() -> int:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device)
        return 1024 * int(Path("/proc/self/status").read_text("utf-8").partition("VmHWM:")[2].split()[0])

    run()
    before, peak, times = math.nan, math.nan, []
    with contextlib.suppress(OSError, AttributeError):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            ctypes.CDLL(None).malloc_trim(0)  # else the run would reuse freed pages that are still counted
            Path("/proc/self/clear_refs").write_text("5", "utf-8")
        before = high_water()
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    if not math.isnan(before):
        peak = high_water()
    return statistics.median(times), (peak - before) / 2**20


# Language models: bytes of real text, by the recipe of docs/quality.md (Muon, warm-up) and shapes of
# docs/guides/sizes.md: heads of 128, three sub-networks each, five layers instead of six.

HELD_OUT = 0.1  # the end of the text
MINIMUM_BYTES, MAXIMUM_BYTES = 50_000, 32 << 20
TRIAL_STEPS, FEWEST_STEPS = 4, 40
SIZES = {
    device: {
        "SwiGLU": {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": width, "intermediate_size": swiglu},
        "FlashMHF": {"num_hidden_layers": 5, "num_attention_heads": 4, "hidden_size": width}
        | {"intermediate_size": flashmhf, "ffn_num_heads": width // 128, "ffn_num_subnets": 3},
    }
    for device, width, swiglu, flashmhf in (("cpu", 256, 512, 528), ("cuda", 512, 1536, 1632))
}
BUDGETS = {"cpu": {"length": 128, "batch": 8, "steps": 320}, "cuda": {"length": 512, "batch": 32, "steps": 400}}


@dataclass(frozen=True)
class Trained:
    """A model's parameters, the loss of every step, the held-out loss (nats a byte) and the seconds of a step."""

    parameters: int
    losses: list[float]
    held_out: float
    step_s: float


def training_text(path: str | None) -> bytes:
    """Return a text file's bytes, or the standard library's. Raises OSError, DataError for binary or short ones."""
    data = _standard_library() if path is None else Path(path).read_bytes()
    if b"\0" in data:
        raise DataError(f"{path} has NUL bytes and looks like a binary file; supported: text")
    if len(data) < MINIMUM_BYTES:
        name = path or "the standard library"
        raise DataError(f"{name} has {len(data):,} bytes; training and holding out need {MINIMUM_BYTES:,}")
    return data[:MAXIMUM_BYTES]


def _standard_library() -> bytes:
    """Return its modules in a fixed shuffled order, so that the held-out end is like the rest."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = [path for path in sorted(root.rglob("*.py")) if left_out.isdisjoint(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"{root} has no Python sources here; name a text with --text FILE")
    random.Random(0).shuffle(files)
    return b"\n".join(path.read_bytes() for path in files)


def train(
    text: bytes, device: torch.device, steps: int | None = None, bar: bool = False, clock: Clock | None = None
) -> dict[str, Trained]:
    """Train each network's model on the same batches for ``steps``, or as many as there is time for (perhaps none).

    A few steps of each tell how many; where the machine has become slower since, training ends by the clock.
    """
    clock, budgeted = clock or Clock(), steps or BUDGETS[device.type]["steps"]
    wanted, timed = budgeted, steps is None and clock.limit < math.inf
    if timed:
        from . import training  # noqa: F401 - its time is none of a run's

        start, end = time.monotonic(), time.monotonic() + clock.left()
        both = sum(_train(text, name, device, TRIAL_STEPS, TRIAL_STEPS, end).step_s for name in SIZES[device.type])
        once = max(0.0, time.monotonic() - start - TRIAL_STEPS * both)  # of a run, without its steps
        # a part for the held-out loss and the clock's noise; past the end, a trial may have no second step to time
        possible = int((clock.left() - once) / (1.15 * both)) if clock.left() > 0 else 0
        if possible < FEWEST_STEPS:
            clock.left_out.append(f"the language models: there is time for {max(0, possible)} steps of each")
            return {}
        wanted = min(wanted, possible)
    trained, at_most = {}, wanted
    for runs_left, name in zip((2, 1), SIZES[device.type], strict=True):
        end = time.monotonic() + clock.left() / runs_left if timed else math.inf
        trained[name] = _train(text, name, device, wanted, at_most, end, bar)
        at_most = len(trained[name].losses)
    if at_most < budgeted:
        clock.left_out.append(f"{budgeted - at_most} of {budgeted} steps of the language models")
    return trained


def _train(
    text: bytes, name: str, device: torch.device, steps: int, at_most: int, end: float, bar: bool = False
) -> Trained:
    """Train on the schedule of ``steps``; end after ``at_most``, or so that the result is there at ``end``."""
    from transformers.utils import logging

    from . import metrics, stopping, tokenizer, training

    logging.disable_progress_bar()
    sizes, budget = SIZES[device.type][name], BUDGETS[device.type] | {"steps": steps}
    length = budget["length"]
    # The paper's initializer_range of 0.02 belongs to models six to sixteen times as wide.
    model = sizes | {"max_position_embeddings": length, "initializer_range": sizes["hidden_size"] ** -0.5}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "text.txt"
        wanted = int(math.prod(budget.values()) / (1 - HELD_OUT)) + length  # more would only be tokenised
        file.write_text(text[:wanted].decode(errors="replace"), "utf-8")
        settings = {"preset": "tiny", "ffn": name.lower(), "model": model, "data": file, "micro_batch": budget["batch"]}
        settings |= {"optimizer": "muon", "weight_decay": 0.3, "learning_rate": 8e-3, "min_learning_rate": 8e-4}
        settings |= {"warmup": min(60, max(1, steps // 4)), "eval_fraction": HELD_OUT, "eval_every": steps}
        settings |= {"vocab_size": tokenizer.SMALLEST, "log_every": 1}  # no merges: a token a byte
        settings |= {"device": "cpu" if device.type == "cpu" else "auto"}
        settings |= {"arguments": {"report_to": [], "save_strategy": "no"}}
        until = stopping.Until(end, at_most, batches=round(steps * HELD_OUT / (1 - HELD_OUT)))
        with contextlib.redirect_stdout(sys.stderr):  # what a run says of itself is no part of the table
            run = training.Options(str(Path(scratch) / "run"), **settings, **budget)
            result = training.start(run, bar=bar, callbacks=[until])
        rows = [row for row in metrics.read_rows(result.output) if "loss" in row]
    speeds = [row["tokens_per_second"] for row in rows[1:] if "tokens_per_second" in row]
    step_s = length * budget["batch"] / statistics.median(speeds) if speeds else math.nan
    return Trained(result.parameters, [row["loss"] for row in rows], result.eval_loss, step_s)


# Table and picture


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


def table(
    setting: Setting, accuracies: Sequence[Accuracy] = (), measurements: Sequence[Measurement] = (),
    trained: dict[str, Trained] | None = None, text: str = "",
) -> str:  # fmt: skip
    """Return one column a network; blocks for errors, time and memory, and the language models on ``text``."""
    trained, names = trained or {}, [name for name in COLORS if name in modules(setting)]
    rows: list[tuple[str, ...]] = [("", *names)]

    def add(title: str, values: dict[str, object], attribute: str) -> None:
        rows.append((title, *(_number(getattr(values.get(name), attribute, None)) for name in names)))

    for kind in dict.fromkeys(a.kind for a in accuracies):
        worst = max((a for a in accuracies if a.kind == kind), key=lambda a: a.error / a.limit)
        label = f"{kind}: largest error vs float64 ({worst.tensor}, limit {worst.limit:.1e})"
        rows.append((label, *["-"] * (len(names) - 1), f"{worst.error:.1e}{'' if worst.passed else ' FAILED'}"))
    if measurements:
        by_tokens: dict[int, dict[str, Measurement]] = {}
        for m in measurements:
            by_tokens.setdefault(m.tokens, {})[m.module] = m
        ours, theirs = setting.layers
        layers = "one layer" if ours == theirs == 1 else f"{ours} layers, {theirs} of SwiGLU"
        dtype = str(setting.dtype).removeprefix("torch.")
        rows.append(())
        add(f"{layers}, d_model {setting.d_model}, {dtype}: parameters", next(iter(by_tokens.values())), "parameters")
        for attribute, title in FIGURES.items():
            each = f"{title} (one layer)" if attribute.endswith("mib") and ours > 1 else title
            for tokens, values in by_tokens.items():
                add(f"  {each}, {tokens:,} tokens", values, attribute)
    if trained:
        rows.append(())
        add(f"language model on {text}: parameters", trained, "parameters")
        add("  seconds of a step", trained, "step_s")
        steps = " and ".join(dict.fromkeys(str(len(model.losses)) for model in trained.values()))
        add(f"  held-out loss after {steps} steps, nats/byte", trained, "held_out")
    return headline(setting) + "\n\n" + _aligned(rows)


def picture(path: Path, setting: Setting, measurements: Sequence[Measurement], trained: dict[str, Trained]) -> bool:
    """Draw time and memory of inference (GPU), memory of a training step, and the training curves; return whether the
    PNG was written. One that cannot be drawn is a warning: the table has it all."""

    def lines(axis, attribute: str) -> None:
        tokens = sorted({m.tokens for m in measurements})
        for name, color in COLORS.items():
            if points := [(m.tokens, getattr(m, attribute)) for m in measurements if m.module == name]:
                axis.plot(*zip(*points, strict=True), "o-", color=color, label=name)
        each = "one layer" if attribute.endswith("mib") or setting.layers == (1, 1) else "all layers"
        axis.set(title=f"{FIGURES[attribute]} ({each})", xlabel="tokens", xscale="log", yscale="log")
        axis.set_xticks(tokens, [f"{count:,}" for count in tokens], rotation=30)
        axis.minorticks_off()
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.yaxis.set_major_formatter("{x:,.0f}")

    def losses(axis) -> None:
        for name, model in trained.items():
            smoothed = [statistics.fmean(model.losses[max(0, at - 9) : at + 1]) for at in range(len(model.losses))]
            label = f"{name}, {model.parameters / 1e6:.2f}M: held out {model.held_out:.3f}"
            axis.plot(smoothed, color=COLORS[name], label=label)
            axis.plot(len(smoothed) - 1, model.held_out, "o", color=COLORS[name])
        axis.set(title="language model: loss, nats/byte (too short to rank them)", xlabel="step")

    attributes = ["forward_ms", "forward_mib", "step_mib"] if setting.device.type == "cuda" else ["step_mib"]
    panels = [partial(lines, attribute=name) for name in attributes if measurements] + [losses] * bool(trained)
    try:
        from matplotlib.figure import Figure  # without pyplot, which would need a display

        figure = Figure(figsize=(5.5 * len(panels), 4.8), layout="constrained")
        for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel(axis)
            axis.grid(True, which="both", alpha=0.3)
            axis.legend(fontsize=9)
        figure.suptitle(headline(setting))
        figure.savefig(path, dpi=110, format="png")
    except Exception as error:  # fonts, caches, disks: matplotlib raises whatever they do
        logger.warning("%s was not drawn: %s: %s", path, type(error).__name__, " ".join(str(error).split()))
        return False
    return True
