"""``python -m benchmarks.distributed`` with four CPU processes over gloo."""

import json
from pathlib import Path

from conftest import run_python

from benchmarks.harness.training import covered

ROOT = Path(__file__).resolve().parents[2]


def test_four_processes(tmp_path):
    command = ("-m", "benchmarks.distributed", "--smoke", "--ranks", 4, "--steps", 2, "--out", tmp_path / "run")
    run_python(*command, "--parts", "module", "layouts", cwd=ROOT, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    record = json.loads((tmp_path / "run_x4_cpu.json").read_text())
    assert record["environment"]["ranks"] == 4 and {row["status"] for row in record["rows"]} == {"ok"}
    assert {row["tp"] for row in record["rows"] if row["part"] == "module"} == {1, 2, 4}
    losses = {(row["precision"], row["layout"]): row["losses"] for row in record["rows"] if row["part"] == "layouts"}
    assert {name for _, name in losses} == {"one", "fsdp2 4", "fsdp2 2 x tp 2", "tp 4"}
    assert all(len(values) == 2 and values[0] != values[1] for values in losses.values())


def test_the_length_of_a_union_of_intervals():
    assert covered([]) == 0
    assert covered([(5, 9), (0, 3), (2, 4), (6, 7), (9, 10)]) == 4 + 5
