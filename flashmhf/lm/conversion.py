"""Official checkpoints (``MHFFNMoEForCausalLM``) <-> :class:`FlashMHFForCausalLM`: configuration, state dict, directory.

The official model is a Llama whose ``mlp`` is the module that :mod:`flashmhf.convert` knows; everything else has Llama's names.
Its ``q_norm.weight`` exists even when unused (it then never gets a gradient and stays at ones): it is dropped here when unused, and
written as ones on the way back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..nn import convert
from .configuration import FlashMHFConfig
from .modeling import FlashMHFForCausalLM

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
# Official settings that choose an implementation or initial values, not the function; the rest is handled or refused by name.
_WITHOUT_EFFECT = {
    "mhffnmoe_use_flash",
    "mhffnmoe_use_legacy_flash",
    "mhffnmoe_init_wself_identity",
    *(f"mhffnmoe_init_{name}_gain" for name in ("w_self", "w_self_2", "gate", "up", "down", "router")),
}
_HANDLED = {
    "mhffnmoe_num_heads",
    "mhffnmoe_num_kuv_heads",
    "mhffnmoe_num_experts",
    "mhffnmoe_skip_linear",
    "mhffnmoe_apply_dot_scaling",
    "mhffnmoe_apply_dot_scaling_theory",
    "mhffnmoe_apply_final_scaling",
    "mhffnmoe_apply_rmsnorm",
    "mhffnmoe_disable_original_mlp_rmsnorm",
    "mhffnmoe_custom_init",
}


def config_from_official(official: Mapping[str, object]) -> FlashMHFConfig:
    """The official config.json's content -> our configuration.

    Raises NotImplementedError, by name, for official settings without a counterpart, ValueError for another model type.
    """
    if official.get("model_type", "mhffnmoe") != "mhffnmoe":
        raise ValueError(f"model_type is {official['model_type']!r}; expected 'mhffnmoe'")
    convert.check_official_config(official)
    unknown = sorted(name for name in official if name.startswith("mhffnmoe_") and name not in _WITHOUT_EFFECT | _HANDLED)
    if unknown:
        raise NotImplementedError(f"unknown settings of the official configuration: {unknown}")
    rope = {"rope_type": "default", **(official.get("rope_scaling") or {}), "rope_theta": official.get("rope_theta", 10_000.0)}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    return FlashMHFConfig(
        **{name: official[name] for name in _SHARED if name in official},
        rope_parameters=rope,
        ffn_type="flashmhf",
        ffn_num_heads=official.get("mhffnmoe_num_heads", 1),
        ffn_num_subnets=official.get("mhffnmoe_num_experts", 1),
        ffn_q_norm=bool(official.get("mhffnmoe_apply_rmsnorm", False)),
        ffn_norm=not official.get("mhffnmoe_disable_original_mlp_rmsnorm", False),
        ffn_init="official" if official.get("mhffnmoe_custom_init") else "normal",
    )


def config_to_official(config: FlashMHFConfig) -> dict[str, object]:
    """Our configuration -> the official config.json's content. NotImplementedError for other feed-forward networks than flashmhf."""
    if config.ffn_type != "flashmhf":
        raise NotImplementedError(f"the official model has ffn_type='flashmhf' only, got {config.ffn_type!r}")
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        "architectures": ["MHFFNMoEForCausalLM"],
        "model_type": "mhffnmoe",
        **{name: getattr(config, name) for name in _SHARED},
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "mhffnmoe_num_heads": config.ffn_num_heads,
        "mhffnmoe_num_kuv_heads": config.ffn_num_heads,
        "mhffnmoe_num_experts": config.ffn_num_subnets,
        "mhffnmoe_apply_rmsnorm": config.ffn_q_norm,
        "mhffnmoe_disable_original_mlp_rmsnorm": not config.ffn_norm,
        "mhffnmoe_custom_init": config.ffn_init == "official",
    }


def _split_layers(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Tensors outside the feed-forward networks, and those inside by the network's prefix."""
    outside, inside = {}, {}
    for name, tensor in state.items():
        prefix, mlp, rest = name.partition(".mlp.")
        if mlp:
            inside.setdefault(prefix + mlp, {})[rest] = tensor
        else:
            outside[name] = tensor
    return outside, inside


def state_from_official(state: Mapping[str, Tensor], config: FlashMHFConfig) -> dict[str, Tensor]:
    """Official state dict of the whole model -> ours, for the configuration that :func:`config_from_official` gave."""
    outside, inside = _split_layers(state)
    if config.tie_word_embeddings and not torch.equal(
        outside.pop("lm_head.weight", outside["model.embed_tokens.weight"]), outside["model.embed_tokens.weight"]
    ):
        raise ValueError("lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is true")
    for prefix, official in inside.items():
        ours = convert.from_official(official, config.ffn_num_heads, config.ffn_num_subnets)
        if not config.ffn_q_norm:
            ours.pop("q_norm.weight", None)
        outside.update({prefix + name: tensor for name, tensor in ours.items()})
    return outside


def state_to_official(state: Mapping[str, Tensor], config: FlashMHFConfig) -> dict[str, Tensor]:
    """Our state dict of the whole model -> the official one, complete for a strict load there."""
    outside, inside = _split_layers(state)
    for prefix, ours in inside.items():
        heads, _, _, head_dim = ours["k"].shape
        official = {"q_norm.weight": ours["k"].new_ones(heads, head_dim), **convert.to_official(ours)}
        outside.update({prefix + name: tensor for name, tensor in official.items()})
    if config.tie_word_embeddings:
        outside.setdefault("lm_head.weight", outside["model.embed_tokens.weight"])
    return outside


def _read_state(directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint directory: safetensors or PyTorch files, one or several."""
    for pattern, load in (("*.safetensors", load_file), ("pytorch_model*.bin", lambda path: torch.load(path, "cpu", weights_only=True))):
        files = sorted(directory.glob(pattern))
        if files:
            return {name: tensor for file in files for name, tensor in load(file).items()}
    raise FileNotFoundError(f"{directory} has neither *.safetensors nor pytorch_model*.bin")


def load_official(directory: str | Path, dtype: torch.dtype | None = None) -> FlashMHFForCausalLM:
    """An official checkpoint directory (config.json and weights) as our model, in its stored dtype unless ``dtype`` is given.

    Raises FileNotFoundError, and what :func:`config_from_official` and :func:`flashmhf.convert.from_official` raise.
    """
    directory = Path(directory)
    config = config_from_official(json.loads((directory / "config.json").read_text()))
    state = state_from_official(_read_state(directory), config)
    stored = state["model.embed_tokens.weight"].dtype
    with torch.device("meta"):
        model = FlashMHFForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name in missing if name not in model.all_tied_weights_keys]
    if missing or unexpected:
        raise ValueError(f"{directory} does not fit its config.json: missing {missing}, unexpected {unexpected}")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its buffers are in no checkpoint
    return model.to(dtype or stored).eval()


def save_official(model: FlashMHFForCausalLM, directory: str | Path) -> None:
    """Writes config.json and model.safetensors as the official code reads them."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    official = config_to_official(model.config)
    official["torch_dtype"] = str(model.dtype).removeprefix("torch.")
    state = {name: tensor.contiguous() for name, tensor in state_to_official(model.state_dict(), model.config).items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]  # safetensors stores no tensor twice; the official model ties it on loading
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(official, indent=2) + "\n")
