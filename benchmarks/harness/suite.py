"""Measures cells, the important ones first, until the time budget is used up, and writes the record.

A cell is one shape, one number of tokens, one direction; its subjects are prepared one by one (check, memory) and then timed
together, interleaved. A subject whose check is red, that is missing, fails or finds no time left is a row with a status and a reason,
and without a number.
"""

from __future__ import annotations

import csv
import gc
import json
import pathlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flashmhf.testing import relative_l2

from . import environment, timing
from .shapes import BATCH, DECODE_TOKENS, LENGTHS, SHAPES, Shape
from .subjects import SUBJECTS, Call, Settings, Subject, first_backend, randomise

CHECKED_ROWS = 64
LIMITS = {  # relative L2 error of a whole layer's output against float64; gradients twice that (they pass through more roundings)
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.float32: 2e-5,
}
YARDSTICK = 8192  # the square matrix product that rates are compared with
COPY_BYTES = 1 << 30
GRAPH_SETS = 8  # layers in one graph, so that its launch is a small part of a pass
ALSO = ("flashmhf_triton", "swiglu_liger", "swiglu_quack", "dense_moe", "official")
ALSO_LENGTHS = (384, 4032)


@dataclass(frozen=True)
class Cell:
    """Subjects that are timed together on ``batch`` sequences of ``length`` tokens. graph: each pass replays a CUDA graph."""

    group: str
    shape: Shape
    length: int
    subjects: tuple[str, ...]
    batch: int = BATCH
    direction: str = "forward"  # or "training": forward and backward
    graph: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass
class Context:
    """Device and duration of a run's measurements. ``deadline``: in seconds of time.monotonic."""

    settings: Settings
    rounds: int = 5
    window_seconds: float = 0.04
    training_window_seconds: float = 0.2  # longer, because a pass through several layers, forward and backward, takes longer
    settle_seconds: float = 0.1  # before each window; does not count
    warm_up_seconds: float = 1.0  # before the yardstick
    cell_warm_up_seconds: float = 0.3  # before each cell's first round; the GPU is idle while subjects are prepared
    deadline: float = float("inf")
    log: Callable[[str], None] = print
    seed: int = 0
    timer: object = field(init=False)

    def __post_init__(self):
        self.timer = timing.timer_for(self.settings.device)

    @property
    def l2_bytes(self) -> int:
        device = self.settings.device
        return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 20


class RedCheckError(Exception):
    """The subject's result is wrong, so its time is not recorded."""


def check(subject: Subject, shape: Shape, module: nn.Module, call: Call, x: Tensor, direction: str, generator: torch.Generator) -> float:
    """The largest relative L2 error over the direction's results, on CHECKED_ROWS rows of the tensors that are timed.

    Training: the upstream gradient is zero outside those rows, so the weight gradients depend on those rows alone.
    Raises RedCheckError above the limit.
    """
    count = x.shape[:-1].numel()
    rows = torch.randperm(count, device=x.device, generator=generator)[:CHECKED_ROWS]
    weights = {name: weight.detach().double() for name, weight in module.named_parameters()}
    x_rows = x.detach().reshape(count, -1)[rows].double()
    errors = {}
    if direction == "forward":
        with torch.no_grad():
            out = call(module, x)
            errors["output"] = relative_l2(out.reshape(count, -1)[rows], subject.exact(shape, weights, x_rows))
    else:
        names, leaves = list(weights), [x_rows.requires_grad_(), *(w.requires_grad_() for w in weights.values())]
        exact = subject.exact(shape, weights, x_rows)
        upstream = torch.zeros_like(x).reshape(count, -1)
        upstream[rows] = torch.randn(exact.shape, device=x.device, generator=generator).to(x.dtype)
        expected = torch.autograd.grad(exact, leaves, upstream[rows].double())
        out = call(module, x)
        dx, *gradients = torch.autograd.grad(out, [x, *module.parameters()], upstream.view_as(x))
        errors["output"] = relative_l2(out.detach().reshape(count, -1)[rows], exact.detach())
        errors["dx"] = relative_l2(dx.reshape(count, -1)[rows], expected[0]) / 2
        errors |= {f"d {name}": relative_l2(g, e) / 2 for name, g, e in zip(names, gradients, expected[1:], strict=True)}
    limit = LIMITS[x.dtype]
    worst = max(errors, key=errors.get)
    if not errors[worst] <= limit:
        factor = 1 if worst == "output" else 2
        raise RedCheckError(f"{worst}: relative L2 error {factor * errors[worst]:.2e} against float64, the limit is {factor * limit:.0e}")
    return errors[worst]


@dataclass
class Prepared:
    """A subject that passed its check. run: one pass, of ``calls`` calls. row: the subject's figures so far."""

    run: timing.Pass
    calls: int
    row: dict


def _one_call(call: Call, direction: str) -> Callable[[nn.Module, Tensor, Tensor | None], None]:
    def forward(module, x, upstream):
        with torch.no_grad():
            call(module, x)

    def training(module, x, upstream):
        torch.autograd.grad(call(module, x), [x, *module.parameters()], upstream)

    return forward if direction == "forward" else training


def prepare(subject: Subject, cell: Cell, context: Context) -> Prepared:
    """Makes the subject's layers and inputs, checks the first layer and measures its memory. Returns the pass to time."""
    settings, shape, training = context.settings, cell.shape, cell.direction == "training"
    generator = torch.Generator(settings.device).manual_seed(context.seed)

    def layer() -> nn.Module:
        return randomise(subject.make(shape, settings), generator).requires_grad_(training)

    def tokens() -> Tensor:
        size = (cell.batch, cell.length, shape.d_model)
        return torch.randn(size, device=settings.device, generator=generator).to(settings.dtype).requires_grad_(training)

    modules, inputs = [layer()], [tokens()]
    call = subject.caller()
    error = check(subject, shape, modules[0], call, inputs[0], cell.direction, generator)
    upstream = tokens().detach() if training else None
    one = _one_call(call, cell.direction)
    beyond = timing.peak_memory(lambda: one(modules[0], inputs[0], upstream), settings.device)

    weight_bytes = sum(p.numel() * p.element_size() for p in modules[0].parameters())
    input_bytes = inputs[0].numel() * inputs[0].element_size()
    sets = max(timing.cold_copies(weight_bytes, context.l2_bytes), GRAPH_SETS if cell.graph else 0)
    modules += [layer() for _ in range(sets - 1)]
    if input_bytes < timing.COLD * context.l2_bytes:
        inputs += [tokens() for _ in range(len(modules) - 1)]

    def run() -> None:
        for i, module in enumerate(modules):
            one(module, inputs[i % len(inputs)], upstream)

    flops = subject.flops(shape, cell.tokens)
    if training:
        flops += subject.backward_flops(shape, cell.tokens) if subject.backward_flops else 2 * flops
    row = {"error": error, "flops": flops, "weight_sets": len(modules), "bytes": weight_bytes + 2 * input_bytes}
    if beyond is not None:
        row["memory_mib"] = {"beyond": beyond / 2**20, "total": (beyond + weight_bytes + input_bytes) / 2**20}
    return Prepared(timing.graphed(run) if cell.graph else run, len(modules), row)


def _blank(cell: Cell, name: str) -> dict:
    subject = SUBJECTS[name]
    return {
        "group": cell.group,
        "subject": name,
        "title": subject.title,
        "shape": cell.shape.name,
        "batch": cell.batch,
        "length": cell.length,
        "tokens": cell.tokens,
        "direction": cell.direction,
        "timing": "CUDA graph" if cell.graph else "events",
        "layers": subject.layers(cell.shape),
    }


def clear(device: torch.device) -> None:
    """Frees what earlier subjects left, so that the next one's memory and time do not depend on them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def attempt(row: dict, prepare: Callable[[], Prepared]) -> Prepared | None:
    """Calls ``prepare``. If it raises, writes status and reason into ``row`` and returns None, so the other subjects are still measured."""
    try:
        return prepare()
    except RedCheckError as error:
        row |= {"status": "wrong", "reason": str(error)}
    except torch.OutOfMemoryError:
        row |= {"status": "failed", "reason": "out of memory"}
    except Exception as error:
        row |= {"status": "failed", "reason": environment.brief(error)}
    return None


def measure_together(
    runs: dict[str, timing.Pass], rows: dict[str, dict], context: Context, window_seconds: float
) -> dict[str, list[float]]:
    """Seconds of every pass of every run, on a warm GPU. If a run raises, writes status and reason into ``rows`` and returns {}."""
    try:
        if runs:
            timing.warm_up(next(iter(runs.values())), context.timer, context.cell_warm_up_seconds)
        return timing.interleave(runs, context.timer, context.rounds, window_seconds, context.settle_seconds)
    except Exception as error:
        for name in runs:
            rows[name] |= {"status": "failed", "reason": environment.brief(error)}
        return {}


def run_cell(cell: Cell, context: Context) -> list[dict]:
    """One row for every subject of the cell."""
    rows: dict[str, dict] = {}
    ready: dict[str, Prepared] = {}
    for name in cell.subjects:
        row = rows[name] = _blank(cell, name)
        subject = SUBJECTS[name]
        if time.monotonic() > context.deadline:
            row |= {"status": "skipped", "reason": "the time budget was used up"}
            continue
        reason = subject.why_missing(cell.shape, context.settings)
        if reason is not None:
            row |= {"status": "missing", "reason": reason}
            continue
        clear(context.settings.device)
        prepared = attempt(row, lambda subject=subject: prepare(subject, cell, context))
        if prepared is not None:
            ready[name] = prepared
    clear(context.settings.device)
    seconds = context.training_window_seconds if cell.direction == "training" else context.window_seconds
    times = measure_together({name: prepared.run for name, prepared in ready.items()}, rows, context, seconds)
    for name, samples in times.items():
        rows[name] |= ready[name].row | _timed(samples, ready[name], rows[name]["layers"])
    for row in rows.values():
        context.log(_line(row))
    return list(rows.values())


def _timed(samples: list[float], prepared: Prepared, layers: int) -> dict:
    layer_ms = {name: 1e3 * value / prepared.calls for name, value in timing.percentiles(samples).items()}
    return {
        "status": "ok",
        "layer_ms": layer_ms,
        "stack_ms": layers * layer_ms["p50"],
        "tflops": prepared.row["flops"] / layer_ms["p50"] / 1e9,
        "gb_per_s": prepared.row["bytes"] / layer_ms["p50"] / 1e6,
        "samples": len(samples),
    }


def _line(row: dict) -> str:
    head = f"{row['group']:<9} {row['shape']:<6} T={row['tokens']:<7} {row['direction']:<9} {row['title']:<28}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['reason']}"
    spread = (row["layer_ms"]["p80"] - row["layer_ms"]["p20"]) / row["layer_ms"]["p50"]
    memory = f" {row['memory_mib']['beyond']:>8.0f} MiB" if "memory_mib" in row else ""
    return f"{head} {row['layer_ms']['p50']:>9.4f} ms ±{50 * spread:>4.1f}% {row['tflops']:>6.1f} TFLOP/s{memory} error {row['error']:.1e}"


def yardstick(context: Context) -> dict[str, float]:
    """TFLOP/s of a bf16 square product on random data and GB/s of a copy (bytes read plus bytes written), on a warm GPU."""
    if context.settings.device.type != "cuda":
        return {}
    a, b = (torch.randn(YARDSTICK, YARDSTICK, device=context.settings.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    timing.warm_up(product, context.timer, context.warm_up_seconds)
    seconds = timing.percentiles(timing.interleave({"": product}, context.timer, context.rounds, 0.1)[""])["p50"]
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=context.settings.device).random_(0, 256)
    target = torch.empty_like(source)
    copy = timing.interleave({"": lambda: target.copy_(source)}, context.timer, context.rounds, 0.02)[""]
    return {"matmul_tflops": 2 * YARDSTICK**3 / seconds / 1e12, "copy_gb_per_s": 2 * COPY_BYTES / timing.percentiles(copy)["p50"] / 1e9}


def latency_cells(ours: str, lengths: Iterable[int] = LENGTHS, shape: Shape = SHAPES["paper"], batch: int = BATCH) -> list[Cell]:
    """The paper's table: FlashMHF, SwiGLU eager and compiled, naive MH-FFN; the other subjects at two lengths only."""
    main = (ours, "swiglu", "swiglu_compiled", "mhffn_naive")
    return [Cell("latency", shape, n, main + (_others(ours) if n in ALSO_LENGTHS else ()), batch) for n in lengths]


def _others(ours: str) -> tuple[str, ...]:
    return tuple(name for name in ALSO if name != ours)


def training_cells(ours: str, length: int = 4032, shape: Shape = SHAPES["paper"], batch: int = BATCH) -> list[Cell]:
    """Without the official kernels: their backward tunes sixteen kernels for every length before it runs."""
    others = tuple(name for name in _others(ours) if name != "official")
    subjects = (ours, "swiglu", "swiglu_checkpointed", "swiglu_compiled", *others)
    return [Cell("training", shape, length, subjects, batch, direction="training")]


def decode_cells(ours: str, tokens: Iterable[int] = DECODE_TOKENS, shape: Shape = SHAPES["paper"], graph: bool = True) -> list[Cell]:
    return [Cell("decode", shape, 1, (ours, "swiglu", "swiglu_compiled"), batch=t, graph=graph) for t in tokens]


def model_cells(ours: str, length: int = 4032, names: Iterable[str] = ("128M", "370M", "1.3B"), batch: int = BATCH) -> list[Cell]:
    subjects = (ours, "swiglu", "swiglu_compiled")
    return [Cell("models", SHAPES[name], length, subjects, batch, direction) for name in names for direction in ("forward", "training")]


def kernel_cells(ours: str, lengths: Iterable[int] = LENGTHS, shape: Shape = SHAPES["paper"], batch: int = BATCH) -> list[Cell]:
    """The operator alone, for the roofline; with backward at every third length."""
    kernel = (ours.replace("flashmhf_", "kernel_"),)
    lengths = tuple(lengths)
    cells = [Cell("kernel", shape, n, kernel, batch) for n in lengths]
    return cells + [Cell("kernel", shape, n, kernel, batch, direction="training") for n in lengths[::3]]


def ours_for(shape: Shape, settings: Settings) -> str:
    return f"flashmhf_{first_backend(shape, settings)}"


def run(cells: Iterable, context: Context, save: Callable[[dict], None] = lambda record: None, measure: Callable | None = None) -> dict:
    """The record of all cells, each measured by ``measure(cell, context)`` (default: :func:`run_cell`).

    ``save`` is called with the record after each cell, so that an interrupted run leaves what it has.
    """
    measure = measure or run_cell
    device = context.settings.device
    start = time.monotonic()
    record = {"schema": 1, "environment": environment.describe(device), "rows": []}
    record["settings"] = {
        "dtype": str(context.settings.dtype).removeprefix("torch."),
        "rounds": context.rounds,
        "window_seconds": context.window_seconds,
        "training_window_seconds": context.training_window_seconds,
        "settle_seconds": context.settle_seconds,
        "checked_rows": CHECKED_ROWS,
    }
    record["before"] = {"sensors_idle": environment.sensors(device)} | yardstick(context)
    record["before"]["sensors"] = environment.sensors(device)
    for cell in cells:
        record["rows"] += measure(cell, context)
        record["seconds"] = round(time.monotonic() - start, 1)
        save(record)
    clear(device)
    record["after"] = yardstick(context) | {"sensors": environment.sensors(device)}
    record["seconds"] = round(time.monotonic() - start, 1)
    save(record)
    return record


_COLUMNS = (
    *("group", "shape", "batch", "length", "tokens", "direction", "timing", "subject", "status", "reason", "layers"),
    *("layer_ms.p20", "layer_ms.p50", "layer_ms.p80", "stack_ms", "tflops", "gb_per_s", "memory_mib.beyond", "memory_mib.total"),
    *("error", "samples", "weight_sets"),
)


def write_csv(record: dict, path: pathlib.Path) -> None:
    """One line a row, with the device and the version in the first columns."""
    fixed = {"device": record["environment"]["device"], "flashmhf": record["environment"]["flashmhf"]}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*fixed, *_COLUMNS], lineterminator="\n")
        writer.writeheader()
        for row in record["rows"]:
            flat = {f"{a}.{b}": value for a, part in row.items() if isinstance(part, dict) for b, value in part.items()} | row
            writer.writerow(fixed | {name: flat.get(name, "") for name in _COLUMNS})


def write_json(record: dict, path: pathlib.Path) -> None:
    path.write_text(json.dumps(_rounded(record), indent=1) + "\n")


def _rounded(value):
    """Six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value
