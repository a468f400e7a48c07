"""Official checkpoints (``MHFFNMoEForCausalLM``, ``MHFFNForCausalLM``) as :class:`FlashMHFForCausalLM`.

The official model is a Llama whose ``mlp`` is what :mod:`flashmhf.convert` knows. A ``q_norm.weight`` that is not used
is dropped. ``MHFFNForCausalLM`` has published configurations, not code: its settings are read as those of the mixture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, utils

from ..checks import divisor, expect_shape, instance, positive, tensors, weight_dtype
from ..nn import convert
from ..nn.init import INITIALIZER_RANGE, OfficialInit
from ..nn.weights import mark_drawn
from .configuration import FlashMHFConfig
from .modeling import FlashMHFForCausalLM, FlashMHFPreTrainedModel, check_complete

# of the files and the code that wrote them; every other setting of the configuration is carried over
_DROPPED = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version")
_ANSWERING = "transformer."  # in place of "model." in the names of a model for question answering
_GAINS = {
    "init_w_self_gain": "in_proj", "init_w_self_2_gain": "out_proj", "init_gate_gain": "k", "init_up_gain": "u",
    "init_down_gain": "v", "init_router_gain": "router",
}  # fmt: skip
# other official settings are refused by name; "use_flash" and "use_legacy_flash" choose an implementation alone
_KNOWN = {
    "use_flash", "use_legacy_flash", "num_heads", "num_kuv_heads", "num_experts", "skip_linear", "apply_dot_scaling",
    "apply_dot_scaling_theory", "apply_final_scaling", "apply_rmsnorm", "disable_original_mlp_rmsnorm", "custom_init",
    "init_wself_identity", *_GAINS,
}  # fmt: skip


def config_from_official(official: Mapping[str, object]) -> FlashMHFConfig:
    """Return our configuration for an official config.json: model_type "mhffnmoe", "mhffn", or a baseline's "llama".

    Settings outside the feed-forward network are carried over. Scalings have no setting here: :func:`load_official`
    multiplies the weights by them. Raises NotImplementedError, by name, for settings without a counterpart, ValueError
    for another model type, TypeError and ValueError for numbers of heads, and what :class:`FlashMHFConfig` raises.
    """
    if official.get("quantization_config"):
        raise NotImplementedError("quantization_config is set; supported: official checkpoints that are not quantised")
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    for given in (official.get("rope_scaling"), official.get("rope_parameters")):  # transformers 4's name and 5's
        rope |= given or {}
    rope["rope_theta"] = official.get("rope_theta", rope["rope_theta"])
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    prefixes = (*convert.PREFIXES.values(), "rope_")
    shared = {name: x for name, x in official.items() if name not in _DROPPED and not name.startswith(prefixes)}
    if official.get("model_type") == "llama":
        return FlashMHFConfig(**shared, rope_parameters=rope, ffn_type="swiglu", ffn_init="normal")
    settings = convert.official_settings(official)
    unknown = sorted(settings.keys() - _KNOWN)
    if unknown:
        raise NotImplementedError(f"unknown settings of the official configuration: {unknown}")
    for name, value in settings.items():  # "false" is true as a condition
        instance(name, value, int | float | None, "a number or a bool")
    mixture, kv_heads = official.get("model_type") != "mhffn", settings.get("num_kuv_heads")
    heads = positive("num_heads", settings.get("num_heads", 1))
    divisor("num_kuv_heads", kv_heads, "num_heads", heads)
    custom = bool(settings.get("custom_init"))
    return FlashMHFConfig(
        **shared, rope_parameters=rope, ffn_type="flashmhf" if mixture else "mh_ffn", ffn_num_heads=heads,
        ffn_num_kv_heads=None if kv_heads == heads else kv_heads,
        ffn_num_subnets=settings.get("num_experts", 1) if mixture else None,
        ffn_q_norm=bool(settings.get("apply_rmsnorm", False)), ffn_skip_linear=bool(settings.get("skip_linear", False)),
        ffn_norm=not settings.get("disable_original_mlp_rmsnorm", False), ffn_init="official" if custom else "normal",
        ffn_official_init=_official_init(official, settings) if custom else None,
    )  # fmt: skip


def _official_init(official: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, object]:
    """Return the gains with what the weights take in: the scale of the scores, and initializer_range in units of ours.

    Under apply_dot_scaling_theory the official code divides the root of the scores' scale out, the sum's out of V.
    """
    gains = {ours: float(settings.get(theirs, 1.0)) for theirs, ours in _GAINS.items()}
    score, _ = convert.official_scales(official)
    score = math.sqrt(score) if settings.get("apply_dot_scaling_theory") else score
    unit = official.get("initializer_range", INITIALIZER_RANGE) / INITIALIZER_RANGE
    factors = {"k": score * unit, "u": score * unit, "v": unit, "router": unit}
    gains = {name: gain * factors.get(name, 1.0) for name, gain in gains.items()}
    gains["identity"] = bool(settings.get("init_wself_identity", False))
    return {name: value for name, value in gains.items() if value != getattr(OfficialInit(), name)}


def _converted(state: Mapping[str, Tensor], config: FlashMHFConfig, scales: tuple[float, float]) -> dict[str, Tensor]:
    """Return our state dict for the official one of a whole model. K, U and V are multiplied by ``scales``."""
    ours, networks = {}, {}
    for name, tensor in state.items():
        if name.startswith(_ANSWERING):
            name = "model." + name.removeprefix(_ANSWERING)
        prefix, mlp, rest = name.partition(".mlp.")
        if mlp and config.ffn_type != "swiglu":  # a baseline's names are Llama's and ours
            networks.setdefault(prefix + mlp, {})[rest] = tensor
        else:
            ours[name] = tensor
    embedding = ours.get("model.embed_tokens.weight")
    tied = embedding is not None and config.tie_word_embeddings
    if tied and not torch.equal(ours.pop("lm_head.weight", embedding), embedding):
        raise ValueError("lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is true")
    sizes = {"num_kv_heads": config.ffn_num_kv_heads, "skip_linear": config.ffn_skip_linear}
    for prefix, official in networks.items():
        network = convert.from_official(official, config.ffn_num_heads, config.ffn_num_subnets, scales=scales, **sizes)
        columns = network["k"].shape[0] * config.hidden_size // config.ffn_num_heads
        expected = (config.intermediate_size, columns), "[d_ff, H_kv d_h] of the configuration"
        expect_shape(f"{prefix}gate_weight", official["gate_weight"], *expected)
        if not config.ffn_q_norm:
            network.pop("q_norm.weight", None)
        ours |= {prefix + name: tensor for name, tensor in network.items()}
    return ours


def _read_state(directory: Path) -> dict[str, Tensor]:
    """Read a checkpoint directory as transformers would: a whole file or an index's, safetensors first."""
    names = utils.SAFE_WEIGHTS_NAME, utils.SAFE_WEIGHTS_INDEX_NAME, utils.WEIGHTS_NAME, utils.WEIGHTS_INDEX_NAME
    found = next((name for name in names if (directory / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{directory} has no weights; expected one of {', '.join(names)}")
    is_index = found.endswith(".json")
    place = json.loads((directory / found).read_text(encoding="utf-8"))["weight_map"] if is_index else {}
    files, state = sorted({*place.values()}) if is_index else [found], {}
    if lacking := [file for file in files if not (directory / file).is_file()]:
        raise FileNotFoundError(f"{directory} lacks {lacking}, which {found} names")
    for file in files:
        if file.endswith(".safetensors"):
            stored = load_file(directory / file)
        else:
            tensors(**(stored := torch.load(directory / file, "cpu", weights_only=True)))
            # such a file may hold one tensor under two names, which would be trained as one
            stored = {name: tensor.clone() for name, tensor in stored.items()}
        state |= {name: tensor for name, tensor in stored.items() if place.get(name, file) == file}
    return state


def load_official(
    directory: str | Path, dtype: torch.dtype | None = None,
    model_class: type[FlashMHFPreTrainedModel] = FlashMHFForCausalLM,
) -> FlashMHFPreTrainedModel:  # fmt: skip
    """Load an official checkpoint directory as our model, in eval mode on the CPU.

    dtype: None for the stored one. model_class: a FlashMHFFor... class, for the official models with other heads.
    Raises FileNotFoundError if there are no weights, ValueError for missing and for unknown ones, and what
    :func:`config_from_official` and :func:`flashmhf.convert.from_official` raise.
    """
    weight_dtype(dtype)
    directory = Path(directory)
    official = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = config_from_official(official)
    scales = (1.0, 1.0) if config.ffn_type == "swiglu" else convert.official_scales(official)
    try:
        state = _converted(_read_state(directory), config, scales)
    except KeyError as error:
        raise ValueError(f"{directory} lacks weights of its model: {error.args[0]}") from error
    with torch.device("meta"):
        model = model_class(config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    check_complete(directory, set(missing) - model.all_tied_weights_keys.keys())
    if unexpected:
        raise ValueError(f"{directory} does not fit its config.json: unexpected {unexpected}")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its buffers are in no checkpoint
    mark_drawn(model)
    if model.can_generate():  # in transformers 4 settings of the generation were some of the configuration
        own = (directory / utils.GENERATION_CONFIG_NAME).is_file()
        settings = {} if own else {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(directory, **settings)
    return model.to(dtype or model.model.embed_tokens.weight.dtype).eval()
