"""What this package has put into a model of transformers, beside what the model's class builds.

``replace_ffn`` marks its networks (``placed``), FP8 has a class of its own. A model's configuration records these, and
nothing else: replaced networks as ``flashmhf_networks``, those in FP8 as ``quantization_config``.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..nn import FlashMHF
from ..nn.weights import check_held
from ..quantize import LAYOUT, Fp8FlashMHF
from ..quantize.modules import METHOD, own_method
from .configuration import FlashMHFConfig

NETWORKS, LAYERS = "flashmhf_networks", "flashmhf_layers"  # entries of a configuration: what, and among how many
_ARGUMENTS = inspect.signature(FlashMHF).parameters.keys() - {"bias", "device", "dtype", "q_norm", "q_norm_eps"}
_TRANSPARENT = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # state dicts leave these names out


def recorded(model: PreTrainedModel, changes: bool = False) -> tuple[dict[str, dict[str, Any]], bool | list[str]]:
    """Return the arguments of the replaced networks by name, and the names of those in FP8 or whether all are.

    Raises ValueError for a network that cannot be recorded, and if another method quantises a model that has networks
    in FP8, or that is about to get ``changes``.
    """
    networks, packed, method = {}, [], method_of(model.config)
    present = networks_in(model, FlashMHF | Fp8FlashMHF)
    for name, network in present.items():
        if not (network.placed or isinstance(network, Fp8FlashMHF)):
            continue
        check_held(name, network, empty=True, offloaded=True)
        if own := own_method(network):
            raise ValueError(f"{name} is a {type(network).__name__} with a {own} of its own, which is not recorded")
        if "_orig_mod" in name.split("."):
            raise ValueError(f"{name} is compiled, and no model has this name; supported: compiled by .compile()")
        # FP8 has none of training
        settings = {each: getattr(network, each) for each in sorted(_ARGUMENTS) if hasattr(network, each)}
        settings["bias"] = getattr(network.in_proj, "bias", None) is not None
        if network.q_norm is not None:
            settings |= {"q_norm": True, "q_norm_eps": network.q_norm.eps}
        known = {*network.SHARDED, "layout", "_flat_param", *(["out_proj.bias"] if settings["bias"] else [])}
        found = {key for key, _ in (*network.named_parameters(), *network.named_buffers())}
        if (strange := sorted(found - known)) and method in (None, METHOD):  # another one stores its own tensors
            raise ValueError(f"{name} has {', '.join(strange)}, which is not recorded; supported: what its class makes")
        name = ".".join(part for part in name.split(".") if part not in _TRANSPARENT)
        if network.placed:
            networks[name] = settings
        if isinstance(network, Fp8FlashMHF):
            packed.append(name)
    if (packed or changes) and method not in (None, METHOD):
        raise ValueError(f"{type(model).__name__} is quantised by {method!r}; supported: no other method")
    return networks, packed if 0 < len(packed) < len(present) else bool(packed)


def record(model: PreTrainedModel) -> None:
    """Write :func:`recorded` into the model's configuration. Raises what that raises; nothing has then changed."""
    networks, fp8 = recorded(model)
    for config in (part.config for part in model.modules() if isinstance(part, PreTrainedModel)):
        # what is recorded of a part has other names, and may be no longer so
        config.__dict__.pop(NETWORKS, None)
        config.__dict__.pop(LAYERS, None)
        if method_of(config) == METHOD:
            del config.quantization_config
        if METHOD in (fusions := dict(getattr(config, "fusion_config", None) or {})):
            del fusions[METHOD]
            config.__dict__.update(fusion_config=fusions) if fusions else config.__dict__.pop("fusion_config")
    if networks:
        setattr(model.config, NETWORKS, networks)
        setattr(model.config, LAYERS, layers_of(model.config))
    if fp8:
        model.config.quantization_config = {"quant_method": METHOD, "fp8": fp8, "layout": LAYOUT}
    if (networks or fp8) and not isinstance(model.config, FlashMHFConfig):  # whose model_type needs the import anyway
        # transformers by itself refuses a fusion that is not registered, and else would draw SwiGLU networks here.
        # False: it replaces no class, the networks are put in one by one.
        model.config.fusion_config = {**(getattr(model.config, "fusion_config", None) or {}), METHOD: False}


def networks_in(model: nn.Module, kinds: Any) -> dict[str, nn.Module]:
    """Return the modules of these kinds by name; a shared one has all of its names."""
    return {name: each for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, kinds)}


def is_fp8(model: nn.Module) -> bool:
    """Return whether networks of the model are in FP8."""
    return bool(networks_in(model, Fp8FlashMHF))


def models_in(module: nn.Module) -> list[PreTrainedModel]:
    """Return transformers' models within a module, itself included, but none that is a part of another."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    inner = {part for model in models for part in model.modules() if part is not model}
    return [model for model in models if model not in inner]


def layers_of(config: PreTrainedConfig) -> int:
    return getattr(config.get_text_config(), "num_hidden_layers", None) or 1


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the method that quantises a model of this configuration, "flashmhf" for FP8, or None."""
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
