"""Held-out loss, generation, and their commands; lm-eval loads what they leave."""

import copy
import io
import json
import math
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from lm_runs import start
from small_models import write_official
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from flashmhf.models import FFN_TYPES, generation
from flashmhf_recipes import cli, evaluation, pretrained

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory) -> dict[str, Path]:
    """A short run of every network."""
    parent = tmp_path_factory.mktemp("runs")
    settings = dict(length=64, micro_batch=8, steps=40, log_every=20, save_every=40)
    return {ffn: start(parent / ffn, text, preset=f"{ffn}-tiny", **settings).output for ffn in FFN_TYPES}


@pytest.fixture(scope="module")
def trained(runs):
    return pretrained.load(str(runs["flashmhf"]), device="cpu")


def token_losses(model, ids: np.ndarray, window: int, stride: int) -> list[float]:
    """Every token's loss, one at a time, with the context that the sliding window gives it."""
    losses, end, previous = [], min(window, len(ids)), 1
    while True:
        for target in range(previous, end):
            context = torch.from_numpy(ids[max(0, end - window) : target + 1])[None]
            with torch.no_grad():
                logits = model(context).logits[0, -2].double()
            losses.append((logits.logsumexp(0) - logits[ids[target]]).item())
        if end == len(ids):
            return losses
        previous, end = end, min(end + stride, len(ids))


@pytest.mark.parametrize(("tokens", "window", "stride"), [
    (50, 16, 8), (50, 16, 15), (49, 16, 1), (10, 16, 8), (16, 16, 5), (2, 16, 8),
])  # fmt: skip
def test_window_losses_score_every_token_once(trained, tokens, window, stride):
    model, _ = trained
    ids = np.random.default_rng(0).integers(0, 300, tokens)
    scored = list(evaluation.window_losses(model, ids, window, stride, batch=3))
    expected = token_losses(model, ids, window, stride)
    assert sum(count for _, count in scored) == len(expected) == tokens - 1
    assert sum(nats for nats, _ in scored) == pytest.approx(sum(expected), rel=1e-5)


def test_held_out_loss(trained, tmp_path):
    """Documents one by one, each after an end-of-text token; a measure per byte beside that per token."""
    model, tokenizer = trained
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat"}\n{}\n{"text": "on the mat, ä"}\n')
    found = evaluation.held_out_loss(model, tokenizer, [tmp_path], window=32, stride=8)
    expected = []
    for document in ("the cat sat", "on the mat, ä"):
        expected += token_losses(model, np.array([0, *tokenizer(document)["input_ids"]]), 32, 8)
    assert found.tokens == len(expected) and found.bytes == 11 + 14
    assert found.loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(sum(expected) / 25 / math.log(2), rel=1e-5)
    assert +found.left_out == {"documents without text": 1} and found.documents == 2


def test_held_out_refusals(trained, text, tmp_path):
    model, tokenizer = trained
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data.fill_(math.nan)
    (tmp_path / "empty.txt").touch()
    for case, path, settings, message in (
        (model, text, {"window": 1}, "window is 1; it must be at least 2 and at most the model's 128"),
        (model, text, {"window": 64, "stride": 64}, "stride is 64; it must be at least 1 and below the window of 64"),
        (model, text, {"batch": 0}, "batch is 0; it must be at least 1"),
        (broken, text, {}, "the model's loss is nan: its weights are damaged"),
        (model, tmp_path, {}, "no text is left to evaluate on.*documents without text"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluation.held_out_loss(case, tokenizer, [path], **settings)


def test_what_can_be_loaded(runs, trained, tmp_path):
    """A run, a checkpoint, an unfinished run's last one, an official checkpoint with a tokenizer elsewhere."""
    model, tokenizer = trained
    ids = torch.arange(9)[None]
    expected = model(ids).logits
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "checkpoint-40").symlink_to(runs["flashmhf"] / "checkpoint-40")
    for path in (runs["flashmhf"] / "checkpoint-40", unfinished):
        assert torch.equal(pretrained.load(str(path), device="cpu")[0](ids).logits, expected)
    write_official(model, tmp_path / "official")
    official, _ = pretrained.load(str(tmp_path / "official"), tokenizer_name=str(runs["flashmhf"]), device="cpu")
    torch.testing.assert_close(official(ids).logits, expected)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no model"):
        pretrained.load(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="dtype is 'int8'; supported: auto, float32"):
        pretrained.load(str(runs["flashmhf"]), device="cpu", dtype="int8")


def test_generation(trained):
    model, tokenizer = trained
    settings = dict(max_new_tokens=12, seed=3)
    greedy = generation.generate(model, tokenizer, "the cat number", temperature=0.0, **settings)
    for temperature in (0.0, 1e-6):
        again = generation.generate(model, tokenizer, "the cat number", temperature=temperature, **settings)
        assert again == greedy != ""
    hot = dict(temperature=2.0, top_p=1.0, max_new_tokens=12)
    sampled = [generation.generate(model, tokenizer, "the cat", seed=seed, **hot) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert isinstance(generation.generate(model, tokenizer, "", **settings), str)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    generation.generate(model, tokenizer, "the cat", seed=5, **hot)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    torch.manual_seed(7)
    following = [generation.generate(model, tokenizer, "the cat", **hot) for _ in range(2)]
    torch.manual_seed(7)
    assert [generation.generate(model, tokenizer, "the cat", **hot) for _ in range(2)] == following
    assert following[0] != following[1]  # without a seed the process's state goes on


@pytest.mark.parametrize(("prompt", "settings", "message"), [
    *(("x", {"temperature": value}, f"temperature is {value}; supported: 0, and finite numbers from 1e-06 on")
      for value in (-1, 1e-40, math.inf, math.nan)),
    *(("x", {"seed": seed}, f"seed is {seed}; supported: integers from 0 to") for seed in (-1, 1 << 32)),
    ("cat dog " * 200, {}, "the model has 128 positions"),
    ("\udcff", {}, "prompt is not Unicode"),
    (["x"], {}, "prompt must be a str, got list"),
    ("x", {"max_new_tokens": 2.5}, "max_new_tokens must be an int, got float"),
    *(("x", {name: "1"}, f"{name} must be a.*, got str") for name in ("temperature", "top_p", "seed")),
    ("", {"eos_token": None}, "prompt is empty, and the tokenizer has no end-of-text token"),
    *(("the cat", {"temperature": value, "logit": math.nan}, "the model's logits are not finite: its weights")
      for value in (0.0, 1.0)),
])  # fmt: skip
def test_generation_refuses(prompt, settings, message, trained, monkeypatch):
    model, tokenizer = trained
    if "eos_token" in settings:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.eos_token = settings.pop("eos_token")
    if "logit" in settings:
        logit = settings.pop("logit")
        monkeypatch.setattr(model.lm_head, "forward", lambda x: torch.full((*x.shape[:-1], 300), logit))
    with pytest.raises((TypeError, ValueError), match=message):
        generation.generate(model, tokenizer, prompt, **settings)


def test_only_the_given_settings_change_probabilities(trained, monkeypatch):
    """transformers' top_k of 50 and what a model's own files set did, too. The model is not written to, so that several
    threads may call at once."""
    model, tokenizer = trained
    outputs, own, generate = [], model.generation_config, type(model).generate
    for name, value in {"repetition_penalty": 3.0, "min_p": 0.9, "no_repeat_ngram_size": 1}.items():
        monkeypatch.setattr(own, name, value)
    before, attributes = own.to_dict(), dict(vars(model))

    def noted(*args, **kwargs):
        assert model.generation_config is own and vars(model).keys() == attributes.keys()
        outputs.append(generate(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(type(model), "generate", noted)
    monkeypatch.setattr(model.lm_head, "forward", lambda x: torch.linspace(1, 2, 300).expand(*x.shape[:-1], 300))
    for temperature in (0.0, 1e30):
        generation.generate(model, tokenizer, "", temperature=temperature, top_p=1.0, seed=0)
    likeliest, uniform = (set(out[0, 1:].tolist()) for out in outputs)
    assert likeliest == {299} and len(uniform) > 60
    assert own.to_dict() == before and all(vars(model)[name] is value for name, value in attributes.items())
    with pytest.raises(TypeError, match="model must be a transformers.PreTrainedModel, got Sequential"):
        generation.generate(torch.nn.Sequential(model), tokenizer, "the cat")


def test_streamed_generation_prints_the_same_text(runs, trained, capsys):
    model, tokenizer = trained
    settings = dict(seed=3, max_new_tokens=12, streamer=generation.Printer(tokenizer))
    text = generation.generate(model, tokenizer, "the cat", **settings)
    assert capsys.readouterr().out == text + "\n"
    command = ["generate", "the cat", *f"--model {runs['flashmhf']} --device cpu --seed 3 --max-new-tokens 12".split()]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"the cat{text}\n"
    for refused in ("--temperature -1", "--top-p 2", "--max-new-tokens 0"):
        assert cli.main([*command, *refused.split()]) == 2
        assert not capsys.readouterr().out


def test_a_continuation_keeps_the_space_before_it(trained, capsys):
    """A tokenizer that marks where words begin decodes a first word without its space: they were one word."""
    made = Tokenizer(models.WordLevel({f"\u2581{i}": i for i in range(300)}, unk_token="\u25810"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="\u25810")
    settings = dict(temperature=0, max_new_tokens=4, streamer=generation.Printer(words))
    text = generation.generate(trained[0], words, "5 6", **settings)
    assert re.fullmatch(r"( \d+)+", text) and capsys.readouterr().out == text + "\n"


def test_streaming_prints_as_tokens_come(runs, monkeypatch):
    """Whoever reads the output sees the prompt and words before the model is done."""
    out, seen = io.StringIO(), []
    step = generation._RefuseNotFinite.__call__
    noted = lambda *args: seen.append(out.getvalue()) or step(*args)  # noqa: E731
    monkeypatch.setattr(generation._RefuseNotFinite, "__call__", noted)
    monkeypatch.setattr(sys, "stdout", out)
    command = ["generate", "--model", str(runs["swiglu"]), "--device", "cpu", "--temperature", "0"]
    assert cli.main([*command, "the cat"]) == 0
    assert seen[0] == "the cat" and len(set(seen)) > 3 and seen[-1][len("the cat")].isspace()


@pytest.mark.slow
def test_lm_eval_loads_what_a_run_and_quantize_leave(runs, tmp_path):
    """By transformers and the file that the configuration names. A task in its own format: which continuation the
    training text had."""
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
    rows = [{"question": "the head mixes what each", "choices": ["sub", "xqz"], "answer": 0} for _ in range(4)]
    rows.append({"question": "each sub network finds and", "choices": ["QQQQ", "the"], "answer": 1})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "choice", "output_type": "multiple_choice", "dataset_path": "json", "test_split": "test"}
    task["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    task |= {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "doc_to_choice": "{{choices}}"}
    (tmp_path / "choice.yaml").write_text(json.dumps(task))  # which is YAML, too
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    assert cli.main(["quantize", "--model", str(runs["flashmhf"]), "--output", str(tmp_path / "fp8")]) == 0
    for model in (runs["flashmhf"], tmp_path / "fp8"):
        given = {"model": "hf", "model_args": f"pretrained={model},trust_remote_code=True", "device": "cpu"}
        found = lm_eval.simple_evaluate(**given, tasks=["choice"], task_manager=manager, bootstrap_iters=0)
        assert found["results"]["choice"]["acc,none"] == 1.0


@pytest.mark.parametrize("ffn", FFN_TYPES)
def test_every_network_evaluates_and_generates(ffn, runs, text, capsys):
    model = ["--model", str(runs[ffn]), "--device", "cpu"]
    assert cli.main(["eval", *model, "--data", str(text), "--window", "128"]) == 0
    out = capsys.readouterr().out
    assert float(out.split("loss ")[1].split()[0]) < 3.5  # ln 300 = 5.7 before training
    assert "left out" not in out
    assert cli.main(["generate", *model, "the cat", "--max-new-tokens", "5", "--seed", "0"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
