"""Whole feed-forward networks, one layer times the model's layers: the paper's efficiency table, training, decode."""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from flashmhf.testing import relative_l2

from ..harness import timing
from ..harness.measure import LIMITS, Cell, Context, MissingError, Prepared, RedCheckError
from .shapes import BATCH, DECODE_TOKENS, LENGTHS, SHAPES, Shape
from .subjects import SUBJECTS, Call, Settings, Subject, first_backend, randomise

CHECKED_ROWS = 64
GRAPH_SETS = 8  # layers in one graph, so that its launch is a small part of a pass
ALSO = ("flashmhf_triton", "swiglu_liger", "dense_moe", "official")
ALSO_LENGTHS = (384, 4032)


def check(
    subject: Subject, shape: Shape, module: nn.Module, call: Call, x: Tensor, direction: str, generator: torch.Generator
) -> float:
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
        for name, gradient, truth in zip(names, gradients, expected[1:], strict=True):
            errors[f"d {name}"] = relative_l2(gradient, truth) / 2
    limit = LIMITS[x.dtype]
    worst = max(errors, key=errors.get)
    if not errors[worst] <= limit:
        error, limit = (each * (1 if worst == "output" else 2) for each in (errors[worst], limit))
        raise RedCheckError(f"{worst}: relative L2 error {error:.2e} against float64; limit {limit:.0e}")
    return errors[worst]


def _one_call(call: Call, direction: str) -> Callable[[nn.Module, Tensor, Tensor | None], None]:
    def forward(module, x, upstream):
        with torch.no_grad():
            call(module, x)

    def training(module, x, upstream):
        torch.autograd.grad(call(module, x), [x, *module.parameters()], upstream)

    return forward if direction == "forward" else training


def prepare(
    subject: Subject, shape: Shape, size: tuple[int, int], direction: str, graph: bool, official: pathlib.Path | None,
    context: Context,
) -> Prepared:  # fmt: skip
    """Make the subject's layers and inputs of ``size``, check the first, measure its memory, make the pass."""
    settings, training = Settings(context.device, context.dtype, official), direction == "training"
    reason = subject.why_missing(shape, settings)
    if reason is not None:
        raise MissingError(reason)
    generator = torch.Generator(settings.device).manual_seed(0)

    def layer() -> nn.Module:
        return randomise(subject.make(shape, settings), generator).requires_grad_(training)

    def tokens() -> Tensor:
        made = torch.randn(*size, shape.d_model, device=settings.device, generator=generator)
        return made.to(settings.dtype).requires_grad_(training)

    modules, inputs = [layer()], [tokens()]
    call = subject.caller()
    error = check(subject, shape, modules[0], call, inputs[0], direction, generator)
    upstream = tokens().detach() if training else None
    one = _one_call(call, direction)
    beyond = timing.peak_memory(lambda: one(modules[0], inputs[0], upstream), settings.device)

    weight_bytes = sum(p.numel() * p.element_size() for p in modules[0].parameters())
    input_bytes = inputs[0].numel() * inputs[0].element_size()
    sets = max(timing.cold_copies(weight_bytes, context.l2_bytes), GRAPH_SETS if graph else 0)
    modules += [layer() for _ in range(sets - 1)]
    if input_bytes < timing.COLD * context.l2_bytes:
        inputs += [tokens() for _ in range(len(modules) - 1)]

    def run() -> None:
        for i, module in enumerate(modules):
            one(module, inputs[i % len(inputs)], upstream)

    count = size[0] * size[1]
    flops = subject.flops(shape, count)
    if training:
        flops += subject.backward_flops(shape, count) if subject.backward_flops else 2 * flops
    row = {"layers": subject.layers(shape), "error": error, "flops": flops, "weight_sets": len(modules)}
    row["bytes"] = weight_bytes + 2 * input_bytes
    if beyond is not None:
        row["memory_mib"] = {"beyond": beyond / 2**20, "total": (beyond + weight_bytes + input_bytes) / 2**20}
    return Prepared(timing.graphed(run) if graph else run, len(modules), row)


def layer_cell(
    group: str, shape: Shape, length: int, subjects: Iterable[str], *, batch: int = BATCH, direction: str = "forward",
    graph: bool = False, official: pathlib.Path | None = None,
) -> Cell:  # fmt: skip
    """Subjects on ``batch`` sequences of ``length`` tokens. direction: "forward", or "training" (and backward)."""
    row = {"group": group, "shape": shape.name, "batch": batch, "length": length, "tokens": batch * length}
    row |= {"direction": direction, "timing": "CUDA graph" if graph else "events"}

    def one(name: str, context: Context, made: None) -> Prepared:
        return prepare(SUBJECTS[name], shape, (batch, length), direction, graph, official, context)

    parts = {name: functools.partial(one, name) for name in subjects}
    return Cell(row, parts, window_scale=5 if direction == "training" else 1)  # a pass of both directions is longer


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=LENGTHS, metavar="L", help="tokens of a sequence; of decode, tokens")
    add("--subjects", nargs="+", choices=SUBJECTS, metavar="NAME", help=f"only these of {', '.join(SUBJECTS)}")
    add("--shape", choices=SHAPES, default="paper", help="(paper)")
    add("--official", type=pathlib.Path, metavar="PATH", help="checkout of the official code to measure as well")


def cells(options: argparse.Namespace, context: Context) -> list[Cell]:
    """The cells of the parts: FlashMHF against SwiGLU, eager and compiled, the other subjects at two lengths only."""
    shape = SHAPES[options.shape]
    ours = f"flashmhf_{first_backend(shape, Settings(context.device, context.dtype))}"
    pair = (ours, "swiglu", "swiglu_compiled")
    others = tuple(name for name in ALSO if name != ours)
    gpu = context.device.type == "cuda"
    # Without the official kernels: their backward tunes sixteen kernels for every length before it runs.
    trained = (*pair, "swiglu_checkpointed", *(name for name in others if name != "official"))
    tokens = DECODE_TOKENS if options.lengths == LENGTHS else options.lengths
    official = {"official": options.official}
    also = {n: (*pair, "mhffn_naive", *(others if n in ALSO_LENGTHS else ())) for n in options.lengths}
    plan = {
        "latency": [(n, names, official) for n, names in also.items()],
        "training": [(4032, trained, {"direction": "training"})],
        "decode": [(1, pair, {"batch": t, "graph": gpu}) for t in tokens],
    }
    found = []
    for part in options.parts:
        for length, names, settings in plan[part]:
            names = [name for name in names if options.subjects is None or name in options.subjects]
            if names:
                found.append(layer_cell(part, shape, length, names, **settings))
    return found
