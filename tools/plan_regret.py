"""Measures what the forward's planner gives away: the time of the plan that it takes over that of the best one that can
be forced, on this GPU, for shapes of all head dimensions in 16 bits and in FP8.

    python tools/plan_regret.py build/forward_harness OUT.json

The harness times all plans of a shape in turn, in CUDA graphs whose launches take copies of the weights in turn. Exit
status: 0 all at most 1.05, 1 some above (they are listed), 2 the harness failed.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

LIMIT = 1.05
NETWORKS = {64: (32, 22, 192), 96: (21, 22, 256), 128: (16, 22, 384), 256: (8, 22, 704)}  # H, E, d_e by d_h
SHAPES = [(d_h, *network, 1, tokens) for d_h, network in NETWORKS.items() for tokens in (1, 64, 256, 512, 1536)]
SHAPES += [(128, 12, 15, 384, 1, 384), (128, 6, 8, 256, 1, 1024), (128, 16, 22, 384, 4, 16), (64, 32, 22, 192, 1, 192)]


def measure(harness: str, shape: tuple[int, ...], kind: str) -> dict:
    """All plans of a shape with their times; RuntimeError with what the harness says."""
    d_h, heads, subnets, subnet_dim, group, tokens = shape
    sizes = {"T": tokens, "H": heads, "group": group, "d_h": d_h, "E": subnets, "d_e": subnet_dim}
    options = {"format": kind, "gate": "w", "launches": 0, "check": 0, "chain": 2, "plans": 1}
    command = [harness, *(f"{name}={value}" for name, value in (sizes | options).items())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    plans = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    taken, best = plans[0]["us"], min(plans, key=lambda plan: plan["us"])
    regret = {"taken_us": taken, "regret": round(taken / best["us"], 3), "best": best}
    return {"format": kind, **sizes, **regret, "plans": plans}


def main(harness: str, out: str) -> int:
    try:
        records = [measure(harness, shape, kind) for kind in ("f16", "e4m3") for shape in SHAPES]
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except (OSError, RuntimeError) as error:
        print(f"plan_regret: {error}", file=sys.stderr)
        return 2
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    where = {"command": "python tools/plan_regret.py build/forward_harness OUT.json", "commit": commit or "unknown"}
    where |= {"date": datetime.date.today().isoformat(), "device": gpu.splitlines()[0]}
    Path(out).write_text(json.dumps(where | {"records": records}, indent=1) + "\n", encoding="utf-8")
    above = [record for record in records if record["regret"] > LIMIT]
    for record in above:
        print({name: value for name, value in record.items() if name != "plans"})
    largest = max(record["regret"] for record in records)
    print(f"{len(records)} shapes, {len(above)} with a regret above {LIMIT}, largest {largest}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 3 else __doc__)
