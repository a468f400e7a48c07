"""metrics.jsonl: one JSON object a line, in the order of training.

Keys: step, loss (nats a token), learning_rate, grad_norm, tokens (so far), tokens_per_second, mfu (where the GPU's peak
is known), peak_memory_bytes (CUDA), eval_loss (nats a token).
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .checkpoints import write_whole
from .errors import ADVICE, TrainingError

FILE = "metrics.jsonl"


def read_rows(output: Path) -> list[dict]:
    """Return the rows of a run's metrics.jsonl; a last line torn by a kill is left out."""
    rows = []
    path = output / FILE
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def keep_rows(output: Path, step: int) -> None:
    """Drop the rows after ``step``, which a resumed run records again."""
    write_whole(output / FILE, "".join(json.dumps(row) + "\n" for row in read_rows(output) if row["step"] <= step))


class MetricsCallback(TrainerCallback):
    """Add speed to what the Trainer logs, and write metrics.jsonl. Evaluation and saving take no time."""

    def __init__(self, output: Path, tokens_per_step: int, flops_per_token: float, peak: float | None, bar: bool):
        self.output, self.tokens_per_step = output, tokens_per_step
        self.flops_per_token, self.peak, self.show, self.bar = flops_per_token, peak, bar, None

    def _restart(self, args, state: TrainerState, control, **kwargs) -> None:
        self._step, self._time = state.global_step, time.perf_counter()

    on_evaluate = on_save = _restart

    def on_train_begin(self, args, state: TrainerState, control, **kwargs):
        sizes = {"initial": state.global_step, "total": state.max_steps, "dynamic_ncols": True}
        self.bar = tqdm(desc="training", unit="step", disable=not self.show, **sizes)
        self._restart(args, state, control)

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs):
        if state.is_world_process_zero:
            self.bar.update(state.global_step - self.bar.n)
        if state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control, logs: dict, **kwargs):
        if not ({"loss", "eval_loss"} & logs.keys()) or not state.is_world_process_zero:
            return
        step = state.global_step
        logged = ("loss", "learning_rate", "grad_norm", "eval_loss")
        row = {"step": step} | {name: logs[name] for name in logged if name in logs}
        for name, value in row.items():
            if not math.isfinite(value):
                raise TrainingError(f"the {name} is {value} at step {step}; {ADVICE}")
        if "loss" in logs:
            row |= self._speed(args, state)
        with (self.output / FILE).open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        forms = {"loss": ".3f", "tokens_per_second": ",.0f", "mfu": ".2f"}
        if shown := {name: f"{row[name]:{form}}" for name, form in forms.items() if name in row}:
            self.bar.set_postfix(shown)

    def _speed(self, args: TrainingArguments, state: TrainerState) -> dict:
        seconds, steps = time.perf_counter() - self._time, state.global_step - self._step
        self._restart(args, state, None)
        row = {"tokens": state.global_step * self.tokens_per_step}
        if steps:
            row["tokens_per_second"] = steps * self.tokens_per_step / seconds
            if self.peak is not None:
                row["mfu"] = row["tokens_per_second"] * self.flops_per_token / (self.peak * args.world_size)
        if args.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(args.device)
        return row

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()
