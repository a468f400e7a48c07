"""Trained models for the commands: found by name, loaded through one checked loader, written in FP8."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

from flashmhf.models import loading
from flashmhf.models.quantization import quantise

from . import checkpoints
from .arguments import chosen_device
from .errors import refuse
from .tokenizer import load as load_tokenizer
from .tokenizer import token_numbers

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    name: str, *, tokenizer_name: str | None = None, device: str = "auto", dtype: str = "auto", fp8: bool = False
) -> tuple[PreTrainedModel, object]:
    """Return (model in eval mode, tokenizer) of a run, checkpoint, saved or official model, or a name.

    Raises FileNotFoundError where there is no model, ValueError for a device or a tokenizer that does not fit.
    """
    location = locate(name)
    chosen = chosen_device(device)
    if dtype not in ("auto", *_DTYPES):
        raise ValueError(f"dtype is {dtype!r}; supported: auto, {', '.join(_DTYPES)}")
    wanted = (torch.bfloat16 if chosen.type == "cuda" else torch.float32) if dtype == "auto" else _DTYPES[dtype]
    model = loading.load(location, wanted)
    tokenizer = load_tokenizer(tokenizer_name or location)
    largest, rows = token_numbers(tokenizer) - 1, model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        what = f"the tokenizer {tokenizer_name or location!r} has token numbers up to {largest:,}"
        raise ValueError(f"{what}; the vocabulary of {name!r} has {rows:,}")
    model = model.to(chosen).eval()
    if fp8:
        quantise(model)
    return model, tokenizer


def save_fp8(name: str, output: Path, *, tokenizer_name: str | None, device: str, dtype: str) -> None:
    """Write what :func:`load` finds, FlashMHF in FP8, the rest in ``dtype``. Raises OptionError, TrainingError, too."""
    for path in (output, checkpoints.partial(output)):
        refuse(path.exists(), f"output is {str(output)!r}, and {path} is there already; choose a new directory")
    # float32, so that packed weights are rounded once.
    model, tokenizer = load(name, tokenizer_name=tokenizer_name, device=device, dtype="float32", fp8=True)
    model.to(_DTYPES[dtype])
    with checkpoints.whole(output) as partial, checkpoints.writing(partial):
        checkpoints.save_pretrained(partial, model, tokenizer)


def positions(model: PreTrainedModel) -> int | None:
    """Return the longest sequence of the model, None where its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def locate(name: str) -> str:
    """Return the directory of :func:`load`'s ``name``, or the name. Raises FileNotFoundError where there is none."""
    path = Path(name := os.path.expanduser(name))
    if path.is_dir() and not (path / "config.json").exists():
        complete = checkpoints.complete_checkpoints(path)
        if not complete:
            raise FileNotFoundError(f"{path} holds no model: neither config.json nor a complete checkpoint")
        return str(complete[-1])
    if not path.exists() and (path.is_absolute() or name.startswith(".")):
        raise FileNotFoundError(f"{path} does not exist")
    return name
