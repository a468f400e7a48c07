"""What the entry points of inference engines call in every process: models of this package become known to them.

``vllm.general_plugins`` calls :func:`vllm`, ``sglang.srt.plugins`` calls :func:`sglang`. Nothing of an engine is imported before.
"""

from __future__ import annotations

import sys

ARCHITECTURE = "FlashMHFForCausalLM"


def vllm() -> None:
    """Registers the configuration with transformers, and with vLLM the model class, by name, and the quantisation method."""
    from vllm import ModelRegistry

    from . import vllm_fp8 as vllm_fp8  # registers flashmhf_fp8

    ModelRegistry.register_model(ARCHITECTURE, f"{__package__}.vllm:{ARCHITECTURE}")


def sglang() -> None:
    """Registers the model for SGLang's transformers back end, which raises for styles of tensor parallelism that it does not know."""
    from ..models import FlashMHFConfig

    FlashMHFConfig.plans_networks = False
    into_transformers()


def into_transformers() -> None:
    """Makes the model class an attribute of transformers: its server and SGLang look classes up there, not in the auto classes."""
    import transformers as imported_before  # importing the model can replace the module; others may hold the module of before

    from .. import models as lm

    for module in (imported_before, sys.modules["transformers"]):
        setattr(module, ARCHITECTURE, getattr(lm, ARCHITECTURE))
