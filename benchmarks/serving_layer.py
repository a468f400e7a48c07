"""The layer for inference engines against the module it serves: both in CUDA graphs, the time to queue one call, and SwiGLU beside them.

    $ python benchmarks/serving_layer.py --out benchmarks/results/serving_layer_h200.json

Graphs: passes over several weight sets at sustained clocks, subjects interleaved (flashmhf.bench.timing). Host: as in host_time.py.
Before a time is taken, the layer's values are compared with the module's; a difference ends the run.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch
from host_time import queue_time

import flashmhf
from flashmhf.bench import environment, suite, timing
from flashmhf.serving import FlashMHFShard

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
SIZES = (2048, 16, 22, 384)
SETS, ROUNDS, HOST_ROUNDS = 4, 12, 10


def subjects() -> dict[str, list[torch.nn.Module]]:
    """SETS modules of each kind; layer and module hold the same weights."""
    settings = {"device": "cuda", "dtype": torch.bfloat16}
    modules = [flashmhf.FlashMHF(*SIZES, **settings) for _ in range(SETS)]
    layers = [FlashMHFShard(*SIZES, **settings) for _ in range(SETS)]
    for layer, module in zip(layers, modules, strict=True):
        layer.load(module.state_dict())
    compiled = [torch.compile(layer, fullgraph=True, dynamic=True) for layer in layers]
    swiglu = [flashmhf.SwiGLU(2048, 8192, **settings) for _ in range(SETS)]
    return {"module": modules, "layer": layers, "layer compiled": compiled, "swiglu": swiglu}


def graphs(made: dict[str, list[torch.nn.Module]], x: torch.Tensor) -> dict[str, timing.Pass]:
    """One CUDA graph a subject that calls its SETS modules on ``x``."""

    def over(modules: list[torch.nn.Module]) -> timing.Pass:
        def run() -> None:
            for module in modules:
                module(x)

        return timing.graphed(run)

    return {name: over(modules) for name, modules in made.items()}


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
            host = dict.fromkeys(made, float("inf"))
            for _ in range(HOST_ROUNDS):
                for name, modules in made.items():
                    host[name] = min(host[name], queue_time(modules[0], x, filler))
            for name, seconds in medians.items():
                ratio = seconds / medians["module"]
                rows.append({"tokens": tokens, "subject": name, "graph_us": 1e6 * seconds, "x_module": ratio, "host_us": 1e6 * host[name]})
            print(tokens, *(f"{r['subject']} {r['graph_us']:.1f} us x{r['x_module']:.3f} host {r['host_us']:.1f};" for r in rows[-4:]))
    record = {
        "environment": environment.describe(torch.device("cuda", 0)),
        "shape": dict(zip(("d_model", "H", "E", "d_e"), SIZES, strict=True)),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        suite.write_json({**record, "rows": rows}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
