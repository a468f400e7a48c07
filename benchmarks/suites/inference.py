"""One layer at inference: CUDA graphs beside SwiGLU (serving), the host's time to queue a call (host)."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import flashmhf
from flashmhf import quantize
from flashmhf.testing import relative_l2

from ..harness import timing
from ..harness.measure import LIMITS, Cell, Context, MissingError, Prepared, require

SIZES, D_FF = (2048, 16, 22, 384), 8192
SETS = 4  # layers of a graph, together larger than the L2 cache
SERVING_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
HOST_TOKENS, HOST_CALLS, HOST_ROUNDS = (1, 64, 256, 1536), 50, 20


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, fullgraph=True, dynamic=True)


# CUDA graphs


class MergedSwiGLU(nn.Module):
    """SwiGLU with one product for gate and up, as inference engines have it: x [T, d_model] -> [T, d_model]."""

    def __init__(self, d_model: int, d_ff: int, **settings) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(d_model, 2 * d_ff, bias=False, **settings)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False, **settings)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Piece(nn.Module):
    """What an engine captures between two calls of attention: residual sum, RMSNorm, ``network``, both again."""

    def __init__(self, network: nn.Module, **settings) -> None:
        super().__init__()
        self.network = network
        self.before, self.after = (nn.RMSNorm(SIZES[0], eps=1e-5, **settings) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        residual = x + x
        residual = residual + self.network(self.before(residual))
        return self.after(residual) + residual


@functools.cache
def served(device: torch.device, dtype: torch.dtype) -> dict[str, list[nn.Module]]:
    """SETS modules of each kind for all cells; module, compiled and piece share their weights."""
    like = {"device": device, "dtype": dtype}
    modules = [flashmhf.FlashMHF(*SIZES, **like).eval() for _ in range(SETS)]
    merged = [MergedSwiGLU(SIZES[0], D_FF, **like) for _ in range(SETS)]
    return {
        "module": modules,
        "compiled": [compiled(module) for module in modules],
        "swiglu": [flashmhf.SwiGLU(SIZES[0], D_FF, **like) for _ in range(SETS)],
        "piece": [compiled(Piece(module, **like)) for module in modules],
        "piece swiglu": [compiled(Piece(module, **like)) for module in merged],
    }


SERVED = ("module", "compiled", "swiglu", "piece", "piece swiglu")


def serving_cell(tokens: int, names: tuple[str, ...] = SERVED) -> Cell:
    def make(context: Context) -> tuple:
        like = {"device": context.device, "dtype": context.dtype}
        return served(*like.values()), torch.randn(tokens, SIZES[0], **like)

    @torch.no_grad()
    def prepare(name: str, context: Context, made: tuple) -> Prepared:
        modules, x = made
        row = {}
        if name == "compiled":
            error = relative_l2(modules[name][0](x), modules["module"][0](x).double())
            row["error"] = require({"out": error}, LIMITS[x.dtype])

        @torch.no_grad()
        def run() -> None:
            for module in modules[name]:
                module(x)

        return Prepared(timing.graphed(run) if x.is_cuda else run, SETS, row)

    faster_than = {name: (name, 1.0) for name in ("swiglu", "piece swiglu")}
    subjects = {name: functools.partial(prepare, name) for name in names}
    return Cell({"T": tokens}, subjects, make, faster_than=faster_than)


# The host


@functools.cache
def queued(device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    like = {"device": device, "dtype": dtype}
    plain = {
        "flashmhf": flashmhf.FlashMHF(*SIZES, **like),
        "flashmhf q_norm": flashmhf.FlashMHF(*SIZES, q_norm=True, **like),
        "swiglu": flashmhf.SwiGLU(SIZES[0], D_FF, **like),
    }
    eager = {name: module.eval() for name, module in plain.items()}
    fp8 = {"flashmhf fp8": quantize.to_fp8(eager["flashmhf"])}
    return eager | fp8 | {f"{name} compiled": compiled(module) for name, module in eager.items()}


@torch.no_grad()
def inference(module: nn.Module, x: Tensor) -> None:
    module(x)


def training(module: nn.Module, parameters: list[nn.Parameter], x: Tensor) -> None:
    leaf = x.detach().requires_grad_()
    torch.autograd.grad(module(leaf), [leaf, *parameters], x)


@dataclass(frozen=True)
class HostCell:
    """Milliseconds in which the host queues a call behind products of some milliseconds, and their ratio to compiled
    SwiGLU's of the same round: medians over HOST_ROUNDS, since the host's speed drifts and single rounds are lucky.
    """

    tokens: int

    @property
    def row(self) -> dict:
        return {"T": self.tokens}

    def measure(self, context: Context) -> list[dict]:
        modules = queued(context.device, context.dtype)
        x = torch.randn(self.tokens, SIZES[0], device=context.device, dtype=context.dtype)
        filler = torch.randn(8192, 8192, device=context.device, dtype=context.dtype)
        runs = {(name, "forward"): functools.partial(inference, module, x) for name, module in modules.items()}
        runs |= {
            (name, "backward"): functools.partial(training, module, list(module.parameters()), x)
            for name, module in modules.items()
            if "fp8" not in name
        }
        for run in runs.values():
            run()  # compiles
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        order = list(runs)
        for _ in range(HOST_ROUNDS):
            for key in order:
                seconds[key].append(queue_time(runs[key], filler))
            order.append(order.pop(0))
        row = self.row | {"status": "ok", "timing": "host clock"}
        rows = []
        for (name, direction), times in seconds.items():
            ratios = [a / b for a, b in zip(times, seconds["swiglu compiled", direction], strict=True)]
            ms = timing.percentiles([1e3 * time for time in times]) | {"min": 1e3 * min(times)}
            ratio = timing.percentiles(ratios)["p50"]
            rows.append({**row, "subject": name, "direction": direction, "ms": ms, "to_swiglu_compiled": ratio})
        return rows


def queue_time(run: Callable[[], None], filler: Tensor) -> float:
    """Seconds per call of ``run``, while the GPU works on ``filler``."""
    torch.cuda.synchronize()
    for _ in range(4):
        filler @ filler
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        run()
    seconds = (time.perf_counter() - begin) / HOST_CALLS
    torch.cuda.synchronize()
    return seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T")
    parser.add_argument("--subjects", nargs="+", choices=SERVED, default=SERVED, help="of the suite serving")


def cells(options: argparse.Namespace, context: Context) -> list:
    if context.device.type != "cuda":
        raise MissingError(f"the suite {options.suite} needs a CUDA GPU")
    found = {
        "serving": lambda: [serving_cell(tokens, options.subjects) for tokens in options.tokens or SERVING_TOKENS],
        "host": lambda: [HostCell(tokens) for tokens in options.tokens or HOST_TOKENS],
    }
    return [cell for part in options.parts for cell in found[part]()]
