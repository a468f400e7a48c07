"""Small language models with FlashMHF and with SwiGLU, trained on bytes of real text by the recipe of docs/quality.md
(Muon, warm-up). Their shapes are those of docs/guides/sizes.md: heads of 128, three sub-networks each, five layers
instead of six."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import DataError

HELD_OUT = 0.1  # the end of the text
MINIMUM_BYTES, MAXIMUM_BYTES = 50_000, 32 << 20
TRIAL_STEPS, FEWEST_STEPS = 4, 40
SIZES = {
    device: {
        "SwiGLU": {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": width, "intermediate_size": swiglu},
        "FlashMHF": {"num_hidden_layers": 5, "num_attention_heads": 4, "hidden_size": width}
        | {"intermediate_size": flashmhf, "ffn_num_heads": width // 128, "ffn_num_subnets": 3},
    }
    for device, width, swiglu, flashmhf in (("cpu", 256, 512, 528), ("cuda", 512, 1536, 1632))
}
BUDGETS = {"cpu": {"length": 128, "batch": 8, "steps": 320}, "cuda": {"length": 512, "batch": 32, "steps": 400}}


class Trained(NamedTuple):
    """A model's parameters, the loss of every step, the held-out loss (nats a byte) and the seconds of a step."""

    parameters: int
    losses: list[float]
    held_out: float
    step_s: float


def training_text(path: str | None) -> bytes:
    """Return a text file's bytes, or the standard library's. Raises OSError, DataError for binary or short ones."""
    data = _standard_library() if path is None else Path(path).read_bytes()
    if b"\0" in data:
        raise DataError(f"{path} has NUL bytes and looks like a binary file; supported: text")
    if len(data) < MINIMUM_BYTES:
        name = path or "the standard library"
        raise DataError(f"{name} has {len(data):,} bytes; training and holding out need {MINIMUM_BYTES:,}")
    return data[:MAXIMUM_BYTES]


def _standard_library() -> bytes:
    """Return its modules in a fixed shuffled order, so that the held-out end is like the rest."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = [path for path in sorted(root.rglob("*.py")) if left_out.isdisjoint(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"{root} has no Python sources here; name a text with --text FILE")
    random.Random(0).shuffle(files)
    return b"\n".join(path.read_bytes() for path in files)


def train(text: bytes, device: torch.device, end: float, left_out: list[str], steps: int | None) -> dict[str, Trained]:
    """Train each network's model on the same batches for ``steps``. If None, for as many as there is time for until
    ``end`` (by time.monotonic), perhaps none; the others are named in ``left_out``."""
    budgeted = steps or BUDGETS[device.type]["steps"]
    at_most = wanted = budgeted if steps else min(budgeted, _possible_steps(text, device, end))
    if steps is None and wanted < FEWEST_STEPS:
        left_out.append(f"the language models: there is time for {wanted} steps of each")
        return {}
    trained = {}
    for runs_left, name in zip((2, 1), SIZES[device.type], strict=True):
        # a machine may have become slower: training ends by the clock, too
        now = time.monotonic()
        ends = math.inf if steps else now + (end - now) / runs_left
        trained[name] = _train(text, name, device, wanted, at_most, ends, bar=True)
        at_most = len(trained[name].losses)
    if at_most < budgeted:
        left_out.append(f"{budgeted - at_most} of {budgeted} steps of the language models")
    return trained


def _possible_steps(text: bytes, device: torch.device, end: float) -> int:
    """Return for how many steps of each model there is time, by a few steps of each."""
    from .. import training  # noqa: F401 - its time is none of a run's

    start = time.monotonic()
    both = sum(_train(text, name, device, TRIAL_STEPS, TRIAL_STEPS, end).step_s for name in SIZES[device.type])
    now = time.monotonic()
    once = max(0.0, now - start - TRIAL_STEPS * both)  # of a run, without its steps
    # a part for the held-out loss and the clock's noise; past the end, a trial may have no second step to time
    return max(0, int((end - now - once) / (1.15 * both))) if now < end else 0


def _train(
    text: bytes, name: str, device: torch.device, steps: int, at_most: int, end: float, bar: bool = False
) -> Trained:
    """Train on the schedule of ``steps``; end after ``at_most``, or so that the result is there at ``end``."""
    from transformers.utils import logging

    from .. import metrics, stopping, tokenizer, training

    logging.disable_progress_bar()
    sizes, budget = SIZES[device.type][name], BUDGETS[device.type] | {"steps": steps}
    length = budget["length"]
    # The paper's initializer_range of 0.02 belongs to models six to sixteen times as wide.
    model = sizes | {"max_position_embeddings": length, "initializer_range": sizes["hidden_size"] ** -0.5}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "text.txt"
        wanted = int(math.prod(budget.values()) / (1 - HELD_OUT)) + length  # more would only be tokenised
        file.write_text(text[:wanted].decode(errors="replace"), "utf-8")
        options = training.Options(
            str(Path(scratch) / "run"), preset="tiny", ffn=name.lower(), model=model, data=file, **budget,
            optimizer="muon", weight_decay=0.3, learning_rate=8e-3, min_learning_rate=8e-4, micro_batch=budget["batch"],
            warmup=min(60, max(1, steps // 4)), eval_fraction=HELD_OUT, eval_every=steps, log_every=1,
            vocab_size=tokenizer.SMALLEST,  # no merges: a token a byte
            device=device.type, arguments={"report_to": [], "save_strategy": "no"},
        )  # fmt: skip
        until = stopping.Until(end, at_most, batches=round(steps * HELD_OUT / (1 - HELD_OUT)))
        with contextlib.redirect_stdout(sys.stderr):  # what a run says of itself is no part of the table
            result = training.start(options, bar=bar, callbacks=[until])
        rows = [row for row in metrics.read_rows(result.output) if "loss" in row]
    speeds = [row["tokens_per_second"] for row in rows[1:] if "tokens_per_second" in row]
    step_s = length * budget["batch"] / statistics.median(speeds) if speeds else math.nan
    return Trained(result.parameters, [row["loss"] for row in rows], result.eval_loss, step_s)
