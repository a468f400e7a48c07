"""Trains the networks of a queue one after another on token files.

$ python experiments/compare.py QUEUE --tokens DIR --out RUNS [--minutes 8.5]

A queue is a JSON file: {"defaults": settings, "runs": [settings, ...]}, settings being the fields of Run. A call takes
the first run that nobody holds (by a file lock) or has finished, several at once one each. A finished run is a line of
RUNS/runs.jsonl, which names its commit. A run that is stopped goes on from RUNS/NAME.state in the next call, with the
same losses. Networks of one size have equal parameters beside the embedding (1 %) and see equal batches. Model,
batches and steps (model.py, tokens.py, training.py) are not the recipe's: they repeat the published runs, loss by loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import math
import platform
import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from runs import Run, finished_runs, read_queue, write_lines
from tokens import Tokens
from training import TimeUpError, train

import flashmhf


def record(run: Run, result: dict[str, object], device: str, commit: str, tokens: Tokens) -> dict[str, object]:
    """The line of a run: configuration, versions, mean loss and norm of every ``every`` steps, evaluations, result."""
    every = max(10, run.steps // 100)
    means = {
        name: [round(float(np.mean(result[name][begin : begin + every])), 4) for begin in range(0, run.steps, every)]
        for name in ("losses", "norms")
    }
    packages = {"flashmhf": flashmhf.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "run": run.name, "configuration": dataclasses.asdict(run), "commit": commit,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": packages | {"python": platform.python_version()}, "corpus": tokens.described(), "every": every,
        **result, **means,
    }  # fmt: skip


@contextmanager
def lock(path: Path, wait: bool) -> Iterator[bool]:
    """Whether the file's lock is held. It ends with the process that holds it, however that ends."""
    with path.open("a", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def current_commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    deadline = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of this call")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default=current_commit())
    options = parser.parse_args(arguments)
    deadline += 60 * options.minutes
    device, tokens, failed = options.device, Tokens(options.tokens, options.device), 0
    # a graph for each kind of network
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    torch.set_float32_matmul_precision("high")
    locks, results = options.out / "locks", options.out / "runs.jsonl"
    locks.mkdir(parents=True, exist_ok=True)
    for run in read_queue(options.queue):
        with lock(locks / run.name, wait=False) as held:
            if not held or run.name in finished_runs([results]):
                continue
            state = options.out / f"{run.name}.state"
            try:
                if time.monotonic() > deadline:
                    raise TimeUpError
                result = train(run, tokens, device, state, deadline, compiled=device == "cuda")
            except TimeUpError:
                break
            except Exception:
                failed = 1
                print(f"{run.name}: failed\n{traceback.format_exc()}", flush=True)
                continue
            with lock(locks / ".runs", wait=True):
                write_lines(results, [record(run, result, device, options.commit, tokens)])
            state.unlink(missing_ok=True)
            print(f"{run.name}: validation loss {result['validation_loss']}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
