"""What a training run records: metrics.jsonl (one row a log), loss.png, a progress bar, and the mark of complete checkpoints."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

ROWS = "metrics.jsonl"
CURVE = "loss.png"
COMPLETE = "complete"  # an empty file in a checkpoint directory, written last


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why."""


def complete_checkpoints(output: Path) -> list[Path]:
    """Checkpoints that were written to the end, oldest first."""
    return sorted((path.parent for path in output.glob(f"checkpoint-*/{COMPLETE}")), key=lambda path: int(path.name.split("-")[1]))


def remove_incomplete_checkpoints(output: Path) -> None:
    for path in output.glob("checkpoint-*"):
        if not (path / COMPLETE).exists():
            shutil.rmtree(path)


def read_rows(output: Path) -> list[dict]:
    """The rows of metrics.jsonl; a last line torn by a kill is left out."""
    rows = []
    path = output / ROWS
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def keep_rows(output: Path, step: int) -> None:
    """Drops what a resumed run is about to record again."""
    rows = [row for row in read_rows(output) if row["step"] <= step]
    partial = output / (ROWS + ".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(output / ROWS)


def draw_losses(runs: dict[str, list[dict]], path: Path) -> None:
    """Training loss, and held-out loss where there is one, over steps, one colour a run."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (name, rows) in enumerate(runs.items()):
        for key, style, label in (("loss", "-", name), ("eval_loss", "o--", f"{name}, held out")):
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    partial = path.with_name("partial-" + path.name)
    figure.savefig(partial, dpi=150)
    partial.replace(path)


class Recorder(TrainerCallback):
    """Adds speed to what the Trainer logs, and writes it down.

    Rows: step, loss, learning_rate, grad_norm, tokens (so far), tokens_per_second, mfu (where the GPU's peak is known),
    peak_memory_bytes (CUDA), eval_loss. The clock stands still during evaluation and while checkpoints are written.
    """

    def __init__(
        self, output: Path, tokens_per_step: int, flops_per_token: float, peak: float | None, bar: bool = True, reference_step: int = 0
    ):
        self.output, self.tokens_per_step, self.flops_per_token, self.peak = output, tokens_per_step, flops_per_token, peak
        self.bar = tqdm(desc="training", unit="step", disable=not bar, initial=reference_step, dynamic_ncols=True)
        self._restart(reference_step)

    def _restart(self, step: int) -> None:
        self._step, self._time = step, time.perf_counter()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.bar.total = state.max_steps
        self._restart(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if state.is_world_process_zero:
            self.bar.update(state.global_step - self.bar.n)
        if control.should_save:
            control.should_log = True  # a resumed run averages its losses from the checkpoint on

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **kwargs):
        if logs is None or not ({"loss", "eval_loss"} & logs.keys()) or not state.is_world_process_zero:
            return
        row = {
            "step": state.global_step,
            **{name: logs[name] for name in ("loss", "learning_rate", "grad_norm", "eval_loss") if name in logs},
        }
        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                raise TrainingError(
                    f"the loss is {logs['loss']} at step {state.global_step}; try a lower --learning-rate or a longer --warmup"
                )
            row |= self._speed(args, state.global_step)
        with (self.output / ROWS).open("a") as out:
            out.write(json.dumps(row) + "\n")
        shown = {
            name: f"{row[key]:{form}}"
            for name, key, form in (("loss", "loss", ".3f"), ("tok/s", "tokens_per_second", ",.0f"), ("MFU", "mfu", ".2f"))
            if key in row
        }
        if shown:
            self.bar.set_postfix(shown)

    def _speed(self, args: TrainingArguments, step: int) -> dict:
        seconds, steps = time.perf_counter() - self._time, step - self._step
        self._restart(step)
        row = {"tokens": step * self.tokens_per_step}
        if steps:
            row["tokens_per_second"] = steps * self.tokens_per_step / seconds
            if self.peak is not None:
                row["mfu"] = row["tokens_per_second"] * self.flops_per_token / (self.peak * args.world_size)
        if args.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(args.device)
        return row

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self._restart(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # every rank has stored its part
        if state.is_world_process_zero:
            (self.output / f"checkpoint-{state.global_step}" / COMPLETE).touch()
            draw_losses({"training": read_rows(self.output)}, self.output / CURVE)
        self._restart(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.bar.close()
        if state.is_world_process_zero:
            draw_losses({"training": read_rows(self.output)}, self.output / CURVE)
