"""All measurements of the efficiency tables in one command, within a time budget.

    $ python benchmarks/run_h200.py --out benchmarks/results/h200 [--budget 270] [--official PATH] [--parts latency training ...]

Writes results.json and results.csv after every cell, so that an interrupted run leaves what it has, then latency.png, memory.png and
roofline.png, and prints the tables.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from flashmhf.bench import cli, paper


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER")
    parser.add_argument("--budget", type=float, default=270, metavar="SECONDS", help="no measurement starts later than this")
    parser.add_argument("--official", type=pathlib.Path, metavar="PATH", help="checkout of the official code")
    parser.add_argument("--parts", nargs="+", choices=cli.PARTS, default=cli.PARTS)
    parser.add_argument("--lengths", type=int, nargs="+", metavar="L")
    parser.add_argument("--subjects", nargs="+", metavar="NAME", help="only these")
    options = parser.parse_args()
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
    print("\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
