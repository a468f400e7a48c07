"""Measures on this GPU the constants of csrc/forward/cost_model.h and csrc/backward/cost_model.h, and prints them
beside those in the code.

    cmake -G Ninja -B build -DTORCH_ROOT=... && cmake --build build --target forward_harness backward_harness
    python -m benchmarks.measure_cost_model build [--head-dim 128] [--rounds 5]

Each constant is a difference of two launches that the harnesses time without Python: one that pays the cost and one
that does not, by forcing the plan. Fixed times are given as tiles * d_h, so that one figure serves all head dimensions.
The GPU should be idle otherwise, and hot (the script warms it up): the constants are ratios of times, so clocks cancel
only where they are equal in both.

Exit status: 0 printed, 2 no harness or a failed launch.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEVER = 10**9  # as a cost: the planner never splits
D_E = 384


@dataclass(frozen=True)
class Launch:
    """One harness run: its median time in ms and what its plan says."""

    ms: float
    plan: dict[str, float]


class Harness:
    def __init__(self, folder: Path, head_dim: int, rounds: int):
        self.folder, self.head_dim, self.rounds = folder, head_dim, rounds

    def run(self, direction: str, launches: int = 60, **arguments: object) -> Launch:
        given = {"d_h": self.head_dim, "d_e": D_E, "check": 0, "launches": launches} | arguments
        command = [str(self.folder / f"{direction}_harness"), *(f"{name}={value}" for name, value in given.items())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        median = float(re.search(r"median ([\d.]+) ms", done.stdout)[1])
        patterns = {
            "waves": r"waves (\d+)", "inter_tiles": r"inter tiles (\d+)", "clusters": r"clusters (\d+)", "rest": r", items (\d+) split",
            "splits": r"split over (\d+)", "ctas": r"of (\d+) CTAs", "items": r"items (\d+) of which", "whole": r"of which (\d+) whole",
            "inter_time": r"inter time ([\d.]+)", "token_time": r"token time ([\d.]+)", "tiles": r"token tiles (\d+)",
        }  # fmt: skip
        plan = {
            name: float(match[1]) for name, pattern in patterns.items() if (match := re.search(pattern, done.stdout))
        }
        return Launch(median, plan | {"adds": "added by forward" in done.stdout})

    def compare(self, *runs: tuple[str, dict]) -> list[Launch]:
        """The runs in alternation, the median of `rounds` times of each."""
        times: list[list[Launch]] = [[] for _ in runs]
        for _ in range(self.rounds):
            for found, (direction, arguments) in zip(times, runs, strict=True):
                found.append(self.run(direction, **arguments))
        return [Launch(statistics.median(x.ms for x in found), found[0].plan) for found in times]


def forward_constants(harness: Harness) -> dict[str, float]:
    device = harness.run("forward", T=32256, H=16, E=22, launches=5).plan
    clusters, rows = int(device["clusters"]), int(device["ctas"]) * 128
    d_h, gate = harness.head_dim, {"gate": "ones"}
    whole = {"combine": NEVER, "behind_waves": NEVER, "next_item": 0, **gate}

    def shape(items: int, subnets: int) -> dict:  # one head; an item is `rows` tokens
        return {"T": rows * items, "H": 1, "E": subnets}

    # Time of a tile: two lengths of the inter dimension in whole waves.
    short, long = harness.compare(
        ("forward", shape(4 * clusters, 11) | whole), ("forward", shape(4 * clusters, 44) | whole)
    )
    tile = (long.ms - short.ms) / (4 * (long.plan["inter_tiles"] - short.plan["inter_tiles"]))

    def split_cost(items: int, subnets: int, **cost: int) -> float:
        """What splitting the items behind the whole waves costs beyond its tiles, in tiles, and an equal launch without
        that costs.
        """
        base = items // clusters * clusters
        arguments = {"combine": 0, "behind_waves": 0, "next_item": 0, **gate} | cost
        split, reference = harness.compare(
            ("forward", shape(items, subnets) | arguments), ("forward", shape(max(base, clusters), subnets) | whole)
        )
        plan = split.plan
        span = plan["rest"] * plan["inter_tiles"] / plan["splits"]
        expected = reference.ms + (span if base else span - plan["inter_tiles"]) * tile
        return (split.ms - expected) / tile

    combine = split_cost(clusters * 3 // 4, 44)
    behind = split_cost(2 * clusters + clusters // 2, 22)
    next_item = split_cost(clusters + clusters // 2, 44)

    # The rate of the memory: few tokens, where all weights are streamed once.
    few = harness.run("forward", T=64, H=16, E=22, gate="ones")
    sms = int(clusters * device["ctas"])
    stream = few.ms / (16 * few.plan["inter_tiles"] / sms * tile)
    return {
        "us a tile": 1e3 * tile,
        "combine": combine * d_h,
        "behind_waves": behind * d_h,
        "next_item": next_item * d_h,
        "stream_numerator / stream_denominator": stream,
    }


def backward_constants(harness: Harness, sms: int) -> dict[str, float]:
    d_h = harness.head_dim
    # items = H * E * d_e / 64 is a multiple of the SMs: whole waves only.
    heads, subnets = 22, 6
    if heads * subnets * (D_E // 64) % sms:
        heads, subnets = sms, 1
    shape = {"H": heads, "E": subnets, "gate": "r", "groups": 1}
    waves = heads * subnets * (D_E // 64) / sms

    def times(kernels: str, deterministic: int) -> tuple[float, float]:
        """ms of a token tile of every CTA, and ms at none.

        Both launches are short: a long one meets the power limit and lower clocks.
        """
        few, many = harness.compare(
            ("backward", shape | {"T": 1024, "kernels": kernels, "deterministic": deterministic}),
            ("backward", shape | {"T": 4096, "kernels": kernels, "deterministic": deterministic}),
        )
        slope = (many.ms - few.ms) / (many.plan["tiles"] - few.plan["tiles"])
        return slope, few.ms - slope * few.plan["tiles"]

    fused, start = times("fused", 0)
    ordered, ordered_start = times("ordered", 1)
    pair, _ = times("pair", 1)
    tile = fused / waves
    one, two = harness.compare(
        ("backward", shape | {"T": 4096, "kernels": "fused"}),
        ("backward", shape | {"T": 4096, "kernels": "fused", "groups": 2}),
    )
    launch_ms = two.ms - one.ms
    return {
        "us a tile": 1e3 * tile,
        "cta_tiles": (start - launch_ms) / tile / waves,
        "launch": launch_ms / tile * d_h,
        "ordered_slowdown": ordered / fused,
        "ordered_tiles": (ordered_start - start) / tile / (subnets * (D_E // 64)),
        "pair_slowdown": pair / fused,
    }


def in_code(direction: str) -> dict[str, str]:
    text = (ROOT / "csrc" / direction / "cost_model.h").read_text()
    return dict(re.findall(r"(\w+) = ([\d.]+)(?=[,;])", text))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="CMake build folder with forward_harness and backward_harness")
    parser.add_argument(
        "--head-dim", type=int, default=128, choices=(96, 128), help="d_h of the launches (default 128)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="times that each pair of launches is compared (default 5)"
    )
    options = parser.parse_args(arguments)
    harness = Harness(options.build, options.head_dim, options.rounds)
    try:
        warm = harness.run("forward", T=32256, launches=300)
        sms = int(warm.plan["clusters"] * warm.plan["ctas"])
        measured = {"forward": forward_constants(harness), "backward": backward_constants(harness, sms)}
    except (OSError, RuntimeError) as error:
        print(f"measure_cost_model: {error}", file=sys.stderr)
        return 2
    for direction, constants in measured.items():
        code = in_code(direction)
        print(f"{direction}, d_h = {options.head_dim}, {sms} SMs")
        for name, value in constants.items():
            print(f"  {name:40} measured {value:10.2f}   in the code {code.get(name, '')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
