"""Writes README's table of the kernels from the committed records of the single back ends; --check says whether the two agree.

$ python benchmarks/kernel_table.py [--check]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- kernels: begin (benchmarks/kernel_table.py) -->", "<!-- kernels: end -->"
HEADER = ("operator", "T", "d_h, E, d_e", "Hopper ms", "TFLOP/s", "÷ matmul", "Triton ms", "TFLOP/s", "÷ matmul")


def _record(name: str) -> dict:
    """The newest record of that name."""
    return json.loads(sorted(RESULTS.glob(f"{name}_h200_*.json"))[-1].read_text())


def _run(what: str, record: dict) -> str:
    """Where and when the figures of ``what`` were measured."""
    return f"{what}: {record['device']}, torch {record['torch']}, {record['date']}"


def _row(operator: str, case: dict, ms: float, tflops: float, ratio: float, beside: dict | None) -> tuple[str, ...]:
    shape = f"{case['d_h']}, {case['E']}, {case['d_e']}"
    others = (f"{beside['ms']:.2f}", f"{beside['tflops']:.0f}", f"{beside['x_matmul']:.2f}") if beside else ("", "", "")
    return (operator, f"{case['T']:,}", shape, f"{ms:.2f}", f"{tflops:.0f}", f"{ratio:.2f}", *others)


def table() -> str:
    """The block between README's markers."""
    forward, backward, triton = (_record(name) for name in ("forward", "backward", "triton"))

    def beside(direction: str, case: dict) -> dict | None:
        same = {"T": case["T"], "E": case["E"], "pass": direction}
        if case["d_h"] != 128 or case["H"] != 16:
            return None
        return next((x for x in triton["cases"] if same.items() <= x.items()), None)

    rows = [
        _row("forward", case, case["ms"], case["tflops"], case["x_matmul"], beside("forward", case))
        for case in [*forward["flagship"], *forward["head_dims"]]
    ]
    flagship = [case for case in backward["rows"] if case["shape"].startswith(("L4032", "L16128", "d_h"))]
    for case in flagship:
        rows.append(
            _row("backward", case, case["default_ms"], case["useful_tflops"], case["ratio"], beside("backward", case)),
        )
    lines = ["| " + " | ".join(row) + " |" for row in (HEADER, ("---",) * len(HEADER), *rows)]
    swiglu = ", ".join(f"{case['x_swiglu']:.2f} at T = {case['T']:,}" for case in forward["flagship"])
    note = (
        f"{_run('Hopper forward', forward)}, medians of rounds that alternate the subjects. {_run('Hopper backward', backward)}, medians "
        f"of the second half of a block of calls. {_run('Triton', triton)}, medians of {triton['repeats']} blocks. All: bf16, back to back "
        "at sustained clocks. TFLOP/s count useful operations: 6 T H d_h E d_e forward, 16 backward. The yardstick is an 8192^3 bf16 "
        f"matrix product timed in the same run as the figure beside it. The Hopper forward runs at {swiglu} times the rate of an eager "
        "cuBLAS SwiGLU of d_ff 8192 in the same run. Largest "
        f"error against float64: {max(forward['errors'].values()):.2e} (Hopper forward, T up to {max(map(int, forward['errors'])):,})."
    )
    if "changed_since" in forward:
        note += " " + forward["changed_since"]
    return "\n".join([BEGIN, *lines, "", note, END])


def with_table(text: str) -> str:
    """``text`` with the block between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text lacks the markers {BEGIN!r} and {END!r}")
    return before + table() + after


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when they disagree")
    options = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    wanted = with_table(readme.read_text())
    if options.check:
        if wanted != readme.read_text():
            print("README.md disagrees with benchmarks/results: run python benchmarks/kernel_table.py", file=sys.stderr)
            return 1
        return 0
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
