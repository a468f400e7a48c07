"""A byte-level language model small enough to train in half a minute on two CPU cores, with any feed-forward module.

Legend: B sequences, L bytes each, D = d_model.
"""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
HELD_OUT = 0.1  # the end of the text
MINIMUM_BYTES = 50_000
MAXIMUM_BYTES = 32 << 20


@dataclass(frozen=True)
class Recipe:
    """Sizes and budget of one training run."""

    d_model: int = 128
    layers: int = 4
    heads: int = 2
    subnets: int = 2
    subnet_dim: int = 176
    context: int = 128
    batch: int = 8
    steps: int = 320
    warmup: int = 60
    learning_rate: float = 2e-3
    evaluation_batches: int = 16


CPU_RECIPE = Recipe()
GPU_RECIPE = Recipe(d_model=512, layers=6, heads=4, subnets=4, subnet_dim=384, context=512, batch=32, steps=400, learning_rate=1e-3)


class TextError(ValueError):
    """The text cannot be trained on; the message says why."""


def read_text(path: str | None) -> Tensor:
    """The bytes of a text file, or of the Python standard library's own source, as uint8.

    Raises TextError for what is missing, empty, binary or too short.
    """
    data = _standard_library() if path is None else _file(Path(path))
    if len(data) < MINIMUM_BYTES:
        raise TextError(f"{path or 'the standard library'} has {len(data):,} bytes; training and holding out need {MINIMUM_BYTES:,}")
    return torch.frombuffer(bytearray(data[:MAXIMUM_BYTES]), dtype=torch.uint8)


def _file(path: Path) -> bytes:
    if not path.exists():
        raise TextError(f"{path} does not exist")
    if not path.is_file():
        raise TextError(f"{path} is not a file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise TextError(f"{path} is empty")
    if b"\0" in data:
        raise TextError(f"{path} has NUL bytes and looks like a binary file; plain text in an 8-bit encoding such as UTF-8 is needed")
    return data


def _standard_library() -> bytes:
    """Its modules in a fixed shuffled order, so that the held-out end is like the rest."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = [path for path in sorted(root.rglob("*.py")) if left_out.isdisjoint(path.relative_to(root).parts)]
    if not files:
        raise TextError(f"{root} has no Python sources here; name a text with --text FILE")
    random.Random(0).shuffle(files)
    return b"\n".join(path.read_bytes() for path in files)


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions of x [B, heads, L, D/heads]."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    """Pre-norm causal attention and a feed-forward module."""

    def __init__(self, recipe: Recipe, feed_forward: Callable[[], nn.Module]):
        super().__init__()
        self.heads = recipe.heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(recipe.d_model), nn.RMSNorm(recipe.d_model)
        self.qkv = nn.Linear(recipe.d_model, 3 * recipe.d_model, bias=False)
        self.attention_out = nn.Linear(recipe.d_model, recipe.d_model, bias=False)
        self.feed_forward = feed_forward()

    def forward(self, x_BLD: Tensor) -> Tensor:  # noqa: N803
        q, k, v = self.qkv(self.attention_norm(x_BLD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q), _rotate(k)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.attention_out(attended.transpose(1, 2).flatten(2))  # noqa: N806
        return x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))


class ByteLM(nn.Module):
    """Decoder over bytes with rotary positions and tied embeddings."""

    def __init__(self, recipe: Recipe, feed_forward: Callable[[], nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, recipe.d_model)
        self.blocks = nn.ModuleList(Block(recipe, feed_forward) for _ in range(recipe.layers))
        self.norm = nn.RMSNorm(recipe.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens_BL: Tensor) -> Tensor:  # noqa: N803
        x_BLD = self.embedding(tokens_BL)  # noqa: N806
        for block in self.blocks:
            x_BLD = block(x_BLD)  # noqa: N806
        return functional.linear(self.norm(x_BLD), self.embedding.weight)

    def loss(self, tokens_BL: Tensor) -> Tensor:  # noqa: N803
        """Mean cross-entropy, nats a byte, of predicting each byte from those before it."""
        logits = self(tokens_BL[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens_BL[:, 1:].flatten())


@dataclass(frozen=True)
class Step:
    """One training step's loss; the last one carries the held-out loss too (nats a byte)."""

    loss: float
    held_out: float | None = None


def train(text: Tensor, recipe: Recipe, feed_forward: Callable[[], nn.Module], device: torch.device, seed: int = 0) -> Iterator[Step]:
    """Trains on the text's beginning, step by step; every module sees the same batches in the same order."""
    split = int(len(text) * (1 - HELD_OUT))
    training, held_out = text[:split], text[split:]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = ByteLM(recipe, feed_forward).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, recipe))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for step in range(recipe.steps):
        with autocast:
            loss = model.loss(_batch(training, recipe, generator).to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step + 1 < recipe.steps:
            yield Step(loss.item())
    with torch.no_grad(), autocast:
        generator.manual_seed(seed)
        losses = [model.loss(_batch(held_out, recipe, generator).to(device)).item() for _ in range(recipe.evaluation_batches)]
    yield Step(loss.item(), sum(losses) / len(losses))


def _batch(text: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """[B, L+1] bytes from random places."""
    starts = torch.randint(len(text) - recipe.context, (recipe.batch, 1), generator=generator)
    return text[starts + torch.arange(recipe.context + 1)].long()


def _learning_rate_factor(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)))
