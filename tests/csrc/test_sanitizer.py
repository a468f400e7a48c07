"""compute-sanitizer over the standalone harnesses at small shapes. FLASHMHF_BUILD names the CMake build folder of them.

memcheck and synccheck must report nothing. racecheck does not follow this chain: a warp accesses shared memory with all its lanes,
`__syncwarp`, one lane arrives (release) on a semaphore for which the other side waits (acquire). It counts only the arriving lane's
accesses (rule 2 of csrc/README.md). HAND_OVERS names the places of this kind; any other report fails.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

# Functions that hold the two accesses of a report, and what is handed over there.
HAND_OVERS = {
    frozenset(pair): what
    for *pair, what in (
        ("load_gates", "scores", "backward: R of a tile, behind q_full; back by grads_full and q_empty"),
        ("load_gates", "scores_and_query_grads", "backward: R of a tile, behind q_full; back by grads_full and q_empty"),
        ("add_gate_grads", "scores_and_query_grads", "backward: sums of dR, behind grads_full; back by grads_empty"),
        ("sts", "sts", "backward: staged dQ of one S warpgroup, then of the other, behind staged_full and staged_empty"),
        ("sts", "reduce_add_async", "backward: staged dQ, read by a bulk copy behind staged_full"),
        ("unit_scale", "read", "forward: the scale of a gate tile, behind q_full"),
        ("load_gate", "read", "forward: a gate tile that TMA does not bring, behind q_full"),
        ("copy_word_async", "read", "forward: a gate tile that TMA does not bring, behind q_full"),
        ("load", "load_async", "forward: W, fetched anew behind w_empty"),
        ("signal_parts", "gather_parts", "forward: number and addresses of the gathered parts, behind piece_full"),
        ("load_rows_of_items", "prepare", "forward, e4m3: scales and record of an item, behind q_full"),
        ("load_rows_fp8", "prepare", "forward, e4m3: scales and record of an item, behind q_full"),
        ("load_rows_fp8", "load_q", "forward, e4m3: scales and record of an item, behind q_full"),
    )
}
ACCESS = re.compile(r"(?:Read|Write) access at .*? in (\S+):(\d+)")


def function_at(source: list[str], line: int) -> str:
    """Name of the device function that holds the line `line`, counted from 1. Raises ValueError where there is none."""
    if line > len(source):
        raise ValueError(f"no line {line}")
    for start in range(line - 1, -1, -1):
        if "__device__" in source[start] or "__global__" in source[start]:
            head = " ".join(source[start : start + 4])
            head = head[head.index("__device__" if "__device__" in head else "__global__") :]
            return next(name for name in re.findall(r"(\w+)\(", head) if not name.startswith("__"))
    raise ValueError(f"no device function around line {line}")


def functions_at(path: str, line: int) -> set[str]:
    """The device functions at this line of the source files of that name: a report has no folders."""
    files = [file for folder in ("csrc", "thunderkittens/include") for file in (ROOT / folder).rglob(Path(path).name)]
    assert files, f"no source file {path}"
    found = set()
    for file in files:
        with contextlib.suppress(ValueError):  # too short, or no function before the line
            found.add(function_at(file.read_text().splitlines(), line))
    assert found, f"no device function around line {line} of {path}"
    return found


def reported_pairs(report: str) -> list[frozenset[str]]:
    """The functions of both accesses of every race in racecheck's report: a known hand-over where the names allow one."""
    pairs = []
    for race in report.split("Race reported between ")[1:]:
        accesses = ACCESS.findall(race)[:2]
        assert len(accesses) == 2, f"a report of another form:\n{race[:600]}"
        possible = [frozenset(pair) for pair in itertools.product(*(functions_at(name, int(line)) for name, line in accesses))]
        pairs.append(next((pair for pair in possible if pair in HAND_OVERS), possible[0]))
    return pairs


def test_reports_are_read():
    source = (ROOT / "csrc/backward/inter_loader.cuh").read_text().splitlines()
    write = next(i for i, text in enumerate(source, 1) if "shared.r[q.slot][lane] = r[0]" in text)
    source = (ROOT / "csrc/backward/inter_scores.cuh").read_text().splitlines()
    read = next(i for i, text in enumerate(source, 1) if "shared.r[ring.slot][row]" in text)
    kernel = "void flashmhf::flashmhf_backward_inter<(int)64, (int)7, __half>(flashmhf::BackwardMaps, flashmhf::BackwardParams)"
    report = (
        f"========= Error: Race reported between Write access at {kernel}+0x2a10 in inter_loader.cuh:{write}\n"
        f"=========     and Read access at {kernel}+0x41d0 in /build/csrc/backward/inter_scores.cuh:{read} [128 hazards]\n"
        "=========\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )
    assert reported_pairs(report) == [frozenset({"load_gates", "scores_and_query_grads"})]
    assert reported_pairs(report)[0] in HAND_OVERS
    with pytest.raises(AssertionError, match="another form"):
        reported_pairs("========= Error: Race reported between something else\n")


CASES = (
    ("forward", "T=200", "gate=w"),
    ("forward", "T=20", "gate=r"),  # clusters divide an item
    ("forward_fp8", "T=200", "gate=w"),
    ("backward", "T=200", "gate=w"),
    ("backward", "T=200", "gate=r", "kernels=ordered", "deterministic=1"),
    ("backward", "T=200", "gate=w", "kernels=pair", "deterministic=1"),
    ("project", "T=40", "depth=256", "features=256", "bias=1"),
    ("project", "T=300", "depth=256", "features=256"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=" ".join)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_sanitizer(tool, case):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer: it comes with the CUDA toolkit")
    folder = os.environ.get("FLASHMHF_BUILD")
    if not folder:
        pytest.skip("FLASHMHF_BUILD names no CMake build folder")
    direction, *arguments = case
    harness = Path(folder) / f"{direction}_harness"
    if not harness.exists():
        pytest.skip(f"{harness} was not built (cmake --build {folder} --target {direction}_harness)")
    shape = [] if direction == "project" else ["H=2", "E=3", "d_e=80"]
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--print-limit", "1000", harness, *shape, *arguments, "launches=1", "check=0"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = done.stdout + done.stderr
    assert "SUMMARY: " in report and "Internal Sanitizer Error" not in report, report[-3000:]
    if tool != "racecheck":
        assert "ERROR SUMMARY: 0 errors" in report, report[-3000:]
        return
    unknown = {" and ".join(sorted(pair)) for pair in reported_pairs(report) if pair not in HAND_OVERS}
    assert not unknown, f"hazards that are no known hand-over, between {sorted(unknown)}\n{report[-3000:]}"
