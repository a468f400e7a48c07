"""Whole modules: the paper's efficiency tables, decode, the operator and the models, within a time budget.

    $ python benchmarks/run_h200.py --out benchmarks/results/h200 [--budget 270] [--official PATH] [--parts latency training ...]
    $ python benchmarks/run_h200.py --out FOLDER --quick

Writes results.json and results.csv after every cell, so that an interrupted run leaves what it has, then latency.png, memory.png,
roofline.png and tables.md, and prints the tables. Adds the run to runs.csv beside FOLDER (not with ``--quick``, ``--subjects`` or
``--lengths``).
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch

from .harness import cli, paper, records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER")
    parser.add_argument("--budget", type=float, default=270, metavar="SECONDS", help="no measurement starts later than this")
    parser.add_argument("--official", type=pathlib.Path, metavar="PATH", help="checkout of the official code")
    parser.add_argument("--parts", nargs="+", choices=cli.PARTS, default=cli.PARTS)
    parser.add_argument("--lengths", type=int, nargs="+", metavar="L")
    parser.add_argument("--subjects", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--quick", action="store_true", help="latency at L = 384 and 4032, and training")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this PyTorch sees no CUDA GPU")
    if options.quick:
        options.parts, options.lengths = ("latency", "training"), options.lengths or [384, 4032]
    record = cli.measure(
        options.out,
        parts=tuple(options.parts),
        lengths=options.lengths,
        only=options.subjects,
        official=options.official,
        budget=options.budget,
    )
    text = paper.report(record)
    (options.out / "tables.md").write_text(text + "\n")
    if not (options.quick or options.subjects or options.lengths):
        records.append(record, options.out, f"{options.out.name}/results.json")
    print("\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
