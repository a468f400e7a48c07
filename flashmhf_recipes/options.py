"""The options of a run: the paper's values by preset, checks, and what transformers gets of them."""

from __future__ import annotations

import difflib
import importlib.util
import math
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from flashmhf.models.configuration import FFN_TYPES, FlashMHFConfig
from flashmhf.models.presets import SCALES, Preset, preset

from .errors import OptionError
from .layout import Layout, layout_of

DEFAULT_PRESET = "flashmhf-128m"
MICRO_BATCH = 8

# TrainingArguments that an option of ours decides.
_OWN_ARGUMENTS = {
    "output_dir": "output",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "per_device_train_batch_size": "micro_batch",
    "per_device_eval_batch_size": "micro_batch",
    "gradient_accumulation_steps": "batch",
    "auto_find_batch_size": "micro_batch",
    "learning_rate": "learning_rate",
    "warmup_steps": "warmup",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "bf16": "precision",
    "fp16": "precision",
    "use_cpu": "device",
    "torch_compile": "compile",
    "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "seed": "seed",
    "data_seed": "seed",
    "train_sampling_strategy": "seed",
    "logging_steps": "log_every",
    "eval_strategy": "eval_fraction",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep",
    "resume_from_checkpoint": "resume",
}
# TrainingArguments that a run of ours cannot have, and why.
_REFUSED_ARGUMENTS = {
    "enable_jit_checkpoint": "SIGTERM and SIGINT save a checkpoint without it",
    "save_only_model": "the run could not be resumed",
    "ignore_data_skip": "a resumed run would see other batches",
    "restore_callback_states_from_checkpoint": "the callbacks are made anew with the run's options",
}
# FlashMHFConfig settings that an option of ours, or the tokenizer, decides.
_OWN_SETTINGS = {"vocab_size": "vocab_size", "ffn_type": "ffn"}
_TOKENIZER_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Options that choose a model, which a trained model to start from has chosen already.
_MODEL_OPTIONS = ("preset", "ffn", "model", "vocab_size")

# What is supported of a number, and whether a value is. NaN is nowhere.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "learning_rate": ("finite numbers above 0", lambda x: 0 < x < math.inf),
    "warmup": ("a share of the steps below 1, or steps from 1 on", lambda x: 0 <= x < math.inf),
    "weight_decay": ("finite numbers from 0 on", lambda x: 0 <= x < math.inf),
    "betas": ("two numbers from 0 on and below 1", lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x)),
    "max_grad_norm": ("numbers from 0 on; 0 does not clip", lambda x: x >= 0),
    "eval_fraction": ("numbers from 0 on and below 1", lambda x: 0 <= x < 1),
    "seed": ("integers from 0 to 2^32 - 1", lambda x: 0 <= operator.index(x) < 1 << 32),
}


@dataclass
class Options:
    """One run. Where None stands, the preset (the paper's value) decides.

    preset: a name of flashmhf.models.presets, or a scale ("128m") together with ``ffn``; None stands for flashmhf-128m.
    init_from: a trained model to start from instead of a preset: run, checkpoint, saved or official model, or a name. Its tokenizer is
        used, and ``steps`` and ``learning_rate`` must be given.
    data, dataset, tokens: one of text, JSON-lines, Parquet files and directories of them; "name" or "name:config" of the datasets
        library; the directory of a run whose tokens and tokenizer are to be used again.
    tokenizer: directory, tokenizer.json or name; None trains one on the data.
    chat_template: "plain" or a Jinja file that the tokenizer gets; None leaves the tokenizer as it is. Servers refuse chats without one.
    batch: sequences a step, over all processes.
    micro_batch: at most so many of them at once on a device (8). What is used divides batch / processes; the rest is accumulated.
    eval_fraction: the end of the tokens, held out; its loss is recorded every ``eval_every`` steps and at the end.
    precision: "bf16" (autocast, float32 weights), "fp32", "auto" (bf16 on GPUs).
    device: "cpu", "cuda", or "auto" for a GPU where there is one.
    optimizer: "adamw", or "muon": flashmhf.Muon for the blocks' matrices and AdamW for the rest.
    param_groups: the groups of flashmhf.param_groups (FlashMHF's in_proj and out_proj learn at 0.3 of the learning rate: ours, not the
        paper's), or one learning rate for all.
    tp: processes that share the heads of one sequence (tensor parallelism), neighbours in rank.
    dp_shard: processes that share the parameters, their gradients and the optimizer's state (FSDP2); what is left of the processes are
        replicas. None for both: one replica a process, or the layout of ``accelerate launch``.
    model, arguments: further FlashMHFConfig and TrainingArguments settings.
    """

    output: str
    preset: str | None = None
    ffn: str | None = None
    init_from: str | None = None
    data: list[str] = field(default_factory=list)
    dataset: str | None = None
    tokens: str | None = None
    split: str = "train"
    text_field: str = "text"
    tokenizer: str | None = None
    chat_template: str | None = None
    vocab_size: int | None = None
    length: int | None = None
    batch: int | None = None
    micro_batch: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    min_learning_rate: float = 1e-5
    warmup: float = 0.015
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    param_groups: bool = True
    eval_fraction: float = 0.0
    eval_every: int = 1000
    save_every: int = 1000
    keep: int = 2
    log_every: int = 10
    seed: int = 0
    precision: str = "auto"
    device: str = "auto"
    compile: bool = False
    checkpointing: bool = False
    tp: int | None = None
    dp_shard: int | None = None
    model: dict[str, object] = field(default_factory=dict)
    arguments: dict[str, object] = field(default_factory=dict)

    def resolve(self) -> tuple[Preset | None, Options]:
        """The preset (None with ``init_from``), and these options without None and with absolute paths.

        Raises OptionError for values that are not supported and for contradictions.
        """
        chosen = self._from_trained() if self.init_from else self._preset()
        scale = chosen.scale if chosen else SCALES["128m"]
        resolved = Options(
            **{
                **asdict(self),
                "preset": chosen and chosen.name,
                "ffn": None,
                "data": [os.path.abspath(path) for path in self.data],
                "tokens": self.tokens and os.path.abspath(self.tokens),
                "init_from": _absolute(self.init_from),
                "tokenizer": _absolute(self.tokenizer),
                "chat_template": _absolute(self.chat_template),
                "vocab_size": scale.vocabulary if self.vocab_size is None and not self.init_from else self.vocab_size,
                "length": scale.context if self.length is None and not self.init_from else self.length,
                "batch": scale.batch if self.batch is None else self.batch,
                "steps": scale.steps if self.steps is None else self.steps,
                "learning_rate": scale.learning_rate if self.learning_rate is None else self.learning_rate,
            }
        )
        resolved._check()
        return chosen, resolved

    def _preset(self) -> Preset:
        if self.ffn is not None and self.ffn not in FFN_TYPES:
            raise OptionError("{ffn} is {value!r}; supported: {supported}", value=self.ffn, supported=", ".join(FFN_TYPES))
        name = self.preset or DEFAULT_PRESET
        if name in SCALES:
            name = f"{self.ffn or 'flashmhf'}-{name}"
        elif self.ffn is not None:
            name = f"{self.ffn}-{name.split('-')[1] if '-' in name else name}"
        return preset(name)

    def _from_trained(self) -> None:
        for name in _MODEL_OPTIONS:
            if getattr(self, name):
                raise OptionError(f"{{{name}}} cannot be given with {{init_from}}: the trained model decides")
        for name in ("steps", "learning_rate"):
            if getattr(self, name) is None:
                raise OptionError(f"{{{name}}} must be given with {{init_from}}: the paper has no value for further training")

    def _check(self) -> None:
        if sum(map(bool, (self.data, self.dataset, self.tokens))) != 1:
            raise OptionError("give one of {data}, {dataset} and {tokens}")
        for name in ("length", "batch", "micro_batch", "steps", "eval_every", "save_every", "log_every", "vocab_size", "tp", "dp_shard"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise OptionError(f"{{{name}}} is {{value!r}}; supported: integers from 1 on", value=value)
        for name, (supported, holds) in _RANGES.items():
            value = getattr(self, name)
            try:
                inside = holds(value)
            except TypeError:  # no number
                inside = False
            if not inside:
                raise OptionError(f"{{{name}}} is {{value!r}}; supported: {{supported}}", value=value, supported=supported)
        if self.keep < 2:
            raise OptionError("{keep} is {value}; at least 2 checkpoints are kept, so that one is complete at any moment", value=self.keep)
        if not 0 < self.min_learning_rate <= self.learning_rate:
            raise OptionError(
                "{min_learning_rate} is {value}; it must be above 0 and at most {learning_rate} = {peak}",
                value=self.min_learning_rate,
                peak=self.learning_rate,
            )
        for name, supported in (
            ("precision", ("auto", "bf16", "fp32")),
            ("device", ("auto", "cpu", "cuda")),
            ("optimizer", ("adamw", "muon")),
        ):
            if getattr(self, name) not in supported:
                raise OptionError(
                    f"{{{name}}} is {{value!r}}; supported: {{supported}}", value=getattr(self, name), supported=", ".join(supported)
                )
        if self.optimizer != "adamw" and "optim" in self.arguments:
            raise OptionError("{arguments} cannot set optim with {optimizer} {value!r}", value=self.optimizer)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise OptionError("{device} is 'cuda'; this PyTorch sees no CUDA GPU")
        self._check_settings("model", "FlashMHFConfig", [entry.name for entry in fields(FlashMHFConfig)], _OWN_SETTINGS)
        for name in _TOKENIZER_SETTINGS:
            if name in self.model:
                raise OptionError(f"{{model}} cannot set {name}: the tokenizer decides")
        positions = self.model.get("max_position_embeddings")
        if isinstance(positions, int) and self.length and positions < self.length:
            raise OptionError("{model} sets max_position_embeddings to {value}, below {length} = {n}", value=positions, n=self.length)
        known = [entry.name for entry in fields(TrainingArguments) if entry.init]
        self._check_settings("arguments", "TrainingArguments", known, _OWN_ARGUMENTS)
        for name, reason in _REFUSED_ARGUMENTS.items():
            if self.arguments.get(name):
                raise OptionError(f"{{arguments}} cannot set {name}: {reason}")
        for entry in fields(TrainingArguments):
            self._check_type(entry.name, entry.default)

    def _check_settings(self, option: str, type_name: str, known: Iterable[str], own: Mapping[str, str]) -> None:
        """Refuses what another option decides, by its name, and what there is not."""
        for name in getattr(self, option):
            if name in own:
                raise OptionError(f"{{{option}}} cannot set {{name}}: use {{{own[name]}}}", name=name)
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise OptionError(f"{{{option}}}: {{type}} has no setting {{name!r}}{{hint}}", type=type_name, name=name, hint=hint)

    def _check_type(self, name: str, default: object) -> None:
        """Refuses a value of ``arguments`` that is no number or no boolean where the default is one; TrainingArguments checks neither."""
        if name in self.arguments and isinstance(default, bool | int | float):
            expected = bool if isinstance(default, bool) else int | float
            if not isinstance(self.arguments[name], expected):
                kind = "true or false" if expected is bool else "a number"
                raise OptionError(
                    "{arguments} sets {name} to {value!r}; it must be {kind}", name=name, value=self.arguments[name], kind=kind
                )

    def layout(self, processes: int) -> Layout:
        """How the run lies over ``processes``. Raises OptionError where :attr:`tp` and :attr:`dp_shard` do not divide them."""
        return layout_of(self.tp, self.dp_shard, processes)

    def micro_batch_for(self, processes: int) -> int:
        """Sequences at once on a device: the largest divisor of batch / processes up to :attr:`micro_batch`.

        Raises OptionError where the batch is no multiple of the processes.
        """
        if self.batch % processes:
            raise OptionError(
                "{batch} is {value}; it must be a multiple of the {processes} processes", value=self.batch, processes=processes
            )
        each = self.batch // processes
        return next(size for size in range(min(self.evaluation_batch, each), 0, -1) if each % size == 0)

    @property
    def evaluation_batch(self) -> int:
        """Held-out sequences at once: fixed, so that the held-out loss has the same bits for any number of processes."""
        return self.micro_batch or MICRO_BATCH

    def accumulation(self, processes: int) -> str:
        """How a step is made up, for people."""
        layout = self.layout(processes)
        size = self.micro_batch_for(layout.data_processes)
        turns = self.batch // (size * layout.data_processes)
        devices = "1 device" if processes == 1 else f"each of {layout.data_processes} devices"
        if layout.tp > 1:
            devices = f"each of {layout.data_processes} groups of {layout.tp} devices"
        accumulated = f", {turns} times" if turns > 1 else ""
        tokens = f"{self.batch:,} sequences of {self.length:,} tokens = {self.batch * self.length:,} tokens"
        return f"a step: {tokens}; {size} sequences at once on {devices}{accumulated}"


def _absolute(name: str | None) -> str | None:
    """The absolute path where ``name`` is one; a name of the Hugging Face hub stays."""
    return os.path.abspath(name) if name and Path(name).exists() else name


def training_arguments(options: Options) -> TrainingArguments:
    """transformers' arguments for resolved options: AdamW, cosine to a minimum learning rate, warm-up as a share of the steps.

    Raises OptionError for settings that transformers refuses and for reports without their package.
    """
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    report = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    settings = dict(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_eval_batch_size=options.evaluation_batch,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": options.min_learning_rate},
        warmup_steps=options.warmup if options.warmup < 1 else int(options.warmup),
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        bf16=options.precision == "bf16" or (options.precision == "auto" and on_gpu),
        use_cpu=not on_gpu,
        torch_compile=options.compile,
        gradient_checkpointing=options.checkpointing,
        seed=options.seed,
        train_sampling_strategy="sequential",  # the data set shuffles
        remove_unused_columns=False,
        prediction_loss_only=True,
        logging_steps=options.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=None,  # RunTrainer removes old checkpoints, and only complete ones
        eval_strategy="steps" if options.eval_fraction else "no",
        eval_steps=options.eval_every,
        report_to=report,
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        ddp_find_unused_parameters=False,
    )
    if "lr_scheduler_type" in options.arguments:
        del settings["lr_scheduler_kwargs"]  # other schedules know no minimum
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            arguments = TrainingArguments(**{**settings, **options.arguments})
            for callback in get_reporting_integration_callbacks(arguments.report_to):
                callback()  # raises where the package of a report is missing
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            if not options.arguments:
                raise
            raise OptionError("{arguments}: {error}", error=" ".join(str(error).split())) from error
    if arguments.n_gpu > 1:  # one process is one GPU; the Trainer would spread it over all with DataParallel
        arguments._n_gpu = 1
    layout = options.layout(arguments.world_size)
    arguments.per_device_train_batch_size = options.micro_batch_for(layout.data_processes)
    arguments.gradient_accumulation_steps = options.batch // (arguments.per_device_train_batch_size * layout.data_processes)
    if layout.sharded:
        if options.optimizer == "muon":  # its iteration takes whole matrices
            raise OptionError("{optimizer} is 'muon'; a run with {tp} or {dp_shard} above 1 supports 'adamw'")
        arguments.torch_compile = False  # Layout.shard compiles the blocks: collectives between them are no part of a graph
        arguments.torch_compile_backend = arguments.torch_compile_mode = None
    return arguments


def model_config(chosen: Preset, options: Options) -> FlashMHFConfig:
    """The configuration of a new model for resolved options; the tokenizer's numbers are not in it yet.

    Raises OptionError for sizes that no model has.
    """
    positions = max(chosen.scale.context, options.length)
    try:
        config = chosen.config(**{"max_position_embeddings": positions, "vocab_size": options.vocab_size, **options.model})
        empty_model(config)
    except (StrictDataclassError, ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        if not options.model:
            raise
        raise OptionError("{model}: {error}", error=" ".join(str(error.__cause__ or error).split())) from error
    return config


def empty_model(config: FlashMHFConfig) -> PreTrainedModel:
    """The configuration's model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
