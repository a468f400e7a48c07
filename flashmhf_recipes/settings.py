"""What transformers gets of a run's options: its TrainingArguments, the schedule and the model's configuration."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import logging

from flashmhf.models.configuration import FlashMHFConfig
from flashmhf.models.presets import preset

from . import fused_loss
from .arguments import check_value
from .errors import OptionError, refuse
from .options import SHARE, Options

# Settings of TrainingArguments that a run decides or has no use for, by the options that decide them: the others are
# transformers' own.
_BY = {
    "output": "output_dir", "steps": "max_steps num_train_epochs", "seed": "seed", "learning_rate": "learning_rate",
    "warmup": "warmup_steps warmup_ratio", "compile": "torch_compile", "device": "use_cpu",
    "micro_batch": "per_device_train_batch_size per_device_eval_batch_size",
    "batch and micro_batch": "gradient_accumulation_steps auto_find_batch_size dataloader_drop_last accelerator_config",
    "data without workers": "dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor",
    "data and seed": "data_seed train_sampling_strategy length_column_name ignore_data_skip label_names",
    "eval_fraction": "eval_strategy do_eval prediction_loss_only batch_eval_metrics", "eval_every": "eval_steps",
    "init_from with the checkpoint that is best": "load_best_model_at_end metric_for_best_model greater_is_better",
    "save_every": "save_steps", "log_every": "logging_steps logging_strategy",
    "keep: a run resumes from its own whole checkpoints": "save_total_limit save_only_model resume_from_checkpoint",
    "precision": "bf16 fp16 bf16_full_eval fp16_full_eval",
    "tp and dp_shard": "fsdp fsdp_config deepspeed parallelism_config",
    "fused_loss": "use_liger_kernel liger_kernel_config",  # which pass over FlashMHF without a word
}  # fmt: skip
DECIDED = {name: option for option, names in _BY.items() for name in names.split()}
_FROM_ZERO = ("finite numbers from 0 on", lambda x: 0 <= x < math.inf)
_LEVELS = (*logging.get_log_levels_dict(), "passive")
# What is supported of settings that transformers takes as they are, and fails at, or computes nonsense with, later on.
_RANGES = dict.fromkeys(("weight_decay", "adam_epsilon"), _FROM_ZERO)
_RANGES |= {"max_grad_norm": ("numbers from 0 on", lambda x: x >= 0)}  # infinity clips nothing
_RANGES |= dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), SHARE)
_RANGES |= dict.fromkeys(("log_level", "log_level_replica"), (", ".join(_LEVELS), lambda x: x in _LEVELS))
# FlashMHFConfig settings that an option of ours, or the tokenizer, decides.
_OWN_SETTINGS = {f"{role}_token_id": "tokenizer" for role in ("bos", "eos", "pad")}
_OWN_SETTINGS |= {"vocab_size": "vocab_size", "ffn_type": "preset", "return_dict": "True, which the Trainer needs"}


def setting_types() -> dict[str, Any]:
    """Return the type of each setting of TrainingArguments."""
    return typing.get_type_hints(TrainingArguments)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Name ``option`` in what transformers raises about the user's settings, around what parses them alone: there are
    no errors of other causes, and their types are any.
    """
    try:
        yield
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"{option}: {' '.join(str(error.__cause__ or error).split())}") from error


def _check_names(option: str, given: Iterable[str], owner: type, own: Mapping[str, str]) -> None:
    """Refuse settings that ``owner`` has not, and ``own``; name the option that each is, or a similar name, or all."""
    supported = {entry.name for entry in fields(owner) if entry.init} - own.keys()
    for name in given:
        if name not in supported:
            close = difflib.get_close_matches(name, supported, 1, 0.8)
            hint = f"did you mean {close[0]}?" if close else f"supported: {', '.join(sorted(supported))}"
            raise OptionError(f"{option} cannot set {name}; " + (f"use {own[name]}" if name in own else hint))


def _check_launch() -> None:
    """Raise OptionError for processes that something else than torchrun has started, or not to the end."""
    for name in os.environ:
        launched = name.startswith(("ACCELERATE_USE_", "ACCELERATE_MIXED_", "ACCELERATE_DYNAMO_"))
        refuse(launched, f"{name} is set, as by `accelerate launch`; start by torchrun, and give options instead")
    ranks = {name: os.environ.get(name, "") for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    partly = "LOCAL_RANK" in os.environ and not all(rank.isdecimal() for rank in ranks.values())
    refuse(partly, f"the environment has {ranks}; supported: integers in all, as of torchrun, or no LOCAL_RANK")


def _check_arguments(options: Options) -> None:
    """Raise OptionError for settings of TrainingArguments that the run decides, or cannot have."""
    given, sets = options.arguments, "arguments cannot set"
    _check_names("arguments", given, TrainingArguments, DECIDED)
    sharded = max(options.tp or 1, options.dp_shard or 1) > 1
    for name, value in given.items():
        check_value(f"arguments sets {name} to", value, setting_types()[name], _RANGES.get(name))
        unused = name.startswith("eval_") and not options.eval_fraction
        refuse(unused, f"{name} is {value!r}, which has no effect without eval_fraction; leave it out")
        own = options.optimizer != "adamw" and name.startswith("optim")
        refuse(own, f"{sets} {name} with optimizer {options.optimizer!r}")
        refuse(sharded and name.startswith("torch_compile"), f"{sets} {name} with tp or dp_shard; use compile")
    strategy = given.get("save_strategy", "steps")
    refuse(strategy not in ("steps", "no"), f"arguments sets save_strategy to {strategy!r}; supported: steps, no")
    schedule_free = str(given.get("optim")).startswith("schedule_free")
    refuse(schedule_free, f"{sets} optim to a schedule-free optimizer: it saves other weights")
    smoothed = options.fused_loss and given.get("label_smoothing_factor")
    refuse(smoothed, f"{sets} label_smoothing_factor with fused_loss: it smooths logits")


class RunArguments(TrainingArguments):
    """transformers', for a process on one GPU: the Trainer would spread it over all with DataParallel."""

    n_gpu = property(lambda self: min(1, super().n_gpu))


def training_arguments(options: Options) -> TrainingArguments:
    """Return transformers' arguments. Raises OptionError for what it refuses, and reports without package."""
    _check_launch()
    _check_arguments(options)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    report = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    settings = dict(
        output_dir=options.output, max_steps=options.steps, seed=options.seed, learning_rate=options.learning_rate,
        logging_steps=options.log_every, save_steps=options.save_every, eval_steps=options.eval_every,
        torch_compile=options.compile,
        # fixed: the held-out loss has the same bits for any number of processes
        per_device_eval_batch_size=options.micro_batch,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": min(1e-5, options.learning_rate / 10)},
        warmup_steps=options.warmup if options.warmup < 1 else int(options.warmup),
        adam_beta1=0.9, adam_beta2=0.95, optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        bf16=options.precision == "bf16" or (options.precision == "auto" and on_gpu), use_cpu=not on_gpu,
        weight_decay=0.1, logging_first_step=True,
        logging_nan_inf_filter=False, report_to=report,
        eval_strategy="steps" if options.eval_fraction else "no",
        dataloader_pin_memory=on_gpu, ddp_find_unused_parameters=False,
    )  # fmt: skip
    if "lr_scheduler_type" in options.arguments:
        del settings["lr_scheduler_kwargs"]  # other schedules know no minimum
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        arguments = RunArguments(**settings)  # what fails here is no fault of the user's
        with _naming("arguments"):
            arguments = RunArguments(**{**settings, **options.arguments})
            for callback in get_reporting_integration_callbacks(arguments.report_to):
                callback()  # raises where the package of a report is missing
            if settings := arguments.gradient_checkpointing_kwargs:  # raises for names and values that it does not know
                with _naming("arguments sets gradient_checkpointing_kwargs"):
                    checkpoint(torch.clone, torch.zeros(1, requires_grad=True), **settings)
            if arguments.torch_compile:  # raises for a mode or a back end that is none
                torch.compile(abs, backend=arguments.torch_compile_backend, mode=arguments.torch_compile_mode)
            if not hasattr(schedule(arguments, options.steps), "lr_lambdas"):
                name = arguments.lr_scheduler_type.value
                raise ValueError(f"lr_scheduler_type is '{name}'; supported: schedules of the step alone")
            if options.optimizer == "adamw":
                Trainer.get_optimizer_cls_and_kwargs(arguments)  # raises where the optimizer's package is missing
    if options.fused_loss:
        fused_loss.check_machine(arguments.device)
    layout = options.layout(arguments.world_size)
    arguments.per_device_train_batch_size = options.micro_batch_for(layout.data_processes)
    at_once = arguments.per_device_train_batch_size * layout.data_processes
    arguments.gradient_accumulation_steps = options.batch // at_once
    if layout.sharded:
        # Layout.shard compiles the blocks: collectives between them are no part of a graph
        arguments.torch_compile = False
        arguments.torch_compile_backend = arguments.torch_compile_mode = None
    return arguments


def schedule(arguments: TrainingArguments, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule over ``steps`` of an optimizer with one parameter."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=arguments.learning_rate)
    kwargs = dict(arguments.lr_scheduler_kwargs or {})
    return get_scheduler(arguments.lr_scheduler_type, optimizer, arguments.get_warmup_steps(steps), steps, kwargs)


def empty_model(options: Options) -> PreTrainedModel:
    """Return a new model on the meta device. Raises OptionError for sizes that no model has."""
    chosen, given = preset(options.preset), options.model
    _check_names("model", given, FlashMHFConfig, _OWN_SETTINGS)
    most = given.get("max_position_embeddings")
    short = isinstance(most, int) and most < options.length
    refuse(short, f"model sets max_position_embeddings to {most}, below length = {options.length}")
    positions = max(chosen.scale.context, options.length)
    sizes = {"max_position_embeddings": positions, "vocab_size": options.vocab_size}
    with _naming("model"):
        config = chosen.config(**sizes | given)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
