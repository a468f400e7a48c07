"""Training under the paper's settings, resumed exactly from a run's directory (docs/training.md lists its files)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback, TrainingArguments, set_seed

from flashmhf.models import FlashMHFConfig, loading
from flashmhf.models.presets import SCALES, preset
from flashmhf.models.record import is_fp8

from . import checkpoints, data, fused_loss, metrics, pretrained
from .arguments import one_path
from .data import DATA, TOKENIZER
from .documents import find_files
from .errors import DataError, TrainingError, refuse
from .options import Options
from .settings import empty_model, schedule, training_arguments
from .stopping import Stopped, StopSignals
from .tokenizer import load as load_tokenizer
from .tokenizer import token_numbers
from .trainer import RunTrainer

RUN, LOCK, INIT = "run.json", "flashmhf.lock", "init"
# What a checkpoint's weights belong to, of FlashMHFConfig.
NETWORK = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    tie_word_embeddings hidden_act attention_bias mlp_bias ffn_type ffn_num_heads ffn_num_subnets ffn_num_kv_heads
    ffn_q_norm ffn_skip_linear ffn_norm""".split()
SHORTEST_WARMUP = 100  # steps, at the paper's learning rates

logger = logging.getLogger(__name__)


@dataclass
class Result:
    """A finished run: directory, parameters, steps, last training loss and held-out loss (nats a token)."""

    output: Path
    parameters: int
    steps: int
    loss: float
    eval_loss: float | None


def first_process() -> bool:
    """Return whether this is the process that writes. transformers' arguments must be there: they join the others."""
    return PartialState().is_main_process


def start(options: Options, *, bar: bool = True, callbacks: Iterable = ()) -> Result:
    """Train from the beginning; a start that fails before its first step removes what it wrote but complete tokens.

    Raises OptionError before anything is written, DataError, FileExistsError where the directory is in use,
    TrainingError, and Stopped after SIGTERM or SIGINT, which finish and save the step in the main thread.
    """
    options = options.resolve()
    output = Path(options.output)
    arguments = training_arguments(options)
    find_files(options.data)
    trained = _load_trained(options) if options.init_from else None
    model = trained[0] if trained else empty_model(options)
    options.layout(arguments.world_size).check(model)
    if options.fused_loss:
        fused_loss.check(model)
    _warn_of_short_warmup(options, arguments)
    if first_process():
        _refuse_occupied(output, options)
    with StopSignals() as signals, _locked(output) as made:
        if first_process():
            checkpoints.write_whole(output / RUN, json.dumps(asdict(options), indent=1) + "\n")
        try:
            return _train(options, arguments, bar, callbacks, signals, None, trained)
        except Exception as error:
            if first_process() and not metrics.read_rows(output) and not checkpoints.numbered_checkpoints(output):
                own = options.tokens == options.output
                _release(output, keep_tokens=own or not isinstance(error, DataError), made=made)
            raise


def resume(
    output: str | Path, *, steps: int | None = None, tp: int | None = None, dp_shard: int | None = None,
    bar: bool = True, callbacks: Iterable = (),
) -> Result:  # fmt: skip
    """Continue a run from its last complete checkpoint; ``steps`` is a new length of the whole run and its schedule.

    Raises FileNotFoundError where there is no run, FileExistsError where another process trains it, OptionError for
    ``steps`` that are done and a run.json edited to another model, TrainingError when no checkpoint loads.
    """
    output = Path(one_path(output))
    run = _read_run(output).resolve()
    stored = {"tp": run.tp, "dp_shard": run.dp_shard}
    layout = stored if (tp, dp_shard) == (None, None) else {"tp": tp, "dp_shard": dp_shard}
    options = replace(run, steps=run.steps if steps is None else steps, **layout).resolve()
    arguments = training_arguments(options)
    with StopSignals() as signals, _locked(output):
        with arguments.main_process_first(local=False, desc="looking for checkpoints"):
            if first_process():
                checkpoints.set_aside_unusable(output)
            checkpoint = next(reversed(checkpoints.complete_checkpoints(output)), None)
        done = checkpoints.step_of(checkpoint)
        if checkpoint is None and (output / "config.json").exists():
            raise TrainingError(f"{output} has a finished model but no checkpoint; train it further with init_from=")
        refuse(steps is not None and steps <= done, f"steps is {steps}; the run has done {done} steps")
        if checkpoint and not options.init_from:
            _check_model(options, output, checkpoint)
        if first_process():
            metrics.keep_rows(output, done)
            if options.steps > done:  # without the shorter run's finished model, the last checkpoint is the run's model
                (output / "config.json").unlink(missing_ok=True)
            if options.steps != run.steps:
                _warn_of_steps(arguments, done, run.steps, options.steps)
                checkpoints.write_whole(output / RUN, json.dumps(asdict(options) | stored, indent=1) + "\n")
        return _train(options, arguments, bar, callbacks, signals, checkpoint)


def _warn_of_short_warmup(options: Options, arguments: TrainingArguments) -> None:
    """At the paper's learning rates the loss jumps after a short warm-up. The tiny preset is not the paper's."""
    steps, tiny = arguments.get_warmup_steps(options.steps), SCALES["tiny"]
    scale = preset(options.preset).scale if options.preset else tiny
    fast = scale is not tiny and options.learning_rate >= scale.learning_rate
    if fast and steps < SHORTEST_WARMUP and first_process():
        what = f"the warm-up is {steps} steps; at a learning rate of {options.learning_rate:g}, fewer than"
        logger.warning(f"{what} {SHORTEST_WARMUP} can make the loss jump: set warmup={SHORTEST_WARMUP} or learn slower")


def _read_run(output: Path) -> Options:
    """Return the options in run.json."""
    path = output / RUN
    if not path.exists():
        raise FileNotFoundError(f"{output} holds no run: there is no {RUN}")
    try:
        return Options(**json.loads(path.read_text("utf-8")) | {"output": str(output)})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no options that this version knows: {error}") from error


def _check_model(options: Options, output: Path, checkpoint: Path) -> None:
    """Raise OptionError if run.json, which may be edited, describes another network than ``checkpoint`` has."""
    now = _config(options, load_tokenizer(str(output / TOKENIZER)))
    stored = FlashMHFConfig.from_pretrained(checkpoint)
    for name in NETWORK:
        found, expected = getattr(now, name), getattr(stored, name)
        what = f"{output / RUN} describes a model with {name} = {found}"
        refuse(found != expected, f"{what}; supported: {expected}, as {checkpoint.name} has")


def _warn_of_steps(arguments: TrainingArguments, done: int, before: int, after: int) -> None:
    """Say what another number of steps does to the schedule."""

    def rate(steps: int) -> float:
        return arguments.learning_rate * schedule(arguments, steps).lr_lambdas[0](min(done, steps))

    what = f"the run ends after {after:,} steps instead of {before:,}, and its schedule with it: the learning rate of"
    logger.warning(f"{what} step {done + 1:,} is {rate(after):.3g} instead of {rate(before):.3g}")


@contextmanager
def _locked(output: Path) -> Iterator[bool]:
    """Hold the run's directory, and say whether it is new; the kernel frees it with the process. Raises FileExistsError
    that names the holder."""
    if not first_process():
        yield False
        return
    made = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    with (output / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # EWOULDBLOCK, EAGAIN
            file.seek(0)
            raise FileExistsError(f"{output} is in use by {file.read().strip() or 'another process'}") from None
        except OSError as error:  # Lustre and NFS may be mounted without locks
            logger.warning(f"{output} cannot be locked ({error.strerror}): see to it that one process trains there")
        with suppress(OSError):  # a full disk: the lock holds without its holder's name
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield made


def _refuse_occupied(output: Path, options: Options) -> None:
    """Raise FileExistsError for a directory with a run, or with anything else that a run would overwrite."""
    if (output / RUN).exists():
        raise FileExistsError(f"{output} holds a run already; continue it with resume or choose another output")
    ours = [TOKENIZER, DATA] if options.tokens != options.output else []
    ours += [INIT, metrics.FILE, "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    ours += ["tokenizer_config.json", "generation_config.json"]
    found = [name for name in ours if (output / name).exists()]
    found += [path.name for path in checkpoints.numbered_checkpoints(output)]
    if found:
        hint = f", or train on its tokens with tokens={output}" if found == [TOKENIZER, DATA] else ""
        raise FileExistsError(f"{output} holds {', '.join(found)}, which a run would overwrite; choose another{hint}")


def _release(output: Path, keep_tokens: bool, made: bool) -> None:
    """Take back a start that failed as far as possible, and the directory if the start has ``made`` it. Never raises:
    what failed has a reason of its own."""
    if not (keep_tokens and (output / DATA).exists()):
        for name in (TOKENIZER, TOKENIZER + ".partial", DATA, DATA + ".partial"):
            shutil.rmtree(output / name, ignore_errors=True)
    shutil.rmtree(output / INIT, ignore_errors=True)
    for remove in (*((output / name).unlink for name in (RUN, metrics.FILE, LOCK)), *[output.rmdir] * made):
        with suppress(OSError):  # also a directory that holds something else
            remove()


def _load_trained(options: Options) -> tuple[PreTrainedModel, object]:
    """Return the model to start from in float32, and its tokenizer; set ``options.length`` where it is None."""
    path = Path(options.init_from)
    own = any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    refuse(options.tokenizer and own, f"tokenizer cannot be given with init_from: {path} has a tokenizer")
    settings = {"tokenizer_name": options.tokenizer, "device": "cpu", "dtype": "float32"}
    model, tokenizer = pretrained.load(options.init_from, **settings)
    refuse(is_fp8(model), f"init_from is {path}, a quantised model; supported: a model as it was trained")
    positions = pretrained.positions(model)
    length = options.length = options.length or positions
    refuse(length is None, f"length must be given: the configuration of {path} has no maximum")
    refuse(positions and length > positions, f"length is {length}; the model of init_from has {positions} positions")
    return model, tokenizer


def _train(
    options: Options, arguments: TrainingArguments, bar: bool, callbacks: Iterable, signals: StopSignals,
    checkpoint: Path | None, trained: tuple[PreTrainedModel, object] | None = None,
) -> Result:  # fmt: skip
    """Train from ``checkpoint`` on; ``trained`` is what :func:`_load_trained` returned, if it was called already."""
    output, bar = Path(options.output), bar and first_process()
    with arguments.main_process_first(local=False, desc="preparing data"):
        wanted = [DATA, INIT] if options.init_from else [DATA]
        if not first_process() and not all((output / name).exists() for name in wanted):
            raise TrainingError(f"{output} has no {' and '.join(wanted)}: the first process failed before that")
        if options.init_from and not (output / INIT).exists():
            # A run killed before its first checkpoint needs the model again.
            trained = trained or _load_trained(options)
            data.save_tokenizer(trained[1], output)
            with checkpoints.whole(output / INIT) as partial, checkpoints.writing(partial):
                checkpoints.save_pretrained(partial, *trained)
        if not (output / DATA / data.MANIFEST).exists():
            if checkpoint:
                what = f"{output / DATA} has no {data.MANIFEST}"
                raise DataError(f"{what}: {checkpoint.name} cannot go on with its batches")
            data.prepare(options, bar)
    tokenizer, tokens = load_tokenizer(str(output / TOKENIZER)), data.load(output / DATA)
    set_seed(options.seed)
    model = trained[0] if trained else _first_model(options, tokenizer)
    tokenizer.model_max_length = pretrained.positions(model) or tokenizer.model_max_length
    train_tokens, eval_tokens = data.split(tokens, options.eval_fraction, options.length, tokenizer.eos_token_id)
    flops, peak = metrics.training_flops_per_token(model, options.length), metrics.peak_flops(arguments.device)
    recorder = metrics.MetricsCallback(output, options.batch * options.length, flops, peak)
    arguments.disable_tqdm |= not bar
    trainer = RunTrainer(
        options, checkpoint, signals, model=model, args=arguments,
        train_dataset=data.Blocks(train_tokens, options.length, options.steps * options.batch, options.seed),
        eval_dataset=None if eval_tokens is None else data.Blocks(eval_tokens, options.length),
        processing_class=tokenizer, callbacks=[recorder, *callbacks],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # which the Trainer has where it shows no bar
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    steps = trainer.state.global_step
    if trainer.stopped:
        raise Stopped(signals.received, steps)
    trainer.write_model(output)
    last = {name: value for row in trainer.state.log_history for name, value in row.items()}
    return Result(output, sum(p.numel() for p in model.parameters()), steps, last["loss"], last.get("eval_loss"))


def _config(options: Options, tokenizer) -> FlashMHFConfig:
    config = empty_model(options).config
    config.vocab_size = max(options.vocab_size, token_numbers(tokenizer))
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = None  # an embedding with a padding token trains that row differently
    return config


def _first_model(options: Options, tokenizer) -> PreTrainedModel:
    if options.init_from:
        return loading.load(Path(options.output) / INIT, torch.float32)
    model = AutoModelForCausalLM.from_config(_config(options, tokenizer))
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
