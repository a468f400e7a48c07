"""Writes the tables of benchmarks/README.md and docs/ from the records in benchmarks/results.

    $ python -m benchmarks.write_readme            # after a record has changed
    $ python -m benchmarks.write_readme --check    # changes nothing; exit status 1 when a file disagrees

A table stands between the markers ``<!-- NAME: begin (benchmarks/write_readme.py) -->`` and ``<!-- NAME: end -->``. It
is made from the record of the first device of DEVICES that has one. Sentences are written by hand; one that quotes a
table or a record names it in a comment before it, and a test looks for its figures there (tests/repository).
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable

from .harness.markdown import with_block
from .records import Records
from .tables import decision, fp8, kernels, layers, models, several_gpus

ROOT = pathlib.Path(__file__).resolve().parent.parent
WRITER = "benchmarks/write_readme.py"
BLOCKS: dict[str, dict[str, Callable[[Records], str]]] = {
    "benchmarks/README.md": {
        "implementations": layers.implementations,
        "module": several_gpus.module,
        "operator": kernels.sixteen_bits,
        "triton": kernels.triton,
        "triton layers": layers.triton,
        "fp8": fp8.kernels,
        "generate fp8": fp8.generation,
    },
    "docs/measurements.md": {
        "decide": decision.decision,
        "training": models.training,
        "depth": models.training_depth,
        "decode": layers.decode,
        "paper": layers.beside_the_paper,
        "models": models.prefill,
        "7b": models.prefill_7b,
        "contexts": models.contexts,
    },
    "docs/api.md": {"deterministic": kernels.deterministic},
    "docs/fp8.md": {"networks": fp8.networks},
    "docs/serving.md": {"generate": models.generation, "vllm": models.vllm},
    "docs/scaling.md": {"7b": several_gpus.large, "memory": several_gpus.memory, "training": several_gpus.training},
}


def renew(root: pathlib.Path, documents: dict[str, dict[str, Callable]], source, writer: str, check: bool) -> list[str]:
    """Write the blocks of documents, path -> name -> function of ``source``; return the paths of those that disagreed.
    With ``check``, nothing is written."""
    stale = []
    for name, blocks in documents.items():
        path = root / name
        text = wanted = path.read_text(encoding="utf-8")
        for block, write in blocks.items():
            wanted = with_block(wanted, block, write(source), writer)
        if text != wanted:
            stale.append(name)
            if not check:
                path.write_text(wanted, encoding="utf-8")
    return stale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when a file disagrees")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository (default: this script's)")
    options = parser.parse_args(arguments)
    stale = renew(options.root, BLOCKS, Records(options.root), WRITER, options.check)
    for name in stale if options.check else ():
        print(f"{name} disagrees with benchmarks/results: run python -m benchmarks.write_readme", file=sys.stderr)
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
