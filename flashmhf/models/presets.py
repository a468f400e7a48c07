"""The paper's models by name (table "Model and training configurations"), and tiny ones for CPUs.

A name is ``<ffn>-<scale>``, as in "flashmhf-370m", with "-dh64" or "-dh256" for the head-dimension ablation.
``printed_parameters`` is the paper's count in units of 2**20 ("M") or 2**30 ("B"), those of FlashMHF with q_norm's
weights, which the official code always allocates. Entries without one complete the grid. All else is the paper's but
for ``ffn_init="balanced"`` and the scale "tiny".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..nn import default_subnet_dim
from .configuration import FlashMHFConfig


@dataclass(frozen=True)
class Scale:
    """Settings that the models of one scale share."""

    d_model: int
    attention_heads: int
    tied: bool
    learning_rate: float
    steps: int
    context: int = 4096
    vocabulary: int = 50_432
    batch: int = 64


MIB, GIB = 2**20, 2**30
SCALES = {
    "128m": Scale(768, 12, True, 3e-3, 245_000),
    "370m": Scale(1024, 16, False, 1.5e-3, 245_000),
    "1.3b": Scale(2048, 32, False, 1e-3, 409_000),
    "tiny": Scale(128, 2, True, 3e-3, 200, context=128, vocabulary=512, batch=8),
}


@dataclass(frozen=True)
class Preset:
    """One model of the paper: sizes, peak learning rate and steps of its training."""

    name: str
    ffn: str
    scale: Scale
    layers: int
    intermediate: int
    heads: int | None = None
    subnets: int | None = None
    printed_parameters: float | None = field(default=None, compare=False)

    def config(self, **overrides) -> FlashMHFConfig:
        """Return the model's configuration; ``overrides`` are FlashMHFConfig arguments."""
        settings = dict(
            ffn_type=self.ffn, vocab_size=self.scale.vocabulary, hidden_size=self.scale.d_model,
            intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.scale.attention_heads, ffn_num_heads=self.heads, ffn_num_subnets=self.subnets,
            tie_word_embeddings=self.scale.tied, max_position_embeddings=self.scale.context, rms_norm_eps=1e-5,
            initializer_range=0.02, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        return FlashMHFConfig(**settings | overrides)


def _table() -> dict[str, Preset]:
    presets = {}

    def add(scale: str, ffn: str, layers: int, d_ff: int, heads=None, subnets=None, printed=None, suffix="") -> None:
        name = f"{ffn}-{scale}{suffix}"
        presets[name] = Preset(name, ffn, SCALES[scale], layers, d_ff, heads, subnets, printed)

    add("128m", "swiglu", 12, 2048, printed=117.96 * MIB)
    add("370m", "swiglu", 24, 2752, printed=388.05 * MIB)
    add("1.3b", "swiglu", 24, 5504, printed=1.323 * GIB)
    add("128m", "mh_ffn", 10, 2048, 6, printed=115.70 * MIB)
    add("370m", "mh_ffn", 20, 2752, 8, printed=379.79 * MIB)
    add("1.3b", "mh_ffn", 20, 5504, 16)
    add("128m", "pkv", 12, 2304, 6)
    add("370m", "pkv", 24, 3072, 8, printed=386.55 * MIB)
    add("1.3b", "pkv", 24, 6208, 16)
    add("128m", "dense_moe", 12, 2048, subnets=8)
    add("370m", "dense_moe", 24, 2752, subnets=8)
    add("1.3b", "dense_moe", 24, 5504, subnets=16)
    add("128m", "flashmhf", 10, 2048, 6, 8, printed=115.77 * MIB)
    add("370m", "flashmhf", 21, 2688, 8, 7, printed=390.08 * MIB)
    add("1.3b", "flashmhf", 20, 5760, 16, 15, printed=1.321 * GIB)
    for scale, layers, d_ff in (("128m", 10, 2048), ("370m", 21, 2688), ("1.3b", 20, 5760)):
        for head_dim in (64, 256):
            d_e, heads = default_subnet_dim(head_dim), SCALES[scale].d_model // head_dim
            subnets = round(d_ff / d_e)
            add(scale, "flashmhf", layers, subnets * d_e, heads, subnets, suffix=f"-dh{head_dim}")
    add("tiny", "swiglu", 2, 352)
    add("tiny", "mh_ffn", 2, 256, 2)
    add("tiny", "pkv", 2, 384, 2)
    add("tiny", "dense_moe", 2, 352, subnets=2)
    add("tiny", "flashmhf", 2, 256, 2, 2)
    return presets


PRESETS = _table()


def preset(name: str) -> Preset:
    """Return the preset of this name; "128m" alone stands for FlashMHF's. Raises ValueError that lists the names."""
    name = f"flashmhf-{name}" if name in SCALES else name
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; supported: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
