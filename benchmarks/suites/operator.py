"""The operator alone: time, rate, memory and error by direction and shape, with a matrix product beside.

A cell is one shape, direction, back end and dtype. Its subjects are the operator, its deterministic mode, the router
fused and apart, and SwiGLU of the same width, each checked against float64. Small batches are replayed from a graph.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.utils.checkpoint
from torch import Tensor

import flashmhf
from flashmhf import reference, testing

from ..harness import proxy, timing
from ..harness.measure import LIMITS, Cell, Context, MissingError, Prepared, clear, require
from .shapes import BATCH, LENGTHS
from .subjects import why_no_backend

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


def swiglu_like(p: testing.Problem) -> torch.nn.Module:
    """A SwiGLU network as wide as the problem's heads together."""
    heads, subnets, subnet_dim, head_dim = p.k.shape
    module = flashmhf.SwiGLU(heads * head_dim, subnets * subnet_dim, device=p.q.device, dtype=p.q.dtype)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return proxy.of_triton(module)


def _forward_subjects(backend: str, compared: bool, swiglu: torch.nn.Module | None) -> dict[str, Subject]:
    ops = torch.ops.flashmhf
    subjects = {
        "forward": Subject(lambda p: ops.forward(*p.operands, p.r, backend=backend), 6, _check_forward),
        "gated forward": Subject(
            lambda p: ops.gated_forward(*p.operands, p.w, p.eps, backend=backend), 6, _check_gated_forward
        ),
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
        subjects["materialising"] = Subject(
            lambda p: reference.backward(p.grad_out, *p.operands, p.r), 16, _check_backward
        )
    if swiglu is not None:

        @torch.enable_grad()
        def training(p: testing.Problem, call: Callable) -> tuple[Tensor, ...]:
            x = p.q.flatten(-2).detach().requires_grad_()
            return torch.autograd.grad(call(x), [x, *swiglu.parameters()], p.grad_out.flatten(-2))

        checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, swiglu, use_reentrant=False)
        subjects["SwiGLU, forward and backward"] = Subject(lambda p: training(p, swiglu), 18)
        subjects["checkpointed SwiGLU, forward and backward"] = Subject(lambda p: training(p, checkpointed), 18)
    return subjects


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
        if subject.check:
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


def cell(direction: str, backend: str, size: Size, dtype: torch.dtype, *, compared: bool = False) -> Cell:
    """A shape, a direction, a back end and a dtype. compared: SwiGLU and other code are measured, too."""
    fused = backend in FUSED

    def inputs(context: Context) -> tuple[list[testing.Problem], torch.nn.Module | None]:
        reason = why_no_backend(backend, context.device, dtype, d_h=size.d_h, d_e=size.d_e)
        if reason is not None:
            raise MissingError(reason)
        bytes_each = dtype.itemsize * (2 * size.T * size.H * size.d_h + 3 * size.H * size.E * size.d_e * size.d_h)
        seeds = range(timing.cold_copies(bytes_each, context.l2_bytes))
        sets = [testing.problem(*asdict(size).values(), dtype, context.device, seed=seed) for seed in seeds]
        if direction == "forward":  # a model served in 16 bits holds W in 16 bits
            sets = [replace(p, w=p.w.to(dtype)) for p in sets]
        return sets, swiglu_like(sets[0]) if compared and fused else None

    def prepare(name: str, context: Context, made: tuple) -> Prepared:
        problems, swiglu = made
        return _prepare(make(backend, compared, swiglu)[name], problems, size, fused, context)

    make = {"forward": _forward_subjects, "backward": _backward_subjects}[direction]
    # made when the cell is measured
    names = make(backend, compared, torch.nn.Identity() if compared and fused else None)
    row = {
        "direction": direction, "backend": backend, "dtype": str(dtype).removeprefix("torch."), **asdict(size),
    }  # fmt: skip
    others = {"SwiGLU": "SwiGLU" if direction == "forward" else "SwiGLU, forward and backward"}
    faster_than = {name: (subject, 1.0) for name, subject in others.items() if subject in names}
    subjects = {name: functools.partial(prepare, name) for name in names}
    return Cell(row, subjects, inputs, product=True, faster_than=faster_than, window_scale=2)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", nargs="+", choices=flashmhf.info().reasons, help="the first usable here")
    add("--shapes", nargs="+", type=Size.parse, default=[], metavar="T,H,d_h,E,d_e", help="default: the paper's")
    add("--alone", action="store_true", help="with --shapes: the operator without what it is compared with")
    add("--quick", action="store_true", help="fewer shapes")


def cells(options: argparse.Namespace, context: Context) -> list[Cell]:
    """FLAGSHIP and the given shapes are measured with all comparisons."""
    size = FLAGSHIP
    reasons = {
        name: why_no_backend(name, context.device, context.dtype, d_h=size.d_h, d_e=size.d_e)
        for name in flashmhf.info().reasons
    }
    names = options.backend or [next(name for name, reason in reasons.items() if reason is None)]
    found = []
    for direction in options.parts:
        for backend in names:
            for size in options.shapes or (QUICK if options.quick else SIZES)[direction]:
                compared = not options.alone if options.shapes else size == FLAGSHIP
                found.append(cell(direction, backend, size, context.dtype, compared=compared))
    return found
