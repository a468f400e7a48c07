"""The one checked way from a directory to a language model: it loads all that this package stores, or refuses."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..checks import weight_dtype
from ..nn.convert import PREFIXES
from . import conversion
from .modeling import check_complete


def load(directory: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a causal language model with all of its weights, on the CPU and in eval mode.

    ``directory`` is what ``save_pretrained`` wrote (also after :func:`flashmhf.replace_ffn` and in FP8), an official
    checkpoint, or a name of the hub; ``dtype`` None keeps the stored one. Raises ValueError for a configuration or
    weights that do not fit, also for missing and unknown ones, of which ``from_pretrained`` only warns, OSError if
    there is no model, NotImplementedError for official settings without a counterpart, TypeError for other dtypes.
    """
    weight_dtype(dtype)
    wrong = f"the configuration in {directory} is not that of a model"
    try:
        file = Path(directory) / "config.json"
        stored = json.loads(file.read_text("utf-8")) if file.exists() else {}
        if isinstance(stored, dict) and stored.get("model_type") in (*PREFIXES,):
            return conversion.load_official(directory, dtype)
        try:
            config = of_known_class(AutoConfig, directory)
        except (AttributeError, KeyError, TypeError) as error:  # entries of types that transformers does not expect
            raise ValueError(f"{wrong}: {error}") from error
        settings = {"config": config, "dtype": dtype or "auto", "output_loading_info": True}
        model, report = of_known_class(AutoModelForCausalLM, directory, **settings)
    except (torch.OutOfMemoryError, NotImplementedError):  # RuntimeErrors both
        raise
    except (StrictDataclassError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{wrong}: {error.__cause__ or error}") from error
    # RuntimeError: tensors of other shapes
    except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"the weights in {directory} do not load: {str(error) or 'a file is empty'}") from error
    check_complete(directory, report["missing_keys"])
    if report["unexpected_keys"]:
        raise ValueError(f"{directory} does not fit its config.json: unexpected {sorted(report['unexpected_keys'])}")
    return model


def of_known_class(auto: type, source: str | Path, **settings: Any) -> Any:
    """Return ``auto.from_pretrained(source)``. Raises ValueError for what has code of its own: transformers would ask,
    on standard input, which may be a prompt, whether to run it.
    """
    try:
        return auto.from_pretrained(source, trust_remote_code=False, **settings)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        supported = "classes of transformers and of flashmhf; for tokenizers also a tokenizer.json"
        raise ValueError(f"{source} has code of its own, which is never run; supported: {supported}") from error
