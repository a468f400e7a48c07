"""The commands train, eval and generate: options are used or refused, help is true, errors are one line."""

import re

import pytest
import torch

from flashmhf.models.presets import PRESETS, SCALES
from flashmhf_recipes import cli, tokenizer, training

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_option_has_a_flag(monkeypatch):
    """Flags are made from the fields: values arrive with their types, and what is not given keeps its default."""
    given, result = [], training.Result("run", 1, 1, 1.0, None)
    monkeypatch.setattr(training, "start", lambda options: given.append(options) or result)
    flags = "--data a b --steps 5 --no-param-groups --compile --optimizer muon --warmup 0.5"
    flags += " --set adam_epsilon=1e-6 --set report_to=none --model-set ffn_q_norm=true"
    assert cli.main(["train", "--output", "run", *flags.split()]) == 0
    expected = dict(data=["a", "b"], steps=5, param_groups=False, compile=True, optimizer="muon", warmup=0.5)
    expected |= dict(arguments={"adam_epsilon": 1e-6, "report_to": "none"}, model={"ffn_q_norm": True})
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
    """Every scale's defaults and the names of all presets follow from the help."""
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    out = capsys.readouterr().out
    for name, scale in SCALES.items():
        sizes = f"{scale.d_model:,} {scale.vocabulary:,} {scale.context:,} {scale.batch}"
        row = [name, *sizes.split(), f"{scale.steps:,}", f"{scale.learning_rate:g}"]
        assert row in [line.split() for line in out.splitlines()]
    names = set(re.search(r"FFN one of ([\w, ]+);", out)[1].split(", "))
    assert {f"{ffn}-{scale}" for ffn in names for scale in SCALES} == {name for name in PRESETS if "-dh" not in name}
    others = {f"flashmhf-{scale}-dh{d}" for scale in SCALES for d in (64, 256) if scale != "tiny"}
    assert others == {name for name in PRESETS if "-dh" in name}
    assert "examples:" in out and "report_to=wandb" in out and "--init-from" in out
