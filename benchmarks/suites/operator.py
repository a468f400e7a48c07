"""The operator alone: time, rate, memory and error by direction and shape, with a matrix product beside.

A cell is one shape, direction, back end and dtype. Its subjects are the operator, with the router fused, and in its
deterministic mode, each checked against float64. Small batches are replayed from a graph.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from flashmhf import testing

from ..harness import timing
from ..harness.measure import LIMITS, Cell, Context, MissingError, Prepared, clear, require
from .shapes import BATCH, LENGTHS
from .subjects import BACKENDS, why_no_backend

FUSED = ("hopper", "triton")
GRAPH_TOKENS = 1024  # up to so many, the host may take longer to launch a call than the GPU to run it
GRAPH_CALLS = 16
CHECKED_ROWS = 512
FEW_TOKENS = 256  # weight gradients of so few tokens have few independent errors
PASS_SECONDS = 2e-3  # recording the events around a pass takes microseconds


@dataclass(frozen=True)
class Size:
    """T tokens, H heads of dimension d_h, E sub-networks per head of width d_e."""

    T: int
    H: int
    d_h: int
    E: int
    d_e: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """The size in "T,H,d_h,E,d_e". Raises argparse.ArgumentTypeError for anything but five positive integers."""
        parts = text.split(",")
        if len(parts) != 5 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise argparse.ArgumentTypeError(f"a shape is T,H,d_h,E,d_e, five positive integers; got {text!r}")
        return cls(*map(int, parts))

    @property
    def products(self) -> int:
        """Half the operations of one T x d_h x d_ff product in every head: the unit of :attr:`Subject.work`."""
        return self.T * self.H * self.d_h * self.E * self.d_e


FLAGSHIP = Size(32256, 16, 128, 22, 384)  # the paper's efficiency table at L = 4032
_MODELS = (Size(32768, 16, 128, 15, 384), Size(32768, 8, 128, 7, 384), Size(32768, 6, 128, 8, 256))  # 1.3B, 370M, 128M


def _flagship(*tokens: int) -> tuple[Size, ...]:
    return tuple(replace(FLAGSHIP, T=t) for t in tokens)


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
QUICK = {name: (FLAGSHIP, *(size for size in sizes if size.d_h != 128), *_flagship(1)) for name, sizes in SIZES.items()}


@dataclass(frozen=True)
class Subject:
    """``call`` on a problem; ``work``: operations in :attr:`Size.products`; ``check``: errors against float64."""

    call: Callable[[testing.Problem], object]
    work: int
    check: Callable[[testing.Problem, object], dict[str, tuple[Tensor, Tensor]]]


# Forward


def _rows(p: testing.Problem) -> Tensor:
    generator = torch.Generator(p.q.device).manual_seed(1)
    return torch.randperm(p.q.shape[0], device=p.q.device, generator=generator)[:CHECKED_ROWS]


def _check_forward(p: testing.Problem, out: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    rows = _rows(p)
    return {"out": (out[rows], p.exact_forward(rows))}


def _check_gated_forward(p: testing.Problem, out: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return _check_forward(p.routed(), out)


def _forward_subjects(backend: str) -> dict[str, Subject]:
    ops = torch.ops.flashmhf
    return {
        "forward": Subject(lambda p: ops.forward(*p.operands, p.r, backend=backend), 6, _check_forward),
        "gated forward": Subject(
            lambda p: ops.gated_forward(*p.operands, p.w, p.eps, backend=backend), 6, _check_gated_forward
        ),
    }


# Backward


def _check_gradients(
    exact: str, last: str, p: testing.Problem, gradients: tuple[Tensor, ...]
) -> dict[str, tuple[Tensor, Tensor]]:
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


def _backward_subjects(backend: str) -> dict[str, Subject]:
    ops = torch.ops.flashmhf

    def backward(p: testing.Problem, deterministic: bool = False):
        return ops.backward(p.grad_out, *p.operands, p.r, deterministic, backend=backend)

    def gated(p: testing.Problem):
        return ops.gated_backward(p.grad_out, *p.operands, p.w, p.eps, backend=backend)

    subjects = {"backward": Subject(backward, 16, _check_backward)}
    if backend == "hopper":  # the others are always deterministic
        subjects["deterministic backward"] = Subject(lambda p: backward(p, True), 16, _check_backward)
    return subjects | {"gated backward": Subject(gated, 16, _check_gated_backward)}


# Cells


def largest_error(subject: Subject, p: testing.Problem, fused: bool) -> float:
    """The largest relative L2 error over the subject's results. Raises RedCheckError when one exceeds its limit.

    Fused back ends: the fixed limits of :mod:`flashmhf.testing`. Others: those of a whole layer, as nothing is
    materialised to compare.
    """
    worst = 0.0
    for name, (actual, exact) in subject.check(p, subject.call(p)).items():
        few = p.q.shape[0] <= FEW_TOKENS
        limit = testing.fixed_limit(exact.numel(), actual.dtype, few_tokens=few) if fused else LIMITS[p.q.dtype]
        worst = max(worst, require({name: testing.relative_l2(actual, exact)}, limit))
    return worst


def _prepare(subject: Subject, problems: list[testing.Problem], size: Size, fused: bool, context: Context) -> Prepared:
    """Checks the subject, measures its memory, and makes the pass to time."""
    device = context.device
    row: dict[str, object] = {}
    with torch.no_grad():
        row["error"] = largest_error(subject, problems[0], fused)
        clear(device)
        once = functools.partial(subject.call, problems[0])
        row["memory_mib"] = (
            timing.peak_memory(once, device) if device.type == "cuda" else timing.peak_tensor_bytes(once)
        ) / 2**20
        graph = device.type == "cuda" and size.T <= GRAPH_TOKENS
        calls = GRAPH_CALLS if graph else len(problems)

        @torch.no_grad()
        def run() -> None:
            for i in range(calls):
                subject.call(problems[i % len(problems)])

        row["timing"] = "CUDA graph" if graph else "events" if device.type == "cuda" else "host clock"
        several, repeats = timing.repeated(timing.graphed(run) if graph else run, context.timer, PASS_SECONDS)
    return Prepared(several, calls * repeats, row | {"flops": subject.work * size.products})


def cell(direction: str, backend: str, size: Size, dtype: torch.dtype) -> Cell:
    def inputs(context: Context) -> list[testing.Problem]:
        reason = why_no_backend(backend, context.device, dtype, d_h=size.d_h, d_e=size.d_e)
        if reason is not None:
            raise MissingError(reason)
        bytes_each = dtype.itemsize * (2 * size.T * size.H * size.d_h + 3 * size.H * size.E * size.d_e * size.d_h)
        seeds = range(timing.cold_copies(bytes_each, context.l2_bytes))
        sets = [testing.problem(*asdict(size).values(), dtype, context.device, seed=seed) for seed in seeds]
        # a model served in 16 bits holds W in 16 bits
        return [replace(p, w=p.w.to(dtype)) for p in sets] if direction == "forward" else sets

    def prepare(subject: Subject, context: Context, problems: list[testing.Problem]) -> Prepared:
        return _prepare(subject, problems, size, backend in FUSED, context)

    made = {"forward": _forward_subjects, "backward": _backward_subjects}[direction](backend)
    row = {"direction": direction, "backend": backend, "dtype": str(dtype).removeprefix("torch."), **asdict(size)}
    subjects = {name: functools.partial(prepare, subject) for name, subject in made.items()}
    return Cell(row, subjects, inputs, product=True, window_scale=2)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", nargs="+", choices=BACKENDS, help="the first usable here")
    add("--shapes", nargs="+", type=Size.parse, default=[], metavar="T,H,d_h,E,d_e", help="default: the paper's")
    add("--quick", action="store_true", help="fewer shapes")


def cells(options: argparse.Namespace, context: Context) -> list[Cell]:
    usable = {"d_h": FLAGSHIP.d_h, "d_e": FLAGSHIP.d_e}
    first = next(name for name in BACKENDS if why_no_backend(name, context.device, context.dtype, **usable) is None)
    return [
        cell(direction, backend, size, context.dtype)
        for direction in options.parts
        for backend in options.backend or [first]
        for size in options.shapes or (QUICK if options.quick else SIZES)[direction]
    ]
