"""The command ``flashmhf`` (= ``python -m flashmhf_recipes``).

Without a sub-command it does the package's job on this machine with the best back end: checks forward and gradients against
float64, compares FlashMHF with SwiGLU and naive MH-FFN at equal parameters, trains a tiny language model with each of two, and
leaves a table on the terminal and ``flashmhf_report.png`` in the current directory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import flashmhf
from flashmhf import backends, extras

from . import lm_cli
from .arguments import positive_integer
from .first_run import report, study, tiny_lm

PICTURE = Path("flashmhf_report.png")
TRAINED = ("SwiGLU", "FlashMHF")
SIZES = ("batch", "d_model", "num_heads", "num_subnets", "subnet_dim", "repeats")
GENERAL = ("text", "steps", "device")  # options before a sub-command


class UsageError(Exception):
    """Something the user can put right; the message says what."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when a check failed, 2 for what the user must put right, 130 after SIGINT, 143 after SIGTERM."""
    options = _parser().parse_args(arguments)
    try:
        _refuse_unused(options)
        return options.run(options)
    except (UsageError, tiny_lm.TextError) as error:
        print(f"flashmhf: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        advice = extras.advice("this command", error.name)
        if advice is None:
            raise
        print(f"flashmhf: {advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("\nflashmhf: interrupted", file=sys.stderr)
        return 128 + getattr(stopped, "signum", signal.SIGINT)


def _parser() -> argparse.ArgumentParser:
    # Suppressed defaults, so that a sub-command does not undo what was said before it.
    device = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    device.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: a CUDA GPU where there is one")
    parser = argparse.ArgumentParser(
        prog="flashmhf",
        description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawTextHelpFormatter,
        parents=[device],
    )
    parser.add_argument("--version", action="version", version=f"flashmhf {flashmhf.__version__}")
    add = parser.add_argument
    add("--text", default=argparse.SUPPRESS, metavar="FILE", help="text to train on (default: the Python standard library's own source)")
    steps_help = "training steps of the language model (default: a fixed short budget)"
    add("--steps", default=argparse.SUPPRESS, type=positive_integer, help=steps_help)
    parser.set_defaults(run=_everything, command=None, takes=GENERAL)

    commands = parser.add_subparsers(title="sub-commands", metavar="{info,check,bench,train,eval,generate,quantize,serve}")
    info = commands.add_parser("info", help="what this machine has: each back end, and why not")
    info.set_defaults(run=_info, command="info", takes=())
    check = commands.add_parser("check", parents=[device], help="errors of forward and gradients against float64")
    check.add_argument("--backend", choices=tuple(backends.BACKENDS), help="default: every usable one")
    check.set_defaults(run=_check, command="check", takes=("device",))
    bench = commands.add_parser("bench", parents=[device], help="time and memory against SwiGLU and naive MH-FFN")
    bench.add_argument("--lengths", type=positive_integer, nargs="+", metavar="L", help="sequence lengths")
    for name in SIZES:
        bench.add_argument(f"--{name.replace('_', '-')}", type=positive_integer, metavar="N")
    bench.set_defaults(run=_bench, command="bench", takes=("device",))
    lm_cli.register(commands)
    return parser


def _refuse_unused(options: argparse.Namespace) -> None:
    """Options before the sub-command that it has no use for."""
    for name in GENERAL:
        if hasattr(options, name) and name not in options.takes:
            raise UsageError(f"--{name} is not an option of flashmhf {options.command}")


def _device(options: argparse.Namespace) -> torch.device:
    wanted = getattr(options, "device", "auto")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA GPU")
    use_gpu = torch.cuda.is_available() if wanted == "auto" else wanted == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


def _headline(setting: study.Setting) -> str:
    sizes = {"d_h": setting.d_model // setting.num_heads, "d_e": setting.subnet_dim}
    usable = (name for name, module in backends.BACKENDS.items() if module.why_not(setting.device, setting.dtype, **sizes) is None)
    gpu = setting.device.type == "cuda"
    machine = torch.cuda.get_device_name(setting.device) if gpu else f"cpu, {torch.get_num_threads()} threads"
    return f"flashmhf {flashmhf.__version__} | {machine} | torch {torch.__version__} | back end {next(usable)}"


@contextlib.contextmanager
def _progress(total: int | None, what: str, unit: str) -> Iterator[Callable[[str], object]]:
    """Gives the function that counts one unit and shows a text beside the bar. Without tqdm (core installation) no bar is drawn."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda shown: None
        return
    interval = 0.1 if sys.stderr.isatty() else 10.0  # a log file gets few lines
    with tqdm(total=total, desc=what, unit=unit, leave=False, dynamic_ncols=True, mininterval=interval, file=sys.stderr) as bar:

        def advance(shown: str) -> None:
            bar.set_postfix_str(shown, refresh=False)
            bar.update()

        yield advance


def _run_check(device: torch.device, backend: str | None = None) -> list[study.Accuracy]:
    accuracies = []
    with _progress(None, "check against float64", "tensor") as advance:
        for accuracy in study.check(device, backend=backend):
            accuracies.append(accuracy)
            advance(f"{accuracy.backend} {str(accuracy.dtype).removeprefix('torch.')}")
    return accuracies


def _run_compare(setting: study.Setting) -> list[study.Measurement]:
    measurements = []
    with _progress(3 * len(setting.lengths), "time and memory", "measurement") as advance:
        for measurement in study.compare(setting):
            measurements.append(measurement)
            advance(f"{measurement.module}, length {measurement.length}")
    return measurements


def _run_training(results: report.Results, text: bytes) -> None:
    results.not_trained = tiny_lm.why_not()
    if results.not_trained:
        return
    with _progress(results.recipe.steps * len(TRAINED), "language model", "step") as advance:

        def show(name: str, step: int, loss: float) -> None:
            advance(f"{name}, loss {loss:.3f}")

        results.trained = tiny_lm.train(text, results.recipe, TRAINED, results.setting.device, show)


def _everything(options: argparse.Namespace) -> int:
    extras.require("the picture", "matplotlib")
    device = _device(options)
    file, steps = getattr(options, "text", None), getattr(options, "steps", None)
    text = tiny_lm.read_text(file)
    if not os.access(PICTURE.parent, os.W_OK) or (PICTURE.exists() and not os.access(PICTURE, os.W_OK)):
        raise UsageError(f"{PICTURE} cannot be written in {Path.cwd()}")
    setting = study.default_setting(device)
    recipe = tiny_lm.GPU_RECIPE if device.type == "cuda" else tiny_lm.CPU_RECIPE
    if steps:
        recipe = dataclasses.replace(recipe, steps=steps)
    name = Path(file).name if file else "Python's standard library"
    results = report.Results(_headline(setting), setting, recipe=recipe, text=name)
    results.accuracies = _run_check(device)
    results.measurements = _run_compare(setting)
    _run_training(results, text)
    report.picture(results, PICTURE)
    print(report.table(results))
    print(f"\npicture: {PICTURE.resolve()}")
    return _verdict(results.accuracies)


def _verdict(accuracies: list[study.Accuracy]) -> int:
    failed = [a for a in accuracies if not a.passed]
    if failed:
        print(f"flashmhf: {len(failed)} of {len(accuracies)} checks against float64 failed", file=sys.stderr)
    return 1 if failed else 0


def _info(options: argparse.Namespace) -> int:
    print(f"flashmhf {flashmhf.__version__}\n{flashmhf.info()}")
    return 0


def _check(options: argparse.Namespace) -> int:
    device = _device(options)
    accuracies = _run_check(device, options.backend)
    if not accuracies:
        reason = backends.BACKENDS[options.backend].why_not(device, torch.float32, d_h=128, d_e=384)
        raise UsageError(f"back end {options.backend} cannot run: {reason}")
    print(report.check_table(accuracies))
    return _verdict(accuracies)


def _bench(options: argparse.Namespace) -> int:
    setting = study.default_setting(_device(options))
    setting = dataclasses.replace(setting, **{name: value for name in SIZES if (value := getattr(options, name))})
    if options.lengths:
        setting = dataclasses.replace(setting, lengths=tuple(options.lengths), seconds=float("inf"))
    if setting.d_model % setting.num_heads:
        raise UsageError(f"--d-model {setting.d_model} is not a multiple of --num-heads {setting.num_heads}")
    results = report.Results(_headline(setting), setting, measurements=_run_compare(setting))
    print(report.table(results))
    return 0
