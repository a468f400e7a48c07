"""``python failing_rank.py train …``: the command line, but the process of rank 1 fails, or dies, after the step in $FAIL_AT or $DIE_AT."""

from __future__ import annotations

import os
import signal
import sys

from lm_runs import At

from flashmhf_recipes import training
from flashmhf_recipes.cli import main
from flashmhf_recipes.errors import TrainingError


def die(**_):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(**_):
    raise TrainingError("this process has a fault of its own")


start = training.start
# Amid a step: after the first of its micro-batches. Or at its end.
faults = [At("on_substep_end", int(os.environ.get("DIE_AT", "-1")), die), At("on_step_end", int(os.environ.get("FAIL_AT", "-1")), fail)]
training.start = lambda options: start(options, callbacks=faults if os.environ["RANK"] == "1" else [])
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
