"""The bare command's language models: bytes of real text, SwiGLU and FlashMHF at equal parameters, trained by the recipe.

The settings are those with which both networks learn best in docs/quality.md: Muon, warm-up, FlashMHF's projections at 0.3 of the
learning rate. Needs the extra ``flashmhf[lm]``; :func:`why_not` says so where it is missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..errors import DataError
from . import study

HELD_OUT = 0.1  # the end of the text
MINIMUM_BYTES = 50_000
MAXIMUM_BYTES = 32 << 20
FFN_TYPES = {"SwiGLU": "swiglu", "FlashMHF": "flashmhf"}


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
    learning_rate: float = 8e-3
    weight_decay: float = 0.3


CPU_RECIPE = Recipe()
GPU_RECIPE = Recipe(d_model=512, layers=6, heads=4, subnets=4, subnet_dim=384, context=512, batch=32, steps=400)


def recipe(device: torch.device, steps: int | None = None) -> Recipe:
    """Return the recipe of ``device``, for ``steps`` where they are given."""
    chosen = GPU_RECIPE if device.type == "cuda" else CPU_RECIPE
    return replace(chosen, steps=steps or chosen.steps)


@dataclass(frozen=True)
class Trained:
    """A model's parameters, the loss of every step and the held-out loss (nats a byte)."""

    parameters: int
    losses: list[float]
    held_out: float


def why_not() -> str | None:
    """None where language models can be trained here, else what is missing."""
    missing = [name for name in ("transformers", "accelerate", "tokenizers") if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}: pip install 'flashmhf[lm]'" if missing else None


def read_text(path: str | None) -> bytes:
    """Return the bytes of a text file, or of the Python standard library's own source.

    Raises OSError where it cannot be read, DataError for one that is binary or too short.
    """
    data = _standard_library() if path is None else Path(path).read_bytes()
    if b"\0" in data:
        raise DataError(f"{path} has NUL bytes and looks like a binary file; plain text in an 8-bit encoding such as UTF-8 is needed")
    if len(data) < MINIMUM_BYTES:
        raise DataError(f"{path or 'the standard library'} has {len(data):,} bytes; training and holding out need {MINIMUM_BYTES:,}")
    return data[:MAXIMUM_BYTES]


def _standard_library() -> bytes:
    """Its modules in a fixed shuffled order, so that the held-out end is like the rest."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = [path for path in sorted(root.rglob("*.py")) if left_out.isdisjoint(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"{root} has no Python sources here; name a text with --text FILE")
    random.Random(0).shuffle(files)
    return b"\n".join(path.read_bytes() for path in files)


def train(text: bytes, recipe: Recipe, device: torch.device, bar: bool = False) -> dict[str, Trained]:
    """Train a model with each of the networks on the same batches."""
    from transformers.utils import logging

    from .. import metrics, tokenizer, training

    logging.disable_progress_bar()
    trained = {}
    with tempfile.TemporaryDirectory() as scratch:
        file, bytewise = Path(scratch) / "text.txt", Path(scratch) / "bytewise"
        wanted = int(recipe.steps * recipe.batch * recipe.context / (1 - HELD_OUT)) + recipe.context
        file.write_text(text[:wanted].decode(errors="replace"))
        tokenizer.train([], tokenizer.SMALLEST).save_pretrained(bytewise)  # no merges: a token a byte
        for name, ffn in FFN_TYPES.items():
            options = training.Options(
                output=str(Path(scratch) / name),
                preset="tiny",
                ffn=ffn,
                model=_sizes(recipe, name),
                data=file,
                tokenizer=str(bytewise),
                vocab_size=1,  # as many as the tokenizer has
                length=recipe.context,
                batch=recipe.batch,
                micro_batch=recipe.batch,
                steps=recipe.steps,
                optimizer="muon",
                weight_decay=recipe.weight_decay,
                learning_rate=recipe.learning_rate,
                min_learning_rate=recipe.learning_rate / 10,
                warmup=min(recipe.warmup, max(1, recipe.steps // 4)),
                eval_fraction=HELD_OUT,
                eval_every=recipe.steps,
                log_every=1,
                device="cpu" if device.type == "cpu" else "auto",
                arguments={"report_to": [], "save_strategy": "no"},
            )
            with contextlib.redirect_stdout(sys.stderr):  # what a run says of itself is no part of the table
                result = training.start(options, bar=bar)
            losses = [row["loss"] for row in metrics.read_rows(result.output) if "loss" in row]
            trained[name] = Trained(result.parameters, losses, result.eval_loss)
    return trained


def _sizes(recipe: Recipe, name: str) -> dict[str, object]:
    """Return the FlashMHFConfig settings of the recipe's model with the named network."""
    sizes = {
        "hidden_size": recipe.d_model,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "max_position_embeddings": recipe.context,
        "initializer_range": recipe.d_model**-0.5,  # the paper's 0.02 belongs to models six to sixteen times as wide
    }
    if name == "FlashMHF":
        width = recipe.subnets * recipe.subnet_dim
        return sizes | {"ffn_num_heads": recipe.heads, "ffn_num_subnets": recipe.subnets, "intermediate_size": width}
    modules = study.equal_parameter_modules(recipe.d_model, recipe.heads, recipe.subnets, recipe.subnet_dim, device="meta")
    return sizes | {"intermediate_size": modules[name]().intermediate_dim}
