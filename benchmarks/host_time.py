"""Host time to queue one forward of a feed-forward layer at inference, eager, bf16, torch.no_grad.

    $ python benchmarks/host_time.py --out benchmarks/results/host_time_h200.json

A product of some milliseconds keeps the GPU busy, so that a call takes only what the host needs for it. 50 calls a round; the fastest of
20 rounds, in microseconds a call, the modules one after the other in each round.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch

import flashmhf

from .harness import environment, suite

TOKENS, CALLS, ROUNDS = (1, 64, 256, 1536), 50, 20


def queue_time(module: torch.nn.Module, x: torch.Tensor, filler: torch.Tensor) -> float:
    """Seconds a call, while the GPU works on ``filler``."""
    torch.cuda.synchronize()
    for _ in range(4):
        filler @ filler
    begin = time.perf_counter()
    for _ in range(CALLS):
        module(x)
    seconds = (time.perf_counter() - begin) / CALLS
    torch.cuda.synchronize()
    return seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this PyTorch sees no CUDA GPU")
    settings = {"device": "cuda", "dtype": torch.bfloat16}
    modules = {
        "flashmhf": flashmhf.FlashMHF(2048, 16, 22, 384, **settings),
        "flashmhf q_norm": flashmhf.FlashMHF(2048, 16, 22, 384, q_norm=True, **settings),
        "swiglu": flashmhf.SwiGLU(2048, 8192, **settings),
    }
    filler = torch.randn(8192, 8192, **settings)
    rows = []
    with torch.no_grad():
        for tokens in TOKENS:
            x = torch.randn(tokens, 2048, **settings)
            best = dict.fromkeys(modules, float("inf"))
            for _ in range(ROUNDS):
                for name, module in modules.items():
                    best[name] = min(best[name], queue_time(module, x, filler))
            rows += [{"tokens": tokens, "subject": name, "microseconds": round(1e6 * seconds, 1)} for name, seconds in best.items()]
            print(tokens, *(f"{name} {1e6 * seconds:.1f} us" for name, seconds in best.items()), flush=True)
    record = {**environment.describe(torch.device("cuda", 0)), "rows": rows}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        suite.write_json(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
