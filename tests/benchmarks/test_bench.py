"""The benchmark harness: what can be shown without a GPU, and a short run on one."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import pathlib
import re

import pytest
import torch

from benchmarks.harness import cli, environment, paper, plots, shapes, subjects, suite, timing

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = shapes.SHAPES["tiny"]
CPU = subjects.Settings(torch.device("cpu"), torch.float32)
ON_CPU = ("flashmhf_eager", "kernel_eager", "swiglu", "swiglu_checkpointed", "mhffn_naive", "dense_moe")


pytestmark = pytest.mark.usefixtures("one_thread")


def context(**changes) -> suite.Context:
    windows = dict.fromkeys(("window_seconds", "training_window_seconds", "settle_seconds"), 1e-4)
    seconds = windows | {"warm_up_seconds": 1e-3, "cell_warm_up_seconds": 1e-3}
    return suite.Context(CPU, rounds=2, log=lambda line: None, **seconds, **changes)


def cell(*names: str, group: str = "latency", **changes) -> suite.Cell:
    return suite.Cell(group, TINY, **({"length": 5, "subjects": names, "batch": 2} | changes))


class FakeTimer:
    """Passes of a set length; remembers the order of the windows."""

    def __init__(self, seconds: dict):
        self.seconds, self.windows = seconds, []

    def window(self, run, passes):
        self.windows.append((run, passes))
        return [self.seconds[run]] * passes


class HalfMillisecond:
    def window(self, run, passes):
        return [5e-4] * passes


# Timing


def test_percentiles():
    assert timing.percentiles([3.0, 1.0, 2.0]) == pytest.approx({"p20": 1.4, "p50": 2.0, "p80": 2.6})
    assert timing.percentiles([5.0]) == {"p20": 5.0, "p50": 5.0, "p80": 5.0}
    assert timing.percentiles(list(range(101))) == {"p20": 20, "p50": 50, "p80": 80}
    with pytest.raises(ValueError, match="no samples"):
        timing.percentiles([])


def test_every_round_begins_with_another_subject():
    timer = FakeTimer({"a": 0.5, "b": 0.25, "c": 2.0})
    samples = timing.interleave({name: name for name in "abc"}, timer, rounds=3, window_seconds=1.0)
    calibration, windows = timer.windows[:3], timer.windows[3:]
    assert calibration == [("a", 2), ("b", 2), ("c", 2)]
    assert [name for name, _ in windows] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert dict(windows) == {"a": 2, "b": 4, "c": 1}
    assert {name: len(values) for name, values in samples.items()} == {"a": 6, "b": 12, "c": 3}


def test_passes_before_the_clocks_have_settled_do_not_count():
    class Settling(FakeTimer):
        def window(self, run, passes):
            return [9.0 if i < 5 and passes > 2 else s for i, s in enumerate(super().window(run, passes))]

    samples = timing.interleave({"a": "a"}, Settling({"a": 0.5}), rounds=2, window_seconds=1.0, settle_seconds=2.5)
    assert samples == {"a": [0.5] * 4}


def test_warm_up_lasts_until_two_windows_agree(monkeypatch):
    clock, lengths = [0.0], iter([0.1, 0.1, 0.10, 0.12, 0.14, 0.15, 0.1505, 9.0])

    class Drifting:
        def window(self, run, passes):
            seconds = next(lengths)
            clock[0] += seconds * passes
            return [seconds] * passes

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    timing.warm_up(None, Drifting(), seconds=0.3)
    assert next(lengths) == 9.0  # stopped after 0.15 and 0.1505


def test_cold_copies_exceed_the_cache():
    assert timing.cold_copies(100 << 20, 60 << 20) == 3
    assert timing.cold_copies(10 << 20, 60 << 20) == 24
    assert timing.cold_copies(1 << 30, 60 << 20) == 2


def test_host_timer_times_each_pass():
    calls = []
    seconds = timing.HostTimer().window(lambda: calls.append(None), 4)
    assert len(seconds) == len(calls) == 4 and min(seconds) >= 0


def test_peak_memory_sees_what_a_call_holds():
    def run():
        a, b = torch.ones(1 << 20), torch.ones(1 << 20)
        del a, b
        torch.ones(1 << 20)

    assert 8 << 20 <= timing.peak_tensor_bytes(run) < 9 << 20
    assert timing.peak_memory(run, torch.device("cpu")) is None


def test_peak_resident_sees_what_a_call_holds():
    peak = timing.peak_resident(lambda: torch.ones(16 << 20))
    if math.isnan(peak):
        pytest.skip("no resettable high-water mark on this system")
    assert 60 << 20 < peak < 80 << 20


def test_short_passes_are_repeated():
    calls = []
    run, count = timing.repeated(lambda: calls.append(None), HalfMillisecond(), 2e-3)
    run()
    assert count == 4 and len(calls) == 4
    assert timing.repeated(len, HalfMillisecond(), 1e-4) == (len, 1)


# Subjects


@pytest.mark.parametrize("direction", ["forward", "training"])
@pytest.mark.parametrize("name", ON_CPU)
def test_every_subject_that_runs_here_is_right(name, direction):
    (row,) = suite.run_cell(cell(name, direction=direction), context())
    assert row["status"] == "ok", row["reason"]
    assert row["error"] < 1e-5 and row["layer_ms"]["p20"] <= row["layer_ms"]["p50"] <= row["layer_ms"]["p80"]
    assert row["stack_ms"] == pytest.approx(row["layers"] * row["layer_ms"]["p50"])


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_bf16_subjects_are_within_the_limits(direction):
    settings = subjects.Settings(torch.device("cpu"), torch.bfloat16)
    wide = shapes.Shape("wide", 512, 4, 5, 320, 2, 1024, 2)
    for name in ON_CPU:
        subject, generator = subjects.SUBJECTS[name], torch.Generator().manual_seed(1)
        training = direction == "training"
        module = subjects.randomise(subject.make(wide, settings), generator).requires_grad_(training)
        x = torch.randn(2, 40, 512, generator=generator).bfloat16().requires_grad_(training)
        error = suite.check(subject, wide, module, subject.caller(), x, direction, generator)
        assert error < 0.8 * suite.LIMITS[torch.bfloat16], name


@pytest.mark.parametrize("direction", ["forward", "training"])
@pytest.mark.parametrize("wrong", ["value", "nan", "gradient"])
def test_a_red_check_leaves_no_number(monkeypatch, wrong, direction):
    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.01 * grad

    change = {"value": lambda y: y * 1.001, "nan": lambda y: y / 0 * 0, "gradient": Gradient.apply}[wrong]
    right = subjects.SUBJECTS["swiglu"]
    broken = subjects.Subject(
        "broken", "broken", right.make, right.exact, right.layers, right.flops, caller=lambda: lambda module, x: change(module(x))
    )
    monkeypatch.setitem(subjects.SUBJECTS, "broken", broken)
    rows = {row["subject"]: row for row in suite.run_cell(cell("swiglu", "broken", direction=direction), context())}
    assert rows["swiglu"]["status"] == "ok"
    if (wrong, direction) == ("gradient", "forward"):
        assert rows["broken"]["status"] == "ok"
        return
    assert rows["broken"]["status"] == "wrong" and "relative L2 error" in rows["broken"]["reason"]
    assert not {"layer_ms", "stack_ms", "tflops", "memory_mib"} & rows["broken"].keys()


def test_missing_and_failing_subjects_are_rows_with_reasons(monkeypatch):
    def fail(shape, settings):
        raise RuntimeError("cannot open /some/where/else/kernel.cubin\nsecond line")

    right = subjects.SUBJECTS["swiglu"]
    broken = subjects.Subject("broken", "broken", fail, right.exact, right.layers, right.flops)
    monkeypatch.setitem(subjects.SUBJECTS, "broken", broken)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in ("liger_kernel", "quack") else real(name, *a))
    names = ("swiglu_liger", "swiglu_quack", "official", "flashmhf_hopper", "broken")
    rows = {row["subject"]: (row["status"], row["reason"]) for row in suite.run_cell(cell(*names), context())}
    assert rows["swiglu_liger"] == ("missing", "liger-kernel is not installed")
    assert rows["swiglu_quack"] == ("missing", "quack-kernels is not installed")
    assert rows["official"] == ("missing", "no checkout of the official code given (--official PATH)")
    assert rows["flashmhf_hopper"][0] == "missing" and "device is cpu" in rows["flashmhf_hopper"][1]
    assert rows["broken"] == ("failed", "RuntimeError: cannot open kernel.cubin")


def test_out_of_memory_is_a_row(monkeypatch):
    def fail(shape, settings):
        raise torch.OutOfMemoryError("tried to allocate")

    right = subjects.SUBJECTS["swiglu"]
    monkeypatch.setitem(subjects.SUBJECTS, "large", subjects.Subject("large", "large", fail, right.exact, right.layers, right.flops))
    (row,) = suite.run_cell(cell("large"), context())
    assert (row["status"], row["reason"]) == ("failed", "out of memory")


def test_the_official_checkout_is_loaded_from_its_path(tmp_path):
    settings = subjects.Settings(torch.device("cuda"), torch.bfloat16, tmp_path)
    assert "does not load" in subjects.SUBJECTS["official"].why_missing(TINY, settings)
    kernel = tmp_path / "kernels" / "triton" / "flash_mlp_moe.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(
        "import torch\nfrom flashmhf import reference\n"
        "class FlashMLPMoE(torch.nn.Module):\n"
        "    def forward(self, q, k, u, v, r):\n"
        "        q, r = q.transpose(1, 2), r.transpose(1, 2).to(q.dtype)\n"
        "        return reference.forward(q, k, u, v, r).transpose(1, 2)\n"
    )
    subject, settings = subjects.SUBJECTS["official"], subjects.Settings(torch.device("cpu"), torch.float32, tmp_path)
    generator = torch.Generator().manual_seed(0)
    module = subjects.randomise(subject.make(TINY, settings), generator)
    x = torch.randn(2, 5, TINY.d_model, requires_grad=True)
    assert suite.check(subject, TINY, module, subject.caller(), x, "training", generator) < 1e-5


def test_random_weights_give_activations_of_order_one():
    generator = torch.Generator().manual_seed(0)
    for name in ON_CPU:
        subject = subjects.SUBJECTS[name]
        module = subjects.randomise(subject.make(TINY, CPU), generator)
        with torch.no_grad():
            size = subject.caller()(module, torch.randn(500, TINY.d_model, generator=generator)).std()
        assert 0.05 < size < 5, (name, size)


# The record


@pytest.fixture(scope="module")
def record() -> dict:
    ours = suite.ours_for(TINY, CPU)
    cells = [
        *suite.latency_cells(ours, (4, 384), TINY, batch=1),
        *suite.training_cells(ours, 4, TINY, batch=1),
        *suite.decode_cells(ours, (1, 16), TINY, graph=False),
        *suite.kernel_cells(ours, (4,), TINY, batch=1),
    ]
    fast = context()
    cells = [suite.Cell(**(vars(c) | {"subjects": tuple(s for s in c.subjects if s != "swiglu_compiled")})) for c in cells]
    result = suite.run(cells, fast)
    for row in result["rows"]:
        row["shape"] = "paper"
    return result


@pytest.fixture
def h200(record) -> dict:
    """The record as one of a GPU run: with rates, sensors and memory."""
    changed = json.loads(json.dumps(record))
    changed["environment"]["device"] = "NVIDIA H200"
    rates = {"matmul_tflops": 700.0, "copy_gb_per_s": 4200.0}
    changed["before"] = rates | {"sensors": {"driver": 580.1, "power_limit_w": 700.0}}
    changed["after"] = rates
    for row in changed["rows"]:
        if row["status"] == "ok":
            row["memory_mib"] = {"beyond": 10.0 if row["subject"].startswith("flashmhf") else 60.0, "total": 100.0}
    return changed


def test_record_schema(record):
    assert record["schema"] == 1
    where = record["environment"]
    assert {"date", "device", "packages", "flashmhf", "cuda", "python"} <= where.keys()
    assert {"before", "after", "settings", "seconds"} <= record.keys() and "sensors" in record["after"]
    fixed = {"group", "subject", "title", "shape", "batch", "length", "tokens", "direction", "timing", "layers", "status"}
    for row in record["rows"]:
        assert fixed <= row.keys()
        if row["status"] == "ok":
            assert {"layer_ms", "stack_ms", "tflops", "gb_per_s", "samples", "weight_sets", "error"} <= row.keys()
            assert row["samples"] >= 2 and row["weight_sets"] >= 2
        else:
            assert row["status"] in ("missing", "failed", "wrong", "skipped") and row["reason"]
            assert "layer_ms" not in row
    assert {row["status"] for row in record["rows"]} == {"ok", "missing"}


def test_record_names_no_host_and_no_path(record, tmp_path):
    suite.write_json(record, tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text)["schema"] == 1
    assert not re.search(r'"(?:/|~)[\w.]', text) and str(ROOT) not in text
    assert environment.brief(OSError("lost /a/b/c.so: no")) == "OSError: lost c.so: no"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/x/y/benchmarks/run_h200.py", "--out", "/x/out", "--quick"], "python benchmarks/run_h200.py --out out --quick"),
        (["benchmarks/run_h200.py", "--out", "a b"], "python benchmarks/run_h200.py --out 'a b'"),
        (["/x/bin/flashmhf", "bench", "--paper"], "flashmhf bench --paper"),
        (["/x/pytest/__main__.py", "-m", "gpu"], "pytest -m gpu"),
    ],
)
def test_command_has_no_folder_of_this_machine(arguments, command):
    assert environment.command(arguments) == command


def test_commit_without_a_repository_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(environment.flashmhf, "__file__", str(tmp_path / "flashmhf" / "__init__.py"))
    monkeypatch.delenv("FLASHMHF_COMMIT", raising=False)
    assert environment.commit() is None
    monkeypatch.setenv("FLASHMHF_COMMIT", "abc1234")
    assert environment.commit() == "abc1234"


def test_csv_has_every_row(record, tmp_path):
    suite.write_csv(record, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(record["rows"])
    for line, row in zip(lines, record["rows"], strict=True):
        assert line["subject"] == row["subject"] and line["device"] == record["environment"]["device"]
        assert bool(line["layer_ms.p50"]) == (row["status"] == "ok")


def test_saved_after_every_cell_and_the_budget_is_kept():
    saved = []
    cells = [cell("swiglu"), cell("swiglu", "flashmhf_eager")]
    result = suite.run(cells, context(deadline=-math.inf), lambda record: saved.append(len(record["rows"])))
    assert saved == [1, 3, 3]
    assert all((row["status"], row["reason"]) == ("skipped", "the time budget was used up") for row in result["rows"])


def test_full_plan_covers_the_tables():
    plan = cli.plan(cli.PARTS, "flashmhf_hopper", None)
    assert [c.length for c in plan if c.group == "latency"] == list(shapes.LENGTHS)
    assert [c.batch for c in plan if c.group == "decode"] == list(shapes.DECODE_TOKENS) and all(
        c.graph for c in plan if c.group == "decode"
    )
    assert {c.shape.name for c in plan if c.group == "models"} == {"128M", "370M", "1.3B"}
    everyone = {"flashmhf_hopper", "flashmhf_triton", "mhffn_naive", "dense_moe", "official"}
    everyone |= {"swiglu", "swiglu_compiled", "swiglu_liger", "swiglu_quack"}
    assert everyone <= {name for c in plan if c.length in suite.ALSO_LENGTHS and c.group == "latency" for name in c.subjects}
    assert any("swiglu_checkpointed" in c.subjects for c in plan if c.direction == "training")
    few = cli.plan(("latency", "training"), "flashmhf_hopper", [384, 768], ["swiglu_liger"])
    assert [(c.group, c.length, c.subjects) for c in few] == [("latency", 384, ("swiglu_liger",)), ("training", 4032, ("swiglu_liger",))]
    with pytest.raises(ValueError, match="no subject liger; there are"):
        cli.plan(cli.PARTS, "flashmhf_hopper", None, ["liger"])


def test_operation_counts():
    shape = shapes.SHAPES["paper"]
    assert shape.kernel_flops(1) == 6 * 16 * 128 * 22 * 384
    subject = subjects.SUBJECTS["flashmhf_eager"]
    assert subject.flops(shape, 3) == 3 * (shape.kernel_flops(1) + 4 * 2048**2)
    assert subject.backward_flops(shape, 1) == 16 * 16 * 128 * 22 * 384 + 8 * 2048**2


# Tables, figures, headline


def test_tables_and_ratios(h200):
    rows = paper.Rows(h200)
    ours, swiglu = (rows.find("latency", subject, 384) for subject in ("flashmhf_eager", "swiglu"))
    text = paper.report(h200)
    assert "NVIDIA H200" in text and "700 TFLOP/s before and 700 after" in text and "liger-kernel" in text
    line = next(line for line in paper.latency_table(h200).splitlines() if line.startswith("| 384"))
    numbers = [part.strip() for part in line.strip("|").split("|")]
    assert numbers[1:4] == [f"{ours['stack_ms']:.2f}", "13.20", f"{swiglu['stack_ms']:.2f}"]
    assert numbers[8:10] == [f"{swiglu['stack_ms'] / ours['stack_ms']:.2f}", "0.93"]
    summary = paper.summary(h200)
    assert summary["SwiGLU ÷ FlashMHF, training memory beyond weights and input"] == 6.0
    assert summary["compiled SwiGLU ÷ FlashMHF, forward, worst length"] is None


def test_figures(h200, record, tmp_path):
    assert {path.name for path in plots.draw(h200, tmp_path)} == {"latency.png", "memory.png", "roofline.png"}
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())
    assert {path.name for path in plots.draw(record, tmp_path)} == {"latency.png"}


def test_a_record_of_few_subjects_is_reported(h200, tmp_path):
    h200["rows"] = [row for row in h200["rows"] if row["subject"] in ("swiglu", "swiglu_liger")]
    assert "SwiGLU (Liger)" in paper.report(h200)
    assert (tmp_path / "latency.png") in plots.draw(h200, tmp_path)


def test_headline_names_sizes_ratios_and_conditions(h200):
    text = paper.headline(h200)
    assert "| 384 |" in text and "d_model 2048" in text and "1/6.0 of its memory" in text and "driver 580.1" in text
    h200["rows"] = [row for row in h200["rows"] if row["group"] == "latency"]
    assert "Forward and backward" not in paper.headline(h200)


# On a GPU


@pytest.mark.gpu
def test_short_run_on_the_gpu(tmp_path):
    settings = subjects.Settings(torch.device("cuda"), torch.bfloat16)
    small = shapes.Shape("paper", 512, 4, 3, 128, 2, 512, 2)
    ours = suite.ours_for(small, settings)
    windows = dict.fromkeys(("window_seconds", "training_window_seconds", "settle_seconds"), 0.002)
    seconds = windows | {"warm_up_seconds": 0.05, "cell_warm_up_seconds": 0.01}
    fast = suite.Context(settings, rounds=2, log=lambda line: None, **seconds)
    cells = [
        *suite.latency_cells(ours, (384,), small),
        *suite.training_cells(ours, 64, small),
        *suite.decode_cells(ours, (1, 64), small),
        *suite.kernel_cells(ours, (384,), small),
    ]
    result = suite.run(cells, fast, lambda record: suite.write_json(record, tmp_path / "results.json"))
    plots.draw(result, tmp_path)
    paper.report(result)
    needed = {ours, "swiglu", "swiglu_compiled", "swiglu_checkpointed", "mhffn_naive", "dense_moe", ours.replace("flashmhf_", "kernel_")}
    for row in result["rows"]:
        if row["subject"] in needed:
            assert row["status"] == "ok", (row["subject"], row["reason"])
            assert row["memory_mib"]["beyond"] > 0
    assert result["before"]["matmul_tflops"] > 0 and result["after"]["matmul_tflops"] > 0


@pytest.mark.gpu
def test_a_graph_keeps_what_it_reads():
    def make():
        x = torch.full((1000,), 2.0, device="cuda")
        total = torch.zeros((), device="cuda")
        return timing.graphed(lambda: total.add_(x.sum())), total

    replay, total = make()
    junk = [torch.full((1000,), float("nan"), device="cuda") for _ in range(50)]
    total.zero_()
    replay()
    assert total.item() == 2000 and junk
