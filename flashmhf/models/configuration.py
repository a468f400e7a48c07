"""Configuration of a Llama with one of the paper's feed-forward networks. This module does not postpone annotations:
@strict checks a field's type only if its annotation is a type, not a string.
"""

import math
from pathlib import Path

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from ..checks import choice, divisor, epsilon, positive
from ..nn.flashmhf import default_num_heads, default_subnet_dim
from ..nn.init import DEFAULT_INIT, INITS, OfficialInit
from ..reference import ACTIVATIONS

FFN_TYPES = ("swiglu", "mh_ffn", "flashmhf")
_FORMER_TYPES = ("pkv", "dense_moe")  # the paper's other networks, which are modules alone
_LACKING = {
    "swiglu": (
        "ffn_num_heads", "ffn_num_subnets", "ffn_num_kv_heads", "ffn_q_norm", "ffn_skip_linear", "ffn_recompute_q",
    ),
    "mh_ffn": ("ffn_num_subnets", "ffn_recompute_q"),
}  # fmt: skip
_ATTENTION_PLAN = {name: style for name, style in LlamaConfig.base_model_tp_plan.items() if ".mlp." not in name}
# A saved model names this module, so that AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True) finds
# the classes where flashmhf is installed but not imported. The module holds no code of the model.
_AUTO_MODULE = "modeling_flashmhf"
AUTO_CLASSES = {"AutoConfig": "FlashMHFConfig", "AutoModel": "FlashMHFModel"}
for _head in ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
    AUTO_CLASSES[f"AutoModelFor{_head}"] = f"FlashMHFFor{_head}"
_AUTO_SOURCE = f'''"""The classes of this model, from the installed package: pip install "flashmhf[lm]"."""

from flashmhf.models import {", ".join(AUTO_CLASSES.values())}

__all__ = [{", ".join(f'"{name}"' for name in AUTO_CLASSES.values())}]
'''


def _num_subnets(intermediate_size: int, usual: int) -> int:
    """Return E, a divisor of intermediate_size, for widths near ``usual``: those that fill the kernels' tiles
    (multiples of 64) come before those that the kernels take (of 16), and these before all others.
    """

    def rank(count: int) -> tuple[bool, bool, float]:
        width = intermediate_size // count
        return width % 64 > 0, width % 16 > 0, abs(math.log(width / usual))

    divisors = (count for count in range(1, intermediate_size + 1) if intermediate_size % count == 0)
    return min(divisors, key=rank, default=1)


@strict
class FlashMHFConfig(LlamaConfig):
    """Configure a Llama with a choice of feed-forward network.

    Args:
        ffn_type: "flashmhf" (section 3.2), "mh_ffn" (section 3.1), or the baseline, "swiglu", which has none of the
            settings of heads and takes hidden_act "silu" alone; the others "gelu", "relu" and "relu2", too.
        intermediate_size: d_ff = E d_e; a head's width for "mh_ffn".
        ffn_num_heads: H, a divisor of hidden_size; None as in :func:`flashmhf.replace_ffn`.
        ffn_num_subnets: E of "flashmhf", a divisor of intermediate_size; None for d_e near 8/3 d_h, a multiple of 64 or
            else of 16 if there is one.
        ffn_num_kv_heads, ffn_q_norm, ffn_skip_linear, ffn_recompute_q: as in :class:`flashmhf.FlashMHF`, which alone
            has the last.
        ffn_router_eps: the eps of the gate's normalisation.
        ffn_norm: whether an RMSNorm precedes the network (negates ``mhffnmoe_disable_original_mlp_rmsnorm``).
        ffn_init, ffn_official_init: flashmhf.nn.init's "balanced", "official" (with the gains of OfficialInit) or
            "normal". All else is drawn from N(0, initializer_range).
        ffn_backend, ffn_deterministic: as in :func:`flashmhf.flash_mhf`; "naive" is a back end of "mh_ffn", too.
        mlp_bias: give the projections biases.

    Raises huggingface_hub's StrictDataclassError for wrong types, sizes that do not divide, and settings that the
    chosen network lacks.
    """

    model_type = "flashmhf"
    base_model_tp_plan = _ATTENTION_PLAN  # transformers replicates all networks but SwiGLU, see distributed.parallelize

    ffn_type: str = "flashmhf"
    ffn_num_heads: int | None = None
    ffn_num_subnets: int | None = None
    ffn_num_kv_heads: int | None = None
    ffn_q_norm: bool = False
    ffn_skip_linear: bool = False
    ffn_recompute_q: bool = False
    ffn_router_eps: float | int = 1e-20
    ffn_norm: bool = True
    ffn_init: str = DEFAULT_INIT
    ffn_official_init: dict | None = None
    ffn_backend: str = "auto"
    ffn_deterministic: bool | None = None

    def __post_init__(self, **kwargs):
        if self.ffn_type == "swiglu":
            self.base_model_tp_plan = dict(LlamaConfig.base_model_tp_plan)
        elif self.ffn_num_heads is None:
            self.ffn_num_heads = default_num_heads(self.hidden_size)
        if self.ffn_num_subnets is None and self.ffn_type == "flashmhf":
            head_dim = self.hidden_size // max(1, self.ffn_num_heads)
            self.ffn_num_subnets = _num_subnets(self.intermediate_size, default_subnet_dim(max(1, head_dim)))
        if self.hidden_act == "swish":  # transformers' other name of it
            self.hidden_act = "silu"
        if self.head_dim is None:  # LlamaConfig's, which fails where there are no heads
            self.head_dim = self.hidden_size // max(1, self.num_attention_heads)
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """Write config.json as transformers does, with an ``auto_map`` and, beside it, the module that this names."""
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{_AUTO_MODULE}.py").write_text(_AUTO_SOURCE, "utf-8")
        self.auto_map = {auto: f"{_AUTO_MODULE}.{name}" for auto, name in AUTO_CLASSES.items()}
        super().save_pretrained(save_directory, **kwargs)
        if push_to_hub:  # transformers' own save_pretrained would upload config.json alone
            self.push_to_hub(kwargs.pop("repo_id", directory.name), **kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Take every ffn_ setting: transformers passes over those it does not know, which the constructor refuses."""
        given = {name: kwargs.pop(name) for name in [*kwargs] if name.startswith("ffn_")}
        return super().from_dict(config_dict | given, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Do nothing: transformers would copy this package's sources into every saved model, where they cannot run."""

    def validate_architecture(self):
        """Check the settings together; transformers calls this after construction."""
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            positive(name, getattr(self, name))
        super().validate_architecture()
        # transformers itself says so only in later versions than 5.17
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary position embeddings need an even one")
        for name in ("rms_norm_eps", "ffn_router_eps"):
            epsilon(name, getattr(self, name))
        if not 0 <= (self.attention_dropout or 0) <= 1:  # LlamaConfig takes None
            raise ValueError(f"attention_dropout is {self.attention_dropout}; supported: numbers from 0 to 1")
        divisor("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", self.num_attention_heads)
        if self.ffn_type not in FFN_TYPES:
            former = ", which flashmhf 0.1 had" if self.ffn_type in _FORMER_TYPES else ""
            raise ValueError(f"ffn_type is {self.ffn_type!r}{former}; supported: {', '.join(FFN_TYPES)}")
        known = [name for name in self.__dataclass_fields__ if name.startswith("ffn_")]
        if unknown := sorted(name for name in vars(self) if name.startswith("ffn_") and name not in known):
            raise ValueError(f"unknown settings: {unknown}; supported: {', '.join(known)}")
        choice("ffn_init", self.ffn_init, INITS)
        activations = ("silu",) if self.ffn_type == "swiglu" else ACTIVATIONS
        if self.hidden_act not in activations:
            supported = ", ".join(map(repr, activations))
            raise ValueError(f"hidden_act is {self.hidden_act!r}; ffn_type={self.ffn_type!r} supports: {supported}")
        for name in _LACKING.get(self.ffn_type, ()):
            if (value := getattr(self, name)) is not None and value is not False:
                raise ValueError(f"{name} is {value}; ffn_type={self.ffn_type!r} has none, leave it out")
        for name, of in (
            ("ffn_num_heads", "hidden_size"), ("ffn_num_kv_heads", "ffn_num_heads"),
            ("ffn_num_subnets", "intermediate_size"),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                divisor(name, getattr(self, name), of, getattr(self, of))
        if self.ffn_skip_linear and self.mlp_bias:
            raise ValueError("mlp_bias=True is not supported with ffn_skip_linear=True, without W_in and W_out")
        if self.ffn_recompute_q and self.ffn_skip_linear:
            raise ValueError("ffn_recompute_q=True is not supported with ffn_skip_linear=True, without W_in")
        self.official_init  # noqa: B018  raises for unknown gains

    @property
    def official_init(self) -> OfficialInit:
        """Return the gains of ffn_init="official". Raises ValueError for an unknown name in ``ffn_official_init``."""
        gains, known = self.ffn_official_init or {}, OfficialInit.__dataclass_fields__
        if unknown := sorted(gains.keys() - known.keys()):
            raise ValueError(f"ffn_official_init has {unknown}; supported: {', '.join(known)}")
        return OfficialInit(**gains)

    @property
    def ffn_subnet_dim(self) -> int | None:
        """Return d_e, or None if the network has no sub-networks."""
        return None if self.ffn_num_subnets is None else self.intermediate_size // self.ffn_num_subnets
