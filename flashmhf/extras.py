"""The optional packages: which extra of flashmhf installs which, and the one line that says so where one is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

from torch import nn

_LM = (
    "accelerate",
    "datasets",
    "huggingface_hub",
    "matplotlib",
    "numpy",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "tqdm",
    "transformers",
)
EXTRA_OF = {**dict.fromkeys(_LM, "lm"), "lm_eval": "eval", "spmd_types": "titan", "torchtitan": "titan"}


def advice(user: str, module: str | None) -> str | None:
    """Return that ``user`` needs the module's package, and the command that installs it, or None for a module that no
    extra brings.
    """
    package = (module or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    return f"{user} needs {package}: pip install 'flashmhf[{extra}]'" if extra else None


def require(user: str, module: str) -> None:
    """Import the module. Raises ModuleNotFoundError with :func:`advice` if it is not installed."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(advice(user, error.name) or str(error), name=error.name) from None


def pretrained_models(module: nn.Module, network: type[nn.Module]) -> Iterator[nn.Module]:
    """Yield transformers' models within ``module``, itself included, that hold a ``network``, but none that is a part
    of another.
    """
    inner: set[nn.Module] = set()
    library = sys.modules.get("transformers.modeling_utils")  # a model of transformers has imported it
    for part in module.modules() if library else ():
        if part not in inner and isinstance(part, library.PreTrainedModel):
            inner.update(part.modules())
            if any(isinstance(each, network) for each in part.modules()):
                yield part
