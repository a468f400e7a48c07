"""The optional packages: which extra of flashmhf installs which, and the one line that says so where one is missing."""

from __future__ import annotations

import importlib

_LM = (
    "accelerate", "datasets", "huggingface_hub", "matplotlib", "numpy", "pyarrow", "safetensors", "tokenizers", "tqdm",
    "transformers",
)  # fmt: skip
EXTRA_OF = {**dict.fromkeys(_LM, "lm"), "spmd_types": "titan", "torchtitan": "titan"}


def advice(user: str, module: str | None) -> str | None:
    """Return the command that installs the package of ``module`` for ``user``, None if no extra brings it."""
    package = (module or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    return f"{user} needs {package}: pip install 'flashmhf[{extra}]'" if extra else None


def require(user: str, module: str, least: str = "0") -> None:
    """Import the module. Raises ModuleNotFoundError with :func:`advice` if it is not installed, ImportError if it is
    older than ``least``, major and minor version: pip looks at an extra's versions only where the extra is asked for.
    """
    try:
        found = getattr(importlib.import_module(module), "__version__", least)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(advice(user, error.name) or str(error), name=error.name) from None
    if [int(part) for part in found.split(".")[:2]] < [int(part) for part in least.split(".")]:
        found = f"{user} needs {module} {least} or later, not {found}"
        raise ImportError(f"{found}: pip install 'flashmhf[{EXTRA_OF[module]}]'")
