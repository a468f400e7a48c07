"""The runner and its suites: checks, reasons, one shape of records, two builds in turn; short runs on a GPU."""

import contextlib
import dataclasses
import functools
import json
import re

import pytest
import torch
from processes import ROOT, run_python

from benchmarks import run
from benchmarks.harness.measure import Cell, Context, Prepared, timing
from benchmarks.suites import inference, layer, operator, shapes, subjects, timeline

TINY = shapes.SHAPES["tiny"]
CPU = subjects.Settings(torch.device("cpu"), torch.float32)
ON_CPU = ("flashmhf_eager", "swiglu", "swiglu_checkpointed", "mhffn_naive", "dense_moe")
SMALL = operator.Size(40, 2, 16, 3, 32)
FAST = ["--device", "cpu", "--dtype", "float32", "--rounds", "2", "--window", "0.0001"]
OPERATOR = ["--suite", "operator", "--parts", "forward", *FAST, "--shapes", "5,4,16,3,32"]
pytestmark = pytest.mark.usefixtures("one_thread")


def context(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes) -> Context:
    seconds = {"window_seconds": 1e-4, "settle_seconds": 1e-4, "warm_up_seconds": 1e-3, "cell_warm_up_seconds": 1e-3}
    return Context(torch.device(device), dtype, rounds=2, log=lambda line: None, **seconds, **changes)


def by_subject(cell: Cell, where: Context | None = None) -> dict[str, dict]:
    return {row["subject"]: row for row in cell.measure(where or context())}


def tiny(*names: str, **changes) -> Cell:
    return layer.layer_cell("latency", TINY, 5, names, **({"batch": 2} | changes))


def test_a_subject_that_fails_leaves_the_others_their_numbers():
    calls = []

    def later() -> None:
        calls.append(None)
        if len(calls) > 3:
            raise RuntimeError("cannot open /some/where/else/kernel.cubin\nsecond line")

    def memory(context, made):
        raise torch.OutOfMemoryError("tried to allocate")

    right = lambda context, made: Prepared(lambda: made.sum(), 1, {"flops": 10})  # noqa: E731
    broken = {"right": right, "later": lambda context, made: Prepared(later), "memory": memory}
    rows = by_subject(Cell({"T": 1}, broken, lambda context: torch.ones(10), faster_than={"right": ("right", 1.0)}))
    assert rows["right"]["status"] == "ok" and rows["right"]["tflops"] > 0 and "x_right" not in rows["right"]
    assert (rows["later"]["status"], rows["later"]["reason"]) == ("failed", "RuntimeError: cannot open kernel.cubin")
    assert (rows["memory"]["status"], rows["memory"]["reason"]) == ("failed", "out of memory")
    assert "ms" not in rows["memory"]


def test_ratios_are_the_median_of_those_of_one_round(monkeypatch):
    monkeypatch.setattr(timing, "interleave", lambda *_: {"a": [1.0, 1.0, 4.0, 4.0], "b": [2.0, 2.0, 4.0, 4.0]})
    cell = Cell({}, dict.fromkeys("ab", lambda *_: Prepared(lambda: None)), faster_than={"b": ("b", 1.0)})
    assert by_subject(cell)["a"]["x_b"] == 1.5  # of 2 and 1; the medians' is 1.2


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_every_subject_that_runs_here_is_right(direction):
    for name, row in by_subject(tiny(*ON_CPU, direction=direction)).items():
        assert row["status"] == "ok", (name, row)
        assert row["error"] < 1e-5
        assert row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
        assert row["weight_sets"] >= 2


@pytest.mark.parametrize("direction", ["forward", "training"])
@pytest.mark.parametrize("wrong", ["value", "nan", "gradient"])
def test_a_red_check_leaves_no_number(monkeypatch, wrong, direction):
    gradient = lambda y: y + 0.01 * (y - y.detach())  # noqa: E731 - the same value, and 1.01 times the gradient
    change = {"value": lambda y: y * 1.001, "nan": lambda y: y / 0 * 0, "gradient": gradient}[wrong]
    caller = lambda: lambda module, x: change(module(x))  # noqa: E731
    broken = dataclasses.replace(subjects.SUBJECTS["swiglu"], name="broken", caller=caller)
    monkeypatch.setitem(subjects.SUBJECTS, "broken", broken)
    rows = by_subject(tiny("swiglu", "broken", direction=direction))
    assert rows["swiglu"]["status"] == "ok"
    if (wrong, direction) == ("gradient", "forward"):
        assert rows["broken"]["status"] == "ok"
        return
    assert rows["broken"]["status"] == "wrong" and "relative L2 error" in rows["broken"]["reason"]
    assert not {"ms", "tflops", "memory_mib"} & rows["broken"].keys()


def test_missing_subjects_are_rows_with_reasons(monkeypatch):
    monkeypatch.setattr(subjects.importlib.util, "find_spec", lambda name, *a: None)
    rows = by_subject(tiny("swiglu_liger", "official", "flashmhf_hopper"))
    assert {row["status"] for row in rows.values()} == {"missing"}
    assert rows["swiglu_liger"]["reason"] == "liger-kernel is not installed"
    assert rows["official"]["reason"] == "no checkout of the official code given (--official PATH)"
    assert "device is cpu" in rows["flashmhf_hopper"]["reason"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_operator_is_checked_and_timed(direction):
    rows = by_subject(operator.cell(direction, "eager", SMALL, torch.float32))
    assert rows.keys() == {direction, f"gated {direction}"}
    for row in rows.values():
        assert row["status"] == "ok" and row["error"] < 1e-5 and row["ms"]["p50"] > 0 and row["memory_mib"] > 0
        assert row["timing"] == "host clock"


def test_a_run_writes_one_record_and_its_table(tmp_path, capsys):
    assert run.main([*OPERATOR, "--out", str(tmp_path / "new" / "operator")]) == 0
    text = (tmp_path / "new" / "operator_cpu.json").read_text()
    record = json.loads(text)
    assert {"command", "commit", "date", "device", "packages", "back_ends"} <= record["environment"].keys()
    assert {"suite", "settings", "before", "after", "rows", "seconds"} <= record.keys()
    assert [row["subject"] for row in record["rows"]] == ["forward", "gated forward"]
    assert not re.search(r'"(?:/|~)[\w.]', text) and str(tmp_path) not in text
    table = (tmp_path / "new" / "operator_cpu.md").read_text()
    assert table in capsys.readouterr().out and "gated forward" in table


def test_two_builds_take_turns(capsys):
    assert run.main([*OPERATOR, "--base", str(ROOT), "--turns", "1"]) == 0
    out = capsys.readouterr().out
    assert "this ÷ base" in out and "base: commit" in out and "failed" not in out
    with pytest.raises(SystemExit):
        run.main([*OPERATOR, "--base", "no-such-folder"])
    assert "--base is no-such-folder; it must be a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    ([*OPERATOR, "--rounds", "0"], "--rounds is 0; it must be at least 1"),
    ([*OPERATOR, "--device", "nosuch"], "nosuch"),
    ([*OPERATOR, "--as", "sm80"], "--as sm80 needs a CUDA GPU, and device is cpu"),
    (["--suite", "serving", "--device", "cpu"], "the suite serving needs a CUDA GPU"),
])  # fmt: skip
def test_what_cannot_be_measured_here_is_one_line(arguments, message, capsys):
    with contextlib.suppress(SystemExit):  # argparse's
        assert run.main(arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def has_row_scales(device: str) -> bool:
    """Whether PyTorch multiplies e4m3 by scales of rows there, as the FP8 SwiGLU does: 2.11 does not on a CPU."""
    x, scale = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn), torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(x, x.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def test_whole_models(capsys, monkeypatch):
    monkeypatch.setattr(run, "make_context", lambda options: context())
    fp8 = ["--fp8"] if has_row_scales(context().device) else []
    tiny_models = [*FAST, *fp8, "--scales", "tiny", "--contexts", "16", "--batches", "2", "--blocks", "eager"]
    for suite, more in (("train", ["--steps", "1"]), ("model", []), ("generate", ["--new", "12"])):
        assert run.main(["--suite", suite, *tiny_models, "--layers", "3", *more]) == 0
        out = capsys.readouterr().out
        for subject in ("flashmhf", "flashmhf 3 layers", "swiglu"):
            assert f" {subject} |" in out and "failed" not in out and ("÷ swiglu" in out) == (suite != "train")
        assert (" networks | swiglu |" in re.sub(" +", " ", out)) == (suite == "train")
        assert (" dynamic | flashmhf |" in re.sub(" +", " ", out)) == (suite == "generate")


def test_a_timeline_is_recorded_and_drawn(monkeypatch, tmp_path):
    charts = pytest.importorskip("benchmarks.charts", exc_type=ImportError)
    for name, value in {"SIZES": (32, 2, 2, 16), "D_FF": 64, "compiled": lambda module: module}.items():
        monkeypatch.setattr(timeline, name, value)
    rows = timeline.TimelineCell(8).measure(context())
    assert [row["subject"] for row in rows] == ["flashmhf", "swiglu"]
    for row in rows:  # a CPU has no kernels: two are made up
        (forward, begin, took), (backward, later, _) = row["ranges"]
        assert (forward, begin, backward) == ("forward", 0, "backward") and later >= took > 0 and not row["kernels"]
        row["kernels"] = [["flashmhf_forward", 5.0, 40.0], ["product", 50.0, 9.0]]
    charts.save(charts.timeline({"rows": rows}), tmp_path / "timeline.svg")
    drawn = (tmp_path / "timeline.svg").read_text()
    assert drawn.count("1 flashmhf_forward") == drawn.count("2 product") == 2


def test_cells_in_processes_of_their_own(tmp_path, capsys):
    """Ways of training one after the other; one that takes too long is ended, and one without time is not begun."""
    rows = ["--suite", "train", *FAST, "--scales", "tiny", "--contexts", "16", "--batches", "2", "--blocks", "eager"]
    rows += ["--steps", "1", "--ways", "swiglu:networks", "flashmhf 3 layers:blocks"]
    assert run.main([*rows, "--apart", "200", "--out", str(tmp_path / "ways")]) == 0
    found = json.loads((tmp_path / "ways_cpu.json").read_text())["rows"]
    ways = [("swiglu", "networks"), ("flashmhf 3 layers", True)]
    assert [(row["subject"], row["checkpointing"]) for row in found] == ways and all(row["ms"] for row in found)
    assert run.main([*rows, "--apart", "0.01"]) == 1 and run.main([*rows, "--apart", "9", "--budget", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("failed: not finished within --apart 0.01") == 2
    assert out.count("skipped: the time budget was used up") == 2


def test_models_of_recorded_trainings_have_their_parameters():
    from benchmarks.harness.training import RUNS, TRAINED, configuration
    from flashmhf.models import FlashMHFForCausalLM

    recorded = {line["run"]: line["non_embedding"] for line in map(json.loads, RUNS.read_text().splitlines())}
    for (subject, scale), run_name in TRAINED.items():
        with torch.device("meta"):
            model = FlashMHFForCausalLM(configuration(subject, scale))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        found = sum(p.numel() for p in model.parameters()) - model.lm_head.weight.numel()
        assert found == recorded[run_name], (subject, scale)
    for subject, layers, expected in (("flashmhf", 27, 6.829), ("flashmhf 28 layers", 28, 6.8), ("swiglu", 32, 6.889)):
        with torch.device("meta"):
            model = FlashMHFForCausalLM(configuration(subject, "7b"))
        assert len(model.model.layers) == layers
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(expected, rel=0.01)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_blocks_of_every_cell_are_compiled(monkeypatch):
    """Beyond Dynamo's limit those of later cells ran eagerly under the name of compiled ones."""
    pytest.importorskip("transformers")
    from benchmarks.suites import models

    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        for length in (4, 5):
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            rows = by_subject(models.prefill_cell("tiny", 1, length, ("compiled",)))
            assert {row["status"] for row in rows.values()} == {"ok"}
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before >= len(rows) == 2, length


def test_four_processes(tmp_path):
    """``python -m benchmarks.distributed`` over gloo."""
    command = ("-m", "benchmarks.distributed", "--smoke", "--ranks", 4, "--steps", 2, "--out", tmp_path / "run")
    run_python(*command, "--parts", "module", "train", cwd=ROOT, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    record = json.loads((tmp_path / "run_x4_cpu.json").read_text())
    assert record["environment"]["ranks"] == 4 and {row["status"] for row in record["rows"]} == {"ok"}
    assert {row["tp"] for row in record["rows"] if row["part"] == "module"} == {1, 2, 4}
    trained = {(row["subject"], row["layout"]): row for row in record["rows"] if row["part"] == "train"}
    layouts = {"one", "fsdp2 4", "fsdp2 2 x tp 2", "tp 4"}
    assert trained.keys() == {(ffn, layout) for ffn in ("flashmhf", "swiglu") for layout in layouts}
    for (_, layout), row in trained.items():
        assert row["losses"][0] != row["losses"][-1] and ("x_one" in row) == (layout != "one")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_operator_on_the_gpu(gpu_backend, direction):
    for size in (operator.Size(3000, 4, 128, 3, 128), operator.Size(16, 4, 128, 3, 128)):
        cell = operator.cell(direction, gpu_backend, size, torch.bfloat16)
        rows = by_subject(cell, context("cuda", torch.bfloat16))
        assert all(row["status"] == "ok" for row in rows.values()), rows
        assert rows[direction]["x_product"] > 0
        assert rows[direction]["timing"] == ("events" if size.T > 1024 else "CUDA graph")


@pytest.mark.gpu
def test_layers_on_the_gpu():
    small, where = shapes.Shape("paper", 512, 4, 3, 128, 2, 512, 2), context("cuda", torch.bfloat16)
    ours = f"flashmhf_{subjects.first_backend(small, subjects.Settings(where.device, where.dtype))}"
    names = (ours, "swiglu", "swiglu_compiled", "mhffn_naive", "dense_moe")
    for changes in ({}, {"direction": "training"}, {"graph": True, "batch": 1}):
        for name, row in by_subject(layer.layer_cell("latency", small, 64, names, **changes), where).items():
            assert row["status"] == "ok" and row["memory_mib"]["beyond"] > 0, (name, row)
    served = by_subject(inference.serving_cell(5), where)
    assert {row["status"] for row in served.values()} == {"ok"}, served
