"""``python failing_rank.py train …``: the command line, but the process of rank 1 fails, or dies, after the step in $FAIL_AT or $DIE_AT."""

from __future__ import annotations

import os
import signal
import sys

from transformers import TrainerCallback

from flashmhf_recipes import training
from flashmhf_recipes.cli import main
from flashmhf_recipes.errors import TrainingError


class Fail(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        """Amid a step: after the first of its micro-batches."""
        if os.environ["RANK"] == "1" and state.global_step == int(os.environ.get("DIE_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "1" and state.global_step == int(os.environ.get("FAIL_AT", "-1")):
            raise TrainingError("this process has a fault of its own")


start = training.start
training.start = lambda options: start(options, callbacks=[Fail()])
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
