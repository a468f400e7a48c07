"""compute-sanitizer over the standalone harnesses at small shapes, in every way that the planners can choose to launch
(PLANNED of test_harness.py). FLASHMHF_BUILD names the CMake build folder of them.
memcheck and synccheck must report nothing. racecheck does not follow this chain: a warp accesses shared memory with all
its lanes, `__syncwarp`, one lane arrives (release) on a semaphore for which the other side waits (acquire). It counts
only the arriving lane's accesses (rule 2 of csrc/README.md). HAND_OVERS names the places of this kind; any other report
fails: a build with FLASHMHF_LINEINFO=ON says where."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from processes import ROOT
from test_harness import PLANNED, harness

# Functions that hold the two accesses of a report, and what is handed over there.
HAND_OVERS = {
    frozenset(pair.split()): what.strip()
    for pair, what in (
        line.split("|")
        for line in """\
load_gates scores                       | backward: R of a tile, behind q_full; back by grads_full and q_empty
load_gates scores_and_query_grads       | backward: R of a tile, behind q_full; back by grads_full and q_empty
add_gate_grads scores_and_query_grads   | backward: sums of dR, behind grads_full; back by grads_empty
store store                             | backward: staged dQ of both S warpgroups, behind staged_full and staged_empty
store reduce_add_async                  | backward: staged dQ, read by a bulk copy behind staged_full
unit_scale read                         | forward: the scale of a gate tile, behind q_full
load_gate read                          | forward: a gate tile that TMA does not bring, behind q_full
copy_word_async read                    | forward: a gate tile that TMA does not bring, behind q_full
load load_async                         | forward: W, fetched anew behind w_empty
signal_parts gather_parts               | forward: number and addresses of the parts to add, behind gathered
load_scales read                        | forward, e4m3: scales of an item, behind q_full
load_scales prepare                     | forward, e4m3: scales of an item, behind q_full
load_scales load_q                      | forward, e4m3: scales of an item, behind q_full
keep_own_sums add_sums                  | projections: own sums, behind parts_full; one lane arrives for its warp
""".splitlines()
    )
}
ACCESS = re.compile(r"(?:Read|Write) access at (.*?)(?: in (\S+):(\d+))?(?: \[\d+ hazards?\])?$", re.MULTILINE)
# The one store that may meet itself: of staged dQ, by the two S warpgroups in turn.
STAGED = re.compile(r"void flashmhf::flashmhf_backward_inter<.*>\(.*\)\+0x")


def sources() -> list[Path]:
    return [path for folder in ("csrc", "thunderkittens/include") for path in sorted((ROOT / folder).rglob("*.cuh"))]


def function_at(source: list[str], line: int) -> str | None:
    """Name of the device function that holds the line `line`, counted from 1."""
    for start in range(min(line, len(source)) - 1, -1, -1):
        if "__device__" in source[start] or "__global__" in source[start]:
            head = " ".join(source[start : start + 4])
            head = head[head.index("__device__" if "__device__" in head else "__global__") :]
            return next((name for name in re.findall(r"(\w+)\(", head) if not name.startswith("__")), None)
    return None


def functions_of(name: str, line: int) -> set[str]:
    """The functions that `name:line` may mean: several, where files of a `name` without a folder are."""
    of_path = [path for path in sources() if path.match(name.lstrip("/"))]
    files = of_path or [path for path in sources() if path.name == Path(name).name]
    return {function for path in files if (function := function_at(path.read_text().splitlines(), line))}


def unknown_races(report: str) -> list[str]:
    """The races of racecheck's report that are no hand-over, by the functions of both accesses. Of some inlined stores
    it knows the kernel alone, though the line table has them: there the other access must be one of a hand-over, or the
    same instruction where a store may meet itself."""
    unknown = []
    for race in report.split("Race reported between ")[1:]:
        accesses = ACCESS.findall(race)[:2]
        assert len(accesses) == 2, f"a report of another form:\n{race[:600]}"
        (one, *lines), (other, *other_lines) = accesses
        has_line = any(lines + other_lines)
        staged = not has_line and one == other and STAGED.match(one)
        assert staged or has_line, f"neither access has a line:\n{race[:600]}"
        named = {"store"} if staged else set().union(*HAND_OVERS)
        first, second = (functions_of(name, int(line)) if name else named for _, name, line in accesses)
        if not any(frozenset((a, b)) in HAND_OVERS for a in first for b in second):
            shown = ("an access without a line" if x is named else "|".join(sorted(x)) for x in (first, second))
            unknown.append(" and ".join(shown))
    return unknown


def test_reports_are_read():
    def access(kind: str, file: str, text: str) -> str:
        source = (ROOT / "csrc/backward" / file).read_text().splitlines()
        line = next(i for i, of_line in enumerate(source, 1) if text in of_line)
        kernel = "void flashmhf::flashmhf_backward_inter<(int)64, (int)7, __half>(...)"
        return f"{kind} access at {kernel}+0x2a10 in {file}:{line}"

    write = access("Write", "inter_loader.cuh", "shared.r[q.slot][lane] = r[0]")
    read = access("Read", "inter_scores.cuh", "shared.r[ring.slot][row]")
    other = access("Read", "inter_weight_grads.cuh", "add_product(dv,")
    form = "========= Error: Race reported between {}\n=========     and {} [128 hazards]\n=========\n"
    without_line = write[: write.index(" in ")]
    assert unknown_races(form.format(write, other) + form.format(write, read)) == [
        "load_gates and accumulate_weight_grads"
    ]
    for pair, unknown in (
        ((write, read), []), ((read, without_line), []), ((without_line, without_line), []),
        ((other, without_line), ["accumulate_weight_grads and an access without a line"]),
    ):  # fmt: skip
        assert unknown_races(form.format(*pair)) == unknown
    elsewhere, token = without_line.replace("+0x2a10", "+0x2a20"), without_line.replace("_inter", "_token")
    for pair in ((elsewhere, without_line), (token, without_line), (token, token)):
        with pytest.raises(AssertionError, match="neither access has a line"):
            unknown_races(form.format(*pair))
    with pytest.raises(AssertionError, match="another form"):
        unknown_races("========= Error: Race reported between something else\n")


def test_the_named_functions_exist():
    text = "\n".join(path.read_text() for path in sources())
    assert [name for name in sorted(set().union(*HAND_OVERS)) if not re.search(rf"\b{name}\(", text)] == []


def covering() -> list[tuple[str, tuple, tuple[str, ...]]]:
    """The calls of the harness' tables: all at d_h = 128, and one of each plan at the other head widths."""
    seen = set()
    return [x for x in PLANNED if x[1][-1] == 128 or not (x[:2] in seen or seen.add(x[:2]))]


@pytest.mark.gpu
@pytest.mark.parametrize("case", covering(), ids=lambda case: " ".join((case[0], *case[2])))
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_sanitizer(tool, case):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer: it comes with the CUDA toolkit")
    direction, _, arguments = case
    command = [sanitizer, "--tool", tool, "--print-limit", "1000", harness(direction), *arguments]
    done = subprocess.run([*command, "launches=1", "check=0"], capture_output=True, text=True, timeout=300)
    report = done.stdout + done.stderr
    assert "SUMMARY: " in report and "Internal Sanitizer Error" not in report, report[-3000:]
    if tool != "racecheck":
        assert "ERROR SUMMARY: 0 errors" in report, report[-3000:]
        return
    unknown = sorted(set(unknown_races(report)))
    assert unknown == [], f"hazards that are no known hand-over, between {unknown}\n{report[-3000:]}"
