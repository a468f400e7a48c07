"""The training of one run, which goes on where it was stopped with the same losses."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from model import Model, make_model
from runs import Run
from tokens import Tokens
from torch import Tensor, nn

import flashmhf

EVALUATED = 26_000_000  # tokens between two evaluations along the way, about
SAMPLE = 256  # windows of each kind in one of them
CHECKED, SAVED = 25, 120  # steps between two looks at the clock, seconds between two states at least


def make_optimizer(run: Run, model: Model, device: str) -> torch.optim.Optimizer:
    rates = {"projection_rate": run.projection_rate, "muon": run.optimizer == "muon", "outputs": []}  # a tied head
    groups = flashmhf.param_groups(model, run.learning_rate, run.weight_decay, **rates)
    if run.optimizer == "muon":
        return flashmhf.Muon(groups, betas=(0.9, 0.95))
    if run.optimizer != "adamw":
        raise ValueError(f"{run.name}: optimizer is {run.optimizer!r}; supported: adamw, muon")
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")


def schedule(run: Run, step: int) -> float:
    """Factor on the learning rates at ``step``: linear warm-up, cosine to min_rate."""
    done = max(0, step - run.warmup) / max(1, run.steps - run.warmup)
    cosine = run.min_rate + (1 - run.min_rate) * 0.5 * (1 + math.cos(math.pi * done))
    return min(1.0, (step + 1) / max(1, run.warmup)) * cosine


class TimeUpError(Exception):
    """The minutes are over; the run's state is saved."""


@dataclass
class Progress:
    """Where a run is and what it has recorded. ``timed`` steps took ``seconds``; compilation, evaluation and saving do
    not count."""

    losses: Tensor
    norms: Tensor
    step: int = 0
    evaluations: list[dict] = field(default_factory=list)
    timed: int = 0
    seconds: float = 0.0
    wall: float = 0.0


class Training:
    """A run's model, optimizer and progress, from ``state`` on if there is one."""

    def __init__(self, run: Run, tokens: Tokens, device: str, state: Path, compiled: bool):
        self.run, self.tokens, self.state = run, tokens, state
        if run.batch % run.micro_batch:
            sizes = f"batch is {run.batch}, micro_batch {run.micro_batch}"
            raise ValueError(f"{run.name}: {sizes}; supported: a batch that is a multiple of micro_batch")
        self.model = make_model(run, tokens.stored["vocabulary"], device)
        if compiled:
            for part in (*self.model.blocks, self.model.head):
                part.compile(fullgraph=True, dynamic=False)
        self.optimizer = make_optimizer(run, self.model, device)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.progress = Progress(*(torch.zeros(run.steps, device=device) for _ in range(2)))
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
        if state.exists():
            self._load(device)
        self.saved = time.monotonic()
        self.begin = self.saved - self.progress.wall
        self.timed_from: tuple[int, float] | None = None  # a step, and when it began

    def save(self) -> None:
        self.saved = time.monotonic()
        self.progress.wall = time.monotonic() - self.begin
        partial = self.state.with_suffix(".partial")
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({"run": dataclasses.asdict(self.run), **parts, "progress": vars(self.progress)}, partial)
        partial.replace(self.state)

    def _load(self, device: str) -> None:
        """Restore what ``save`` wrote. Raises ValueError where it is the state of other settings."""
        state = torch.load(self.state, map_location=device, weights_only=True)
        if changed := [key for key, value in dataclasses.asdict(self.run).items() if state["run"].get(key) != value]:
            raise ValueError(f"{self.state} was saved with other settings: {', '.join(changed)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def step(self, batch: Tensor) -> None:
        """Take a step, and record its loss and the norm of its gradient on the device."""
        progress = self.progress
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * schedule(self.run, progress.step)
        for part in batch.split(self.run.micro_batch):
            with self.autocast:
                loss = self.model(part.long())
            share = len(part) / self.run.batch
            (loss * share).backward()
            progress.losses[progress.step] += loss.detach() * share
        progress.norms[progress.step] = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1

    def validate(self, sample: int | None = None) -> dict[str, float]:
        """Mean losses by kind and, as "all", of all tokens, in ``sample`` windows a kind, evenly spaced, or all. The
        last batch of a kind stays out where it is not full.
        """
        found = {}
        for kind, text in self.tokens.validation.items():
            windows = text.unfold(0, self.run.context + 1, self.run.context)
            if sample is not None and len(windows) > sample:
                windows = windows[torch.arange(sample, device=text.device) * len(windows) // sample]
            size = min(self.run.micro_batch, len(windows))
            batches = windows[: len(windows) // size * size].split(size)
            with self.autocast:  # with gradients on: without, every block would be compiled again
                found[kind] = [self.model(batch.long()).item() for batch in batches]
        found["all"] = [loss for losses in found.values() for loss in losses]
        return {kind: round(sum(losses) / len(losses), 5) for kind, losses in found.items()}

    def evaluate(self) -> None:
        """Record the losses of a sample, and save the state if it has not been saved for long."""
        found = self.validate(SAMPLE)
        self.progress.evaluations.append({"tokens": self.progress.step * self.run.batch_tokens} | found)
        if time.monotonic() - self.saved > SAVED:
            self.save()

    def start_clock(self) -> None:
        self._wait()
        self.timed_from = self.progress.step, time.monotonic()

    def stop_clock(self) -> None:
        """Wait for the steps that were taken; the time since the clock was started, if it was, is theirs."""
        self._wait()
        if self.timed_from:
            step, began = self.timed_from
            self.progress.timed += self.progress.step - step
            self.progress.seconds += time.monotonic() - began

    def _wait(self) -> None:
        if self.progress.losses.is_cuda:
            torch.cuda.synchronize()


def train(run: Run, tokens: Tokens, device: str, state: Path, deadline: float, compiled: bool) -> dict[str, object]:
    """Train one network, from ``state`` on if there is one; return its losses and speed. Raises TimeUpError past the
    deadline, after saving ``state``.
    """
    training = Training(run, tokens, device, state, compiled)
    progress = training.progress
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    every, first = max(1, round(EVALUATED / run.batch_tokens)), progress.step
    warm = first + min(5, (run.steps - first) // 2)  # steps from here on are timed
    for _, batch in zip(range(first, run.steps), tokens.batches(run, first), strict=False):
        training.step(batch)
        done, ended = progress.step, progress.step == run.steps
        evaluated, checked = (done % each == 0 and not ended for each in (every, CHECKED))
        if not (ended or evaluated or checked or done == warm):
            continue  # the host runs ahead
        training.stop_clock()
        if evaluated:
            training.evaluate()
        if checked and time.monotonic() > deadline:
            training.save()
            print(f"{run.name}: saved after {done} of {run.steps} steps; {progress.evaluations[-1:]}", flush=True)
            raise TimeUpError
        if done >= warm:
            training.start_clock()
    memory = torch.cuda.max_memory_allocated() - tokens.bytes if device == "cuda" else None
    losses = training.validate()
    speed = round(progress.timed * run.batch_tokens / progress.seconds) if progress.timed else None
    return {
        "losses": progress.losses.tolist(), "norms": progress.norms.tolist(),
        "non_embedding": training.model.non_embedding, "evaluations": progress.evaluations,
        "validation_loss": losses.pop("all"), "validation": losses, "tokens_per_second": speed,
        "seconds": round(time.monotonic() - training.begin, 2), "peak_memory": memory,
    }  # fmt: skip
