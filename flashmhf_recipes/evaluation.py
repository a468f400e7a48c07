"""Held-out loss with a sliding window, and the paper's six tasks through lm-eval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from traceback import walk_tb

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from .data import Documents, encode
from .documents import find_files, read
from .errors import DataError, OptionError
from .pretrained import positions

# lm-eval's names of the paper's tasks: HellaSwag, SIQA, PIQA, OBQA, WinoGrande, RACE.
PAPER_TASKS = ("hellaswag", "social_iqa", "piqa", "openbookqa", "winogrande", "race")


@dataclass
class HeldOut:
    """The loss of some text in nats a token, and in bits a byte, which compare across tokenizers; what was not read."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    documents: int
    left_out: Counter


def held_out_loss(
    model: PreTrainedModel, tokenizer, paths: Iterable[str | Path], *, window: int | None = None,
    stride: int | None = None, batch: int = 4, text_field: str = "text", bar: bool = False,
) -> HeldOut:  # fmt: skip
    """Return the loss over files' documents, each after an end-of-text token, every token scored once, in windows that
    advance by ``stride`` (half). Raises ValueError for sizes and a loss that is not finite, DataError without text.
    """
    limit = positions(model)
    window = limit if window is None else window
    if window is None:
        raise OptionError("give window: the model's configuration has no maximum")
    stride = max(1, window // 2) if stride is None else stride
    if not 2 <= window <= (limit or window):
        most = f" and at most the model's {limit} positions" if limit else ""
        raise OptionError(f"window is {window}; it must be at least 2{most}")
    if not 1 <= stride < window:
        raise OptionError(f"stride is {stride}; it must be at least 1 and below the window of {window}")
    if batch < 1:
        raise OptionError(f"batch is {batch}; it must be at least 1")
    files, left_out = find_files(paths)
    documents = Documents(partial(read, files, text_field), f"read {len(files):,} files", left_out)
    nats, tokens, size, count = 0.0, 0, 0, 0
    with tqdm(desc="evaluating", unit="token", unit_scale=True, disable=not bar) as progress:
        for text in documents:
            count += 1
            size += len(text.encode())
            ids = np.concatenate(([tokenizer.eos_token_id], *encode([text], tokenizer)))[:-1].astype(np.int64)
            for part, scored in window_losses(model, ids, window, stride, batch):
                nats, tokens = nats + part, tokens + scored
                progress.update(scored)
    if not tokens:
        raise DataError(f"no text is left to evaluate on: {documents}")
    loss = nats / tokens
    perplexity = math.exp(loss) if loss < 709 else math.inf
    return HeldOut(loss, perplexity, nats / (size * math.log(2)), tokens, size, count, +left_out)  # + drops counts of 0


@torch.no_grad()
def window_losses(model, ids: np.ndarray, window: int, stride: int, batch: int) -> Iterator[tuple[float, int]]:
    """Yield (sum of nats, tokens) of batches of windows over one sequence; all tokens but the first are scored."""
    spans = _spans(len(ids), window, stride)
    while spans:
        scored, length = spans[0][2], spans[0][1] - spans[0][0]
        group = [span for span in spans[:batch] if (span[1] - span[0], span[2]) == (length, scored)]
        spans = spans[len(group) :]
        inputs = torch.from_numpy(np.stack([ids[start:end] for start, end, _ in group])).to(model.device)
        logits = model(inputs, use_cache=False, logits_to_keep=scored + 1).logits[:, :-1].float()
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, -scored:].flatten(), reduction="sum")
        if not nats.isfinite():
            raise ValueError(f"the model's loss is {nats}: its weights are damaged, or its dtype's range is small")
        yield nats.item(), scored * len(group)


def _spans(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (start, end, tokens scored at the end) of the windows over a sequence."""
    ends = [*range(min(window, tokens), tokens, stride), tokens]
    return [(max(0, end - window), end, end - before) for before, end in pairwise([1, *ends]) if end > before]


@lru_cache
def task_manager(tasks: tuple[str, ...], include_path: str | None = None):
    """Return lm-eval's index, of thousands of files. Raises for what :func:`task_scores` refuses, before any work."""
    from lm_eval.tasks import TaskManager, get_task_dict

    with _lm_eval(f"include_path {include_path!r}"):
        manager = TaskManager(include_path=include_path)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise OptionError(f"lm-eval has no tasks {unknown}; local ones are found through include_path")
    for task in dict.fromkeys(tasks):
        with _lm_eval(f"task {task!r}"):
            get_task_dict([task], manager)  # its data set, which may need a network, a package or a login
    return manager


@contextmanager
def _lm_eval(what: str) -> Iterator[None]:
    """Raise DataError for what lm-eval, data sets and templates raise, but let pass what comes from within a model."""
    try:
        yield
    except Exception as error:  # whatever their parsers do
        if any(frame.f_globals["__name__"].startswith("torch.nn") for frame, _ in walk_tb(error.__traceback__)):
            raise
        message = " ".join(str(error).split())
        raise DataError(f"lm-eval cannot take {what}: {type(error).__name__}: {message}") from error


def task_scores(
    model: PreTrainedModel, tokenizer, tasks: str | Iterable[str] = PAPER_TASKS, *, include_path: str | None = None,
    batch: int = 16,
) -> tuple[dict[str, dict[str, float]], float | None]:  # fmt: skip
    """Return the metrics of lm-eval's and local tasks, and the mean accuracy, None for fewer than two; a tag stands for
    its tasks. Raises ImportError without the extra flashmhf[eval], OptionError and DataError for tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    manager = task_manager(tasks := (tasks,) if isinstance(tasks, str) else tuple(tasks), include_path)
    tags = {task: manager.task_index[task] for task in tasks if task in manager.all_tags}
    # dictionaries up to lm-eval 0.4.9
    members = {tag: entry["task"] if isinstance(entry, dict) else sorted(entry.tags) for tag, entry in tags.items()}
    tasks = list(dict.fromkeys(name for task in tasks for name in members.get(task, [task])))
    settings = {"batch_size": batch, "max_length": positions(model), "add_bos_token": False}
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, **settings)
    with _lm_eval(f"the tasks {', '.join(tasks)}"):
        found = simple_evaluate(model=wrapped, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    scores = {}
    for task, values in found["results"].items():
        named = {name: value for name, value in values.items() if isinstance(value, int | float) and "," in name}
        scores[task] = {name.removesuffix(",none"): value for name, value in named.items() if "stderr" not in name}
    accuracies = [scores[task]["acc"] for task in tasks if "acc" in scores.get(task, ())]
    return scores, fmean(accuracies) if len(accuracies) > 1 else None
