"""The command ``flashmhf``: torch is imported where it is needed, and an error is one line with status 2."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterable
from pathlib import Path

from .arguments import Parser, add_options, chosen_device, one_path, parsed
from .errors import TrainingError, refuse

STARTED = time.monotonic()  # before torch is imported

DESCRIPTION = """\
Without a command, flashmhf shows within a minute what it does on this machine: it checks output and gradients against
float64, compares time and memory with SwiGLU's and naive MH-FFN's at equal parameters, says what that means, and leaves
flashmhf_report.png in the current directory.

commands (flashmhf COMMAND --help):
"""


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0, 1 for a failed check, 2 for an error, 130, 143 (signals) or 141 (a closed pipe)."""
    # Threads that spin at barriers make every small CPU product wait for the scheduler on a busy machine. OpenMP reads
    # this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler says on stderr when it starts and stops
    os.environ["MPLBACKEND"] = "agg"  # that of a notebook, which its "!" commands inherit, may not be installed here
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed from the start
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # of characters that its encoding lacks
    try:
        status = _status(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return status
    except OSError as error:  # of standard output: a reader that has gone, a full disk
        with contextlib.suppress(OSError, ValueError):  # or Python would try again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE
        print(f"flashmhf: error: standard output: {error.strerror}", file=sys.stderr)
        return 2


def _status(arguments: list[str]) -> int:
    """Run the command and print what it raises."""
    try:
        command, rest = (arguments[0], arguments[1:]) if arguments and arguments[0] in COMMANDS else ("", arguments)
        overview = DESCRIPTION + "\n".join(f"  {name:9} {text.split('.')[0]}" for name, (text, _) in COMMANDS.items())
        description, action = COMMANDS.get(command, (overview, _everything))
        parser = Parser(prog=f"flashmhf {command}".strip(), description=description)
        return action(parser, rest)
    except KeyboardInterrupt as stopped:
        print(f"\nflashmhf: {str(stopped) or 'interrupted'}{getattr(stopped, 'hint', '')}", file=sys.stderr)
        return 128 + getattr(stopped, "signum", signal.SIGINT)
    except ModuleNotFoundError as error:
        message = "torch is not installed: pip install torch" if error.name == "torch" else str(error)
        if error.name not in ("torch", None):  # Python's own names the module
            from flashmhf import extras

            if (message := extras.advice("this command", error.name)) is None:
                raise
    except BrokenPipeError:
        raise
    except Exception as error:
        library, name = type(error).__module__.partition(".")[0], type(error).__name__
        plain = ImportError, ValueError, OSError, NotImplementedError, TrainingError
        message = str(error)
        if not isinstance(error, plain) and name != "OutOfMemoryError":
            if library in ("builtins", "torch", "flashmhf"):
                raise  # a fault of ours, or in a kernel
            message = f"{library}: {name}: {error}"  # as of reports, hubs, data formats and templates
    print(f"flashmhf: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto (a CUDA GPU where there is one), cpu, cuda, cuda:1, …")


# What this machine has and does


def _collected(found: Iterable, what: str) -> list:
    """Return everything in ``found``, which is counted on a bar. Without tqdm (core installation) no bar is drawn."""
    with contextlib.suppress(ModuleNotFoundError):
        from tqdm import tqdm

        found = tqdm(found, what, leave=False, dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 10.0)
    return list(found)


def _everything(parser: Parser, arguments: list[str]) -> int:
    import flashmhf

    from . import first_run

    parser.add_argument("--version", action="version", version=f"flashmhf {flashmhf.__version__}")
    _add_device(parser)
    setting = first_run.setting_of(chosen_device(parser.parse_args(arguments).device))
    accuracies = _collected(first_run.check(setting.device), "check against float64")
    measurements = _collected(first_run.compare(setting), "time and memory")
    picture = Path("flashmhf_report.png")
    drawn = first_run.picture(picture, setting, measurements)
    found = setting, accuracies, measurements
    print(first_run.table(*found), first_run.meaning(*found), sep="\n\n")
    print(f"\n{f'picture: {picture.resolve()}; ' if drawn else ''}this took {time.monotonic() - STARTED:.0f} s")
    if failed := [a for a in accuracies if not a.passed]:
        print(f"flashmhf: error: {len(failed)} of {len(accuracies)} checks against float64 failed", file=sys.stderr)
    return 1 if failed else 0


def _info(parser: Parser, arguments: list[str]) -> int:
    parser.parse_args(arguments)
    import flashmhf

    print(f"flashmhf {flashmhf.__version__}\n{flashmhf.info()}")
    return 0


# Language models

EXAMPLES = """\
presets: FFN-SCALE, with FFN one of {ffns}; flashmhf-SCALE-dh64 and flashmhf-SCALE-dh256 of the paper's
scales ({scales}) with other head dimensions. SCALE alone is flashmhf-SCALE. docs/training.md has their settings.

The paper's settings are the defaults but for two of ours (docs/quality.md): the initialisation and, with AdamW, the
learning rate of FlashMHF's projections. --model-set ffn_init=official --no-param-groups restores the paper's.

examples:
  flashmhf train --output run --preset flashmhf-128m --data corpus/ --eval-fraction 0.01 --compile
  flashmhf train --output run --resume                      # after SIGTERM, Ctrl-C or a crash
  flashmhf train --output run --resume --steps 300000       # longer; the schedule then ends there
  flashmhf train --output tuned --init-from run --data other/ --steps 1000 --learning-rate 1e-4
  flashmhf train --output second --preset swiglu-128m --tokens run --set report_to=wandb
  torchrun --nproc_per_node 8 -m flashmhf_recipes train --output run --preset flashmhf-1.3b --data corpus/ --dp-shard 4

exit status: 0; 2 for an error; 130 after SIGINT and 143 after SIGTERM, with the step finished and saved (a second
signal ends at once).
"""


def _train(parser: Parser, arguments: list[str]) -> int:
    from transformers.utils import logging

    from flashmhf.models import FFN_TYPES
    from flashmhf.models.presets import SCALES

    from . import training
    from .settings import setting_types

    parser.epilog = EXAMPLES.format(ffns=", ".join(FFN_TYPES), scales=", ".join(SCALES))
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run; takes --steps, --tp and --dp-shard")
    add_options(parser, training.Options, typing.get_type_hints(training.Options))
    given = vars(parser.parse_args(arguments))
    output, resumed = given.pop("output"), given.pop("resume")
    logging.disable_progress_bar()
    try:
        if resumed:
            extra = ", ".join(sorted(given.keys() - {"steps", "tp", "dp_shard"}))
            refuse(extra, f"--resume takes steps, tp and dp_shard alone; leave out: {extra}")
            result = training.resume(output, **given)
        else:
            for name, kinds in (("model", {}), ("arguments", setting_types())):
                if name in given:
                    given[name] = {key: parsed(text, kinds.get(key, typing.Any)) for key, text in given[name]}
            result = training.start(training.Options(output, **given))
    except KeyboardInterrupt as stopped:
        if (Path(one_path(output)) / training.RUN).exists():
            stopped.hint = f"; continue with: flashmhf train --resume --output {shlex.quote(output)}"
        raise
    held_out = "" if result.eval_loss is None else f", held out {result.eval_loss:.4f}"
    if training.first_process():
        print(f"{result.steps} steps, loss {result.loss:.4f}{held_out} (nats a token); the model is in {result.output}")
    return 0


def _add_model(parser: Parser, dtypes: tuple[str, ...] = ("auto", "bfloat16", "float16", "float32")) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="training run, checkpoint, saved or official model, or a name")
    add("--tokenizer", metavar="PATH", help="where the model's directory has none")
    _add_device(parser)
    add("--dtype", default=dtypes[0], choices=dtypes, help=f"of what is not quantised ({dtypes[0]})")
    if "auto" in dtypes:
        add("--fp8", action="store_true", help="FlashMHF networks in FP8; flashmhf quantize writes them so")


def _load(args: dict):
    """Take what :func:`_add_model` added out of ``args``, and return model and tokenizer."""
    from . import pretrained

    settings = {name: args.pop(name) for name in ("device", "dtype", "fp8")}
    return pretrained.load(args.pop("model"), tokenizer_name=args.pop("tokenizer"), **settings)


def _eval(parser: Parser, arguments: list[str]) -> int:
    from . import evaluation

    _add_model(parser)
    add = parser.add_argument
    add("--data", nargs="+", required=True, metavar="PATH", help="held-out text, JSON-lines, Parquet; or directories")
    add("--text-field", default="text")
    add("--window", type=int, help="tokens of a window (the model's positions)")
    add("--stride", type=int, help="tokens it advances by (half a window)")
    add("--batch", type=int, default=4, help="windows at once (4)")
    args = vars(parser.parse_args(arguments))
    found = evaluation.held_out_loss(*_load(args), args.pop("data"), bar=sys.stderr.isatty(), **args)
    print(f"{found.documents:,} documents, {found.tokens:,} tokens{found.left_out}")
    print(f"loss {found.loss:.4f} nats/token, perplexity {found.perplexity:.3f}, {found.bits_per_byte:.4f} bits/byte")
    return 0


def _generate(parser: Parser, arguments: list[str]) -> int:
    from flashmhf.models import generation

    _add_model(parser)
    add = parser.add_argument
    add("prompt", nargs="?", default="", help="'-' reads it from standard input")
    add("--max-new-tokens", type=int, default=100)
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    add("--top-p", type=float, default=0.95)
    add("--seed", type=int)
    args = vars(parser.parse_args(arguments))
    prompt = args.pop("prompt")
    refuse(prompt == "-" and sys.stdin is None, "prompt is '-', and standard input is closed")
    model, tokenizer = _load(args)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    generation.generate(model, tokenizer, prompt, streamer=generation.Printer(tokenizer, prompt), **args)
    return 0


def _quantize(parser: Parser, arguments: list[str]) -> int:
    from . import pretrained

    _add_model(parser, ("bfloat16", "float16", "float32"))
    parser.add_argument("--output", required=True, metavar="DIR", type=os.path.expanduser, help="the new directory")
    args = parser.parse_args(arguments)
    output = Path(args.output)
    pretrained.save_fp8(args.model, output, tokenizer_name=args.tokenizer, device=args.device, dtype=args.dtype)
    size = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    print(f"{output}: {size / 1e6:,.1f} MB of weights")
    return 0


COMMANDS: dict[str, tuple[str, Callable[[Parser, list[str]], int]]] = {
    "info": ("List the back ends and say why any of them cannot be used.", _info),
    "train": ("Train a language model. transformers' Trainer runs it under the paper's settings.", _train),
    "eval": ("Measure the held-out loss of a model on local text. lm-eval has tasks, and loads it by itself.", _eval),
    "generate": ("Continue a prompt with a trained model.", _generate),
    "quantize": ("Write a model with its FlashMHF networks in FP8. eval and generate load it.", _quantize),
}
