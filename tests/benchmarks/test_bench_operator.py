"""The operator's benchmark: cases, checks, record and script, without a GPU; a short run on one."""

from __future__ import annotations

import csv
import importlib.util
import json
import pathlib

import pytest
import torch

from benchmarks.harness import operator, records, subjects, suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = operator.Size(40, 2, 16, 3, 32)

pytestmark = pytest.mark.usefixtures("one_thread")


def context(device: str = "cpu", dtype: torch.dtype = torch.float32) -> suite.Context:
    seconds = dict.fromkeys(("window_seconds", "settle_seconds", "warm_up_seconds", "cell_warm_up_seconds"), 1e-3)
    return suite.Context(subjects.Settings(torch.device(device), dtype), rounds=2, log=lambda line: None, **seconds)


def measured(direction: str, backend: str = "eager", compared: bool = True) -> dict[str, dict]:
    case = operator.Case(direction, backend, SMALL, torch.float32, compared)
    return {row["subject"]: row for row in operator.run_case(case, context())}


@pytest.mark.parametrize(
    ("direction", "names"),
    [
        ("forward", {"forward", "gated forward", "gate, then forward", "materialising"}),
        ("backward", {"backward", "gated backward", "forward and backward", "materialising"}),
    ],
)
def test_every_subject_is_checked_and_timed(direction, names):
    rows = measured(direction)
    assert rows.keys() == names
    for row in rows.values():
        assert row["status"] == "ok" and row["error"] < 1e-5 and row["ms"]["p50"] > 0 and row["memory_mib"] > 0
        assert row["timing"] == "host clock"
    assert measured(direction, compared=False).keys() < names


@pytest.mark.parametrize(("direction", "result"), [("forward", 0), ("backward", 0), ("backward", 3), ("backward", 4)])
def test_a_wrong_result_leaves_no_number(monkeypatch, direction, result):
    def spoil(x):
        return x + 0.01 * x.abs().mean()

    right = operator.subjects_of(operator.Case(direction, "eager", SMALL, torch.float32))[direction]

    def wrong(p):
        out = right.call(p)
        return spoil(out) if direction == "forward" else tuple(spoil(x) if i == result else x for i, x in enumerate(out))

    monkeypatch.setattr(operator, "subjects_of", lambda case, swiglu: {direction: operator.Subject(wrong, right.work, right.check)})
    row = measured(direction)[direction]
    assert row["status"] == "wrong" and "relative L2 error" in row["reason"] and "ms" not in row


def test_swiglu_of_the_same_width_is_compared_with_fused_back_ends():
    p = operator.testing.problem(40, 2, 16, 3, 32, torch.float32)
    for direction, name in (("forward", "SwiGLU"), ("backward", "checkpointed SwiGLU, forward and backward")):
        case = operator.Case(direction, "triton", SMALL, torch.float32, compared=True)
        module = operator._swiglu(p)
        assert sum(weight.numel() for weight in module.parameters()) == 3 * 32 * 96
        results = operator.subjects_of(case, module)[name].call(p)
        assert len(results) == (40 if direction == "forward" else 4)


def test_missing_back_end_is_a_row_with_its_reason():
    row = measured("forward", "hopper")["forward"]
    assert row["status"] == "missing" and "cpu" in row["reason"]


def test_default_cases_cover_the_shapes():
    cases = operator.cases(("forward", "backward"), ("hopper",), (torch.bfloat16,))
    for direction in ("forward", "backward"):
        sizes = [case.size for case in cases if case.direction == direction]
        assert {size.d_h for size in sizes} == {64, 96, 128, 256} and {1, 32256, 129024} <= {size.T for size in sizes}
        assert [case.size for case in cases if case.direction == direction and case.compared] == [operator.FLAGSHIP]
    quick = operator.cases(("forward",), ("hopper",), (torch.bfloat16,), quick=True)
    assert len(quick) == 5 and operator.FLAGSHIP in [case.size for case in quick]


@pytest.mark.parametrize("text", ["1,2,3,4", "1,2,3,4,0", "1,2,3,4,x", "1,2,3,4,5,6"])
def test_shapes_are_five_positive_integers(text):
    with pytest.raises(ValueError, match="T,H,d_h,E,d_e"):
        operator.Size.parse(text)


def script():
    spec = importlib.util.spec_from_file_location("bench_operator", ROOT / "benchmarks" / "bench_operator.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_writes_record_table_and_a_run(tmp_path, monkeypatch, capsys):
    fast = context()
    monkeypatch.setattr(suite, "Context", lambda *args, **kwargs: fast)
    out = tmp_path / "new" / "operator.json"
    arguments = ["--device", "cpu", "--backend", "eager", "--shapes", "40,2,16,3,32", "--out", str(out)]
    assert script().main(arguments) == 0
    record = json.loads(out.read_text())
    assert {row["direction"] for row in record["rows"]} == {"forward", "backward"}
    assert {"command", "commit", "date", "device", "packages"} <= record["environment"].keys()
    table = out.with_suffix(".md").read_text()
    assert table in capsys.readouterr().out and "materialising ÷ forward" in table and str(tmp_path) not in table
    with (out.parent / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == len(record["rows"]) and tuple(runs[0]) == records.COLUMNS
    assert runs[0]["record"] == "operator.json" and runs[0]["shape"] == "float32 T=40 H=2 d_h=16 E=3 d_e=32"
    assert float(runs[0]["value"]) == pytest.approx(record["rows"][0]["ms"]["p50"], rel=1e-4)
    assert script().main([*arguments, "--quick"]) == 0
    with (out.parent / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(runs)  # a quick run is not kept


def test_groups_are_rows_beside_the_ungrouped_ones(tmp_path, monkeypatch):
    fast = context()
    monkeypatch.setattr(suite, "Context", lambda *args, **kwargs: fast)
    out = tmp_path / "groups.json"
    arguments = ["--direction", "forward", "--device", "cpu", "--backend", "eager", "--shapes", "5,4,16,3,32", "--out", str(out)]
    assert script().main([*arguments, "--groups", "1", "4"]) == 0
    record = json.loads(out.read_text())
    assert [(row["subject"], row["H_kv"]) for row in record["rows"]] == [(n, h) for h in (4, 1) for n in ("forward", "gated forward")]
    assert all(row["error"] < 1e-5 for row in record["rows"])
    times = [row["ms"]["p50"] for row in record["rows"]]
    ratio = operator.summary(record)["eager, T=5 d_h=16 d_e=32 float32: gated forward, H_kv=4 ÷ 1, time"]
    assert ratio == times[1] / times[3]
    assert "gated forward, H_kv=1" in out.with_suffix(".md").read_text()
    with (tmp_path / "runs.csv").open() as file:
        assert [row["shape"] for row in csv.DictReader(file)][1:3] == [
            "float32 T=5 H=4 d_h=16 E=3 d_e=32",
            "float32 T=5 H=4 H_kv=1 d_h=16 E=3 d_e=32",
        ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--direction", "forward", "--groups", "3"], "H = 4 is not a multiple of a group of 3"),
        (["--direction", "backward", "--groups", "2"], "direction is 'backward'"),
    ],
)
def test_groups_that_do_not_fit_are_refused(arguments, message, capsys):
    assert script().main(["--device", "cpu", "--backend", "eager", "--shapes", "5,4,16,3,32", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_short_run_on_the_gpu(gpu_backend, direction):
    for size in (operator.Size(3000, 4, 128, 3, 128), operator.Size(16, 4, 128, 3, 128)):
        case = operator.Case(direction, gpu_backend, size, torch.bfloat16, compared=size.T > 512)
        rows = {row["subject"]: row for row in operator.run_case(case, context("cuda", torch.bfloat16))}
        assert all(row["status"] == "ok" for row in rows.values()), rows
        assert operator.MATMUL in rows and rows[direction]["x_matmul"] > 0
        assert rows[direction]["timing"] == ("events" if size.T > 512 else "CUDA graph")
