"""The one checked way from a directory to a language model:

it loads all that this package writes or converts, or refuses.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..nn.convert import PREFIXES
from . import conversion
from .modeling import FlashMHFForCausalLM, check_complete
from .replaced import NETWORKS, load_replaced


def is_official(directory: str | Path) -> bool:
    """Return whether ``directory`` holds a checkpoint of the official code:

    by the ``model_type`` of its config.json.
    """
    config = Path(directory) / "config.json"
    return config.exists() and json.loads(config.read_text("utf-8")).get("model_type") in PREFIXES


def load(directory: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a causal language model with all of its weights, on the CPU and in eval mode.

    Args:
        directory: a directory that ``save_pretrained`` wrote (also of a model with packed FP8 weights, or one that
            :func:`flashmhf.replace_ffn` has changed), an official checkpoint, or a name of the Hugging Face hub.
        dtype: the dtype that the weights are loaded in; None for the stored one. Packed weights keep theirs.

    transformers' own ``from_pretrained`` draws a missing weight at random and warns; for a model that ``replace_ffn``
    has changed it draws SwiGLU networks. Here nothing is drawn, and no stored weight of a model of this package is left
    out.

    Raises ValueError for a configuration that no model has, for weights that do not load or do not fit it, and for
    missing weights; OSError if the directory holds no model, NotImplementedError for official settings without a
    counterpart.
    """
    try:
        if is_official(directory):
            return conversion.load_official(directory, dtype)
        config = AutoConfig.from_pretrained(directory)
        load_any = load_replaced if getattr(config, NETWORKS, None) else AutoModelForCausalLM.from_pretrained
        model, report = load_any(directory, config=config, dtype=dtype or "auto", output_loading_info=True)
    except (torch.OutOfMemoryError, NotImplementedError):  # RuntimeErrors both
        raise
    except (StrictDataclassError, json.JSONDecodeError) as error:
        raise ValueError(
            f"the configuration in {directory} is not that of a model: {error.__cause__ or error}"
        ) from error
    # RuntimeError: tensors of other shapes
    except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"the weights in {directory} do not load: {str(error) or 'a file is empty'}") from error
    check_complete(directory, report["missing_keys"])
    if isinstance(model, FlashMHFForCausalLM) and report["unexpected_keys"]:
        raise ValueError(f"{directory} does not fit its config.json: unexpected {sorted(report['unexpected_keys'])}")
    return model
