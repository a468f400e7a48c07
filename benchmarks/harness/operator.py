"""The operator alone: time, rate, memory and error by direction and shape, with a matrix product in the same rounds.

A case is one shape and one direction. Its subjects (the operator, its deterministic mode, the router fused and apart, SwiGLU of the same
width) are timed in rounds as in :mod:`.suite`. Before that, each is checked against float64 on the tensors that are timed. A pass calls
a subject on several sets of inputs, together larger than the L2 cache. Few tokens are replayed from a CUDA graph, because the host
launches more slowly than the GPU runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import torch
import torch.utils.checkpoint
from torch import Tensor

import flashmhf
from flashmhf import backends, reference, testing

from . import suite, timing
from .paper import table
from .shapes import BATCH, LENGTHS
from .subjects import Settings, why_no_backend

FUSED = ("hopper", "triton")
MATMUL = "8192³ product"
GRAPH_TOKENS = 512  # up to so many, the host takes longer to launch a call than the GPU to run it
GRAPH_CALLS = 16
CHECKED_ROWS = 512
FEW_TOKENS = 256  # weight gradients of so few tokens have few independent errors
PASS_SECONDS = 2e-3  # recording the events around a pass takes microseconds


@dataclass(frozen=True)
class Size:
    """T tokens, H heads of dimension d_h, E sub-networks a head of width d_e."""

    T: int
    H: int
    d_h: int
    E: int
    d_e: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """From "T,H,d_h,E,d_e". Raises ValueError for anything but five positive integers."""
        parts = text.split(",")
        if len(parts) != 5 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"a shape is T,H,d_h,E,d_e, five positive integers; got {text!r}")
        return cls(*map(int, parts))

    @property
    def products(self) -> int:
        """Half the operations of one T x d_h x d_ff product in every head: the unit of :attr:`Subject.work`."""
        return self.T * self.H * self.d_h * self.E * self.d_e


FLAGSHIP = Size(32256, 16, 128, 22, 384)  # the paper's efficiency table at L = 4032
_MODELS = (Size(32768, 16, 128, 15, 384), Size(32768, 8, 128, 7, 384), Size(32768, 6, 128, 8, 256))  # 1.3B, 370M, 128M


def _flagship(*tokens: int) -> tuple[Size, ...]:
    return tuple(Size(t, *list(asdict(FLAGSHIP).values())[1:]) for t in tokens)


SIZES = {
    "forward": (
        *_flagship(*(BATCH * length for length in LENGTHS)),
        *_MODELS,
        *(Size(32256, 32, 64, 22, 192), Size(32256, 21, 96, 22, 256), Size(32256, 8, 256, 22, 704)),
        *_flagship(1, 16, 64, 128, 256),
    ),
    "backward": (
        *_flagship(3072, 12288, 32256, 129024),
        *_MODELS,
        *(Size(32768, 16, 64, 22, 192), Size(32768, 16, 96, 22, 256), Size(16384, 8, 256, 22, 704)),
        *_flagship(1, 16, 64, 256),
    ),
}
QUICK = {direction: (FLAGSHIP, *(size for size in sizes if size.d_h != 128), *_flagship(1)) for direction, sizes in SIZES.items()}

# The flagship's heads, then as many as layers of 4,096 and 8,192 features have.
GROUPED = (*_flagship(1, 16, 64, 1536, 32256), Size(1, 32, 128, 22, 384), Size(1, 64, 128, 22, 384))


@dataclass(frozen=True)
class Case:
    """A shape, a direction, a back end and a dtype.

    compared: SwiGLU, the separate router and the materialising code are measured, too. group: heads of q that share a head of K, U and V.
    """

    direction: str
    backend: str
    size: Size
    dtype: torch.dtype
    compared: bool = False
    group: int = 1

    @property
    def kv_heads(self) -> int:
        return self.size.H // self.group


@dataclass(frozen=True)
class Subject:
    """``call`` on a problem; ``work``: useful operations in units of :attr:`Size.products`; ``check``: its errors against float64."""

    call: Callable[[testing.Problem], object]
    work: int
    check: Callable[[testing.Problem, object], dict[str, tuple[Tensor, Tensor]]] | None = None


# Forward


def _rows(p: testing.Problem) -> Tensor:
    generator = torch.Generator(p.q.device).manual_seed(1)
    return torch.randperm(p.q.shape[0], device=p.q.device, generator=generator)[:CHECKED_ROWS]


def _check_forward(p: testing.Problem, out: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    rows = _rows(p)
    return {"out": (out[rows], p.exact_forward(rows))}


def _check_gated_forward(p: testing.Problem, out: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return _check_forward(p.routed(), out)


def _swiglu(p: testing.Problem) -> torch.nn.Module:
    heads, subnets, subnet_dim, head_dim = p.k.shape
    width = subnets * subnet_dim
    module = flashmhf.SwiGLU(heads * head_dim, width, device=p.q.device, dtype=p.q.dtype)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return module


def _forward_subjects(backend: str, compared: bool, swiglu: torch.nn.Module | None) -> dict[str, Subject]:
    ops = torch.ops.flashmhf
    subjects = {
        "forward": Subject(lambda p: ops.forward(*p.operands, p.r, backend=backend), 6, _check_forward),
        "gated forward": Subject(lambda p: ops.gated_forward(*p.operands, p.w, p.eps, backend=backend), 6, _check_gated_forward),
    }
    if compared:
        subjects["gate, then forward"] = Subject(
            lambda p: ops.forward(*p.operands, flashmhf.gate(p.q, p.w, p.eps), backend=backend), 6, _check_gated_forward
        )
        if backend not in FUSED:
            subjects["materialising"] = Subject(lambda p: reference.forward(*p.operands, p.r), 6, _check_forward)
        if swiglu is not None:
            subjects["SwiGLU"] = Subject(lambda p: swiglu(p.q.flatten(-2)), 6)
    return subjects


# Backward


def _check_gradients(exact: str, last: str, p: testing.Problem, gradients: tuple[Tensor, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """First and last head: every token and sub-network of theirs."""
    pairs = {}
    for head in {0, p.q.shape[1] - 1}:
        dq, dk, du, dv, rest = gradients
        ours = dq[:, head], dk[head], du[head], dv[head], rest[:, head] if last == "dr" else rest[head]
        for name, actual, truth in zip(("dq", "dk", "du", "dv", last), ours, getattr(p, exact)(head), strict=True):
            pairs[f"{name} of head {head}"] = actual, truth
    return pairs


_check_backward = functools.partial(_check_gradients, "exact_backward", "dr")
_check_gated_backward = functools.partial(_check_gradients, "exact_gated_backward", "dw")


def _backward_subjects(backend: str, compared: bool, swiglu: torch.nn.Module | None) -> dict[str, Subject]:
    ops = torch.ops.flashmhf

    def backward(p: testing.Problem, deterministic: bool = False):
        return ops.backward(p.grad_out, *p.operands, p.r, deterministic, backend=backend)

    def both(p: testing.Problem):
        ops.forward(*p.operands, p.r, backend=backend)
        return backward(p)

    subjects = {"backward": Subject(backward, 16, _check_backward)}
    if backend == "hopper":  # the others are always deterministic
        subjects["deterministic backward"] = Subject(lambda p: backward(p, True), 16, _check_backward)
    if not compared:
        return subjects
    subjects["gated backward"] = Subject(
        lambda p: ops.gated_backward(p.grad_out, *p.operands, p.w, p.eps, backend=backend), 16, _check_gated_backward
    )
    subjects["forward and backward"] = Subject(both, 22, _check_backward)
    if backend not in FUSED:
        subjects["materialising"] = Subject(lambda p: reference.backward(p.grad_out, *p.operands, p.r), 16, _check_backward)
    if swiglu is not None:

        @torch.enable_grad()
        def training(p: testing.Problem, call: Callable) -> tuple[Tensor, ...]:
            x = p.q.flatten(-2).detach().requires_grad_()
            return torch.autograd.grad(call(x), [x, *swiglu.parameters()], p.grad_out.flatten(-2))

        checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, swiglu, use_reentrant=False)
        subjects["SwiGLU, forward and backward"] = Subject(lambda p: training(p, swiglu), 18)
        subjects["checkpointed SwiGLU, forward and backward"] = Subject(lambda p: training(p, checkpointed), 18)
    return subjects


def subjects_of(case: Case, swiglu: torch.nn.Module | None = None) -> dict[str, Subject]:
    make = {"forward": _forward_subjects, "backward": _backward_subjects}[case.direction]
    return make(case.backend, case.compared, swiglu)


# Measuring


def _why_not(backend: str, settings: Settings, size: Size) -> str | None:
    return why_no_backend(backend, settings, d_h=size.d_h, d_e=size.d_e)


def first_backend(settings: Settings) -> str:
    """The back end that ``backend="auto"`` chooses for the flagship's shape."""
    return next(name for name in backends.BACKENDS if _why_not(name, settings, FLAGSHIP) is None)


def largest_error(subject: Subject, p: testing.Problem, fused: bool) -> float:
    """The largest relative L2 error over the subject's results. Raises suite.RedCheckError when one exceeds its limit.

    Fused back ends: the fixed limits of :mod:`flashmhf.testing`. Others: those of a whole layer, as nothing is materialised to compare.
    """
    pairs = subject.check(p, subject.call(p))
    worst = 0.0
    for name, (actual, exact) in pairs.items():
        error = testing.relative_l2(actual, exact)
        few = p.q.shape[0] <= FEW_TOKENS
        limit = testing.fixed_limit(exact.numel(), actual.dtype, few_tokens=few) if fused else suite.LIMITS[p.q.dtype]
        if not error <= limit:
            raise suite.RedCheckError(f"{name}: relative L2 error {error:.2e} against float64, the limit is {limit:.1e}")
        worst = max(worst, error)
    return worst


@functools.lru_cache(1)
def _matmul(device: torch.device) -> timing.Pass:
    a, b = (torch.randn(suite.YARDSTICK, suite.YARDSTICK, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _prepare(subject: Subject, sets: list[testing.Problem], case: Case, context: suite.Context) -> suite.Prepared:
    """Checks the subject, measures its memory, and makes the pass to time."""
    device = context.settings.device
    row = {}
    if subject.check:
        row["error"] = largest_error(subject, sets[0], case.backend in FUSED)
    suite.clear(device)
    once = functools.partial(subject.call, sets[0])
    row["memory_mib"] = (timing.peak_memory(once, device) if device.type == "cuda" else timing.peak_tensor_bytes(once)) / 2**20
    graph = device.type == "cuda" and case.size.T <= GRAPH_TOKENS
    calls = GRAPH_CALLS if graph else len(sets)

    def run() -> None:
        for i in range(calls):
            subject.call(sets[i % len(sets)])

    row["timing"] = "CUDA graph" if graph else "events" if device.type == "cuda" else "host clock"
    several, repeats = timing.repeated(timing.graphed(run) if graph else run, context.timer, PASS_SECONDS)
    return suite.Prepared(several, calls * repeats, row | {"flops": subject.work * case.size.products})


@torch.no_grad()
def run_case(case: Case, context: suite.Context) -> list[dict]:
    """One row for every subject of the case; on a CUDA device one more for the matrix product of the same rounds."""
    device, size = context.settings.device, case.size
    fixed = asdict(size) | {"H_kv": case.kv_heads, "direction": case.direction, "backend": case.backend}
    fixed["dtype"] = str(case.dtype).removeprefix("torch.")
    reason = _why_not(case.backend, Settings(device, case.dtype), size)
    if reason is None and time.monotonic() > context.deadline:
        reason = "the time budget was used up"
    if reason is not None:
        rows = {case.direction: fixed | {"subject": case.direction, "status": "missing", "reason": reason}}
        return _finished(rows, context)

    suite.clear(device)
    bytes_each = case.dtype.itemsize * (2 * size.T * size.H * size.d_h + 3 * case.kv_heads * size.E * size.d_e * size.d_h)
    count = timing.cold_copies(bytes_each, context.l2_bytes)
    sets = [testing.problem(*asdict(size).values(), case.dtype, device, seed=seed, num_kv_heads=case.kv_heads) for seed in range(count)]
    if case.direction == "forward":  # a model served in 16 bits holds W in 16 bits
        sets = [replace(p, w=p.w.to(case.dtype)) for p in sets]
    swiglu = _swiglu(sets[0]) if case.compared and case.backend in FUSED else None
    rows, ready = {}, {}
    for name, subject in subjects_of(case, swiglu).items():
        rows[name] = fixed | {"subject": name}
        prepared = suite.attempt(rows[name], lambda subject=subject: _prepare(subject, sets, case, context))
        if prepared is not None:
            ready[name] = prepared
    if device.type == "cuda" and ready:
        rows[MATMUL] = fixed | {"subject": MATMUL}
        ready[MATMUL] = suite.Prepared(_matmul(device), 1, {"flops": 2 * suite.YARDSTICK**3})
    runs = {name: prepared.run for name, prepared in ready.items()}
    for name, samples in suite.measure_together(runs, rows, context, context.window_seconds).items():
        ms = {key: 1e3 * value / ready[name].calls for key, value in timing.percentiles(samples).items()}
        flops = ready[name].row.pop("flops")
        rows[name] |= ready[name].row | {"status": "ok", "ms": ms, "tflops": flops / ms["p50"] / 1e9, "samples": len(samples)}
    product = rows.get(MATMUL, {}).get("tflops")
    for row in rows.values():
        if product and row["status"] == "ok":
            row["x_matmul"] = row["tflops"] / product
    return _finished(rows, context)


def _finished(rows: dict[str, dict], context: suite.Context) -> list[dict]:
    for row in rows.values():
        context.log(line(row))
    return list(rows.values())


def cases(
    directions: Iterable[str],
    names: Iterable[str],
    dtypes: Iterable[torch.dtype],
    sizes: Iterable[Size] = (),
    quick: bool = False,
    groups: Iterable[int] = (),
) -> list[Case]:
    """``sizes``: empty for the default shapes of each direction. FLAGSHIP and the given ``sizes`` are measured with all comparisons.

    ``groups``: every shape (default: GROUPED) with each number of heads that share weights, without comparisons. Raises ValueError where
    one does not divide H, and for the backward, whose check reads a weight head for every head.
    """
    groups = tuple(groups)
    found = []
    for direction in directions:
        for backend in names:
            for dtype in dtypes:
                chosen = tuple(sizes) or (GROUPED if groups else (QUICK if quick else SIZES)[direction])
                if groups:
                    found += [Case(direction, backend, size, dtype, group=group) for size in chosen for group in groups]
                else:
                    found += [Case(direction, backend, size, dtype, compared=bool(sizes) or size == FLAGSHIP) for size in chosen]
    for case in found:
        if case.group > 1 and case.direction != "forward":
            raise ValueError(f"direction is {case.direction!r}; heads that share weights are measured in 'forward' only")
        if case.size.H % case.group:
            raise ValueError(f"H = {case.size.H} is not a multiple of a group of {case.group}")
    return found


# Reporting


def _spread(row: dict) -> str:
    """Half the distance of the 20 and 80 percentiles, in % of the median."""
    return f"{50 * (row['ms']['p80'] - row['ms']['p20']) / row['ms']['p50']:.1f}"


def _subject(row: dict) -> str:
    """With the number of weight heads, where heads share them."""
    kv_heads = row.get("H_kv", row["H"])
    return row["subject"] if kv_heads == row["H"] else f"{row['subject']}, H_kv={kv_heads}"


def line(row: dict) -> str:
    head = (
        f"{row['backend']:<7} T={row['T']:<7} H={row['H']:<3} d_h={row['d_h']:<4} E={row['E']:<3} d_e={row['d_e']:<4} {_subject(row):<42}"
    )
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['reason']}"
    product = f" {row['x_matmul']:.3f} of the product" if "x_matmul" in row else ""
    error = f" error {row['error']:.1e}" if "error" in row else ""
    return f"{head} {row['ms']['p50']:>9.4f} ms ±{_spread(row)}% {row['tflops']:>6.1f} TFLOP/s{product}{error}"


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def summary(record: dict) -> dict[str, float]:
    """Ratios between rows: evenness over lengths, and at each compared shape the operator beside SwiGLU and its other modes."""
    ok = [row for row in record["rows"] if row["status"] == "ok"]
    ratios = {}
    for backend in dict.fromkeys(row["backend"] for row in ok):
        for direction in ("forward", "backward"):
            long = [r for r in ok if _subject(r) == direction and r["backend"] == backend and r["T"] > GRAPH_TOKENS]
            rates = [r["tflops"] for r in long if all(r[name] == value for name, value in asdict(FLAGSHIP).items() if name != "T")]
            if len(rates) > 1:
                ratios[f"{backend}, {direction}: lowest ÷ highest rate over T at the flagship's other sizes"] = min(rates) / max(rates)
    sizes = ("backend", "direction", "dtype", *asdict(FLAGSHIP))
    groups: dict[tuple, dict[str, dict]] = {}
    for row in ok:
        groups.setdefault(tuple(row[name] for name in sizes), {})[_subject(row)] = row
    pairs = (
        ("SwiGLU", "forward"),
        ("gate, then forward", "gated forward"),
        ("deterministic backward", "backward"),
        ("forward and backward", "SwiGLU, forward and backward"),
        ("forward and backward", "checkpointed SwiGLU, forward and backward"),
        ("materialising", "forward"),
        ("materialising", "backward"),
    )
    for key, group in groups.items():
        for above, below in pairs:
            if {above, below} <= group.keys():
                place = f"T={key[3]} d_h={key[5]} d_e={key[7]} {key[2]}"
                ratios[f"{key[0]}, {place}: {above} ÷ {below}, time"] = group[above]["ms"]["p50"] / group[below]["ms"]["p50"]
        for name, row in group.items():
            if name != row["subject"] and row["subject"] in group:
                what = f"{key[0]}, T={key[3]} d_h={key[5]} d_e={key[7]} {key[2]}: {row['subject']}, H_kv={key[4]} ÷ {row['H_kv']}, time"
                ratios[what] = group[row["subject"]]["ms"]["p50"] / row["ms"]["p50"]
    return ratios


def report(record: dict) -> str:
    """The record as Markdown."""
    where = record["environment"]
    lines = []
    for row in record["rows"]:
        shape = [f"{row['T']:,}", *(str(row[name]) for name in ("H", "d_h", "E", "d_e"))]
        if row["status"] != "ok":
            lines.append([row["backend"], *shape, _subject(row), f"{row['status']}: {row['reason']}", *[""] * 5])
            continue
        figures = [_figure(row["ms"]["p50"], 3), _spread(row), _figure(row["tflops"], 0), _figure(row.get("x_matmul"), 3)]
        error = f"{row['error']:.1e}" if "error" in row else ""
        lines.append([row["backend"], *shape, _subject(row), *figures, _figure(row.get("memory_mib"), 0), error])
    header = ["back end", "T", "H", "d_h", "E", "d_e", "subject", "ms", "± %", "TFLOP/s", "÷ product", "MiB", "error"]
    ratios = [[name, f"{value:.3f}"] for name, value in summary(record).items()]
    parts = [
        f"# The operator on {where['device']}, {where['date']}",
        f"`{where['command']}`",
        "ms: median. ±: half the distance of the 20 and 80 percentiles. TFLOP/s: useful operations, 6 T H d_h E d_e forward, 16 backward. "
        "÷ product: the rate over that of an 8192³ bf16 product in the same rounds. MiB: peak memory beyond the inputs. "
        "error: the largest relative L2 error against float64.",
        table(header, lines),
    ]
    return "\n\n".join([*parts, *([table(["ratio", "measured"], ratios)] if ratios else [])]) + "\n"
