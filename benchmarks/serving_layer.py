"""The layer for inference engines against the module it serves: both in CUDA graphs, the time to queue one call, and SwiGLU beside them.

"piece" is what an engine compiles and captures between two calls of attention, apart from attention's projections: residual sum, RMSNorm,
the layer as one operator, residual sum, RMSNorm. "piece swiglu" is the same with gate and up projections merged, as engines have them.

    $ python benchmarks/serving_layer.py --out benchmarks/results/serving_layer_h200.json

Graphs: passes over several weight sets at sustained clocks, subjects interleaved (benchmarks.harness.timing). Host: as in host_time.py.
Before a time is taken, the layer's values are compared with the module's; a difference ends the run.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterable

import torch
from host_time import queue_time

import flashmhf
from flashmhf.integrations import FlashMHFShard

from .harness import environment, suite, timing

TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SIZES, D_FF = (2048, 16, 22, 384), 8192
SETS, ROUNDS, HOST_ROUNDS = 4, 6, 4
PIECES = ("piece", "piece swiglu")


class MergedSwiGLU(torch.nn.Module):
    """SwiGLU with one product for gate and up: x [T, d_model] -> [T, d_model]."""

    def __init__(self, d_model: int, d_ff: int, **settings) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(d_model, 2 * d_ff, bias=False, **settings)
        self.down_proj = torch.nn.Linear(d_ff, d_model, bias=False, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(torch.nn.functional.silu(gate) * up)


class Piece(torch.nn.Module):
    """What lies between two calls of attention around ``network``: x, residual [T, d_model] -> the same two."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        settings = {"device": "cuda", "dtype": torch.bfloat16}
        self.network = network
        self.before, self.after = (torch.nn.RMSNorm(SIZES[0], eps=1e-5, **settings) for _ in range(2))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        residual = residual + self.network(self.before(residual))
        return self.after(residual), residual


def subjects() -> dict[str, list[torch.nn.Module]]:
    """SETS modules of each kind; layer and module hold the same weights."""
    settings = {"device": "cuda", "dtype": torch.bfloat16}
    modules = [flashmhf.FlashMHF(*SIZES, **settings) for _ in range(SETS)]
    layers = [FlashMHFShard(*SIZES, **settings) for _ in range(SETS)]
    for layer, module in zip(layers, modules, strict=True):
        layer.load(module.state_dict())
    merged = [MergedSwiGLU(SIZES[0], D_FF, **settings) for _ in range(SETS)]
    return {
        "module": modules,
        "layer": layers,
        "layer compiled": compiled(layers),
        "swiglu": [flashmhf.SwiGLU(SIZES[0], D_FF, **settings) for _ in range(SETS)],
        "piece": compiled(map(Piece, layers)),
        "piece swiglu": compiled(map(Piece, merged)),
    }


def compiled(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    return [torch.compile(module, fullgraph=True, dynamic=True) for module in modules]


def graphs(made: dict[str, list[torch.nn.Module]], x: torch.Tensor) -> dict[str, timing.Pass]:
    """One CUDA graph a subject that calls its SETS modules on ``x``, pieces also on a residual."""

    def over(modules: list[torch.nn.Module], *inputs: torch.Tensor) -> timing.Pass:
        def run() -> None:
            for module in modules:
                module(*inputs)

        return timing.graphed(run)

    residual = torch.randn_like(x)
    return {name: over(modules, x, *([residual] if name in PIECES else [])) for name, modules in made.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this PyTorch sees no CUDA GPU")
    rows = []
    with torch.no_grad():
        made, timer = subjects(), timing.CudaTimer()
        filler = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for tokens in TOKENS:
            x = torch.randn(tokens, SIZES[0], device="cuda", dtype=torch.bfloat16)
            expected = made["module"][0](x)
            for name in ("layer", "layer compiled"):
                if not torch.equal(made[name][0](x), expected):
                    print(f"{name} differs from the module at {tokens} tokens", file=sys.stderr)
                    return 1
            runs = graphs(made, x)
            timing.warm_up(runs["module"], timer, 0.3)
            samples = timing.interleave(runs, timer, ROUNDS, 0.04, 0.02)
            medians = {name: timing.percentiles(values)["p50"] / SETS for name, values in samples.items()}
            host = {name: float("inf") for name in made if name not in PIECES}
            for _ in range(HOST_ROUNDS):
                for name in host:
                    host[name] = min(host[name], queue_time(made[name][0], x, filler))
            for name, seconds in medians.items():
                row = {"tokens": tokens, "subject": name, "graph_us": 1e6 * seconds}
                if name in PIECES:
                    row["x_piece_swiglu"] = seconds / medians["piece swiglu"]
                else:
                    row |= {"x_module": seconds / medians["module"], "host_us": 1e6 * host[name]}
                rows.append(row)
            print(tokens, *rows[-len(made) :], sep="\n", flush=True)
    record = {
        "environment": environment.describe(torch.device("cuda", 0)),
        "shape": {**dict(zip(("d_model", "H", "E", "d_e"), SIZES, strict=True)), "swiglu_d_ff": D_FF},
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        suite.write_json({**record, "rows": rows}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
