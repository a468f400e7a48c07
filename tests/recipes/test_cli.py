"""The main command: what a user sees, and what it says when something is not as it should be."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from flashmhf import backends
from flashmhf_recipes import cli
from flashmhf_recipes.first_run import report, study, tiny_lm


@pytest.fixture
def small(monkeypatch):
    """Sizes at which the whole command takes a second."""
    cpu = torch.device("cpu")
    setting = study.Setting(cpu, torch.float32, 64, 2, 2, 32, 1, (16, 32), 1, 60.0)
    monkeypatch.setattr(study, "default_setting", lambda device: setting)
    monkeypatch.setattr(tiny_lm, "CPU_RECIPE", tiny_lm.Recipe(d_model=32, layers=1, subnet_dim=16, context=16, batch=2, steps=4))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    return path


@pytest.mark.slow
def test_the_whole_command(small, text, tmp_path, monkeypatch, capsys):
    if reason := tiny_lm.why_not():
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--device", "cpu", "--text", str(text)]) == 0
    out = capsys.readouterr().out
    for expected in ("SwiGLU", "naive MH-FFN", "FlashMHF", "eager float32", "held-out loss after 4 steps", "length 32", "text.txt"):
        assert expected in out
    assert (tmp_path / "flashmhf_report.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_extra_the_rest_still_runs(small, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny_lm, "why_not", lambda: "needs transformers: pip install 'flashmhf[lm]'")
    assert cli.main(["--device", "cpu", "--text", str(text)]) == 0
    assert "language model: needs transformers: pip install 'flashmhf[lm]'" in capsys.readouterr().out
    assert (tmp_path / "flashmhf_report.png").exists()


def test_language_models_have_equal_parameters(text):
    if reason := tiny_lm.why_not():
        pytest.skip(reason)
    seen = []
    recipe = tiny_lm.Recipe(d_model=64, layers=2, subnet_dim=80, context=32, batch=4, steps=40, warmup=4)
    trained = tiny_lm.train(
        text.read_bytes(), recipe, ("SwiGLU", "FlashMHF"), torch.device("cpu"), lambda name, step, loss: seen.append((name, step, loss))
    )
    assert [(name, step) for name, step, _ in seen] == [(name, step) for name in trained for step in range(1, 41)]
    assert trained["SwiGLU"].parameters == pytest.approx(trained["FlashMHF"].parameters, rel=0.02)
    for name, model in trained.items():
        assert model.losses == [loss for other, _, loss in seen if other == name]
        assert model.losses[0] > math.log(257) - 0.2 and max(model.losses[-1], model.held_out) < 4


def test_a_failed_check_is_an_error(small, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = study.Accuracy("eager", torch.float32, "dq", math.nan, 4e-7, 5e-7)
    monkeypatch.setattr(study, "check", lambda device, backend=None: iter([wrong]))
    assert cli.main(["--device", "cpu", "--text", str(text)]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out and "1 of 1 checks" in captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"\x7fELF\0\0" * 20000, "binary"),
        (b"too short", "has 9 bytes; training and holding out need 50,000"),
    ],
)
def test_unusable_text(content, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["--text", str(path)]) == 2
    captured = capsys.readouterr()
    assert str(path) in captured.err and message in captured.err
    assert not captured.out and len(captured.err.splitlines()) == 1


def test_a_folder_is_no_text(tmp_path, capsys):
    assert cli.main(["--text", str(tmp_path)]) == 2
    assert "is not a file" in capsys.readouterr().err


def test_the_picture_must_be_writable(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)  # root may write everywhere
    assert cli.main(["--device", "cpu", "--text", str(text)]) == 2
    assert "flashmhf_report.png cannot be written" in capsys.readouterr().err


def test_default_text_is_the_standard_library():
    text = tiny_lm.read_text(None)
    assert len(text) > 1_000_000 and b"import" in text
    assert text == tiny_lm.read_text(None)


def test_info(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in backends.BACKENDS)


def test_check_lists_every_tensor(capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "eager"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[2] for row in rows] == ["out", "dq", "dk", "du", "dv", "dr"] * 3
    assert all(row[-1] == "ok" for row in rows)


def test_check_says_why_a_backend_cannot_run(capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "hopper"]) == 2
    assert "back end hopper cannot run: device is cpu" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_cuda_without_one(capsys):
    assert cli.main(["--device", "cuda", "bench"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_bench_takes_sizes(small, capsys):
    assert cli.main(["bench", "--device", "cpu", "--lengths", "8", "--d-model", "48", "--num-heads", "3"]) == 0
    out = capsys.readouterr().out
    assert "d_model 48" in out and "length 8" in out and "language model" not in out


def test_bench_refuses_heads_that_do_not_divide(small, capsys):
    assert cli.main(["bench", "--device", "cpu", "--d-model", "64", "--num-heads", "3"]) == 2
    assert "--d-model 64 is not a multiple of --num-heads 3" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--lengths", "0"], ["nonsense"], ["--steps", "many"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: flashmhf" in capsys.readouterr().err


def test_interruption_is_short(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "check", interrupt)
    assert cli.main(["check", "--device", "cpu"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_python_m_flashmhf():
    done = subprocess.run([sys.executable, "-m", "flashmhf_recipes", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("flashmhf ")


@pytest.mark.parametrize("sizes", [(768, 6, 8, 256), (2048, 16, 22, 384), (128, 2, 2, 176)])
def test_equal_parameters(sizes):
    modules = study.equal_parameter_modules(*sizes, device="meta")
    counts = [sum(p.numel() for p in module().parameters()) for module in modules.values()]
    assert max(counts) / min(counts) < 1.01


def test_table_shows_what_did_not_fit():
    setting = study.Setting(torch.device("cpu"), torch.float32, 64, 2, 2, 32, 1, (16,), 1, 60.0)
    measurements = [study.Measurement(name, 1, 16, math.nan, math.nan, math.nan) for name in report.COLUMNS]
    assert "n/a" in report.table(report.Results("headline", setting, measurements=measurements))
