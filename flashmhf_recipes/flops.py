"""Floating-point operations of training, and the share of a GPU's peak that they make up (MFU)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from flashmhf.nn.multihead import GroupedHeads

# Dense bf16 tensor-core peaks, FLOP/s, by the device's name; the first that the name contains.
PEAKS = {
    **{"H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989.4e12, "H200": 989.4e12},
    **{"A100": 312e12, "GB200": 2500e12, "B200": 2250e12},
}


def training_flops_per_token(model: PreTrainedModel, length: int) -> float:
    """Return 6 a weight that a token meets, and attention over the causal half of ``length``; no recomputation."""
    config = model.config.get_text_config()
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    for module in model.modules():
        if isinstance(module, GroupedHeads):  # every head of a group multiplies the weights that they share
            shared = module.num_heads // module.num_kv_heads - 1
            weights += shared * sum(weight.numel() for weight in (module.k, module.u, module.v))
    # Qwen2 and others have no head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * length
    return 6.0 * weights + 6.0 * attention


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak, or None where it is not known, as for a part (MIG) of a GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return None if " MIG " in name else next((peak for part, peak in PEAKS.items() if part in name), None)
