"""Eager back end against the materialising PyTorch code on the CPU: time and extra memory, each measured in a fresh process.

    python benchmarks/bench_eager.py [--tokens 4096] [--json benchmarks/results/eager_cpu.json]

Extra memory is the peak of the tensors' bytes beyond the inputs: temporaries, what is saved for backward, and the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import flashmhf
from flashmhf import reference

HEADS, HEAD_DIM, SUBNETS, SUBNET_DIM = 8, 128, 7, 384
FUNCTIONS = {"eager": flashmhf.flash_mhf, "materialising": reference.forward}


def make_inputs(tokens: int, dtype: torch.dtype, backward: bool) -> list[torch.Tensor]:
    q = torch.randn(tokens, HEADS, HEAD_DIM).to(dtype)
    weights = [(torch.randn(HEADS, SUBNETS, SUBNET_DIM, HEAD_DIM) / HEAD_DIM**0.5).to(dtype) for _ in range(3)]
    return [x.requires_grad_(backward) for x in (q, *weights, torch.rand(tokens, HEADS, SUBNETS))]


def peak_bytes(run: Callable[[], None]) -> int:
    """Peak of the tensor bytes allocated while ``run`` runs, beyond what was allocated before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    allocated = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def measure(subject: str, dtype: str, backward: bool, tokens: int, repeats: int) -> dict[str, float]:
    """Seconds (median) and extra bytes of one subject; runs in a process of its own."""
    torch.set_num_threads(2)
    dtype = getattr(torch, dtype)

    def run(inputs: list[torch.Tensor]) -> None:
        out = FUNCTIONS[subject](*inputs)
        if backward:
            out.backward(torch.ones_like(out))

    run(make_inputs(64, dtype, backward))
    inputs = make_inputs(tokens, dtype, backward)
    extra = peak_bytes(lambda: run(inputs))
    seconds = []
    for _ in range(repeats):
        for x in inputs:
            x.grad = None
        start = time.perf_counter()
        run(inputs)
        seconds.append(time.perf_counter() - start)
    return {"seconds": sorted(seconds)[len(seconds) // 2], "extra_bytes": extra}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--one", nargs=3, metavar=("SUBJECT", "DTYPE", "DIRECTION"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        subject, dtype, direction = args.one
        print(json.dumps(measure(subject, dtype, direction == "forward+backward", args.tokens, args.repeats)))
        return
    rows = []
    # Threads that spin at barriers would measure what else the machine is doing; the same for both subjects.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    print(f"T={args.tokens} H={HEADS} d_h={HEAD_DIM} E={SUBNETS} d_e={SUBNET_DIM}, 2 threads, torch {torch.__version__}")
    print(f"{'dtype':<9} {'direction':<17} {'eager':>9} {'material.':>9} {'time':>7} {'eager':>10} {'material.':>10} {'memory':>7}")
    for dtype in ("float32", "bfloat16"):
        for direction in ("forward", "forward+backward"):
            row = {"dtype": dtype, "direction": direction}
            for subject in FUNCTIONS:
                command = [sys.executable, __file__, "--tokens", str(args.tokens), "--repeats", str(args.repeats)]
                command += ["--one", subject, dtype, direction]
                row[subject] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
            row["time_ratio"] = row["eager"]["seconds"] / row["materialising"]["seconds"]
            row["memory_ratio"] = row["eager"]["extra_bytes"] / row["materialising"]["extra_bytes"]
            rows.append(row)
            seconds = [row[subject]["seconds"] for subject in FUNCTIONS]
            mebibytes = [row[subject]["extra_bytes"] / 2**20 for subject in FUNCTIONS]
            print(
                f"{dtype:<9} {direction:<17} {seconds[0]:>8.3f}s {seconds[1]:>8.3f}s {row['time_ratio']:>6.2f}x "
                f"{mebibytes[0]:>7.0f}MiB {mebibytes[1]:>7.0f}MiB 1/{1 / row['memory_ratio']:.0f}"
            )
    if args.json:
        shape = {"T": args.tokens, "H": HEADS, "d_h": HEAD_DIM, "E": SUBNETS, "d_e": SUBNET_DIM}
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "device": f"{platform.machine()} CPU, 2 threads",
            "torch": torch.__version__,
            "shape": shape,
            "rows": rows,
        }
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
