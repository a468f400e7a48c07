"""The paper's models by name (table "Model and training configurations"), and tiny ones for CPUs.

``OFFICIAL`` has the configurations that the official repository ships, by the names of their files: d_h = 96 and d_e =
256 in the 128M mixture, d_e = 256 in the others. Everywhere else a name is ``<ffn>-<scale>``, as in "flashmhf-370m",
with "-dh64" or "-dh256" for the head-dimension ablation.
``printed_parameters`` is the count as the paper prints it, in units of 2**20 ("M") or 2**30 ("B"); so read, all nine
follow from the configurations, those of FlashMHF with the weights of the per-head RMSNorm on Q, which the official code
always allocates. Entries without one complete the grid at the parameters of that scale's baseline.

Sizes, vocabulary, batch, context, learning rate and steps are the paper's; so are the other defaults of
``flashmhf_recipes``' options, but for the initialisation (``ffn_init="balanced"``), the lower learning rate of
projections (``Options.param_groups``) and the scale "tiny", which are ours.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from ..nn import default_subnet_dim
from .configuration import FFN_TYPES, FlashMHFConfig

VOCABULARY = 50_432


@dataclass(frozen=True)
class Scale:
    """Settings that the models of one scale share."""

    d_model: int
    attention_heads: int
    tied: bool
    learning_rate: float
    steps: int
    context: int = 4096
    vocabulary: int = VOCABULARY
    batch: int = 64


SCALES = {
    "128m": Scale(768, 12, True, 3e-3, 245_000),
    "370m": Scale(1024, 16, False, 1.5e-3, 245_000),
    "1.3b": Scale(2048, 32, False, 1e-3, 409_000),
    "tiny": Scale(64, 2, True, 3e-3, 200, context=128, vocabulary=512, batch=8),
}
MIB, GIB = 2**20, 2**30


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
    # arguments of FlashMHFConfig beside the sizes
    settings: dict[str, object] = field(default_factory=dict, compare=False)

    def config(self, **overrides) -> FlashMHFConfig:
        """Return the model's configuration; ``overrides`` are FlashMHFConfig arguments."""
        settings = dict(
            ffn_type=self.ffn,
            vocab_size=self.scale.vocabulary,
            hidden_size=self.scale.d_model,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.scale.attention_heads,
            ffn_num_heads=self.heads,
            ffn_num_subnets=self.subnets,
            tie_word_embeddings=self.scale.tied,
            max_position_embeddings=self.scale.context,
            rms_norm_eps=1e-5,
            initializer_range=0.02,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=0,
            eos_token_id=0,
        )
        return FlashMHFConfig(**{**settings, **copy.deepcopy(self.settings), **overrides})


def _table() -> dict[str, Preset]:
    presets = {}

    def add(
        scale: str, ffn: str, layers: int, intermediate: int, heads=None, subnets=None, printed=None, suffix=""
    ) -> None:
        name = f"{ffn}-{scale}{suffix}"
        presets[name] = Preset(name, ffn, SCALES[scale], layers, intermediate, heads, subnets, printed)

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
            d_e = default_subnet_dim(head_dim)
            subnets = round(d_ff / d_e)
            add(
                scale,
                "flashmhf",
                layers,
                subnets * d_e,
                SCALES[scale].d_model // head_dim,
                subnets,
                suffix=f"-dh{head_dim}",
            )
    for ffn in FFN_TYPES:
        heads = None if ffn in ("swiglu", "dense_moe") else 2
        subnets = 2 if ffn in ("dense_moe", "flashmhf") else None
        add("tiny", ffn, 2, {"swiglu": 192, "dense_moe": 192, "pkv": 192}.get(ffn, 128), heads, subnets)
    return presets


PRESETS = _table()


_INIT = {"ffn_init": "official", "ffn_official_init": {}}
_SMALL_MHFFN = {"ffn_init": "official", "ffn_official_init": {"in_proj": 1.0, "out_proj": 1.0}}
OFFICIAL = {
    name: Preset(name, ffn, SCALES[scale], layers, intermediate, heads, subnets, settings=settings)
    for name, ffn, scale, layers, intermediate, heads, subnets, settings in (
        ("configure-1-tinymhffnmoe", "flashmhf", "128m", 10, 2048, 8, 8, _INIT),
        ("configure-2-mhffnmoe-TriDao-350M", "flashmhf", "370m", 20, 2816, 8, 11, _INIT | {"ffn_q_norm": True}),
        ("configure-3-mhffnmoe-TriDao-1.3B", "flashmhf", "1.3b", 20, 5632, 16, 22, _INIT | {"ffn_q_norm": True}),
        ("configure7-tinymhffn", "mh_ffn", "128m", 10, 2048, 8, None, _SMALL_MHFFN),
        ("configure8-TriDao-350M-noskip", "mh_ffn", "370m", 20, 2752, 8, None, _INIT | {"ffn_q_norm": True}),
        ("configure8-tinyllama", "swiglu", "128m", 12, 2048, None, None, {"ffn_init": "normal"}),
        ("configure9-TriDao-350M-bf16-pile", "swiglu", "370m", 24, 2752, None, None, {"ffn_init": "normal"}),
        ("configure10-TriDao-1.3B-bf16-pile", "swiglu", "1.3b", 24, 5504, None, None, {"ffn_init": "normal"}),
    )
}


def preset(name: str) -> Preset:
    """Return the preset of this name; a scale alone ("128m") stands for FlashMHF's. Raises ValueError that lists the
    names.
    """
    presets = PRESETS | OFFICIAL
    name = f"flashmhf-{name}" if name in SCALES else name
    if name not in presets:
        raise ValueError(f"no preset {name!r}; supported: {', '.join(sorted(presets))}")
    return presets[name]
