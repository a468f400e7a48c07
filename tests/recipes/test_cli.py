"""The commands about this machine, and what all commands share: one line for an error, the status, and output that no
command dies of."""

from __future__ import annotations

import ast
import io
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from lm_runs import ROOT, environment, interrupt

from flashmhf import backends
from flashmhf_recipes import cli, first_run
from flashmhf_recipes.options import Options, empty_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def small(monkeypatch):
    """Sizes at which the whole command takes a second."""
    setting = first_run.Setting(torch.device("cpu"), torch.float32, 64, 2, 2, 32, 1, (16, 32), 1, (1, 1))
    monkeypatch.setattr(first_run, "setting_of", lambda device: setting)
    monkeypatch.setitem(first_run.SIZES, "cpu", (SMALL, SMALL | {"ffn_num_heads": 2, "ffn_num_subnets": 2}))
    monkeypatch.setitem(first_run.BUDGETS, "cpu", {"length": 16, "batch": 2, "steps": 4})
    monkeypatch.setattr(first_run, "FEWEST_STEPS", 2)
    monkeypatch.setattr(cli, "STARTED", time.monotonic())


def test_the_whole_command(small, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--device", "cpu", "--text", str(text)]) == 0
    out = capsys.readouterr().out
    expected = ["naive MH-FFN", "eager float32", "held-out loss after 4 steps", "32 tokens", "on an H100 (20 FlashMHF"]
    assert [text for text in (*expected, "nothing of the speed on a GPU") if text not in out] == []
    assert (tmp_path / "flashmhf_report.png").read_bytes().startswith(b"\x89PNG") and "left out" not in out


def test_what_there_is_no_time_for_is_left_out_and_named(small, monkeypatch):
    """Whatever the machine: the command ends in time."""
    cpu, past = torch.device("cpu"), first_run.Clock(165.0, time.monotonic() - 1000)
    assert not [*first_run.check(cpu, clock=past), *first_run.compare(first_run.setting_of(cpu), past)]
    kinds = [f"the check of eager in {dtype}" for dtype in ("float32", "bfloat16", "float16")]
    assert past.left_out == [*kinds, "lengths from 16 on"]

    made = lambda text, name, sizes, device, budget, bar: first_run.Trained(1, [0.0] * budget["steps"], 0.0, 1.0)  # noqa: E731
    monkeypatch.setattr(first_run, "_train", made)
    monkeypatch.setitem(first_run.BUDGETS, "cpu", {"length": 16, "batch": 2, "steps": 20})
    for seconds, steps, note in ((1000, 20, []), (30, 13, ["7 of 20 steps of the language models"])):
        clock = first_run.Clock(seconds)
        models = first_run.train(b"", cpu, clock=clock)
        assert [len(model.losses) for model in models.values()] == [steps] * 2 and clock.left_out == note
    assert not first_run.train(b"", cpu, clock=(clock := first_run.Clock(1)))
    assert clock.left_out == ["the language models: there is time for 0 steps of each"]


def test_recorded_times_are_those_of_the_record():
    rows = json.loads((ROOT / first_run.RECORD).read_text("utf-8"))["rows"]
    for group, way in (("latency", "inference"), ("training", "a training step")):
        for subject, stated in zip(("flashmhf_hopper", "swiglu_compiled"), first_run.RECORDED[way], strict=True):
            row = next(row for row in rows if (row["group"], row["subject"], row["tokens"]) == (group, subject, 32256))
            assert row["layers"] == (20 if subject == "flashmhf_hopper" else 24)
            assert round(row["layers"] * row["ms"]["p50"]) == stated


def test_without_the_extra_the_rest_runs_and_a_failed_check_is_an_error(small, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    wrong = first_run.Accuracy("eager", torch.float32, "dq", math.nan, 4e-7, 5e-7)
    monkeypatch.setattr(first_run, "check", lambda device, backend=None, clock=None: iter([wrong]))
    assert cli.main(["--device", "cpu", "--text", str(text)]) == 1
    captured = capsys.readouterr()
    assert "the language model needs transformers: pip install 'flashmhf[lm]'" in captured.out
    assert "FAILED" in captured.out and "flashmhf: error: 1 of 1 checks" in captured.err
    assert (tmp_path / "flashmhf_report.png").exists()


def test_language_models_learn(small, text, monkeypatch):
    monkeypatch.setitem(first_run.BUDGETS, "cpu", {"length": 32, "batch": 4, "steps": 40})
    for model in first_run.train(text.read_bytes(), torch.device("cpu"), 40).values():
        assert len(model.losses) == 40 and model.losses[0] > math.log(257) - 0.2
        assert max(model.losses[-1], model.held_out) < 4 and model.step_s > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_parameters(device):
    """Of the layers that are timed, and of the language models."""
    setting = replace(first_run.setting_of(torch.device(device)), device=torch.device("cpu"))
    made = first_run.modules(setting, device="meta").values()
    counts = [layers * sum(p.numel() for p in module().parameters()) for layers, module in made]
    assert max(counts) / min(counts) < 1.01
    counts = []
    for ffn, sizes in zip(("swiglu", "flashmhf"), first_run.SIZES[device], strict=True):
        model = empty_model(Options("x", preset="tiny", ffn=ffn, data=["x"], vocab_size=258, model=sizes).resolve())
        counts.append(sum(p.numel() for p in model.parameters()))
    assert max(counts) / min(counts) < 1.03


def test_unusable_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in {"empty": b"", "binary": b"\x7fELF\0\0" * 20000, "short": b"too short"}.items():
        (tmp_path / name).write_bytes(content)
    for name, message in {
        "nothing": "No such file", "folder": "Is a directory", "empty": "has 0 bytes", "binary": "looks like a binary",
        "short": "has 9 bytes; training and holding out need 50,000",
    }.items():  # fmt: skip
        assert cli.main(["--text", name]) == 2
        captured = capsys.readouterr()
        assert name in captured.err and message in captured.err
        assert not captured.out and len(captured.err.splitlines()) == 1


def test_what_a_command_writes_must_be_writable(text, tmp_path, monkeypatch, capsys):
    """It is known before the work is done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert cli.main(["--device", "cpu", "--text", str(text)]) == 2
    assert "flashmhf_report.png cannot be written" in capsys.readouterr().err
    assert cli.main(["eval", "--model", "./nothing", "--data", "x", "--json", "x"]) == 2
    assert "--json is 'x'; it must name a file that can be written" in capsys.readouterr().err


def test_default_text_is_the_standard_library():
    text = first_run.training_text(None)
    assert len(text) > 1_000_000 and b"import" in text
    assert text == first_run.training_text(None)


def test_check_lists_every_tensor(capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "eager"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[2] for row in rows] == ["out", "dq", "dk", "du", "dv", "dr"] * 3
    assert all(row[-1] == "ok" for row in rows)


MISTAKES = {
    "--steps many": "argument --steps: 'many' is not an integer from 1 on; flashmhf --help lists the options",
    "--device tpu": "device is 'tpu'; supported: auto, cpu, cuda, cuda:N",
    "nonsense": "nonsense is not an option or a command; commands: info, check",
    "--device cpu check": "check is not an option or a command; options come after the command",
    "info --device cpu": "unrecognized arguments: --device cpu",
    "check --device cpu --backend hopper": "back end hopper cannot run: device is cpu",
    "generate --model ./nothing x": "nothing does not exist",
    "generate --model x --steps 5": "unrecognized arguments: --steps",
    "eval --model ./nothing": "give --data, --tasks or both",
    "eval --model ./nothing --data x --json ./no/x": "--json is './no/x'; it must name a file that can be written",
    f"eval --model ./nothing --data x --json {__file__}/x": "test_cli.py/x'; it must name a file that can be written",
    "eval --model x --data x --batch 0": "argument --batch: '0' is not an integer from 1 on",
    "train --data x": "the following arguments are required: --output",
    "train --output ./run --data ./nothing.txt": "nothing.txt does not exist",
    "train --output ./run": "give one of data, dataset and tokens",
    "train --output ./run --data x --optimizer lion": "argument --optimizer: invalid choice: 'lion'",
    "train --output ./run --data x --set a": "argument --set: 'a' is not NAME=VALUE",
    "train --output ./run --resume": "holds no run",
    "train --output ./run --resume --batch 9 --set x=1": "leave out: arguments, batch",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_every_mistake_is_one_line_with_status_2(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.rpartition("\r")[2].startswith("flashmhf: error: ") and error.count("\n") == 1
    assert MISTAKES[arguments] in error and not (tmp_path / "run" / "run.json").exists()


def test_interruption_is_short(monkeypatch, capsys):
    monkeypatch.setattr(first_run, "check", interrupt)
    assert cli.main(["check", "--device", "cpu"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("shell", "status", "error"), [
    ("info | head -n 0; exit ${PIPESTATUS[0]}", 141, ""),
    ("info > /dev/full", 2, "No space left on device\n"),
    ("info >&-", 0, ""),
    ("generate --model x - <&-", 2, "flashmhf: error: prompt is '-', and standard input is closed\n"),
])  # fmt: skip
def test_streams_that_cannot_be_used(shell, status, error):
    program = f"{sys.executable} -u -m flashmhf_recipes {shell}"
    settings = {"env": environment(), "capture_output": True, "timeout": 200}
    done = subprocess.run(program, shell=True, executable="/bin/bash", **settings)
    assert done.returncode == status and done.stderr.decode().endswith(error) and done.stderr.count(b"\n") <= 1


def test_characters_that_an_encoding_lacks_are_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setitem(cli.COMMANDS, "info", ("", lambda *_: print("café ×", "日本") or 0))
    assert cli.main(["info"]) == 0 and out.buffer.getvalue() == b"caf\xe9 \xd7 \\u65e5\\u672c\n"


def test_nothing_depends_on_asserts_docstrings_and_the_locale():
    """python -O leaves assert statements out, -OO docstrings, too. Text is UTF-8, also where the linter does not see
    that an object is a path."""
    for path in (path for package in ("flashmhf", "flashmhf_recipes") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(node, "id", getattr(node, "attr", None))
            assert not isinstance(node, ast.Assert) and name != "__doc__", f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("read_text", "write_text"):
                assert "utf-8" in ast.unparse(node), f"{path}:{node.lineno}"


def test_info_and_what_is_set_before_torch_and_matplotlib_are_imported():
    """OpenMP reads its policy when torch is imported; matplotlib refuses a notebook's back end that is missing."""
    program = "import os, sys; from flashmhf_recipes import cli; assert 'torch' not in sys.modules; "
    program += "assert cli.main(['info']) == 0; import matplotlib; print(os.environ['OMP_WAIT_POLICY'])"
    variables = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"}
    variables["MPLBACKEND"] = "nosuch"
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("flashmhf ") and done.stdout.endswith("PASSIVE\n"), done.stderr
    assert all(name in done.stdout for name in backends.BACKENDS)


def test_a_picture_that_cannot_be_drawn_is_a_warning(small, tmp_path, caplog):
    assert not first_run.picture(tmp_path / "nothing" / "x.png", first_run.setting_of(None), [], [], {})
    assert ["was not drawn" in record.message for record in caplog.records] == [True]


def test_table_shows_what_did_not_fit(small):
    setting = first_run.setting_of(None)
    measurements = [first_run.Measurement(name, 1, 16, *[math.nan] * 4) for name in first_run.modules(setting)]
    assert "nan" in first_run.table(setting, measurements=measurements)
