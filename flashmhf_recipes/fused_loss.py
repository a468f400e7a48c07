"""The loss without all logits at once: liger-kernel's fused linear cross-entropy, by its function of Llamas."""

from __future__ import annotations

import importlib.util

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from flashmhf.backends import BACKENDS

from .errors import OptionError


def check(model: PreTrainedModel) -> None:
    """Raise OptionError for a model, which may be on the meta device, whose loss it is not."""
    if not isinstance(model, LlamaForCausalLM):
        raise OptionError(f"fused_loss is on for a {type(model).__name__}; supported: Llamas, with any network")


def check_machine(device: torch.device) -> None:
    """Raise OptionError where its kernels are missing or cannot run."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise OptionError("fused_loss is on; it needs liger-kernel: pip install liger-kernel")
    if reason := BACKENDS["triton"].why_not(device, torch.float32, d_h=128, d_e=128):
        raise OptionError(f"fused_loss is on, whose kernels are Triton's: {reason}")


def apply(model: PreTrainedModel) -> None:
    """Let ``model`` compute its loss so when it is trained on labels, and elsewhere with ``skip_logits=True``."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    others = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
    apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=True, **others)
