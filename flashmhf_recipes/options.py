"""The options of a run: the paper's values by preset, checks, and what transformers gets of them."""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from flashmhf.models.configuration import FlashMHFConfig
from flashmhf.models.presets import SCALES, preset

from . import fused_loss
from .arguments import chosen_device, fits, one_path
from .errors import OptionError, refuse
from .layout import Layout, layout_of

MICRO_BATCH = 8

# Settings of TrainingArguments that options of a run hold as they are, by their names there.
_HELD = {"learning_rate": "learning_rate", "seed": "seed"}
_HELD |= {"output_dir": "output", "max_steps": "steps", "torch_compile": "compile"}
_HELD |= {"logging_steps": "log_every", "save_steps": "save_every", "eval_steps": "eval_every"}
# All that a run decides by itself or has no use for, by the options that decide it: the others are transformers' own.
_BY = {
    "micro_batch": "per_device_train_batch_size per_device_eval_batch_size",
    "batch and micro_batch": "gradient_accumulation_steps auto_find_batch_size dataloader_drop_last accelerator_config",
    "data without workers": "dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor",
    "data and seed": "data_seed train_sampling_strategy length_column_name ignore_data_skip label_names",
    "eval_fraction": "eval_strategy do_eval prediction_loss_only batch_eval_metrics",
    "init_from with the checkpoint that is best": "load_best_model_at_end metric_for_best_model greater_is_better",
    "keep: a run resumes from its own whole checkpoints": "save_total_limit save_only_model resume_from_checkpoint",
    "precision": "bf16 fp16 bf16_full_eval fp16_full_eval",
    "tp and dp_shard": "fsdp fsdp_config deepspeed parallelism_config",
    **{"steps": "num_train_epochs", "warmup": "warmup_steps warmup_ratio", "device": "use_cpu"},
    "log_every": "logging_strategy",
    "fused_loss": "use_liger_kernel liger_kernel_config",  # which pass over FlashMHF without a word
}
DECIDED = _HELD | {name: option for option, names in _BY.items() for name in names.split()}
# What `accelerate launch` puts into the environment, and the options that a run has instead.
_ACCELERATES = dict.fromkeys(("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"), "tp and dp_shard")
_ACCELERATES = {f"ACCELERATE_USE_{name}": option for name, option in _ACCELERATES.items()}
_ACCELERATES |= {"ACCELERATE_MIXED_PRECISION": "precision", "ACCELERATE_DYNAMO_BACKEND": "compile"}
_OFF = ("", "no", "n", "false", "f", "off", "0")
# FlashMHFConfig settings that an option of ours, or the tokenizer, decides.
_OWN_SETTINGS = {f"{role}_token_id": "tokenizer" for role in ("bos", "eos", "pad")}
_OWN_SETTINGS |= {"vocab_size": "vocab_size", "ffn_type": "preset"}

_COUNTS = "vocab_size batch micro_batch steps tp dp_shard save_every log_every eval_every"
# What is supported of a number of an option or of TrainingArguments, and whether one of the right type is.
_RANGES = {
    "learning_rate": ("finite numbers above 0", lambda x: 0 < x < math.inf),
    "weight_decay": ("finite numbers from 0 on", lambda x: 0 <= x < math.inf),
    "length": ("integers from 2 on, a token and the next", lambda x: x >= 2),
    "warmup": ("a share below 1, or whole steps", lambda x: 0 <= x < 1 or (x > 0 and float(x).is_integer())),
    "eval_fraction": ("numbers from 0 on and below 1", lambda x: 0 <= x < 1),
    "seed": ("integers from 0 to 2^32 - 1", lambda x: 0 <= x < 1 << 32),
    "keep": ("integers from 2 on, so that one is complete at any moment", lambda x: x >= 2),
    **dict.fromkeys(_COUNTS.split(), ("integers from 1 on", lambda x: x >= 1)),
}


def _check_value(named: str, name: str, value: object, kind: Any) -> None:
    """Raise OptionError for a value that is not of the type, is out of range, or cannot be written to run.json."""
    if value is None and fits(None, kind):  # the preset's value
        return
    origin = typing.get_origin(kind)
    shown = "a dictionary" if origin is dict else getattr(kind, "__name__", str(kind))
    shown = ", ".join(typing.get_args(kind)) if origin is Literal else shown
    supported, holds = _RANGES.get(name, (shown, lambda _: True))
    try:
        inside = fits(value, kind) and holds(value) and bool(json.dumps(value))
    except (TypeError, OverflowError):  # what is in a dictionary may be of any type; infinity is no integer
        inside, supported = False, "values that JSON has"
    refuse(not inside, f"{named} {value!r}; supported: {supported}")


def _option(default: object, help: str, **metadata: str) -> Any:
    """A field of Options: the command line makes a flag of it, with this help, under the last ``group`` named."""
    metadata = {"help": help} | metadata
    if isinstance(default, (list, dict)):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Options:
    """One run. Where None stands, the preset (the paper's value) decides. The flags of ``flashmhf train`` are made of
    the fields. In Python, ``data`` may be one path. Raises OptionError for values of other types or out of range."""

    output: str
    preset: str | None = _option(None, "a preset's name, or a scale, with FlashMHF (flashmhf-128m)", group="model")
    init_from: str | None = _option(None, "train a model further; takes --steps, --learning-rate", metavar="MODEL")
    model: dict[str, object] = _option({}, "a FlashMHFConfig setting", flag="--model-set")
    data: list[str] = _option([], "text, JSON-lines and Parquet files, or directories", group="data", metavar="PATH")
    tokens: str | None = _option(None, "the tokens and the tokenizer of another run", metavar="RUN")
    text_field: str = _option("text", "field or column that holds the text")
    tokenizer: str | None = _option(None, "directory, tokenizer.json or name; without it one is trained on the data")
    vocab_size: int | None = _option(None, "size of the vocabulary (the preset's)")
    length: int | None = _option(None, "tokens in a sequence (the preset's)")
    eval_fraction: float = _option(0.0, "share of the tokens held out at the end")
    batch: int | None = _option(None, "sequences of a step, over all processes (the preset's)", group="optimisation")
    micro_batch: int | None = _option(None, f"at most so many at once on a device ({MICRO_BATCH}); more accumulate")
    steps: int | None = _option(None, "steps of the run (the preset's); with --resume a new length")
    learning_rate: float | None = _option(None, "the peak (the preset's); the cosine ends at 1e-5, or a tenth of it")
    warmup: float = _option(0.015, "share of the steps, or steps from 1 on")
    optimizer: Literal["adamw", "muon"] = _option("adamw", "muon: flashmhf.Muon for matrices, AdamW for the rest")
    param_groups: bool = _option(True, "AdamW: FlashMHF's projections learn at 0.3 of the rate (ours, not the paper's)")
    seed: int = _option(0, "of weights and batches")
    precision: Literal["auto", "bf16", "fp32"] = _option("auto", "bf16: autocast; auto: bf16 on GPUs", group="machine")
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "auto: a CUDA GPU where there is one")
    tp: int | None = _option(None, "neighbouring processes that share the heads of a sequence (1)")
    dp_shard: int | None = _option(None, "processes that share the parameters: FSDP2 (1; with --tp all groups)")
    compile: bool = _option(False, "torch.compile the model")
    fused_loss: bool = _option(False, "never hold all logits: long sequences on GPUs, by liger-kernel")
    save_every: int = _option(1000, "steps between checkpoints")
    keep: int = _option(2, "checkpoints kept")
    log_every: int = _option(10, "steps between rows of metrics.jsonl")
    eval_every: int = _option(1000, "steps between held-out losses")
    arguments: dict[str, object] = _option({}, "a transformers TrainingArguments setting", flag="--set")

    def __post_init__(self) -> None:
        if isinstance(self.data, (str, os.PathLike)):
            self.data = [self.data]
        self.data = [os.fspath(path) for path in self.data]
        for name, kind in typing.get_type_hints(Options).items():
            if isinstance(value := getattr(self, name), os.PathLike):
                setattr(self, name, value := os.fspath(value))
            _check_value(f"{name} is", name, value, kind)
            # as of a variable that is not set; as a path, "" would be "."
            empty = value == "" or (name == "data" and "" in value)
            refuse(empty, f"{name} is {value!r}; leave it out or give a text that is not empty")

    def resolve(self) -> Options:
        """Return these with absolute paths and the preset's values for None. Raises OptionError for what cannot be."""
        chosen = self._from_trained() if self.init_from else preset(self.preset or "128m")
        scale = chosen.scale if chosen else SCALES["128m"]
        defaults = {"vocab_size": scale.vocabulary, "length": scale.context} if chosen else {}
        defaults |= {name: getattr(scale, name) for name in ("batch", "steps", "learning_rate")}
        defaults["micro_batch"] = MICRO_BATCH
        # Names of the hub stay.
        given = {name: getattr(self, name) for name in ("tokens", "init_from", "tokenizer")}
        given = {name: (at, one_path(at)) for name, at in given.items() if at}
        resolved = replace(
            self, output=one_path(self.output), preset=chosen and chosen.name,
            # as they are called: a file's format is the end of its name, which a link's target need not have
            data=[str(Path(os.path.expanduser(path)).absolute()) for path in self.data],
            **{name: path if os.path.exists(path) else at for name, (at, path) in given.items()},
            **{name: value for name, value in defaults.items() if getattr(self, name) is None},
        )  # fmt: skip
        resolved._check()
        return resolved

    def refuse_unused(self) -> None:
        """Raise OptionError for options that others leave without effect."""
        held_out = self.eval_fraction > 0
        unused = {
            "tokenizer": "with tokens, which have theirs" if self.tokens and not self.init_from else "",
            "text_field": "with tokens" if self.tokens else "",
            "eval_every": "" if held_out else "without eval_fraction",
            "param_groups": "" if self.optimizer == "adamw" else f"with optimizer {self.optimizer!r}",
        }
        evaluation = (name for name in self.arguments if name.startswith("eval_") and not held_out)
        unused |= dict.fromkeys(evaluation, "without eval_fraction")
        for name, why in unused.items():
            value = self.arguments.get(name, getattr(self, name, None))
            given = why and value != getattr(Options, name, None)
            refuse(given, f"{name} is {value!r}, which has no effect {why}; leave it out")

    def _from_trained(self) -> None:
        for name in ("preset", "model", "vocab_size"):
            refuse(getattr(self, name), f"{name} cannot be given with init_from: the trained model decides")
        for name in ("steps", "learning_rate"):
            missing = f"{name} must be given with init_from: the paper has no value for further training"
            refuse(getattr(self, name) is None, missing)

    def _check(self) -> None:
        sets, arguments = "arguments cannot set", self.arguments
        refuse(bool(self.data) == bool(self.tokens), "give one of data and tokens")
        chosen_device(self.device)
        for name, option in _ACCELERATES.items():
            told = os.environ.get(name, "")
            other = told.lower() not in (*_OFF, getattr(self, option, None))
            refuse(other, f"accelerate launch set {name} to {told!r}; give {option} instead")
        _check_settings("model", self.model, FlashMHFConfig, _OWN_SETTINGS)
        positions = self.model.get("max_position_embeddings")
        short = isinstance(positions, int) and self.length and positions < self.length
        refuse(short, f"model sets max_position_embeddings to {positions}, below length = {self.length}")
        _check_settings("arguments", arguments, TrainingArguments, DECIDED)
        sharded = max(self.tp or 1, self.dp_shard or 1) > 1
        for name, value in arguments.items():
            _check_value(f"arguments sets {name} to", name, value, setting_types()[name])
            own = self.optimizer != "adamw" and name.startswith("optim")
            refuse(own, f"{sets} {name} with optimizer {self.optimizer!r}")
            refuse(sharded and name.startswith("torch_compile"), f"{sets} {name} with tp or dp_shard; use compile")
        strategy = arguments.get("save_strategy", "steps")
        refuse(strategy not in ("steps", "no"), f"arguments sets save_strategy to {strategy!r}; supported: steps, no")
        schedule_free = str(arguments.get("optim")).startswith("schedule_free")
        refuse(schedule_free, f"{sets} optim to a schedule-free optimizer: it saves other weights")
        if self.fused_loss:
            tp, smoothed = self.tp or 1, arguments.get("label_smoothing_factor")
            refuse(tp > 1, f"fused_loss is on with tp = {tp}, which shards the head; supported: tp = 1")
            refuse(smoothed, f"{sets} label_smoothing_factor with fused_loss: it smooths logits")

    def layout(self, processes: int) -> Layout:
        """Return how the run lies over ``processes``. Raises OptionError where tp and dp_shard do not divide them."""
        return layout_of(self.tp, self.dp_shard, processes)

    def micro_batch_for(self, processes: int) -> int:
        """Return the largest divisor of batch / processes up to micro_batch. Raises OptionError for a remainder."""
        refuse(self.batch % processes, f"batch is {self.batch}; it must be a multiple of the {processes} processes")
        each = self.batch // processes
        return next(size for size in range(min(self.micro_batch, each), 0, -1) if each % size == 0)


def setting_types() -> dict[str, Any]:
    """Return the type of each setting of TrainingArguments."""
    return typing.get_type_hints(TrainingArguments)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Name ``option`` in what transformers raises about the user's settings, around what parses them alone."""
    try:
        yield
    except (StrictDataclassError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise OptionError(f"{option}: {' '.join(str(error.__cause__ or error).split())}") from error


def _check_settings(option: str, given: Iterable[str], owner: type, own: Mapping[str, str]) -> None:
    """Refuse settings that ``owner`` has not, and ``own``; name the option that each is, or a similar name, or all."""
    supported = {entry.name for entry in fields(owner) if entry.init} - own.keys()
    for name in given:
        if name not in supported:
            close = difflib.get_close_matches(name, supported, 1, 0.8)
            hint = f"did you mean {close[0]}?" if close else f"supported: {', '.join(sorted(supported))}"
            raise OptionError(f"{option} cannot set {name}; " + (f"use {own[name]}" if name in own else hint))


class RunArguments(TrainingArguments):
    """transformers', for a process on one GPU: the Trainer would spread it over all with DataParallel."""

    n_gpu = property(lambda self: min(1, super().n_gpu))


def training_arguments(options: Options) -> TrainingArguments:
    """Return transformers' arguments. Raises OptionError for what it refuses, and reports without package."""
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    report = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    settings = {name: getattr(options, option) for name, option in _HELD.items()} | dict(
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
    chosen = preset(options.preset)
    positions = max(chosen.scale.context, options.length)
    sizes = {"max_position_embeddings": positions, "vocab_size": options.vocab_size}
    with _naming("model"):
        config = chosen.config(**sizes | options.model)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
