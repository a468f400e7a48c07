"""Options of a run: what it decides is refused among transformers' settings; a step for any processes."""

import dataclasses
import importlib.util
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainingArguments

from flashmhf_recipes import settings as module
from flashmhf_recipes import training
from flashmhf_recipes.arguments import parsed
from flashmhf_recipes.options import Options
from flashmhf_recipes.settings import training_arguments

COUNTS, INTERVALS = ("vocab_size", "length", "batch", "micro_batch", "steps"), ("log_every", "eval_every", "save_every")
NO_WANDB = pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
# What a text stands for is no guess of a library in the middle of a run: "False" is true.
UNFIT = {
    "eval_on_start": ("False", 1, None), "max_grad_norm": ("1.0", math.nan, None, True, -1.0), "adam_beta1": ("0.9",),
    "weight_decay": (-0.1, math.inf), "torch_empty_cache_steps": (2.5,), "run_name": (5,), "report_to": ([1],),
    "log_level": ("loud",), "adam_beta2": (1.0, 2), "adam_epsilon": (-1e-8,), "label_smoothing_factor": (-1, 2.0),
    "lr_scheduler_kwargs": ([],), "gradient_checkpointing_kwargs": (1,),
}  # fmt: skip


def resolved(**settings) -> Options:
    return Options(**{"output": "run", "preset": "tiny", "data": ["x"], "device": "cpu", **settings}).resolve()


def test_what_a_run_does_not_decide_is_passed_on_as_it_is():
    settings = {"neftune_noise_alpha": 5, "adam_epsilon": 1e-6, "push_to_hub": False, "lr_scheduler_type": "linear"}
    settings |= {"gradient_checkpointing": True, "weight_decay": 0.3, "max_grad_norm": math.inf}
    never = dict.fromkeys(INTERVALS, 1 << 40) | {"eval_fraction": 0.1}
    arguments = training_arguments(resolved(arguments=settings, learning_rate=1e-6, **never))
    assert arguments.learning_rate == 1e-6
    for rate, lowest in ((1e-3, 1e-5), (1e-5, 1e-6)):  # the paper's; a rate of its own would otherwise rise
        lowest = pytest.approx({"min_lr": lowest})
        assert training_arguments(resolved(learning_rate=rate)).lr_scheduler_kwargs == lowest
    assert {name: getattr(arguments, name) for name in settings} == settings


@pytest.mark.parametrize("name", module.DECIDED)
def test_what_a_run_decides_is_refused_and_names_the_option(name):
    option = module.DECIDED[name]
    names = {field.name for owner in (Options, TrainingArguments) for field in dataclasses.fields(owner)}
    assert names & set(re.findall(r"\w+", option))
    with pytest.raises(ValueError, match=f"^arguments cannot set {name}; use {option}$"):
        training_arguments(resolved(arguments={name: 1}))


@pytest.mark.parametrize("name", ["USE_FSDP", "USE_DEEPSPEED", "MIXED_PRECISION", "DYNAMO_BACKEND"])
def test_accelerate_launch_is_refused(name, monkeypatch):
    """It would shard, compile or cast by settings of its own."""
    monkeypatch.setenv(f"ACCELERATE_{name}", "no")
    with pytest.raises(ValueError, match=f"^ACCELERATE_{name} is set, as by `accelerate launch`; start by torchrun"):
        training_arguments(resolved())


def test_paths_in_python(tmp_path):
    """One path is one path, not its letters."""
    for given in ("file.txt", Path("file.txt"), ["file.txt"], (Path("file.txt"),)):
        assert Options(output=tmp_path, preset="tiny", data=given).resolve().data == [os.path.abspath("file.txt")]


@pytest.mark.parametrize(("settings", "name"), [
    ({}, "flashmhf-128m"),
    ({"preset": "tiny"}, "flashmhf-tiny"),
    ({"preset": "mh_ffn-370m"}, "mh_ffn-370m"),
    ({"preset": "flashmhf-1.3b-dh64"}, "flashmhf-1.3b-dh64"),
])  # fmt: skip
def test_presets_and_networks_combine(settings, name):
    assert Options(output="run", data=["x"], **settings).resolve().preset == name


@pytest.mark.parametrize(("settings", "message"), [
    ({"arguments": {"adam_epsilom": 1}}, "arguments cannot set adam_epsilom; did you mean adam_epsilon?"),
    ({"arguments": {"nosuch": 1}}, "arguments cannot set nosuch; supported: .*adam_beta1, "),
    ({"arguments": {"optim": "schedule_free_adamw"}}, "cannot set optim to a schedule-free optimizer"),
    ({"arguments": {"save_strategy": "best"}}, "arguments sets save_strategy to 'best'; supported: steps, no"),
    *(({"optimizer": "muon", "arguments": {name: "x"}}, f"cannot set {name} with optimizer 'muon'")
      for name in ("optim", "optim_args")),
    ({"dp_shard": 2, "arguments": {"torch_compile_mode": "max-autotune"}}, "mode with tp or dp_shard; use compile"),
    ({"model": {"dtype": torch.float32}}, r"model is .*torch.float32.*; supported: values that JSON has"),
    *(({name: value}, f"^{name} is {re.escape(repr(value))}; supported: ") for name, value in (
        ("compile", "False"), ("param_groups", 0), ("fused_loss", "no"), ("steps", True), ("text_field", 5),
        ("arguments", [1]), ("model", "x"), ("tokens", 1))),
    *(({name: value}, f"^{name} is .*; leave it out or give a text that is not empty") for name, value in (
        ("output", ""), ("data", [""]), ("tokens", ""), ("tokenizer", ""), ("preset", ""))),
    ({"optimizer": "lion"}, "optimizer is 'lion'; supported: adamw, muon"),
    ({"precision": "fp8"}, "precision is 'fp8'; supported: auto, bf16, fp32"),
    ({"device": "tpu"}, "device is 'tpu'; supported: auto, cpu, cuda"),
    ({"preset": "flashmhf-7b"}, "no preset 'flashmhf-7b'; supported: .*flashmhf-1.3b"),
    ({"preset": "128mm"}, "no preset '128mm'"),
    ({"preset": "pkv-370m"}, "no preset 'pkv-370m'"),
    ({"data": []}, "give one of data and tokens"),
    ({"tokens": "run"}, "give one of data and tokens"),
    ({"model": {"vocab_size": 9999}}, "model cannot set vocab_size; use vocab_size"),
    ({"model": {"ffn_type": "mh_ffn"}}, "model cannot set ffn_type; use preset"),
    ({"model": {"pad_token_id": 3}}, "model cannot set pad_token_id; use tokenizer"),
    ({"model": {"hiden_size": 64}}, "model cannot set hiden_size; did you mean hidden_size"),
    ({"model": {"max_position_embeddings": 64}}, "model sets max_position_embeddings to 64, below length = 128"),
    *(({"model": sizes}, "^model: ") for sizes in (
        {"hidden_size": 65}, {"head_dim": 7}, {"hidden_size": "wide"}, {"num_attention_heads": 0}, {"dtype": "fp"},
        {"rope_parameters": {"rope_type": "linear"}}, {"id2label": 5}, {"attention_dropout": 2.0},
        {"ffn_backend": "naive"}, {"num_hidden_layers": 0})),
    ({"model": {"return_dict": False}}, "model cannot set return_dict; use True, which the Trainer needs"),
    ({"arguments": {"lr_scheduler_type": "warmup_stable_decay"}}, "arguments: .*num_decay_steps"),
    *(({"arguments": {"lr_scheduler_type": name}, "eval_fraction": 0.1},
       f"type is '{name}'; supported: schedules of the step alone") for name in ("reduce_lr_on_plateau", "greedy")),
    *(({"arguments": {name: value}, "eval_fraction": 0.1}, rf"^arguments sets {name} to {re.escape(repr(value))}; supp")
      for name, values in UNFIT.items() for value in values),
    ({"arguments": {"lr_scheduler_type": "nosuch"}}, "arguments: nosuch is not a valid SchedulerType"),
    *(({"arguments": {f"torch_compile_{name}": "nosuch"}}, "^arguments: .*nosuch") for name in ("mode", "backend")),
    *(({"arguments": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": wrong}}, "_kwargs: .*foo")
      for wrong in ({"foo": 1}, {"foo": 1, "use_reentrant": False},
                    {"determinism_check": "foo", "use_reentrant": False})),
    ({"arguments": {"report_to": "nosuch"}}, "arguments: nosuch is not supported"),
    pytest.param({"arguments": {"report_to": "wandb"}}, "arguments: WandbCallback requires wandb", marks=NO_WANDB),
    # without effect
    ({"data": [], "tokens": "run", "tokenizer": "gpt2"}, "tokenizer is 'gpt2', which has no effect with tokens"),
    ({"data": [], "tokens": "run", "text_field": "body"}, "text_field is 'body', which has no effect with tokens"),
    ({"eval_every": 5}, "eval_every is 5, which has no effect without eval_fraction"),
    ({"arguments": {"eval_on_start": True}}, "eval_on_start is True, which has no effect without eval_fraction"),
    ({"optimizer": "muon", "param_groups": False}, "param_groups is False, which has no effect with optimizer 'muon'"),
])  # fmt: skip
def test_refused_settings(settings, message, tmp_path, monkeypatch):
    """All of them before anything is written, also where transformers would refuse them in the middle of a start."""
    monkeypatch.setattr(training, "find_files", lambda paths: None)
    given = {"output": str(tmp_path / "run"), "preset": "tiny", "data": ["x"], "device": "cpu"} | settings
    with pytest.raises(ValueError, match=message):
        training.start(Options(**given))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "values"), [
    *((name, (0, -3, 2.5, "5")) for name in (*COUNTS, *INTERVALS)),
    *((name, (1 << 31,)) for name in COUNTS),
    ("length", (1,)),
    ("learning_rate", (0.0, math.inf, math.nan, "high", np.float32(1e-3))),
    ("warmup", (-1.0, 2.9, math.nan, math.inf, "long")),
    ("eval_fraction", (-0.1, 1.0, math.nan)),
    ("seed", (-1, 1 << 32, 0.5)),
    ("keep", (1, 2.5)),
])  # fmt: skip
def test_numbers_out_of_range_are_named(name, values):
    """Before the run's directory is made; some would mean the preset's value, or nothing."""
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name} is {re.escape(repr(value))}; supported: "):
            resolved(**{name: value})


@pytest.mark.parametrize(("batch", "bound", "processes", "expected"), [
    (64, None, 1, 8), (64, None, 8, 8), (64, None, 16, 4), (64, 16, 2, 16), (6, 4, 1, 3), (6, 4, 2, 3), (7, None, 7, 1),
    (3, 8, 1, 3), (22, 8, 2, 1),
    (64, None, 3, "batch is 64; it must be a multiple of the 3 processes"),
])  # fmt: skip
def test_the_micro_batch_follows_the_processes(batch, bound, processes, expected):
    """The batch is what was asked for on any number of processes, and no device gets more at once than it may."""
    options = resolved(batch=batch, micro_batch=bound)
    if isinstance(expected, int):
        assert options.micro_batch_for(processes) == expected
        return
    with pytest.raises(ValueError, match=expected):
        options.micro_batch_for(processes)


@pytest.mark.parametrize(("kind", "texts"), [
    (bool, {"False": False, "false": False, "no": False, "0": False, "True": True, "on": True, "maybe": "maybe"}),
    (float, {".9": 0.9, "1.": 1.0, "1e-8": 1e-8, "5": 5, "1,0": "1,0", "None": "None", "NaN": "NaN", "true": "true"}),
    (float | None, {"None": None, "null": None}),
    (int | None, {"8": 8, "8.5": "8.5"}),
    (str | None, {"5": "5", "true": "true", "None": None, "a=b": "a=b"}),
    (str | list[str], {"none": "none", '["a", "b"]': ["a", "b"], "['a']": ["a"], "[1]": "[1]"}),
    (dict | str | None, {'{"min_lr": 0}': {"min_lr": 0}, "{'min_lr': 0}": {"min_lr": 0}}),
    (object, {"true": True, "False": False, "yes": True, ".5": 0.5, "silu": "silu"}),
])  # fmt: skip
def test_texts_of_the_command_line_are_read_by_type(kind, texts):
    found = {text: parsed(text, kind) for text in texts}
    assert [(value, type(value)) for value in found.values()] == [(value, type(value)) for value in texts.values()]
