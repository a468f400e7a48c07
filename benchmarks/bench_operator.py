"""The operator alone on this machine: forward, backward or both, for one back end or several, at any shapes.

    $ python benchmarks/bench_operator.py --direction forward --out benchmarks/results/forward_h200.json
    $ python benchmarks/bench_operator.py --direction backward --quick
    $ python benchmarks/bench_operator.py --backend triton --shapes 32256,16,128,22,384 12288,16,128,22,384
    $ python benchmarks/bench_operator.py --direction forward --groups 1 2 4 8 --out benchmarks/results/groups_h200.json
    $ python benchmarks/bench_operator.py --backend eager --device cpu --dtypes float32 bfloat16 --shapes 4096,8,128,7,384

Prints a line for each measurement and the table at the end. ``--out FILE.json`` writes the record there after every shape, the table
beside it as FILE.md, and at the end adds the run to runs.csv in the same folder (not for ``--quick``). Exit status 1: something was
wrong or failed. The script is not called operator.py, because Python puts its folder first on the path and torch imports ``operator``.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch

import flashmhf

from .harness import operator, records, subjects, suite

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


def shape(text: str) -> operator.Size:
    try:
        return operator.Size.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    parser.add_argument("--backend", nargs="+", choices=tuple(flashmhf.info().reasons), help="default: the first that is usable here")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), help="default: bfloat16, on a CPU float32")
    parser.add_argument("--shapes", nargs="+", type=shape, default=[], metavar="T,H,d_h,E,d_e", help="default: the paper's")
    parser.add_argument(
        "--groups", nargs="+", type=int, default=[], metavar="G", help="of the forward: so many heads share a head of K, U and V"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no measurement after so many seconds")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    chosen = parser.parse_args(arguments)
    if chosen.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA GPU")
    if any(group < 1 for group in chosen.groups):
        parser.error(f"--groups: positive integers; got {chosen.groups}")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    chosen = options(arguments)
    dtypes = chosen.dtypes or (["bfloat16"] if chosen.device.type == "cuda" else ["float32"])
    settings = subjects.Settings(chosen.device, DTYPES[dtypes[0]])
    backends = chosen.backend or [operator.first_backend(settings)]
    directions = ("forward", "backward") if chosen.direction == "both" else (chosen.direction,)
    deadline = time.monotonic() + chosen.budget if chosen.budget else float("inf")
    context = suite.Context(settings, window_seconds=0.08, deadline=deadline)
    try:
        cases = operator.cases(directions, backends, [DTYPES[name] for name in dtypes], chosen.shapes, chosen.quick, chosen.groups)
    except ValueError as error:
        print(f"bench_operator.py: {error}", file=sys.stderr)
        return 2

    def save(record: dict) -> None:
        if chosen.out:
            suite.write_json(record, chosen.out)
            chosen.out.with_suffix(".md").write_text(operator.report(record))

    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
    record = suite.run(cases, context, save, operator.run_case)
    if chosen.out and not chosen.quick:
        records.append(record, chosen.out)
    print("\n" + operator.report(record))
    return 0 if all(row["status"] == "ok" for row in record["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
