"""The runner and its suites: checks, reasons, one shape of records, two builds in turn; short runs on a GPU."""

import dataclasses
import functools
import json
import math
import re

import pytest
import torch
from processes import ROOT, run_python

import flashmhf
from benchmarks import run
from benchmarks.harness.measure import Cell, Context, Prepared
from benchmarks.harness.training import covered
from benchmarks.suites import fp8, inference, layer, operator, shapes, subjects
from flashmhf.testing import relative_l2

TINY = shapes.SHAPES["tiny"]
CPU = subjects.Settings(torch.device("cpu"), torch.float32)
ON_CPU = ("flashmhf_eager", "swiglu", "swiglu_checkpointed", "mhffn_naive", "dense_moe")
SMALL = operator.Size(40, 2, 16, 3, 32)
FAST = ["--device", "cpu", "--dtype", "float32", "--rounds", "2", "--window", "0.0001"]

pytestmark = pytest.mark.usefixtures("one_thread")


def context(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes) -> Context:
    seconds = {"window_seconds": 1e-4, "settle_seconds": 1e-4, "warm_up_seconds": 1e-3, "cell_warm_up_seconds": 1e-3}
    return Context(torch.device(device), dtype, rounds=2, log=lambda line: None, **seconds, **changes)


def by_subject(cell: Cell, where: Context | None = None) -> dict[str, dict]:
    return {row["subject"]: row for row in cell.measure(where or context())}


def tiny(*names: str, **changes) -> Cell:
    return layer.layer_cell("latency", TINY, 5, names, **({"batch": 2} | changes))


# Cells


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
    assert (rows["memory"]["status"], rows["memory"]["reason"]) == ("failed", "out of memory") and "ms" not in rows[
        "memory"
    ]


def test_the_budget_is_kept():
    rows = tiny("swiglu").measure(context(deadline=-math.inf))
    assert [(row["status"], row["reason"]) for row in rows] == [("skipped", "the time budget was used up")]


# Whole layers


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_every_subject_that_runs_here_is_right(direction):
    for name, row in by_subject(tiny(*ON_CPU, direction=direction)).items():
        assert row["status"] == "ok", (name, row)
        assert (
            row["error"] < 1e-5 and row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"] and row["weight_sets"] >= 2
        )


@pytest.mark.parametrize("direction", ["forward", "training"])
@pytest.mark.parametrize("wrong", ["value", "nan", "gradient"])
def test_a_red_check_leaves_no_number(monkeypatch, wrong, direction):
    gradient = lambda y: y + 0.01 * (y - y.detach())  # noqa: E731 - the same value, and 1.01 times the gradient
    change = {"value": lambda y: y * 1.001, "nan": lambda y: y / 0 * 0, "gradient": gradient}[wrong]
    broken = dataclasses.replace(
        subjects.SUBJECTS["swiglu"], name="broken", caller=lambda: lambda module, x: change(module(x))
    )
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
    assert layer.check(subject, TINY, module, subject.caller(), x, "training", generator) < 1e-5


def test_random_weights_give_activations_of_order_one():
    generator = torch.Generator().manual_seed(0)
    for name in ON_CPU:
        subject = subjects.SUBJECTS[name]
        module = subjects.randomise(subject.make(TINY, CPU), generator)
        with torch.no_grad():
            size = subject.caller()(module, torch.randn(500, TINY.d_model, generator=generator)).std()
        assert 0.05 < size < 5, (name, size)


def test_the_plan_covers_the_paper_s_tables():
    options, suite = run.parse(["--suite", "layer", *FAST])
    rows = [(cell.row, set(cell.subjects)) for cell in suite.cells(options, context())]
    assert [row["length"] for row, _ in rows if row["group"] == "latency"] == list(shapes.LENGTHS)
    assert [row["batch"] for row, _ in rows if row["group"] == "decode"] == list(shapes.DECODE_TOKENS)
    others = {"mhffn_naive", "swiglu", "swiglu_compiled", *layer.ALSO}
    found = [names for row, names in rows if row["group"] == "latency" and row["length"] in layer.ALSO_LENGTHS]
    assert len(found) == 2 and all(others <= names for names in found)
    shape = shapes.SHAPES["paper"]
    assert shape.kernel_flops(1) == 6 * 16 * 128 * 22 * 384
    assert subjects.SUBJECTS["flashmhf_eager"].backward_flops(shape, 1) == 16 * 16 * 128 * 22 * 384 + 8 * 2048**2


# The operator


@pytest.mark.parametrize(
    ("direction", "names"),
    [
        ("forward", {"forward", "gated forward", "gate, then forward", "materialising"}),
        ("backward", {"backward", "gated backward", "forward and backward", "materialising"}),
    ],
)
def test_the_operator_is_checked_and_timed(direction, names):
    rows = by_subject(operator.cell(direction, "eager", SMALL, torch.float32, compared=True))
    assert rows.keys() == names
    for row in rows.values():
        assert row["status"] == "ok" and row["error"] < 1e-5 and row["ms"]["p50"] > 0 and row["memory_mib"] > 0
        assert row["timing"] == "host clock"


@pytest.mark.parametrize(("direction", "result"), [("forward", 0), ("backward", 0), ("backward", 3), ("backward", 4)])
def test_a_wrong_operator_leaves_no_number(monkeypatch, direction, result):
    def spoil(x):
        return x + 0.01 * x.abs().mean()

    make = getattr(operator, f"_{direction}_subjects")
    right = make("eager", False, None)[direction]

    def wrong(p):
        out = right.call(p)
        return (
            spoil(out) if direction == "forward" else tuple(spoil(x) if i == result else x for i, x in enumerate(out))
        )

    monkeypatch.setattr(
        operator, f"_{direction}_subjects", lambda *a: {direction: operator.Subject(wrong, right.work, right.check)}
    )
    row = by_subject(operator.cell(direction, "eager", SMALL, torch.float32))[direction]
    assert row["status"] == "wrong" and "relative L2 error" in row["reason"] and "ms" not in row


def test_swiglu_of_the_same_width_is_compared_with_fused_back_ends():
    p = operator.testing.problem(40, 2, 16, 3, 32, torch.float32)
    module = operator.swiglu_like(p)
    assert sum(weight.numel() for weight in module.parameters()) == 3 * 32 * 96
    assert len(operator._forward_subjects("triton", True, module)["SwiGLU"].call(p)) == 40
    assert (
        len(operator._backward_subjects("triton", True, module)["checkpointed SwiGLU, forward and backward"].call(p))
        == 4
    )
    rows = by_subject(operator.cell("forward", "hopper", SMALL, torch.float32, compared=True))
    assert "SwiGLU" in rows and rows["forward"]["status"] == "missing" and "cpu" in rows["forward"]["reason"]


def test_default_shapes_and_refusals():
    for direction, sizes in operator.SIZES.items():
        assert {size.d_h for size in sizes} == {64, 96, 128, 256} and {1, 32256, 129024} <= {
            size.T for size in sizes
        }, direction
    for text in ("1,2,3,4", "1,2,3,4,0", "1,2,3,4,x", "1,2,3,4,5,6"):
        with pytest.raises(operator.argparse.ArgumentTypeError, match="T,H,d_h,E,d_e"):
            operator.Size.parse(text)


# The runner


def test_a_run_writes_one_record_and_its_table(tmp_path, capsys):
    arguments = ["--suite", "operator", "--parts", "forward", *FAST, "--shapes", "5,4,16,3,32", "--alone"]
    assert run.main([*arguments, "--out", str(tmp_path / "new" / "operator")]) == 0
    text = (tmp_path / "new" / "operator_cpu.json").read_text()
    record = json.loads(text)
    assert {"command", "commit", "date", "device", "packages", "back_ends"} <= record["environment"].keys()
    assert {"suite", "settings", "before", "after", "rows", "seconds"} <= record.keys()
    assert [row["subject"] for row in record["rows"]] == ["forward", "gated forward"]
    assert not re.search(r'"(?:/|~)[\w.]', text) and str(tmp_path) not in text
    table = (tmp_path / "new" / "operator_cpu.md").read_text()
    assert table in capsys.readouterr().out and "gated forward" in table


def test_two_builds_take_turns(capsys):
    """This checkout against itself: equal bits. The digests are compared as they come."""
    arguments = ["--suite", "bits", *FAST, "--tokens", "5", "--head-dims", "64", "--variants", "module", "fp8"]
    assert run.main([*arguments, "--base", str(ROOT), "--turns", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("equal") == 3 and "DIFFERENT" not in out and "base: commit" in out
    rows = [
        {"T": 1, "subject": "a", "status": "ok", "digest": "1", "build": build, "turn": 0}
        | ({"digest": "2"} if build == "this" else {})
        for build in ("base", "this")
    ]
    text, equal = run.differences({"rows": rows, "builds": {}})
    assert not equal and "DIFFERENT" in text


def test_whole_models(capsys, monkeypatch):
    monkeypatch.setattr(run, "make_context", lambda options: context())
    tiny_models = [*FAST, "--scales", "tiny", "--contexts", "16", "--batches", "2", "--blocks", "eager"]
    for suite, more in (("train", ["--steps", "1"]), ("model", []), ("generate", ["--new", "12"])):
        assert run.main(["--suite", suite, *tiny_models, "--layers", "3", *more]) == 0
        out = capsys.readouterr().out
        for subject in ("flashmhf", "flashmhf 3 layers", "swiglu"):
            assert f" {subject} |" in out and "failed" not in out and "÷ swiglu" in out
        assert (" swiglu, networks checkpointed |" in out) == (suite == "train")
        assert (" dynamic | flashmhf |" in re.sub(" +", " ", out)) == (suite == "generate")


def test_models_of_other_depths_have_as_many_parameters():
    """At 1.3B these are 15, 14 and 13 sub-networks of 384."""
    pytest.importorskip("transformers")
    from benchmarks.suites import models

    counts = {}
    for subject in ("flashmhf", "flashmhf 21 layers", "flashmhf 22 layers", "swiglu"):
        config = models.configuration(subject, "1.3b")
        with torch.device("meta"):
            model = models.AutoModelForCausalLM.from_config(config)
        counts[subject] = model.num_parameters(exclude_embeddings=True)
        found = (config.num_hidden_layers, config.ffn_num_subnets, config.ffn_subnet_dim)
        expected = {"flashmhf": (20, 15, 384), "flashmhf 21 layers": (21, 14, 384), "flashmhf 22 layers": (22, 13, 384)}
        assert found == expected.get(subject, (24, None, None))
    assert max(counts.values()) < 1.014 * min(counts.values())


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


def test_models_of_experiments():
    """They have the parameters that the training counted."""
    transformers = pytest.importorskip("transformers")
    from benchmarks.suites import models

    found = {line["run"]: line["non_embedding"] for line in map(json.loads, models.RUNS.read_text().splitlines())}
    for name, trained in models.TRAINED.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(models.configuration(*name.split("-")))
        assert model.num_parameters(exclude_embeddings=True) == found[trained], name


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch._scaled_mm on CPUs takes no scales of rows before torch 2.13"
)
def test_the_fp8_baseline_is_swiglu():
    network = flashmhf.SwiGLU(64, 128, dtype=torch.bfloat16)
    x = torch.randn(20, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert relative_l2(fp8.Fp8SwiGLU(network)(x), network(x).double()) < 0.08


# Many processes


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


def test_the_length_of_a_union_of_intervals():
    assert covered([]) == 0
    assert covered([(5, 9), (0, 3), (2, 4), (6, 7), (9, 10)]) == 4 + 5


# On a GPU


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_operator_on_the_gpu(gpu_backend, direction):
    for size in (operator.Size(3000, 4, 128, 3, 128), operator.Size(16, 4, 128, 3, 128)):
        rows = by_subject(
            operator.cell(direction, gpu_backend, size, torch.bfloat16, compared=True), context("cuda", torch.bfloat16)
        )
        assert all(row["status"] == "ok" for row in rows.values()), rows
        assert rows[direction]["x_product"] > 0 and rows[direction]["timing"] == (
            "events" if size.T > 1024 else "CUDA graph"
        )


@pytest.mark.gpu
def test_layers_on_the_gpu():
    small, where = shapes.Shape("paper", 512, 4, 3, 128, 2, 512, 2), context("cuda", torch.bfloat16)
    ours = f"flashmhf_{subjects.first_backend(small, subjects.Settings(where.device, where.dtype))}"
    names = (ours, "swiglu", "swiglu_compiled", "mhffn_naive", "dense_moe")
    for changes in ({}, {"direction": "training"}, {"graph": True, "batch": 1}):
        for name, row in by_subject(layer.layer_cell("latency", small, 64, names, **changes), where).items():
            assert row["status"] == "ok" and row["memory_mib"]["beyond"] > 0, (name, row)


@pytest.mark.gpu
def test_a_served_layer_on_the_gpu():
    rows = by_subject(inference.serving_cell(5), context("cuda", torch.bfloat16))
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
