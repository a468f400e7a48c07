"""``flashmhf bench --paper``: its options and the run. Importing this module imports argparse only."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time

PARTS = ("latency", "training", "decode", "kernel", "models")
PAPER_OPTIONS = ("parts", "subjects", "official", "budget", "out")  # those that only --paper has


def register(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the ``bench`` sub-command."""
    group = parser.add_argument_group("the paper's efficiency tables (a CUDA GPU, bf16)")
    group.add_argument("--paper", action="store_true", help="measure them here, beside the paper's H100 figures, against every baseline")
    group.add_argument("--parts", nargs="+", choices=PARTS, help="default: latency and training; --paper with all parts takes minutes")
    group.add_argument("--subjects", nargs="+", metavar="NAME", help="only these, of those that the parts have")
    group.add_argument("--official", type=pathlib.Path, metavar="PATH", help="checkout of the official code to measure as well")
    group.add_argument("--budget", type=float, metavar="SECONDS", help="start no measurement after so many seconds")
    group.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="write results.json, results.csv and the figures there")


def plan(parts: tuple[str, ...], ours: str, lengths: list[int] | None, only: list[str] | None = None) -> list:
    """The cells of the parts, in the order of the full plan, with ``only`` these subjects. Raises ValueError for unknown ones."""
    from . import shapes, subjects, suite

    if unknown := set(only or ()) - subjects.SUBJECTS.keys():
        raise ValueError(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(subjects.SUBJECTS)}")

    lengths = tuple(lengths or shapes.LENGTHS)
    cells = {
        "latency": lambda: suite.latency_cells(ours, lengths),
        "training": lambda: suite.training_cells(ours),
        "decode": lambda: suite.decode_cells(ours),
        "kernel": lambda: suite.kernel_cells(ours, lengths),
        "models": lambda: suite.model_cells(ours),
    }
    chosen = [cell for name, make in cells.items() if name in parts for cell in make()]
    if only:
        chosen = [dataclasses.replace(cell, subjects=tuple(name for name in cell.subjects if name in only)) for cell in chosen]
    return [cell for cell in chosen if cell.subjects]


def measure(
    out: pathlib.Path | None,
    *,
    device="cuda",
    parts: tuple[str, ...] = PARTS,
    lengths: list[int] | None = None,
    only: list[str] | None = None,
    official: pathlib.Path | None = None,
    budget: float | None = None,
) -> dict:
    """Runs the parts and returns the record. Writes the record into ``out`` after every cell, and the figures at the end."""
    import torch

    from . import plots, shapes, subjects, suite

    start = time.monotonic()
    settings = subjects.Settings(torch.device(device), torch.bfloat16, official)
    context = suite.Context(settings, deadline=start + budget if budget else float("inf"))

    def save(record: dict) -> None:
        if out is not None:
            suite.write_json(record, out / "results.json")
            suite.write_csv(record, out / "results.csv")

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    record = suite.run(plan(parts, suite.ours_for(shapes.SHAPES["paper"], settings), lengths, only), context, save)
    if out is not None:
        plots.draw(record, out)
    return record


def run(options: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a FlashMHF subject was wrong or failed."""
    from . import paper

    parts = tuple(options.parts or ("latency", "training"))
    record = measure(
        options.out, parts=parts, lengths=options.lengths, only=options.subjects, official=options.official, budget=options.budget
    )
    print("\n" + paper.report(record))
    broken = [r for r in record["rows"] if r["subject"].startswith(("flashmhf_", "kernel_")) and r["status"] in ("wrong", "failed")]
    return 1 if broken else 0
