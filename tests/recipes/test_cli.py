"""The commands about this machine, and what all commands share: one line for an error, the status, and output that no
command dies of."""

from __future__ import annotations

import ast
import io
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from lm_runs import ROOT, environment, interrupt

from flashmhf import backends
from flashmhf_recipes import cli, first_run, plots


@pytest.fixture
def small(monkeypatch):
    """Sizes at which the whole command takes a second."""
    setting = first_run.Setting(torch.device("cpu"), torch.float32, 64, 2, 2, 32, 1, (16, 32), 1, (1, 1))
    monkeypatch.setattr(first_run, "default_setting", lambda device: setting)


def test_the_whole_command(small, capsys):
    assert cli.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    expected = ["naive MH-FFN", "eager float32", "32 tokens"]
    assert [text for text in expected if text not in out] == []


def test_a_failed_check_is_an_error(small, monkeypatch, capsys):
    wrong = first_run.Accuracy("eager", torch.float32, "dq", math.nan, 4e-7, 5e-7)
    monkeypatch.setattr(first_run, "check", lambda device, backend=None: iter([wrong]))
    assert cli.main(["--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out and "flashmhf: error: 1 of 1 checks" in captured.err


def test_what_a_command_writes_must_be_writable(monkeypatch, capsys):
    """It is known before the work is done."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert cli.main(["eval", "--model", "./nothing", "--data", "x", "--json", "x"]) == 2
    assert "--json is 'x'; it must name a file that can be written" in capsys.readouterr().err


def test_check_lists_every_tensor(capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "eager"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[2] for row in rows] == ["out", "dq", "dk", "du", "dv", "dr"] * 3
    assert all(row[-1] == "ok" for row in rows)


def test_bench_takes_sizes(small, capsys):
    assert cli.main(["bench", "--device", "cpu", "--lengths", "8", "--d-model", "48", "--num-heads", "3"]) == 0
    out = capsys.readouterr().out
    assert "d_model 48" in out and "8 tokens" in out and "language model" not in out


MISTAKES = [
    (
        ["bench", "--device", "cpu", "--d-model", "64", "--num-heads", "3"],
        "--d-model 64 is not a multiple of --num-heads 3",
    ),
    (
        ["bench", "--lengths", "0"],
        "argument --lengths: '0' is not an integer from 1 on; flashmhf bench --help lists the options",
    ),
    (["--device", "tpu"], "device is 'tpu'; supported: auto, cpu, cuda, cuda:N"),
    (["nonsense"], "nonsense is not an option or a command; commands: info, check"),
    (["--device", "cpu", "bench"], "bench is not an option or a command; options come after the command"),
    (["info", "--device", "cpu"], "unrecognized arguments: --device cpu"),
    (["check", "--device", "cpu", "--backend", "hopper"], "back end hopper cannot run: device is cpu"),
    (["generate", "--model", "./nothing", "x"], "nothing does not exist"),
    (["generate", "--model", "x", "--steps", "5"], "unrecognized arguments: --steps"),
    (["eval", "--model", "./nothing"], "give --data, --tasks or both"),
    (
        ["eval", "--model", "./nothing", "--data", "x", "--json", "./no/x"],
        "--json is './no/x'; it must name a file that can be written",
    ),
    (
        ["eval", "--model", "./nothing", "--data", "x", "--json", f"{__file__}/x"],
        "test_cli.py/x'; it must name a file that can be written",
    ),
    (["eval", "--model", "x", "--data", "x", "--batch", "0"], "argument --batch: '0' is not an integer from 1 on"),
    (["train", "--data", "x"], "the following arguments are required: --output"),
    (["train", "--output", "./run", "--data", "./nothing.txt"], "nothing.txt does not exist"),
    (["train", "--output", "./run"], "give one of data, dataset and tokens"),
    (
        ["train", "--output", "./run", "--data", "x", "--optimizer", "lion"],
        "argument --optimizer: invalid choice: 'lion'",
    ),
    (["train", "--output", "./run", "--data", "x", "--set", "a"], "argument --set: 'a' is not NAME=VALUE"),
    (["train", "--output", "./run", "--resume"], "holds no run"),
    (["train", "--output", "./run", "--resume", "--batch", "9", "--set", "x=1"], "leave out: arguments, batch"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_every_mistake_is_one_line_with_status_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.rpartition("\r")[2].startswith("flashmhf: error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "run" / "run.json").exists()


def test_interruption_is_short(monkeypatch, capsys):
    monkeypatch.setattr(first_run, "check", interrupt)
    assert cli.main(["check", "--device", "cpu"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shell", "variables", "status", "error"),
    [
        ("info | head -n 0; exit ${PIPESTATUS[0]}", {"PYTHONUNBUFFERED": "1"}, 141, ""),
        ("info > /dev/full", {}, 2, "No space left on device\n"),
        ("info >&-", {}, 0, ""),
        ("generate --model x - <&-", {}, 2, "flashmhf: error: prompt is '-', and standard input is closed\n"),
    ],
)
def test_streams_that_cannot_be_used(shell, variables, status, error):
    program = f"{sys.executable} -m flashmhf_recipes {shell}"
    done = subprocess.run(
        program, shell=True, executable="/bin/bash", env=environment() | variables, capture_output=True, timeout=200
    )
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
    variables = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"} | {
        "MPLBACKEND": "nosuch"
    }
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("flashmhf ") and done.stdout.endswith("PASSIVE\n"), done.stderr
    assert all(name in done.stdout for name in backends.BACKENDS)


def test_a_picture_that_cannot_be_drawn_is_a_warning(tmp_path, caplog):
    assert not plots.draw_losses([{"step": 1, "loss": 2.0}], tmp_path / "nothing" / "loss.png")
    assert ["was not drawn" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_parameters(device):
    setting = first_run.default_setting(torch.device(device))
    made = first_run.modules(replace(setting, device=torch.device("cpu")), device="meta").values()
    counts = [layers * sum(p.numel() for p in module().parameters()) for layers, module in made]
    assert max(counts) / min(counts) < 1.01


def test_table_shows_what_did_not_fit(small):
    setting = first_run.default_setting(None)
    measurements = [first_run.Measurement(name, 1, 16, *[math.nan] * 4) for name in first_run.modules(setting)]
    assert "nan" in first_run.table(setting, measurements=measurements)
