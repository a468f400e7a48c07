"""Kills training runs at random times and resumes them: weights and metrics must be those of an uninterrupted run, bit by bit.

    python tests/recipes/kill_runs.py 20 KILL TERM INT    # 20 runs for each signal

Every trial is a process forked from this one, so that the libraries are imported once. A trial is signalled once at a random time of
its start, and once more, half of the time, of its first resumption; the next resumption ends the run.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from lm_runs import HELD_OUT, options, same_run, write_text

from flashmhf_recipes import training


def forked(output: Path, text: Path) -> int:
    """The process identifier of a process that starts the run in ``output``, or resumes it."""
    if process := os.fork():
        return process
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if (output / training.RUN).exists():
            training.resume(output, bar=False)
        else:
            training.start(options(output, text, arguments={"report_to": []}, **HELD_OUT), bar=False)
        os._exit(0)
    finally:
        os._exit(1)


def trial(output: Path, text: Path, number: int, seconds: float) -> None:
    for signalled in (True, random.random() < 0.5, False):
        process = forked(output, text)
        if signalled:
            time.sleep(random.uniform(0, seconds))
            os.kill(process, number)
        if not os.waitpid(process, 0)[1]:
            return
    raise SystemExit(f"the run in {output} did not end")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        text, expected = write_text(Path(folder) / "text.txt"), Path(folder) / "expected"
        begin = time.monotonic()
        os.waitpid(forked(expected, text), 0)
        seconds = time.monotonic() - begin
        for name in sys.argv[2:]:
            for repeat in range(int(sys.argv[1])):
                output = Path(folder) / f"{name}-{repeat}"
                trial(output, text, signal.Signals[f"SIG{name}"], seconds)
                same_run(output, expected)
            print(f"SIG{name}: {sys.argv[1]} runs ended as the uninterrupted one of {seconds:.1f} s")
