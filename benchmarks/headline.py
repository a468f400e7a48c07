"""Writes README's headline table from the committed results, or with --check says whether the two agree.

$ python benchmarks/headline.py [--check] [--results benchmarks/results/h200/results.json] [--readme README.md]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from flashmhf.bench import paper

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "results.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when they disagree")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--readme", type=pathlib.Path, default=ROOT / "README.md")
    options = parser.parse_args(arguments)
    text = options.readme.read_text()
    wanted = paper.with_headline(text, json.loads(options.results.read_text()))
    if options.check:
        if text != wanted:
            print(f"{options.readme.name} disagrees with {options.results.name}: run python benchmarks/headline.py", file=sys.stderr)
        return int(text != wanted)
    options.readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
