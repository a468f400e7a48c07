"""The commands train, eval and generate: options are used or refused, help is true, errors are one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lm_runs import options, write_text
from transformers import AutoModelForCausalLM, trainer

from flashmhf.models.presets import PRESETS, SCALES
from flashmhf_recipes import cli, evaluation, training

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "run"
    return training.start(options(output, text, steps=2, arguments={"report_to": []}), bar=False).output


@pytest.fixture
def given(monkeypatch):
    """The options that ``train`` would start a run with."""
    seen = []

    def start(options):
        seen.append(options)
        return training.Result(options.output, 1, 1, 1.0, None)

    monkeypatch.setattr(training, "start", start)
    return seen


def test_options_before_train_reach_it(given):
    assert cli.main(["--device", "cpu", "--steps", "5", "train", "--output", "run", "--data", "x"]) == 0
    assert (given[0].device, given[0].steps) == ("cpu", 5)
    assert cli.main(["--device", "cpu", "train", "--output", "run", "--data", "x", "--device", "auto", "--betas", "0.8", "0.9"]) == 0
    assert (given[1].device, given[1].steps, given[1].betas) == ("auto", None, [0.8, 0.9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "file", "train", "--output", "run", "--data", "x"], "--text is not an option of flashmhf train"),
        (["--steps", "5", "bench"], "--steps is not an option of flashmhf bench"),
        (["--device", "cpu", "info"], "--device is not an option of flashmhf info"),
        (["--steps", "5", "generate", "--model", "x"], "--steps is not an option of flashmhf generate"),
        (["bench", "--parts", "decode"], "--parts needs bench --paper"),
        (["bench", "--out", "folder"], "--out needs bench --paper"),
        (["bench", "--paper", "--d-model", "64"], "--d-model cannot be given with bench --paper"),
    ],
)
def test_no_option_is_dropped(arguments, message, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_options_before_eval_and_generate_reach_them(run, capsys):
    assert cli.main(["--device", "cpu", "generate", "--model", str(run), "--max-new-tokens", "2", "the head"]) == 0
    assert capsys.readouterr().out.startswith("the head")


@pytest.mark.parametrize("device", ["cuda:99", "nosuch", "meta"])
@pytest.mark.parametrize("command", ["generate", "eval"])
def test_a_device_that_is_not_there(command, device, run, text, capsys):
    extra = ["--data", str(text)] if command == "eval" else ["the"]
    assert cli.main([command, "--model", str(run), "--device", device, *extra]) == 2
    error = capsys.readouterr().err
    assert f"device is '{device}'" in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["generate", "x"], ["eval", "--data", "x"]])
def test_cuda_without_a_gpu(command, run, capsys):
    assert cli.main([command[0], "--model", str(run), "--device", "cuda", *command[1:]]) == 2
    assert "device is 'cuda'; this PyTorch sees no CUDA GPU" in capsys.readouterr().err
    assert cli.main(["train", "--output", "run", "--data", "x", "--device", "cuda"]) == 2
    assert "--device is 'cuda'; this PyTorch sees no CUDA GPU" in capsys.readouterr().err


def test_a_tokenizer_larger_than_the_model(run, text, tmp_path, capsys):
    other = training.start(options(tmp_path / "other", text, vocab_size=320, steps=1, arguments={"report_to": []}), bar=False).output
    assert cli.main(["eval", "--model", str(run), "--tokenizer", str(other), "--device", "cpu", "--data", str(text)]) == 2
    assert re.search("has token numbers up to 3[01][0-9]; the vocabulary of .* has 300", capsys.readouterr().err)


def test_a_damaged_model(run, tmp_path, capsys):
    for path in run.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes()[:1000])
    assert cli.main(["generate", "--model", str(tmp_path), "--device", "cpu", "x"]) == 2
    assert "do not load" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--limit", "0"], ["--window", "-1"]])
def test_eval_counts_are_positive(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "--model", "x", "--data", "x", *arguments])
    assert stopped.value.code == 2 and "is not positive" in capsys.readouterr().err


def test_help_of_train_is_true(capsys):
    """Every scale's defaults and the names of all presets follow from the help."""
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    out = capsys.readouterr().out
    for name, scale in SCALES.items():
        row = f"{scale.d_model:,} {scale.vocabulary:,} {scale.context:,} {scale.batch} {scale.steps:,} {scale.learning_rate:g}"
        assert re.search(rf"^ +{re.escape(name)} +{re.escape(row).replace(chr(92) + ' ', ' +')}$", out, re.MULTILINE), (name, row)
    names = set(re.search(r"FFN one of ([\w, ]+);", out)[1].split(", "))
    assert {f"{ffn}-{scale}" for ffn in names for scale in SCALES} == {name for name in PRESETS if "-dh" not in name}
    assert {f"flashmhf-{scale}-dh{d}" for scale in SCALES for d in (64, 256) if scale != "tiny"} == {
        name for name in PRESETS if "-dh" in name
    }
    assert "examples:" in out and "report_to=wandb" in out and "--init-from" in out


def test_a_resumed_tied_model_warns_of_nothing(text, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(trainer.logger, "warning", warnings.append)
    output = training.start(options(tmp_path / "run", text, steps=2, arguments={"report_to": []}), bar=False).output
    training.resume(output, bar=False)
    assert not warnings


def test_chat_template(text, tmp_path, capsys):
    """The tokenizer of a run has the template; a file that is none ends the command before anything is written."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    for given, expected in (("plain", "user: Hi\nassistant:"), (str(template), "<Hi>")):
        output = tmp_path / f"run-{len(given)}"
        result = training.start(options(output, text, steps=1, chat_template=given, arguments={"report_to": []}), bar=False)
        loaded = evaluation.load(str(result.output), device="cpu")[1]
        assert loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True) == expected
    for content, message in (("{% for", "chat.jinja"), ("{{ bos_token }}", "leaves the messages out")):
        template.write_text(content)
        arguments = ["train", "--output", str(tmp_path / "new"), "--preset", "tiny", "--data", str(text), "--chat-template", str(template)]
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert "--chat-template is" in error and message in error and error.count("\n") == 1
        assert not (tmp_path / "new").exists()


def test_serve_refuses_and_warns(run, monkeypatch, capsys, caplog):
    assert cli.main(["serve", "--model", "./nothing"]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
    served = []
    monkeypatch.setattr("transformers.cli.serve.Serve", lambda **settings: served.append(settings))
    assert cli.main(["--device", "cpu", "serve", "--model", str(run), "--port", "8123"]) == 0
    assert served[0]["force_model"] == str(run) and served[0]["port"] == 8123 and served[0]["device"] == "cpu"
    assert "has no chat template" in caplog.text
    assert cli.main(["serve", "--model", str(run), "--keep-projections"]) == 2
    assert "--keep-projections needs --fp8" in capsys.readouterr().err

    def incomplete(**settings):
        raise ImportError("Missing dependencies for serving.")

    monkeypatch.setattr("transformers.cli.serve.Serve", incomplete)
    assert cli.main(["serve", "--model", str(run)]) == 2
    advice = "flashmhf: error: flashmhf serve needs transformers' server: pip install 'transformers[serving]'"
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("flashmhf: ")] == [advice]
    known = sys.modules["transformers"]  # importing the models may replace the module that this file has imported
    assert known.FlashMHFForCausalLM.from_pretrained(run).config.model_type == "flashmhf"


@pytest.mark.parametrize("arguments", [[], ["--keep-projections", "--dtype", "bfloat16"]])
def test_serve_in_fp8(run, monkeypatch, arguments):
    """What the server loads is in FP8, and is gone when it ends."""
    folders = []

    def load(force_model, dtype, **settings):
        loaded = AutoModelForCausalLM.from_pretrained(force_model, dtype=dtype)
        found = loaded.config.quantization_config
        assert found.quant_method == "flashmhf_fp8" and found.projections == (not arguments)
        assert loaded.lm_head.weight.dtype == (torch.bfloat16 if arguments else torch.float32)
        folders.append(force_model)

    monkeypatch.setattr("transformers.cli.serve.Serve", load)
    assert cli.main(["serve", "--model", str(run), "--device", "cpu", "--fp8", *arguments]) == 0
    assert len(folders) == 1 and not Path(folders[0]).exists()
