"""Kills training runs at random times and resumes them: weights and metrics must be those of an uninterrupted run, bit by bit.

    python tests/recipes/kill_runs.py --repeats 20 [--signals KILL TERM INT] [--seed 0]

Every trial is a process forked from this one, so that the libraries are imported once. A trial is signalled once at a random time of
its start, and once more, half of the time, of its first resumption; the next resumption ends the run.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lm_runs import options, same_run, write_text

from flashmhf_recipes import checkpoints, training


def train(output: Path, text: Path) -> None:
    """Starts the run in ``output``, or resumes it."""
    if (output / training.RUN).exists():
        training.resume(output, bar=False)
    else:
        training.start(options(output, text, eval_fraction=0.1, eval_every=7, arguments={"report_to": []}), bar=False)


def forked(output: Path, text: Path) -> int:
    """The process identifier of a training process; its exit status is that of the command line."""
    process = os.fork()
    if process:
        return process
    status = 2
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        train(output, text)
        status = 0
    except training.Stopped as stopped:
        status = 128 + stopped.signum
    finally:
        os._exit(status)


def trial(output: Path, text: Path, number: int, seconds: float, chance: random.Random) -> list[str]:
    """How the processes of one run ended, the last of them with the run."""
    ends = []
    signals = [True, chance.random() < 0.5, False]
    for signalled in signals:
        process = forked(output, text)
        if signalled:
            time.sleep(chance.uniform(0, seconds))
            os.kill(process, number)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        ends.append(f"{status} at checkpoint {checkpoints.step_of((checkpoints.complete_checkpoints(output) or [None])[-1])}")
        if status == 0:
            return ends
    raise SystemExit(f"the run in {output} did not end: {ends}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--signals", nargs="+", default=["KILL", "TERM", "INT"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder) / "text.txt")
        begin = time.monotonic()
        os.waitpid(forked(Path(folder) / "expected", text), 0)
        seconds = time.monotonic() - begin
        for name in args.signals:
            ends = Counter()
            for repeat in range(args.repeats):
                output = Path(folder) / f"{name}-{repeat}"
                found = trial(output, text, signal.Signals[f"SIG{name}"], seconds, chance)
                same_run(output, Path(folder) / "expected")
                ends.update(found[:-1])
            print(f"SIG{name}: {args.repeats} runs ended as the uninterrupted one of {seconds:.1f} s; their ends before: {dict(ends)}")


if __name__ == "__main__":
    main()
