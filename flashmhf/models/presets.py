"""The paper's models by name (table "Model and training configurations"), and tiny ones for CPUs.

A name is ``<ffn>-<scale>``, as in "flashmhf-370m", with "-dh64" or "-dh256" for the head-dimension ablation.
``printed_parameters`` is the paper's count in units of 2**20 ("M") or 2**30 ("B"), those of FlashMHF with q_norm's
weights, which the official code always allocates. Entries without one complete the grid. All else is the paper's but
for ``ffn_init="balanced"`` and the scale "tiny".
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


PRESETS = {
    f"{ffn}-{scale}": Preset(f"{ffn}-{scale}", ffn, SCALES[scale.partition("-")[0]], *sizes)
    for ffn, scale, *sizes in (  # layers, d_ff, heads, sub-networks, the paper's count
        ("swiglu", "128m", 12, 2048, None, None, 117.96 * MIB),
        ("swiglu", "370m", 24, 2752, None, None, 388.05 * MIB),
        ("swiglu", "1.3b", 24, 5504, None, None, 1.323 * GIB),
        ("swiglu", "tiny", 2, 352),
        ("mh_ffn", "128m", 10, 2048, 6, None, 115.70 * MIB),
        ("mh_ffn", "370m", 20, 2752, 8, None, 379.79 * MIB),
        ("mh_ffn", "1.3b", 20, 5504, 16),
        ("mh_ffn", "tiny", 2, 256, 2),
        ("flashmhf", "128m", 10, 2048, 6, 8, 115.77 * MIB),
        ("flashmhf", "370m", 21, 2688, 8, 7, 390.08 * MIB),
        ("flashmhf", "1.3b", 20, 5760, 16, 15, 1.321 * GIB),
        ("flashmhf", "tiny", 2, 256, 2, 2),
        ("flashmhf", "128m-dh64", 10, 2112, 12, 11),
        ("flashmhf", "370m-dh64", 21, 2688, 16, 14),
        ("flashmhf", "1.3b-dh64", 20, 5760, 32, 30),
        ("flashmhf", "128m-dh256", 10, 2112, 3, 3),
        ("flashmhf", "370m-dh256", 21, 2816, 4, 4),
        ("flashmhf", "1.3b-dh256", 20, 5632, 8, 8),
    )
}


def preset(name: str) -> Preset:
    """Return the preset of this name; "128m" alone stands for FlashMHF's. Raises ValueError that lists the names."""
    name = f"flashmhf-{name}" if name in SCALES else name
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; supported: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
