"""Triton back end on a GPU: forward and backward at the paper's shapes, as fractions of an 8192^3 bf16 matmul of the same run.

    python benchmarks/bench_triton.py [--json benchmarks/results/triton_h200.json] [--repeats 5]

Useful FLOPs: 6 T H d_h E d_e forward, 16 T H d_h E d_e backward (recomputation does not count). Each repeat times the matmul, then
every shape, each back to back for long enough to be at sustained clocks; a figure is the median of its repeats, a fraction the
median of the ratios to the mean of the matmul before and after. Errors are relative L2 against float64 on a slice of the tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable

import torch
import triton

from flashmhf import reference
from flashmhf.backends import triton as back_end

HEADS, HEAD_DIM, SUBNET_DIM = 16, 128, 384
SHAPES = [(32256, 22), (12288, 22), (3072, 22), (32256, 15)]  # (tokens, sub-networks): the paper's efficiency and 1.3B models
MATMUL = 8192
SECONDS = 0.25
ERROR_TOKENS = 512


def milliseconds(work: Callable[[], object]) -> float:
    """Mean time of a launch over the second half of SECONDS back to back."""

    def timed(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    work()
    count = max(2, round(SECONDS * 500 / timed(2)))
    timed(count)
    return timed(count)


def make_inputs(tokens: int, subnets: int) -> tuple[torch.Tensor, ...]:
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    grad_out, q = (torch.randn(tokens, HEADS, HEAD_DIM, **kind) for _ in range(2))
    k, u, v = (torch.randn(HEADS, subnets, SUBNET_DIM, HEAD_DIM, **kind) * HEAD_DIM**-0.5 for _ in range(3))
    return grad_out, q, k, u, v, torch.rand(tokens, HEADS, subnets, device="cuda")


def errors(inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Relative L2 error of every result, a head at a time."""
    grad_out, q, *weights, r = inputs
    tokens, head = slice(0, ERROR_TOKENS), slice(0, 1)
    x = [grad_out[tokens, head], q[tokens, head], *(w[head] for w in weights), r[tokens, head]]
    exact = [y.double() for y in x]
    wanted = [reference.forward(*exact[1:]), *reference.backward(*exact)]
    found = [back_end.forward(*x[1:]), *back_end.backward(*x)]
    names = ("out", "dq", "dk", "du", "dv", "dr")
    return {n: ((a.double() - b).norm() / b.norm()).item() for n, a, b in zip(names, found, wanted, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    left, right = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def matmul() -> float:
        return 2 * MATMUL**3 / milliseconds(lambda: left @ right) / 1e9

    cases = []
    for tokens, subnets in SHAPES:
        inputs = make_inputs(tokens, subnets)
        useful = tokens * HEADS * HEAD_DIM * subnets * SUBNET_DIM
        cases.append((tokens, subnets, "forward", 6 * useful, lambda x=inputs: back_end.forward(*x[1:])))
        cases.append((tokens, subnets, "backward", 16 * useful, lambda x=inputs: back_end.backward(*x)))
    times = [[] for _ in cases]
    ratios = [[] for _ in cases]
    matmuls = []
    for _ in range(args.repeats):
        before = matmul()
        for i, (*_, flops, work) in enumerate(cases):
            times[i].append(milliseconds(work))
            after = matmul()
            ratios[i].append(flops / times[i][-1] / 1e9 / ((before + after) / 2))
            matmuls.append(after)
            before = after
    report = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bfloat16",
        "H": HEADS,
        "d_h": HEAD_DIM,
        "d_e": SUBNET_DIM,
        "repeats": args.repeats,
        "matmul_tflops": {"median": statistics.median(matmuls), "min": min(matmuls), "max": max(matmuls)},
        "errors": errors(make_inputs(ERROR_TOKENS, 22)),
        "cases": [],
    }
    print(f"{report['device']}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"matmul {report['matmul_tflops']['median']:.0f} TFLOP/s")
    print("relative L2 errors: " + ", ".join(f"{name} {error:.2e}" for name, error in report["errors"].items()))
    print(f"{'T':>6} {'E':>3} {'pass':<9} {'ms':>8} {'TFLOP/s':>8} {'x matmul':>9} {'range':>13}")
    for (tokens, subnets, name, flops, _), ms, ratio in zip(cases, times, ratios, strict=True):
        median, fraction = statistics.median(ms), statistics.median(ratio)
        case = {"T": tokens, "E": subnets, "pass": name, "ms": median, "tflops": flops / median / 1e9, "x_matmul": fraction}
        report["cases"].append({**case, "x_matmul_range": [min(ratio), max(ratio)]})
        print(f"{tokens:6} {subnets:3} {name:<9} {median:8.3f} {case['tflops']:8.1f} {fraction:9.3f} {min(ratio):6.3f}-{max(ratio):.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
