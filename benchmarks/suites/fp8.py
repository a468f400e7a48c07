"""FP8 inference: the operator, decode and whole networks beside 16 bits and beside an FP8 SwiGLU.

The FP8 SwiGLU is two products of torch._scaled_mm with scales for rows, its quantisation included, compiled. All run as
CUDA graphs; networks are also called by the host. Decode and networks run layers whose weights do not fit in the L2
cache together.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import flashmhf
from flashmhf import quantize, reference
from flashmhf.testing import relative_l2

from ..harness import timing
from ..harness.measure import Cell, Context, MissingError, Prepared, require
from .shapes import BATCH, LENGTHS, SHAPES

ERROR_LIMIT = 0.07
LAYERS = 4  # together larger than the L2 cache
DECODE_TOKENS = (1, 16, 64)
NETWORK_TOKENS = (*DECODE_TOKENS, 128, 256, *(BATCH * length for length in LENGTHS))
HEADS = {64: (32, 22, 192), 96: (21, 22, 256), 128: (16, 22, 384), 256: (8, 22, 704)}  # d_h -> (H, E, d_e)
OURS, PLAIN, SWIGLU = "flashmhf", "flashmhf in 16 bits", "swiglu"


E4M3_MAX = 448.0


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> (e4m3 [..., K], scale [..., 1] float32): the largest value of a row becomes E4M3_MAX."""
    scale = (x.abs().amax(-1, keepdim=True).float() / E4M3_MAX).clamp_min(1e-12)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


class ScaledLinear(nn.Module):
    """x W^T with e4m3 rows of both, in operations that a compiler fuses with what stands before them."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        weight8, scale = quantise_rows(weight.detach())
        self.register_buffer("weight8", weight8)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        x8, scale = quantise_rows(x.reshape(-1, x.shape[-1]))
        out = torch._scaled_mm(x8, self.weight8.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])


class Fp8SwiGLU(nn.Module):
    """SwiGLU with all weights in e4m3 and scales for rows: two products of ``torch._scaled_mm``."""

    def __init__(self, plain: flashmhf.SwiGLU) -> None:
        super().__init__()
        self.into = ScaledLinear(torch.cat([plain.gate_proj.weight, plain.up_proj.weight]))
        self.down = ScaledLinear(plain.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> [..., d_model]."""
        gate, up = self.into(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


def weights(context: Context, *size: int) -> tuple[Tensor, Tensor, Tensor]:
    """K, U and V of ``size`` H, E, d_e, d_h."""
    _, subnets, subnet_dim, head_dim = size
    k, u, v = (torch.randn(size, device=context.device, dtype=context.dtype) for _ in range(3))
    return k / math.sqrt(head_dim), u / math.sqrt(head_dim), v / math.sqrt(subnets * subnet_dim)


def inputs(context: Context, tokens: int, heads: int, subnets: int, head_dim: int) -> tuple[Tensor, Tensor]:
    q = torch.randn(tokens, heads, head_dim, device=context.device, dtype=context.dtype)
    r = torch.rand(tokens, heads, subnets, device=context.device)
    return q, r / r.sum(-1, keepdim=True)


def graph(calls: list[Callable[[], object]], row: dict) -> Prepared:
    """The calls one after the other as a CUDA graph: the GPU's time, however long the host takes for a call."""

    @torch.no_grad()
    def run() -> None:
        for call in calls:
            call()

    return Prepared(timing.graphed(run), len(calls), row)


@functools.cache
def swiglu_layer(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """One compiled FP8 SwiGLU of 8,448 features for all cells, so that it is compiled once."""
    layer = Fp8SwiGLU(flashmhf.SwiGLU(2048, 8448, device=device, dtype=dtype))
    return torch.compile(layer, fullgraph=True, dynamic=True)


def operator_cell(part: str, head_dim: int, tokens: int) -> Cell:
    """The FP8 operator beside the 16-bit one: its operations, beside an FP8 SwiGLU of equal size at d_h = 128; in
    decode, where weights come from DRAM, their bytes."""
    heads, subnets, subnet_dim = HEADS[head_dim]
    few, size = part == "decode", 3 * heads * subnets * subnet_dim * head_dim
    sets, repeats = (LAYERS, 5) if few else (1, 1 if tokens > 4096 else 8)

    def work(bytes_each: int) -> dict[str, int]:
        return {"bytes": bytes_each * size} if few else {"flops": 2 * tokens * size}

    def make(context: Context) -> tuple:
        layers = [weights(context, heads, subnets, subnet_dim, head_dim) for _ in range(sets)]
        return layers, *inputs(context, tokens, heads, subnets, head_dim)

    def fp8(context: Context, made: tuple) -> Prepared:
        layers, q, r = made
        packed = [quantize.pack_fp8(*kuv) for kuv in layers]
        chosen = torch.linspace(0, tokens - 1, min(tokens, 64), device=q.device).long()
        exact = reference.forward(*(x.double() for x in (q[chosen], *layers[0], r[chosen])))
        error = require({"out": relative_l2(quantize.forward(q, packed[0], r)[chosen], exact)}, ERROR_LIMIT)
        calls = [functools.partial(quantize.forward, q, each, r) for each in packed * repeats]
        return graph(calls, work(1) | {"error": error})

    def plain(context: Context, made: tuple) -> Prepared:
        layers, q, r = made
        return graph([functools.partial(flashmhf.flash_mhf, q, *each, r) for each in layers * repeats], work(2))

    def swiglu(context: Context, made: tuple) -> Prepared:
        x, layer = made[1].view(tokens, -1), swiglu_layer(context.device, context.dtype)
        return graph([functools.partial(layer, x)] * repeats, work(1))

    subjects = {"fp8": fp8, "16 bits": plain} | ({"swiglu fp8": swiglu} if head_dim == 128 and not few else {})
    faster = {name: (name, 1.0) for name in subjects if name != "fp8"}
    row = {"part": part, "d_h": head_dim, "T": tokens}
    return Cell(row, subjects, make, product=not few, faster_than=faster, window_scale=1 if few else 2)


@functools.cache
def networks(device: torch.device, dtype: torch.dtype) -> dict[str, list[nn.Module]]:
    """The same layers for all cells, so that SwiGLU's are compiled once."""
    shape, like = SHAPES["paper"], {"device": device, "dtype": dtype}
    size = shape.d_model, shape.heads, shape.subnets, shape.subnet_dim
    plain = [flashmhf.FlashMHF(*size, **like) for _ in range(LAYERS)]
    swiglu = [Fp8SwiGLU(flashmhf.SwiGLU(shape.d_model, shape.swiglu_dim, **like)) for _ in range(LAYERS)]
    return {
        OURS: [quantize.to_fp8(each) for each in plain],
        PLAIN: plain,
        SWIGLU: [torch.compile(layer, fullgraph=True, dynamic=True) for layer in swiglu],
    }


def network_cell(tokens: int, way: str) -> Cell:
    """Whole networks with projections; ``x_swiglu`` is of 24 layers of SwiGLU over 20 of FlashMHF."""
    shape = SHAPES["paper"]

    def make(context: Context) -> tuple:
        found = networks(context.device, context.dtype)
        return found, torch.randn(tokens, shape.d_model, device=context.device, dtype=context.dtype)

    @torch.no_grad()
    def prepare(name: str, context: Context, made: tuple) -> Prepared:
        found, x = made
        row = {}
        if name == OURS:
            error = relative_l2(found[name][0](x), found[PLAIN][0](x).double())
            row["error"] = require({"FP8 against 16 bits": error}, ERROR_LIMIT)
        calls = [functools.partial(layer, x) for layer in found[name]]
        if way == "graph":
            return graph(calls, row)

        @torch.no_grad()
        def run() -> None:
            for call in calls:
                call()

        return Prepared(run, len(calls), row)

    subjects = {name: functools.partial(prepare, name) for name in (OURS, PLAIN, SWIGLU)}
    faster_than = {"swiglu": (SWIGLU, shape.swiglu_layers / shape.layers), "16 bits": (PLAIN, 1.0)}
    return Cell({"part": "networks", "T": tokens, "way": way}, subjects, make, faster_than=faster_than)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T", help="of the parts decode and networks")


def cells(options: argparse.Namespace, context: Context) -> list[Cell]:
    if context.device.type != "cuda":
        raise MissingError("the suite fp8 needs a CUDA GPU")
    found = {
        "operator": [operator_cell("operator", d_h, tokens) for d_h in HEADS for tokens in (1536, 32256)],
        "decode": [operator_cell("decode", 128, tokens) for tokens in options.tokens or DECODE_TOKENS],
        "networks": [network_cell(t, way) for t in options.tokens or NETWORK_TOKENS for way in ("graph", "called")],
    }
    return [cell for part in options.parts for cell in found[part]]
