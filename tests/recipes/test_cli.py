"""The commands: options are used or refused, help is true, an error is one line with its status."""

from __future__ import annotations

import ast
import errno
import io
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_runs import ROOT, environment, interrupt
from safetensors import SafetensorError

from flashmhf import backends
from flashmhf.models.presets import PRESETS, SCALES
from flashmhf_recipes import cli, first_run, tokenizer, training


@pytest.fixture
def small(monkeypatch):
    """Sizes at which the whole command takes a second."""
    setting = first_run.Setting(torch.device("cpu"), torch.float32, 64, 2, 2, 32, 1, (16, 32), 1, (1, 1))
    monkeypatch.setattr(first_run, "setting_of", lambda device: setting)
    return setting


def test_the_whole_command(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    expected = ["naive MH-FFN", "eager float32", "32 tokens", "all 18 are within their limits", "on 32 tokens needs"]
    assert [text for text in expected if text not in out] == []
    assert (tmp_path / "flashmhf_report.png").read_bytes().startswith(b"\x89PNG")


def test_memory_and_time_are_measured(small):
    """A step holds more than an inference, more tokens take more memory; FlashMHF holds no hidden layer, naive does."""
    found = {(m.module, m.tokens): m for m in first_run.compare(small._replace(lengths=(64, 1024)))}
    assert all(m.step_mib > m.forward_mib > 0 and m.step_ms > 0 for m in found.values())
    assert all(found[name, 1024].step_mib > 4 * found[name, 64].step_mib for name in ("SwiGLU", "naive MH-FFN"))
    assert found["FlashMHF", 1024].step_mib < found["naive MH-FFN", 1024].step_mib


def test_without_the_extra_the_rest_runs_and_a_failed_check_is_an_error(small, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wrong = first_run.Accuracy("eager float32", "dq", math.nan, 5e-7)
    monkeypatch.setattr(first_run, "check", lambda *_: iter([wrong]))
    assert cli.main(["--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "flashmhf_report.png was not drawn: ModuleNotFoundError" in caplog.text
    assert "FAILED" in captured.out and "1 of 1 are outside" in captured.out
    assert "flashmhf: error: 1 of 1 checks" in captured.err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_parameters(device):
    setting = first_run.setting_of(torch.device(device))._replace(device=torch.device("cpu"))
    made = first_run.modules(setting, device="meta").values()
    counts = [layers * sum(p.numel() for p in module().parameters()) for layers, module in made]
    assert max(counts) / min(counts) < 1.01


MISTAKES = {
    "--steps 5": "unrecognized arguments: --steps 5; flashmhf --help",
    "train --output ./run --data x --steps many": "argument --steps: invalid int value: 'many'; flashmhf train --help",
    "train --output ./run --data x.txt --set max_grad_norm=1,0": "sets max_grad_norm to '1,0'; supported: numbers",
    "train --output ./run --data x --set full_determinism=maybe": "sets full_determinism to 'maybe'; supported: bool",
    "train --output ./run --data x.txt --model-set ffn_q_norm=maybe": "model: ",
    "eval --model x --data =": "data is ['']; leave it out or give a text that is not empty",
    "eval --model = --data x": "model is ''; leave it out",
    "generate --model x --tokenizer =": "tokenizer is ''; leave it out",
    "quantize --model x --output =": "output is ''; leave it out",
    "--device tpu": "device is 'tpu'; supported: auto, cpu, cuda, cuda:N",
    "nonsense": "unrecognized arguments: nonsense; flashmhf --help",
    "info --device cpu": "unrecognized arguments: --device cpu",
    "generate --model ./nothing x": "nothing does not exist",
    "generate --model x --steps 5": "unrecognized arguments: --steps",
    "eval --model ./nothing": "the following arguments are required: --data",
    "train --data x": "the following arguments are required: --output",
    "train --output ./run --data ./nothing.txt": "nothing.txt does not exist",
    "train --output ./run --data x --optimizer lion": "argument --optimizer: invalid choice: 'lion'",
    "train --output ./run --data x --set a": "argument --set: 'a' is not NAME=VALUE",
    "train --output ./run --resume": "holds no run",
    "train --output ./run --resume --batch 9 --set x=1": "leave out: arguments, batch",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_every_mistake_is_one_line_with_status_2(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("x.txt").touch()
    assert cli.main(["" if each == "=" else each for each in arguments.split()]) == 2
    out, error = capsys.readouterr()
    assert error.rpartition("\r")[2].startswith("flashmhf: error: ") and error.count("\n") == 1 and not out
    assert MISTAKES[arguments] in error and not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(("error", "line"), [
    (SafetensorError("damaged"), r"flashmhf: error: safetensors\w*: SafetensorError: damaged\n"),
    (KeyError("x"), None),
])  # fmt: skip
def test_an_error_of_another_librarys_type_is_one_line_and_a_fault_is_none(error, line, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(first_run, "check", fail)
    if line is None:
        with pytest.raises(type(error)):
            cli.main(["--device", "cpu"])
    else:
        assert cli.main(["--device", "cpu"]) == 2 and re.fullmatch(line, capsys.readouterr().err)


def test_interruption_is_short(monkeypatch, capsys):
    monkeypatch.setattr(first_run, "check", interrupt)
    assert cli.main(["--device", "cpu"]) == 130
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
    said = done.stderr.decode()  # also by libraries that transformers imports where they are installed
    assert done.returncode == status and said.endswith(error) and said.count("flashmhf: ") == bool(error)
    assert "Traceback" not in said and "Exception ignored" not in said


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


def test_what_did_not_fit_or_cannot_be_drawn(small, tmp_path, caplog):
    """A network that ran out of memory is nan in the table; a picture that cannot be drawn is a warning."""
    measurements = [first_run.Measurement(name, 1, 16, *[math.nan] * 4) for name in first_run.modules(small)]
    assert "nan" in first_run.table(small, measurements=measurements)
    assert not first_run.picture(tmp_path / "nothing" / "x.png", small, measurements)
    assert ["was not drawn" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("written", [b"", b"half"])
def test_a_full_disk_leaves_the_last_picture(written, small, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")

    def full(self, path, **_):
        Path(path).write_bytes(written)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", full)
    measurements = [first_run.Measurement(name, 1, 16, *[1.0] * 4) for name in first_run.modules(small)]
    (path := tmp_path / "x.png").write_bytes(b"the last")
    assert not first_run.picture(path, small, measurements)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"the last"


def test_every_option_has_a_flag(monkeypatch):
    """Flags are made from the fields: values arrive with their types, and what is not given keeps its default."""
    given, result = [], training.Result("run", 1, 1, 1.0, None)
    monkeypatch.setattr(training, "start", lambda options: given.append(options) or result)
    flags = "--data a b --steps 5 --no-param-groups --compile --optimizer muon --warmup 0.5"
    flags += " --set adam_epsilon=1e-6 --set report_to=none --set eval_on_start=False --model-set ffn_q_norm=True"
    assert cli.main(["train", "--output", "run", *flags.split()]) == 0
    expected = dict(data=["a", "b"], steps=5, param_groups=False, compile=True, optimizer="muon", warmup=0.5)
    expected |= dict(
        arguments={"adam_epsilon": 1e-6, "report_to": "none", "eval_on_start": False}, model={"ffn_q_norm": True}
    )
    assert given == [training.Options("run", **expected)]


@pytest.mark.parametrize("device", ["cuda:99", "nosuch", "meta", *([] if torch.cuda.is_available() else ["cuda"])])
@pytest.mark.parametrize(
    "command", ["generate --model {} the", "eval --model {} --data {}", "train --output run --data {}"]
)
def test_a_device_that_is_not_there(command, device, uninterrupted, text, capsys):
    assert cli.main([*command.format(uninterrupted[0].output, text).split(), "--device", device]) == 2
    error = capsys.readouterr().err
    choice = command.startswith("train") and device != "cuda"
    assert ("--device: invalid choice" if choice else f"device is '{device}'") in error and error.count("\n") == 1
    assert device != "cuda" or "this PyTorch sees no CUDA GPU" in error


def test_a_tokenizer_larger_than_the_model(uninterrupted, text, tmp_path, capsys):
    tokenizer.train([text.read_text()], 320).save_pretrained(tmp_path)
    model = f"--model {uninterrupted[0].output} --tokenizer {tmp_path}"
    assert cli.main(f"eval {model} --device cpu --data {text}".split()) == 2
    assert re.search("has token numbers up to 3[01][0-9]; the vocabulary of .* has 300", capsys.readouterr().err)


def test_help_of_train_is_true(capsys):
    """The names of all presets follow from the help."""
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    out = capsys.readouterr().out
    patterns = r"one of ([\w, ]+);", r"\(([\w., ]+)\) with other"
    names, scales = (set(re.search(pattern, out)[1].split(", ")) for pattern in patterns)
    assert scales == SCALES.keys()
    assert {f"{ffn}-{scale}" for ffn in names for scale in scales} == {name for name in PRESETS if "-dh" not in name}
    others = {f"flashmhf-{scale}-dh{d}" for scale in scales for d in (64, 256) if scale != "tiny"}
    assert others == {name for name in PRESETS if "-dh" in name}
    assert "examples:" in out and "report_to=wandb" in out and "--init-from" in out
