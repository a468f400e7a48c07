"""Official checkpoints (``MHFFNMoEForCausalLM``, ``MHFFNForCausalLM``) <-> :class:`FlashMHFForCausalLM`.

Configuration, state dict, directory. The official model is a Llama whose ``mlp`` is the module that
:mod:`flashmhf.convert` knows; everything else has Llama's names. Its ``q_norm.weight`` exists even when unused (it then
never gets a gradient and stays at ones): it is dropped here when unused, and written as ones on the way back. The
official repository has configurations of ``MHFFNForCausalLM`` but not its code: their settings are read as those of the
mixture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..nn import convert
from ..nn.arguments import divisor, positive
from ..nn.init import INITIALIZER_RANGE, OfficialInit
from .configuration import FlashMHFConfig
from .modeling import FlashMHFForCausalLM, FlashMHFForQuestionAnswering, FlashMHFPreTrainedModel, check_complete

_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_bias",
    "attention_dropout",
    "mlp_bias",
    "head_dim",
)
_OF_HEADS = ("id2label", "label2id", "problem_type", "classifier_dropout", "hidden_dropout")  # of classification
_ROUTER_EPS = 1e-20  # the official code's, a constant
_ANSWERING = "transformer."  # in place of "model." in the names of a model for question answering
_GAINS = {
    "init_w_self_gain": "in_proj",
    "init_w_self_2_gain": "out_proj",
    "init_gate_gain": "k",
    "init_up_gain": "u",
    "init_down_gain": "v",
    "init_router_gain": "router",
}
_KNOWN = {  # other official settings are refused by name
    "use_flash",  # these two choose an implementation, not the function
    "use_legacy_flash",
    "num_heads",
    "num_kuv_heads",
    "num_experts",
    "skip_linear",
    "apply_dot_scaling",
    "apply_dot_scaling_theory",
    "apply_final_scaling",
    "apply_rmsnorm",
    "disable_original_mlp_rmsnorm",
    "custom_init",
    "init_wself_identity",
    *_GAINS,
}


def config_from_official(official: Mapping[str, object]) -> FlashMHFConfig:
    """Return our configuration for the content of an official config.json: model_type "mhffnmoe", "mhffn", or a
    baseline's "llama".

    Scalings have no setting here: :func:`state_from_official` multiplies the weights by them, and the gains of the
    initialisation carry them.

    Raises NotImplementedError, by name, for official settings without a counterpart, ValueError for another model type,
    TypeError and ValueError for numbers of heads, and what :class:`FlashMHFConfig` raises.
    """
    rope = {
        "rope_type": "default",
        **(official.get("rope_scaling") or {}),
        "rope_theta": official.get("rope_theta", 10_000.0),
    }
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    shared = {name: official[name] for name in (*_SHARED, *_OF_HEADS) if name in official}
    if official.get("model_type") == "llama":
        return FlashMHFConfig(**shared, rope_parameters=rope, ffn_type="swiglu", ffn_init="normal")
    settings = convert.official_settings(official)
    unknown = sorted(settings.keys() - _KNOWN)
    if unknown:
        raise NotImplementedError(f"unknown settings of the official configuration: {unknown}")
    mixture, kv_heads = "mhffn" != official.get("model_type"), settings.get("num_kuv_heads")
    heads = positive("num_heads", settings.get("num_heads", 1))
    divisor("num_kuv_heads", kv_heads, "num_heads", heads)
    custom = bool(settings.get("custom_init"))
    return FlashMHFConfig(
        **{**shared, "hidden_act": convert.official_activation(official)},
        rope_parameters=rope,
        ffn_type="flashmhf" if mixture else "mh_ffn",
        ffn_num_heads=heads,
        ffn_num_kv_heads=None if kv_heads == heads else kv_heads,
        ffn_num_subnets=settings.get("num_experts", 1) if mixture else None,
        ffn_q_norm=bool(settings.get("apply_rmsnorm", False)),
        ffn_skip_linear=bool(settings.get("skip_linear", False)),
        ffn_norm=not settings.get("disable_original_mlp_rmsnorm", False),
        ffn_init="official" if custom else "normal",
        ffn_official_init=_official_init(official, settings) if custom else None,
    )


def _official_init(official: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, object]:
    """Return the gains with what the weights take in: the scale of the scores, and initializer_range in units of ours.

    Under apply_dot_scaling_theory the official initialisation divides the square root of the scores' scale out. It
    divides the scale of the sum out of V altogether.
    """
    gains = {ours: float(settings.get(theirs, 1.0)) for theirs, ours in _GAINS.items()}
    score, _ = convert.official_scales(official)
    score = math.sqrt(score) if settings.get("apply_dot_scaling_theory") else score
    unit = official.get("initializer_range", INITIALIZER_RANGE) / INITIALIZER_RANGE
    factors = {"k": score * unit, "u": score * unit, "v": unit, "router": unit}
    gains = {name: gain * factors.get(name, 1.0) for name, gain in gains.items()}
    gains["identity"] = bool(settings.get("init_wself_identity", False))
    return {name: value for name, value in gains.items() if value != getattr(OfficialInit(), name)}


def config_to_official(config: FlashMHFConfig) -> dict[str, object]:
    """Return the content of the official config.json for our configuration. It has no scalings: the weights carry them.

    Raises NotImplementedError for other feed-forward networks than flashmhf and mh_ffn, and for an ``ffn_router_eps``
    above the official constant, with which the official code would compute another function.
    """
    model_type = {"flashmhf": "mhffnmoe", "mh_ffn": "mhffn"}.get(config.ffn_type)
    if model_type is None:
        raise NotImplementedError(
            f"ffn_type is {config.ffn_type!r}; the official code supports 'flashmhf' and 'mh_ffn'"
        )
    if config.ffn_type == "flashmhf" and config.ffn_router_eps > _ROUTER_EPS:
        raise NotImplementedError(
            f"ffn_router_eps is {config.ffn_router_eps}; the official code supports at most {_ROUTER_EPS}"
        )
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    settings = {
        "num_heads": config.ffn_num_heads,
        "num_kuv_heads": config.ffn_num_kv_heads or config.ffn_num_heads,
        "skip_linear": config.ffn_skip_linear,
        "apply_rmsnorm": config.ffn_q_norm,
        "disable_original_mlp_rmsnorm": not config.ffn_norm,
        "custom_init": config.ffn_init == "official",
    }
    if model_type == "mhffnmoe":
        settings["num_experts"] = config.ffn_num_subnets
    if config.ffn_init == "official":
        gains, unit = config.official_init, config.initializer_range / INITIALIZER_RANGE
        scaled = ("k", "u", "v", "router")
        settings |= {theirs: getattr(gains, ours) / (unit if ours in scaled else 1) for theirs, ours in _GAINS.items()}
        settings["init_wself_identity"] = gains.identity
        if model_type == "mhffn":
            del settings["init_router_gain"]
    return {
        "architectures": ["MHFFNMoEForCausalLM" if model_type == "mhffnmoe" else "MHFFNForCausalLM"],
        "model_type": model_type,
        **{name: getattr(config, name) for name in _SHARED},
        **{name: value for name in _OF_HEADS if (value := getattr(config, name, None)) is not None},
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        **{convert.PREFIXES[model_type] + name: value for name, value in settings.items()},
    }


def _split_layers(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the tensors outside the feed-forward networks, and those inside by the network's prefix."""
    outside, inside = {}, {}
    for name, tensor in state.items():
        prefix, mlp, rest = name.partition(".mlp.")
        if mlp:
            inside.setdefault(prefix + mlp, {})[rest] = tensor
        else:
            outside[name] = tensor
    return outside, inside


def _check_sizes(prefix: str, official: Mapping[str, Tensor], config: FlashMHFConfig) -> None:
    """Raise ValueError if one network's official weights have other sizes than the configuration."""
    heads, kv_heads = config.ffn_num_heads, config.ffn_num_kv_heads or config.ffn_num_heads
    convert.check_official(official, heads, config.ffn_num_subnets, kv_heads, config.ffn_skip_linear)
    found, expected = (
        list(official["gate_weight"].shape),
        [config.intermediate_size, config.hidden_size // heads * kv_heads],
    )
    if found != expected:
        raise ValueError(
            f"{prefix}gate_weight has shape {found}; expected {expected} ([d_ff, H_kv d_h] of the configuration)"
        )


def state_from_official(
    state: Mapping[str, Tensor], config: FlashMHFConfig, scales: tuple[float, float] = (1.0, 1.0)
) -> dict[str, Tensor]:
    """Return our state dict for the official one of a whole model, given the configuration of
    :func:`config_from_official`.

    ``scales`` is ``flashmhf.convert.official_scales(official)``; K, U and V are multiplied by them.
    """
    outside, inside = _split_layers(state)
    embedding = outside.get("model.embed_tokens.weight")
    if (
        embedding is not None
        and config.tie_word_embeddings
        and not torch.equal(outside.pop("lm_head.weight", embedding), embedding)
    ):
        raise ValueError("lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is true")
    for prefix, official in inside.items():
        if config.ffn_type == "swiglu":  # a baseline's names are Llama's and ours
            outside.update({prefix + name: tensor for name, tensor in official.items()})
            continue
        ours = convert.from_official(
            official,
            config.ffn_num_heads,
            config.ffn_num_subnets,
            num_kv_heads=config.ffn_num_kv_heads,
            skip_linear=config.ffn_skip_linear,
            scales=scales,
        )
        _check_sizes(prefix, official, config)
        if not config.ffn_q_norm:
            ours.pop("q_norm.weight", None)
        outside.update({prefix + name: tensor for name, tensor in ours.items()})
    return outside


def state_to_official(state: Mapping[str, Tensor], config: FlashMHFConfig) -> dict[str, Tensor]:
    """Return the official state dict for ours of a whole model, complete for a strict load there."""
    outside, inside = _split_layers(state)
    for prefix, ours in inside.items():
        official = convert.to_official(ours)
        _check_sizes(prefix, official, config)
        official.setdefault("q_norm.weight", ours["k"].new_ones(config.ffn_num_heads, ours["k"].shape[-1]))
        outside.update({prefix + name: tensor for name, tensor in official.items()})
    if config.tie_word_embeddings:
        outside.setdefault("lm_head.weight", outside["model.embed_tokens.weight"])
    return outside


def _read_state(directory: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint directory, from one or several safetensors or PyTorch files."""
    for pattern, load in (
        ("*.safetensors", load_file),
        ("pytorch_model*.bin", lambda path: torch.load(path, "cpu", weights_only=True)),
    ):
        files = sorted(directory.glob(pattern))
        if files:
            return {name: tensor for file in files for name, tensor in load(file).items()}
    raise FileNotFoundError(f"{directory} has neither *.safetensors nor pytorch_model*.bin")


def load_official(
    directory: str | Path,
    dtype: torch.dtype | None = None,
    model_class: type[FlashMHFPreTrainedModel] = FlashMHFForCausalLM,
) -> FlashMHFPreTrainedModel:
    """Load an official checkpoint directory (config.json and weights) as our model, in eval mode on the CPU.

    Args:
        directory: the directory that holds config.json and the weights.
        dtype: the model's dtype; None for the stored one.
        model_class: FlashMHFForSequenceClassification, FlashMHFForTokenClassification or FlashMHFForQuestionAnswering
            for the official models with those heads.

    Raises FileNotFoundError if there are no weights, ValueError for missing and for unknown ones, and what
    :func:`config_from_official` and :func:`flashmhf.convert.from_official` raise.
    """
    directory = Path(directory)
    official = json.loads((directory / "config.json").read_text())
    config = config_from_official(official)
    scales = (1.0, 1.0) if config.ffn_type == "swiglu" else convert.official_scales(official)
    stored = {
        name.replace(_ANSWERING, "model.", 1) if name.startswith(_ANSWERING) else name: w
        for name, w in _read_state(directory).items()
    }
    try:
        state = state_from_official(stored, config, scales)
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
    return model.to(dtype or model.model.embed_tokens.weight.dtype).eval()


def save_official(model: FlashMHFPreTrainedModel, directory: str | Path) -> None:
    """Write config.json and model.safetensors as the official code reads them, for a language model or a model with
    another head.
    """
    directory = Path(directory)
    official = config_to_official(model.config)
    language_model = official["architectures"][0]
    official["architectures"] = [
        language_model.removesuffix("ForCausalLM") + type(model).__name__.removeprefix("FlashMHF")
    ]
    official["torch_dtype"] = str(model.dtype).removeprefix("torch.")
    state = {name: tensor.contiguous() for name, tensor in state_to_official(model.state_dict(), model.config).items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]  # safetensors stores no tensor twice; the official model ties it on loading
    if isinstance(model, FlashMHFForQuestionAnswering):
        state = {
            name.replace("model.", _ANSWERING, 1) if name.startswith("model.") else name: w for name, w in state.items()
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(official, indent=2) + "\n")
