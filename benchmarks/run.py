"""Measures a suite on this machine and writes one record.

    $ python -m benchmarks.run --suite operator --parts forward --out benchmarks/results/forward
    $ python -m benchmarks.run --suite layer --official PATH --out benchmarks/results/layer
    $ python -m benchmarks.run --suite host --base ../before
    $ python -m benchmarks.run --suite operator --help        # the options of that suite

``--out benchmarks/results/forward`` writes forward_h100.json on an H100 and forward_h100.md, the same as tables, after
every cell, so that an interrupted run leaves what it has. All records have one shape: ``environment`` (command, commit,
date, device, versions),
``suite``, ``settings``, ``before`` and ``after`` (matrix product, copy, clocks) and ``rows``. A row first says which
problem it is, then
``subject``, ``status``, and ``ms`` with the 20, 50 and 80 percentiles.

``--base`` measures another build in the same run, cell by cell in turn with this one: a folder with a source tree and
its built library (``flashmhf/libflashmhf_hopper.so``). Both are measured by this checkout's benchmarks. Rows then have
``build`` and ``turn``.

Exit status 1: a subject was wrong or failed; 2: the suite cannot run here.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
SUITES = {  # name -> module of benchmarks.suites, its parts
    "operator": ("operator", ("forward", "backward")), "layer": ("layer", ("latency", "training", "decode")),
    "decode": ("layer", ("decode",)), "fp8": ("fp8", ("operator", "decode", "networks")),
    "serving": ("inference", ("serving",)), "host": ("inference", ("host",)),
    "triton": ("triton", ("operator", "few", "networks", "host")),
    "timeline": ("timeline", ("training",)),
    "model": ("models", ("prefill",)), "generate": ("models", ("generate",)), "train": ("models", ("train",)),
}  # fmt: skip
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


def parse(arguments: list[str]) -> tuple[argparse.Namespace, object]:
    """The options and the suite's module."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--suite", choices=SUITES)
    known, _ = first.parse_known_args(arguments)
    shown = {"formatter_class": argparse.RawDescriptionHelpFormatter, "prog": "benchmarks.run"}
    parser = argparse.ArgumentParser(description=__doc__, **shown)
    add = parser.add_argument
    add("--suite", choices=SUITES, required=True)
    add("--out", type=pathlib.Path, metavar="PREFIX", help="write PREFIX_DEVICE.json and PREFIX_DEVICE.md")
    add("--as", dest="architecture", metavar="sm80", help="Triton's code for another GPU, on this one")
    add("--base", type=pathlib.Path, metavar="FOLDER", help="another build to measure in turn with this one")
    add("--turns", type=int, default=2, help="with --base: how often each cell is measured (2)")
    add("--apart", type=float, metavar="SECONDS", help="each cell in a process of its own, ended after them")
    add("--memory", type=float, metavar="GIB", help="use no more of a GPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--budget", type=float, metavar="SECONDS", default=float("inf"), help="begin nothing after them")
    add("--rounds", type=int, default=5, help="windows of each subject (5)")
    add("--window", type=float, default=0.04, metavar="SECONDS", help="length of a window (0.04)")
    suite = None
    if known.suite:
        name, parts = SUITES[known.suite]
        add("--parts", nargs="+", choices=parts, default=parts)
        suite = importlib.import_module(f".suites.{name}", __package__)
        suite.add_options(parser)
    options = parser.parse_args(arguments)
    if options.base and not (options.base / "flashmhf").is_dir():
        parser.error(f"--base is {options.base}; it must be a folder with a source tree, its library built")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    try:
        options.device = torch.device(options.device)
        if options.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: this PyTorch sees no CUDA GPU")
        if options.architecture:
            from .harness import proxy

            if options.device.type != "cuda":
                raise ValueError(f"--as {options.architecture} needs a CUDA GPU, and device is {options.device}")
            proxy.pretend(options.architecture)
    except (ValueError, RuntimeError) as error:  # RuntimeError: of torch.device
        parser.error(str(error))
    return options, suite


def make_context(options: argparse.Namespace):
    from .harness.measure import Context

    if options.memory:
        with torch.cuda.device(options.device):
            whole = torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * 2**30 / whole))
    return Context(
        options.device, DTYPES[options.dtype], rounds=options.rounds, window_seconds=options.window,
        deadline=time.monotonic() + options.budget, log=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip


def new_record(options: argparse.Namespace) -> dict:
    from .harness.environment import describe

    names = ("dtype", "rounds", "window", "parts", "memory", "architecture")
    settings = {name: getattr(options, name) for name in names}
    return {"suite": options.suite, "environment": describe(options.device), "settings": settings, "rows": []}


def measure(options: argparse.Namespace, arguments: list[str], suite, save: Callable[[dict], None]) -> dict:
    """The record of this build."""
    from .harness import measure as harness

    context, record, start = make_context(options), new_record(options), time.monotonic()
    cells = suite.cells(options, context)
    record["before"] = {} if options.apart else harness.yardstick(context)
    for index, cell in enumerate(cells):
        rows = apart(index, cell, options, arguments, context) if options.apart else cell.measure(context)
        record["rows"] += rows
        record["seconds"] = round(time.monotonic() - start, 1)
        for row in rows:
            context.log(line(row))
        save(record)
    harness.clear(context.device)
    record["after"] = {} if options.apart else harness.yardstick(context)
    save(record)
    return record


# Other processes


class Worker:
    """A process that measures cells with the library of ``tree`` and this checkout's benchmarks."""

    def __init__(self, tree: pathlib.Path, arguments: list[str]):
        code = (
            f"import sys, benchmarks; sys.path.insert(0, {str(tree)!r}); import flashmhf; "
            f"assert flashmhf.__file__.startswith({str(tree)!r}); from benchmarks import run; run.serve({arguments!r})"
        )
        # The tree's commit is asked of git; where there is none, it stays unknown.
        variables = {name: value for name, value in os.environ.items() if name != "FLASHMHF_COMMIT" or tree == ROOT}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=variables, **pipes)

    def answer(self) -> dict:
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"the process that measures ended with status {self.process.wait()}")
        return json.loads(text)

    def rows(self, index: int) -> list[dict]:
        print(index, file=self.process.stdin, flush=True)
        return self.answer()["rows"]

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def apart(index: int, cell, options: argparse.Namespace, arguments: list[str], context) -> list[dict]:
    """The rows of a cell, measured by a process that has the GPU's memory for itself."""
    row = {**cell.row, "subject": cell.row.get("subject", "all")}
    if time.monotonic() > context.deadline:
        return [row | {"status": "skipped", "reason": "the time budget was used up"}]
    worker = Worker(ROOT, arguments)
    limit = threading.Timer(options.apart, worker.process.kill)
    limit.start()
    try:
        worker.answer()
        return worker.rows(index)
    except (RuntimeError, OSError) as error:
        late = f"not finished within --apart {options.apart:g}" if limit.finished.is_set() else str(error)
        return [row | {"status": "failed", "reason": late}]
    finally:
        limit.cancel()
        worker.end()


def serve(arguments: list[str]) -> None:
    """Answer on standard output, a JSON object a line: what is measured, then the rows of each cell asked for."""
    from .harness import environment

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    options, suite = parse(arguments)
    context = make_context(options)
    cells = suite.cells(options, context)
    said = functools.partial(print, file=answers, flush=True)
    said(json.dumps({"environment": environment.describe(options.device), "cells": len(cells)}))
    for index in sys.stdin:
        said(json.dumps({"rows": cells[int(index)].measure(context)}))


def compare(options: argparse.Namespace, arguments: list[str], save: Callable[[dict], None]) -> dict:
    """The record of this build and of ``options.base``, whose cells take turns."""
    from .harness import measure as harness

    context, record, start = make_context(options), new_record(options), time.monotonic()
    record["before"] = harness.yardstick(context)
    harness.clear(context.device)
    workers = {"base": Worker(options.base.resolve(), arguments), "this": Worker(ROOT, arguments)}
    said = {build: worker.answer() for build, worker in workers.items()}
    record["builds"] = {build: answer["environment"] for build, answer in said.items()}
    for index in range(said["this"]["cells"]):
        for turn in range(options.turns):
            for build, worker in workers.items():
                record["rows"] += [{**row, "build": build, "turn": turn} for row in worker.rows(index)]
        record["seconds"] = round(time.monotonic() - start, 1)
        save(record)
    for worker in workers.values():
        worker.end()
    record["after"] = harness.yardstick(context)
    save(record)
    return record


# Words


def identity(row: dict) -> dict:
    """The fields that say which problem a row is: those before its subject."""
    names = list(row)
    return {name: row[name] for name in names[: names.index("subject")]}


def line(row: dict) -> str:
    head = " ".join(f"{name}={value}" for name, value in identity(row).items())
    if row["status"] != "ok":
        return f"{head} {row['subject']}: {row['status']}: {row['reason']}"
    figures = [f"{name} {value:.4g}" for name, value in measured(row).items()]
    return f"{head} {row['subject']}: {', '.join(figures)}"


def measured(row: dict) -> dict[str, float]:
    """A row's figures by the heading of their column."""
    found = {}
    if "ms" in row:
        found["ms"] = row["ms"]["p50"]
        if "p80" in row["ms"]:
            found["± %"] = 50 * (row["ms"]["p80"] - row["ms"]["p20"]) / row["ms"]["p50"]
    for name in ("gpu_ms", "tflops", "gb_per_s", "tokens_per_s", "mfu", "error", "host_ms"):
        if row.get(name) is not None:
            found[name] = row[name]
    memory = row.get("memory_mib")
    if memory is not None:
        found["MiB"] = memory["beyond"] if isinstance(memory, dict) else memory
    return found | {"÷ " + name[2:]: value for name, value in row.items() if name.startswith("x_")}


def report(record: dict) -> str:
    """The rows as one table for each set of identifying fields."""
    from .harness.markdown import table

    groups: dict[tuple, list[dict]] = {}
    for row in record["rows"]:
        groups.setdefault(tuple(identity(row)), []).append(row)
    parts = []
    for names, rows in groups.items():
        headings = list(dict.fromkeys(name for row in rows for name in measured(row)))
        lines = []
        for row in rows:
            figures = [f"{measured(row)[name]:.4g}" if name in measured(row) else "" for name in headings]
            note = "" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
            lines.append([*map(str, identity(row).values()), row["subject"], *figures, note])
        parts.append(table([*names, "subject", *headings, "note"], lines))
    return "\n\n".join(parts)


def differences(record: dict) -> str:
    """This build's medians over the turns beside the base's."""
    from .harness.markdown import table

    found: dict[tuple, dict[str, list]] = {}
    for row in record["rows"]:
        key = (*(f"{name} {value}" for name, value in identity(row).items()), row["subject"])
        value = row["ms"]["p50"] if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
        found.setdefault(key, {"base": [], "this": []})[row["build"]].append(value)
    lines = []
    for key, builds in found.items():
        what = [", ".join(key[:-1]), key[-1]]
        timed = all(isinstance(value, float) for values in builds.values() for value in values)
        if timed and builds["base"] and builds["this"]:
            base, this = (statistics.median(builds[build]) for build in ("base", "this"))
            lines.append([*what, f"{base:.5f}", f"{this:.5f}", f"{this / base:.4f}"])
        else:
            base, this = ("; ".join(dict.fromkeys(map(str, builds[build]))) for build in ("base", "this"))
            lines.append([*what, base, this, ""])
    builds = [
        f"{build}: commit {where['commit']}, "
        + ", ".join(f"{name} {reason}" for name, reason in where["back_ends"].items())
        for build, where in record["builds"].items()
    ]
    return "\n\n".join([*builds, table(["problem", "subject", "base", "this", "this ÷ base"], lines)])


def rounded(value):
    """Six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options, suite = parse(arguments)
    written = {}

    def save(record: dict) -> None:
        if options.out:
            from .harness.environment import short_device

            prefix = str(options.out.with_suffix("")) + "_" + short_device(record["environment"]["device"])
            written.update(json=pathlib.Path(prefix + ".json"), md=pathlib.Path(prefix + ".md"))
            written["json"].parent.mkdir(parents=True, exist_ok=True)
            written["json"].write_text(json.dumps(rounded(record), indent=1) + "\n")

    if options.base:
        record = compare(options, arguments, save)
        text = differences(record)
    else:
        from .harness.measure import MissingError

        try:
            record = measure(options, arguments, suite, save)
        except MissingError as error:  # of the suite as a whole
            print(f"benchmarks.run: error: {error}", file=sys.stderr)
            return 2
        text = getattr(suite, "report", report)(record)
    from .harness.markdown import conditions

    text = f"{conditions(record)}\n\n{text}\n"
    if options.out:
        written["md"].write_text(text)
    print(text)
    return 1 if any(row["status"] in ("wrong", "failed") for row in record["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
