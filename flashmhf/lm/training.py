"""Training with transformers' Trainer under the paper's settings: data to tokens, exact resumption, metrics.

A run lives in one directory: run.json (its options), tokenizer/, data/ (tokens), checkpoint-N/, metrics.jsonl, loss.png and, once
finished, the model itself. Everything that a resumed run needs is there.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from . import data, metrics, tokenizer
from .configuration import FFN_TYPES
from .flops import peak_flops, training_flops_per_token
from .metrics import TrainingError
from .presets import SCALES, Preset, preset

RUN, TOKENIZER, DATA = "run.json", "tokenizer", "data"


@dataclass
class Options:
    """One run. Where None stands, the preset (the paper's value) decides.

    preset: a name of flashmhf.lm.presets, or a scale ("128m") together with ``ffn``.
    data, dataset, tokens: one of text, JSON-lines, Parquet files and directories of them; "name" or "name:config" of the datasets
        library; the directory of a run whose tokens and tokenizer are to be used again.
    tokenizer: directory, tokenizer.json or name; None trains one on the data.
    batch, micro_batch: sequences a step, and of those at once on a device (the rest is accumulated).
    eval_fraction: the end of the tokens, held out; its loss is recorded every ``eval_every`` steps and at the end.
    precision: "bf16" (autocast, float32 weights), "fp32", "auto" (bf16 on GPUs).
    model, arguments: further FlashMHFConfig and TrainingArguments settings.
    """

    output: str
    preset: str = "flashmhf-128m"
    ffn: str | None = None
    data: list[str] = field(default_factory=list)
    dataset: str | None = None
    tokens: str | None = None
    split: str = "train"
    text_field: str = "text"
    tokenizer: str | None = None
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
    model: dict[str, object] = field(default_factory=dict)
    arguments: dict[str, object] = field(default_factory=dict)

    def resolve(self) -> tuple[Preset, Options]:
        """The preset, and these options without None. Raises ValueError for contradictions."""
        name = self.preset
        if name in SCALES:
            name = f"{self.ffn or 'flashmhf'}-{name}"
        elif self.ffn is not None:
            scale = name.split("-")[1] if name.count("-") else name
            name = f"{self.ffn}-{scale}"
        if self.ffn is not None and self.ffn not in FFN_TYPES:
            raise ValueError(f"--ffn is {self.ffn!r}; supported: {', '.join(FFN_TYPES)}")
        chosen = preset(name)
        scale = chosen.scale
        batch = self.batch or scale.batch
        resolved = Options(
            **{
                **asdict(self),
                "preset": name,
                "ffn": None,
                "vocab_size": self.vocab_size or scale.vocabulary,
                "length": self.length or scale.context,
                "batch": batch,
                "micro_batch": self.micro_batch or math.gcd(batch, 8),
                "steps": scale.steps if self.steps is None else self.steps,
                "learning_rate": scale.learning_rate if self.learning_rate is None else self.learning_rate,
            }
        )
        resolved._check()
        return chosen, resolved

    def _check(self) -> None:
        if sum(map(bool, (self.data, self.dataset, self.tokens))) != 1:
            raise ValueError("give one of --data, --dataset and --tokens")
        for name in ("length", "batch", "micro_batch", "steps", "eval_every", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.keep < 2:
            raise ValueError(f"--keep is {self.keep}; at least 2 checkpoints are kept, so that one is complete at any moment")
        if self.batch % self.micro_batch:
            raise ValueError(f"--batch is {self.batch}; it must be a multiple of --micro-batch = {self.micro_batch}")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"--eval-fraction is {self.eval_fraction}; it must be at least 0 and below 1")
        if not 0 < self.min_learning_rate <= self.learning_rate:
            raise ValueError(f"--min-learning-rate is {self.min_learning_rate}; it must be above 0 and at most {self.learning_rate}")
        if self.precision not in ("auto", "bf16", "fp32"):
            raise ValueError(f"--precision is {self.precision!r}; supported: auto, bf16, fp32")
        if self.device not in ("auto", "cpu"):
            raise ValueError(f"--device is {self.device!r}; supported: auto, cpu (choose GPUs with CUDA_VISIBLE_DEVICES)")


@dataclass
class Result:
    """A finished run: its directory, the model's parameters, the last training loss and the held-out loss (nats a token)."""

    output: Path
    parameters: int
    steps: int
    loss: float
    eval_loss: float | None


def first_process() -> bool:
    """Whether this is the process that writes; launchers (torchrun, accelerate) set RANK before anything is initialised."""
    return int(os.environ.get("RANK", "0")) == 0


def start(options: Options, *, bar: bool = True, callbacks: Iterable = ()) -> Result:
    """Trains from the beginning. Raises ValueError (options, data), FileExistsError where a run is already, TrainingError."""
    output = Path(options.output)
    _, resolved = options.resolve()
    if first_process():
        if (output / RUN).exists():
            raise FileExistsError(f"{output} holds a run already; continue it with --resume or choose another output directory")
        output.mkdir(parents=True, exist_ok=True)
        partial = output / (RUN + ".partial")
        partial.write_text(json.dumps(asdict(resolved), indent=1) + "\n")
        partial.replace(output / RUN)
    try:
        return _run(resolved, None, bar, callbacks)
    except data.DataError:
        if first_process():
            _discard(output)
        raise


def resume(output: str | Path, *, bar: bool = True, callbacks: Iterable = ()) -> Result:
    """Continues a run from its last complete checkpoint, with the options it was started with and the batches it would have seen."""
    output = Path(output)
    if not (output / RUN).exists():
        raise FileNotFoundError(f"{output} holds no run: there is no {RUN}")
    options = Options(**json.loads((output / RUN).read_text()) | {"output": str(output)})
    checkpoints = metrics.complete_checkpoints(output)
    checkpoint = checkpoints[-1] if checkpoints else None
    if first_process():
        metrics.remove_incomplete_checkpoints(output)
        metrics.keep_rows(output, _step(checkpoint))
    return _run(options, checkpoint, bar, callbacks)


def _discard(output: Path) -> None:
    """Takes back a run that found its data unusable, so that the directory is free for another attempt."""
    for part in (TOKENIZER, DATA):
        shutil.rmtree(output / part, ignore_errors=True)
    (output / RUN).unlink()


def _step(checkpoint: Path | None) -> int:
    return int(checkpoint.name.split("-")[1]) if checkpoint else 0


def _run(options: Options, checkpoint: Path | None, bar: bool, callbacks: Iterable) -> Result:
    chosen, options = options.resolve()
    output = Path(options.output)
    arguments = training_arguments(options)
    with arguments.main_process_first(desc="preparing data"):
        text, tokens = prepare(options, bar and arguments.process_index == 0)
    train_tokens, eval_tokens = split(tokens, options)
    set_seed(options.seed)
    config = chosen.config(**{"max_position_embeddings": max(chosen.scale.context, options.length), **options.model})
    config.vocab_size = max(options.vocab_size, len(text))
    config.bos_token_id = config.eos_token_id = text.eos_token_id
    config.pad_token_id = None
    model = AutoModelForCausalLM.from_config(config)
    recorder = metrics.Recorder(
        output,
        options.batch * options.length,
        training_flops_per_token(model, options.length),
        peak_flops(arguments.device),
        bar and arguments.process_index == 0,
        _step(checkpoint),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data.Blocks(train_tokens, options.length, options.steps * options.batch, options.seed),
        eval_dataset=None if eval_tokens is None else data.Blocks(eval_tokens, options.length),
        data_collator=default_data_collator,
        processing_class=text,
        callbacks=[recorder, *callbacks],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model(str(output))
    rows = metrics.read_rows(output)
    losses, held_out = ([row[key] for row in rows if key in row] for key in ("loss", "eval_loss"))
    parameters = sum(p.numel() for p in model.parameters())
    return Result(output, parameters, trainer.state.global_step, losses[-1], held_out[-1] if held_out else None)


def training_arguments(options: Options) -> TrainingArguments:
    """transformers' arguments for resolved options: AdamW, cosine to a minimum learning rate, warm-up as a share of the steps."""
    on_gpu = options.device == "auto" and torch.cuda.is_available()
    report = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    settings = dict(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=options.micro_batch,
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
        save_total_limit=options.keep,
        eval_strategy="steps" if options.eval_fraction else "no",
        eval_steps=options.eval_every,
        report_to=report,
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        ddp_find_unused_parameters=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        arguments = TrainingArguments(**{**settings, **options.arguments})
    if arguments.n_gpu > 1:  # one process is one GPU; the Trainer would spread it over all with DataParallel
        arguments._n_gpu = 1
    at_once = options.micro_batch * arguments.world_size
    if options.batch % at_once:
        raise ValueError(f"--batch is {options.batch}; it must be a multiple of --micro-batch × processes = {at_once}")
    arguments.gradient_accumulation_steps = options.batch // at_once
    return arguments


def prepare(options: Options, bar: bool = True):
    """(tokenizer, stored tokens) of a run: trained, loaded or reused."""
    if options.tokens is not None:
        source = Path(options.tokens)
        if not (source / DATA / data.MANIFEST).exists():
            raise data.DataError(f"{source} holds no tokens: there is no {DATA}/{data.MANIFEST}")
        return tokenizer.load(str(source / TOKENIZER)), data.load(source / DATA)
    output = Path(options.output)
    files = data.find_files(options.data)

    def pieces(report: data.Report) -> Iterable[data.Piece]:
        if options.dataset is None:
            return data.read_documents(files, report, options.text_field)
        name, _, config = options.dataset.partition(":")
        return data.read_dataset(name, config or None, options.split, report, options.text_field)

    text = _tokenizer(options, output / TOKENIZER, pieces)
    wanted = math.ceil(options.steps * options.batch * options.length / (1 - options.eval_fraction)) + options.length
    settings = [options.dataset, options.split, options.text_field, wanted]
    done = (output / DATA / data.MANIFEST).exists()
    with tqdm(desc="tokenising", unit="token", unit_scale=True, disable=not bar or done) as progress:
        manifest = data.store(output / DATA, data.source_key(settings, files, text), pieces, text, wanted, progress.update)
    if bar and not done:
        tqdm.write("\n".join([*manifest["report"], f"{manifest['tokens']:,} tokens"]))
    return text, data.load(output / DATA)


def _tokenizer(options: Options, directory: Path, pieces):
    if not directory.exists():
        if options.tokenizer is not None:
            text = tokenizer.load(options.tokenizer)
        else:
            report = data.Report()
            text = tokenizer.train((piece.text for piece in pieces(report)), options.vocab_size)
            if not report.documents:
                raise data.DataError("no text is left to train on: " + "; ".join(report.lines()))
        partial = directory.with_name(directory.name + ".partial")
        text.save_pretrained(partial)
        partial.rename(directory)
    return tokenizer.load(str(directory))


def split(tokens, options: Options):
    """(training tokens, held-out tokens or None): the held-out ones are the end, whole blocks of them."""
    blocks = len(tokens) // options.length
    held_out = math.ceil(blocks * options.eval_fraction)
    if held_out and held_out >= blocks:
        raise data.DataError(
            f"the data has {len(tokens):,} tokens, too few to hold {options.eval_fraction:.0%} of the blocks of {options.length:,} out"
        )
    boundary = (blocks - held_out) * options.length
    return (tokens[:boundary] if held_out else tokens), (tokens[boundary:] if held_out else None)


__all__ = ["Options", "Result", "TrainingError", "prepare", "resume", "split", "start", "training_arguments"]
