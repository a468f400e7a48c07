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
        self.begin = time.monotonic() - self.progress.wall

    def save(self) -> None:
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


def train(run: Run, tokens: Tokens, device: str, state: Path, deadline: float, compiled: bool) -> dict[str, object]:
    """Train one network, from ``state`` on if there is one; return its losses and speed. Raises TimeUpError past the
    deadline, after saving ``state``.
    """
    training = Training(run, tokens, device, state, compiled)
    progress = training.progress
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    every = max(1, round(EVALUATED / run.batch_tokens))
    first, saved, timed_from = progress.step, time.monotonic(), None
    warm = first + min(5, (run.steps - first) // 2)  # steps from here on are timed
    for _, batch in zip(range(first, run.steps), tokens.batches(run, first), strict=False):
        training.step(batch)
        done = progress.step
        ended, evaluated = done == run.steps, done % every == 0 and done < run.steps
        if not (ended or evaluated or done == warm or done % CHECKED == 0):
            continue  # the host runs ahead
        wait()
        if timed_from:
            progress.timed += done - timed_from[0]
            progress.seconds += time.monotonic() - timed_from[1]
        if evaluated:
            progress.evaluations.append({"tokens": done * run.batch_tokens} | training.validate(SAMPLE))
            if time.monotonic() - saved > SAVED:
                training.save()
                saved = time.monotonic()
        if done % CHECKED == 0 and not ended and time.monotonic() > deadline:
            training.save()
            print(f"{run.name}: saved after {done} of {run.steps} steps; {progress.evaluations[-1:]}", flush=True)
            raise TimeUpError
        if done >= warm:
            wait()
            timed_from = done, time.monotonic()
    memory = torch.cuda.max_memory_allocated() - tokens.bytes if device == "cuda" else None
    losses = training.validate()
    speed = round(progress.timed * run.batch_tokens / progress.seconds) if progress.timed else None
    return {
        "losses": progress.losses.tolist(), "norms": progress.norms.tolist(),
        "non_embedding": training.model.non_embedding, "evaluations": progress.evaluations,
        "validation_loss": losses.pop("all"), "validation": losses, "tokens_per_second": speed,
        "seconds": round(time.monotonic() - training.begin, 2), "peak_memory": memory,
    }  # fmt: skip
