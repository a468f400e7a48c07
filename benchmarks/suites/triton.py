"""The Triton back end: its operator, networks beside SwiGLU, the host's time of a call.

With ``--as sm80`` all of it, SwiGLU and the matrix product included, is Triton's code for that GPU (harness/proxy.py).
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from flashmhf import testing

from ..harness import timing
from ..harness.measure import Cell, Context, MissingError
from . import inference, layer, operator
from .shapes import SHAPES

FEW = (1, 16, 64)
OTHERS = tuple(
    operator.Size(operator.FLAGSHIP.T, *size) for size in ((32, 64, 22, 192), (21, 96, 22, 256), (8, 256, 22, 704))
)
NETWORKS = ("flashmhf_triton_operator", "flashmhf_triton_compiled", "swiglu_compiled")
LENGTH = 4032
HOST_TOKENS = (1, 16)


class _Nothing(torch.autograd.Function):
    """A node of autograd that only makes its results."""

    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


@dataclass(frozen=True)
class HostCell:
    """Milliseconds in which the host queues an eager call of the operator behind products of some milliseconds."""

    tokens: int

    def measure(self, context: Context) -> list[dict]:
        ops, size = torch.ops.flashmhf, asdict(operator.FLAGSHIP) | {"T": self.tokens}
        p = testing.problem(*size.values(), context.dtype, context.device)
        leaves = [x.detach().requires_grad_() for x in (*p.operands, p.r)]
        filler = torch.randn(8192, 8192, device=context.device, dtype=context.dtype)

        @torch.no_grad()
        def inference_of(call, *gate) -> None:
            call(*p.operands, *gate, backend="triton")

        @torch.no_grad()
        def backward() -> None:
            ops.backward(p.grad_out, *p.operands, p.r, backend="triton")

        def training(forward) -> None:
            torch.autograd.grad(forward(*leaves), leaves, p.grad_out)

        runs = {
            "forward": functools.partial(inference_of, ops.forward, p.r),
            "gated forward": functools.partial(inference_of, ops.gated_forward, p.w, p.eps),
            "backward": backward,
            "forward and backward": functools.partial(training, functools.partial(ops.forward, backend="triton")),
            "autograd's share": functools.partial(training, _Nothing.apply),
        }
        rows = []
        for name, run in runs.items():
            run()  # compiles
            times = [1e3 * inference.queue_time(run, filler) for _ in range(inference.HOST_ROUNDS)]
            ms = timing.percentiles(times) | {"min": min(times)}
            rows.append({"group": "host", **size, "subject": name, "status": "ok", "timing": "host clock", "ms": ms})
        return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=FEW, metavar="T", help="small batches of the operator")


def cells(options: argparse.Namespace, context: Context) -> list[Cell | HostCell]:
    if context.device.type != "cuda":
        raise MissingError(f"the suite {options.suite} needs a CUDA GPU")
    of_operator = functools.partial(operator.cell, backend="triton", dtype=context.dtype)
    sizes = (operator.FLAGSHIP, *OTHERS)
    few = [operator.Size(**(asdict(operator.FLAGSHIP) | {"T": tokens})) for tokens in options.tokens]
    found = {
        "networks": [
            layer.layer_cell(group, SHAPES["paper"], LENGTH, NETWORKS, direction=direction)
            for group, direction in (("latency", "forward"), ("training", "training"))
        ],
        "operator": [of_operator(direction, size=size) for direction in ("forward", "backward") for size in sizes],
        "few": [of_operator("forward", size=size) for size in few],
        "host": [HostCell(tokens) for tokens in HOST_TOKENS],
    }
    return [cell for part in options.parts for cell in found[part]]
