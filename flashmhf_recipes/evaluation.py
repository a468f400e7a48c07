"""Held-out loss with a sliding window. lm-eval loads saved models by itself (docs/tutorials/train.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from .data import Documents, encode
from .documents import LeftOut, find_files, read
from .errors import DataError, refuse
from .pretrained import positions


@dataclass
class HeldOut:
    """The loss of some text in nats a token, and in bits a byte, which compare across tokenizers; what was not read."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    documents: int
    left_out: LeftOut


def held_out_loss(
    model: PreTrainedModel, tokenizer, paths: Iterable[str | Path], *, window: int | None = None,
    stride: int | None = None, batch: int = 4, text_field: str = "text", bar: bool = False,
) -> HeldOut:  # fmt: skip
    """Return the loss over files' documents, each after an end-of-text token, every token scored once, in windows that
    advance by ``stride`` (half). Raises ValueError for sizes and a loss that is not finite, DataError without text.
    """
    limit = positions(model)
    window = limit if window is None else window
    refuse(window is None, "give window: the model's configuration has no maximum")
    stride = max(1, window // 2) if stride is None else stride
    most = f" and at most the model's {limit} positions" if limit else ""
    refuse(not 2 <= window <= (limit or window), f"window is {window}; it must be at least 2{most}")
    refuse(not 1 <= stride < window, f"stride is {stride}; it must be at least 1 and below the window of {window}")
    refuse(batch < 1, f"batch is {batch}; it must be at least 1")
    files, left_out = find_files(paths)
    documents = Documents(read(files, text_field), f"read {len(files):,} files", left_out)
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
    return HeldOut(loss, perplexity, nats / (size * math.log(2)), tokens, size, count, left_out)


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
