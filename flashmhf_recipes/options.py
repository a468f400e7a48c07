"""The options of a run: what they support, and the paper's values by preset."""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from flashmhf.models.presets import SCALES, preset

from .arguments import check_value, chosen_device, one_path, refuse_empty
from .errors import refuse
from .layout import Layout, layout_of

MICRO_BATCH = 8

# What is supported of a number, and whether one of the right type is.
Range = tuple[str, Callable[[Any], bool]]
COUNT: Range = ("integers from 1 to 2^31 - 1", lambda x: 1 <= x < 1 << 31)
INTERVAL: Range = ("integers from 1 on", lambda x: x >= 1)  # one beyond all steps means never
VOCABULARY: Range = ("integers from 1 to 2^24", lambda x: 1 <= x <= 1 << 24)  # the tokenizer's trainer reserves them
LENGTH: Range = ("integers from 2 to 2^31 - 1, a token and the next", lambda x: 2 <= x < 1 << 31)
SHARE: Range = ("numbers from 0 on and below 1", lambda x: 0 <= x < 1)
RATE: Range = ("finite numbers above 0", lambda x: 0 < x < math.inf)
WARMUP: Range = ("a share below 1, or whole steps", lambda x: 0 <= x < 1 or (x > 0 and float(x).is_integer()))
SEED: Range = ("integers from 0 to 2^32 - 1", lambda x: 0 <= x < 1 << 32)
KEPT: Range = ("integers from 2 on, so that one is complete at any moment", lambda x: x >= 2)


def _option(default: object, help: str, supported: Range | None = None, **metadata: str) -> Any:
    """A field of Options: the command line makes a flag of it, with this help, under the last ``group`` named."""
    metadata = {"help": help, "supported": supported} | metadata
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
    vocab_size: int | None = _option(None, "size of the vocabulary (the preset's)", VOCABULARY)
    length: int | None = _option(None, "tokens in a sequence (the preset's)", LENGTH)
    eval_fraction: float = _option(0.0, "share of the tokens held out at the end", SHARE)
    batch: int | None = _option(
        None, "sequences of a step, of all processes (the preset's)", COUNT, group="optimisation"
    )
    micro_batch: int | None = _option(None, f"at most so many at once on a device ({MICRO_BATCH})", COUNT)
    steps: int | None = _option(None, "steps of the run (the preset's); with --resume a new length", COUNT)
    learning_rate: float | None = _option(None, "the peak (the preset's); it falls to 1e-5, or a tenth", RATE)
    warmup: float = _option(0.015, "share of the steps, or steps from 1 on", WARMUP)
    optimizer: Literal["adamw", "muon"] = _option("adamw", "muon: flashmhf.Muon for matrices, AdamW for the rest")
    param_groups: bool = _option(True, "AdamW: FlashMHF's projections learn at 0.3 of the rate (ours, not the paper's)")
    seed: int = _option(0, "of weights and batches", SEED)
    precision: Literal["auto", "bf16", "fp32"] = _option("auto", "bf16: autocast; auto: bf16 on GPUs", group="machine")
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "auto: a CUDA GPU where there is one")
    tp: int | None = _option(None, "neighbouring processes that share the heads of a sequence (1)", COUNT)
    dp_shard: int | None = _option(None, "processes that share the parameters: FSDP2 (1; with --tp all groups)", COUNT)
    compile: bool = _option(False, "torch.compile the model")
    fused_loss: bool = _option(False, "never hold all logits: long sequences on GPUs, by liger-kernel")
    save_every: int = _option(1000, "steps between checkpoints", INTERVAL)
    keep: int = _option(2, "checkpoints kept", KEPT)
    log_every: int = _option(10, "steps between rows of metrics.jsonl", INTERVAL)
    eval_every: int = _option(1000, "steps between held-out losses", INTERVAL)
    arguments: dict[str, object] = _option({}, "a transformers TrainingArguments setting", flag="--set")

    def __post_init__(self) -> None:
        if isinstance(self.data, (str, os.PathLike)):
            self.data = [self.data]
        self.data = [os.fspath(path) for path in self.data]
        kinds = typing.get_type_hints(Options)
        for entry in fields(self):
            name, value = entry.name, getattr(self, entry.name)
            if isinstance(value, os.PathLike):
                setattr(self, name, value := os.fspath(value))
            check_value(f"{name} is", value, kinds[name], entry.metadata.get("supported"))
            refuse_empty(name, value)

    def resolve(self) -> Options:
        """Return these with absolute paths and the preset's values for None. Raises OptionError for what cannot be."""
        self._check()
        chosen = None if self.init_from else preset(self.preset or "128m")
        scale = chosen.scale if chosen else SCALES["128m"]
        defaults = {"vocab_size": scale.vocabulary, "length": scale.context} if chosen else {}
        defaults |= {name: getattr(scale, name) for name in ("batch", "steps", "learning_rate")}
        defaults["micro_batch"] = MICRO_BATCH
        named = {name: getattr(self, name) for name in ("tokens", "init_from", "tokenizer")}
        paths = {name: one_path(at) for name, at in named.items() if at and os.path.exists(one_path(at))}
        return replace(
            self, output=one_path(self.output), preset=chosen and chosen.name,
            # as they are called: a file's format is the end of its name, which a link's target need not have
            data=[str(Path(os.path.expanduser(path)).absolute()) for path in self.data],
            **paths,  # names of the hub stay
            **{name: value for name, value in defaults.items() if getattr(self, name) is None},
        )  # fmt: skip

    def _check(self) -> None:
        """Raise OptionError for options that do not go together, and for those that others leave without effect."""
        refuse(bool(self.data) == bool(self.tokens), "give one of data and tokens")
        chosen_device(self.device)
        if self.init_from:
            for name in ("preset", "model", "vocab_size"):
                refuse(getattr(self, name), f"{name} cannot be given with init_from: the trained model decides")
            for name in ("steps", "learning_rate"):
                missing = f"{name} must be given with init_from: the paper has no value for further training"
                refuse(getattr(self, name) is None, missing)
        whole = not self.fused_loss or (self.tp or 1) == 1
        refuse(not whole, f"fused_loss is on with tp = {self.tp}, which shards the head; supported: tp = 1")
        unused = {
            "text_field": self.tokens and "with tokens",
            "tokenizer": self.tokens and not self.init_from and "with tokens, which have theirs",
            "eval_every": not self.eval_fraction and "without eval_fraction",
            "param_groups": self.optimizer != "adamw" and f"with optimizer {self.optimizer!r}",
        }
        for name, why in unused.items():
            value = getattr(self, name)
            given = why and value != getattr(Options, name)
            refuse(given, f"{name} is {value!r}, which has no effect {why}; leave it out")

    def layout(self, processes: int) -> Layout:
        """Return how the run lies over ``processes``. Raises OptionError where tp and dp_shard do not divide them."""
        return layout_of(self.tp, self.dp_shard, processes)

    def micro_batch_for(self, processes: int) -> int:
        """Return the largest divisor of batch / processes up to micro_batch. Raises OptionError for a remainder."""
        refuse(self.batch % processes, f"batch is {self.batch}; it must be a multiple of the {processes} processes")
        each = self.batch // processes
        return next(size for size in range(min(self.micro_batch, each), 0, -1) if each % size == 0)
