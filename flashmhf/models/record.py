"""What this package has put into a model of transformers, beside what the model's class builds.

``replace_ffn`` and FP8 mark what they put (``placed``, :class:`Fp8FlashMHF`). A model's configuration records that, and
nothing else: replaced networks as ``flashmhf_networks``, those in FP8 as ``quantization_config``.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..nn import FlashMHF
from ..nn.weights import check_held
from ..quantize import LAYOUT, Fp8FlashMHF
from ..quantize.modules import METHOD, own_method
from .configuration import FlashMHFConfig

NETWORKS = "flashmhf_networks"
_SETTINGS = ("d_model", "num_heads", "num_subnets", "subnet_dim", "router_eps", "backend", "deterministic")
_TRANSPARENT = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # state dicts leave these names out
_DEFAULTS = {"skip_linear": False, "activation": "silu"}


@register_quantization_config(METHOD)
class FlashMHFFp8Config(QuantizationConfigMixin):
    """Have ``from_pretrained(directory, quantization_config=FlashMHFFp8Config())`` quantise the FlashMHF networks.

    :func:`flashmhf.quantize.quantize_` quantises any model after it is loaded. fp8: True for all networks, or the names
    of some. layout: the version of packed weights. Raises ValueError for another layout or method and for other
    entries, which a later version may have written.
    """

    def __init__(
        self, *, fp8: bool | list[str] = True, layout: int = LAYOUT, quant_method: str = METHOD, **others: Any
    ) -> None:
        if others:
            raise ValueError(f"the record of the networks has {sorted(others)}, which this version does not know")
        if layout != LAYOUT:
            found = f"layout of the packed weights is {layout!r}"
            raise ValueError(f"{found}; supported: {LAYOUT}. Pack them again with this version")
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}; supported: {METHOD!r}")
        if not isinstance(fp8, bool | list):
            raise ValueError(f"fp8 is {fp8!r}; supported: True, False, or a list of names")
        self.quant_method, self.fp8, self.layout = quant_method, fp8, layout


def described(model: PreTrainedModel) -> tuple[dict[str, dict[str, Any]], bool | list[str]]:
    """Return the arguments of the replaced networks by name, and the names of those in FP8 or whether all are.

    Raises ValueError for a network that cannot be recorded, and for FP8 in a model that another method quantises.
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
        name = ".".join(part for part in name.split(".") if part not in _TRANSPARENT)
        if method in (None, METHOD):
            _check_parts(name, network)
        if network.placed:
            networks[name] = settings_of(network)
        if isinstance(network, Fp8FlashMHF):
            packed.append(name)
    if packed and method not in (None, METHOD):
        raise ValueError(f"{type(model).__name__} is quantised by {method!r}; supported: no other method beside FP8")
    return networks, packed if 0 < len(packed) < len(present) else bool(packed)


def record(model: PreTrainedModel) -> None:
    """Write :func:`described` into the model's configuration. Raises what that raises; nothing has then changed."""
    networks, fp8 = described(model)
    for part in model.modules():  # what is recorded of a part has other names, and may be no longer so
        if isinstance(part, PreTrainedModel):
            _clear(part.config)
    config = model.config
    if networks:
        setattr(config, NETWORKS, networks)
    if fp8:
        config.quantization_config = {"quant_method": METHOD, "fp8": fp8, "layout": LAYOUT}
    if (networks or fp8) and not isinstance(config, FlashMHFConfig):  # whose model_type needs the import anyway
        # transformers refuses to load a model with a fusion that is not registered, which would draw SwiGLU networks
        # here. False: it replaces no class, the networks are put in one by one.
        config.fusion_config = {**(getattr(config, "fusion_config", None) or {}), METHOD: False}


def _clear(config: PreTrainedConfig) -> None:
    config.__dict__.pop(NETWORKS, None)
    if method_of(config) == METHOD:
        del config.quantization_config
    fusions = getattr(config, "fusion_config", None) or {}
    if METHOD in fusions:
        config.fusion_config = {name: options for name, options in fusions.items() if name != METHOD}
        if not config.fusion_config:
            del config.fusion_config


def settings_of(network: FlashMHF | Fp8FlashMHF) -> dict[str, Any]:
    """Return the arguments that make such a network again, without device and dtype; JSON can hold them."""
    settings = {name: getattr(network, name) for name in _SETTINGS}
    settings["bias"] = not network.skip_linear and network.in_proj.bias is not None
    defaults = {"num_kv_heads": network.num_heads, **_DEFAULTS}
    settings |= {name: value for name, usual in defaults.items() if (value := getattr(network, name)) != usual}
    return settings if network.q_norm is None else settings | {"q_norm": True, "q_norm_eps": network.q_norm.eps}


def _check_parts(name: str, network: FlashMHF | Fp8FlashMHF) -> None:
    """Raise ValueError for parts and weights that the constructor does not make, such as pruning's."""
    projections = [each for each in (network.in_proj, network.out_proj) if each is not None]
    known = {*network.SHARDED, "layout", "_flat_param"} - {"in_proj.bias"}  # _flat_param: of FSDP
    if all(getattr(each, "bias", None) is not None for each in projections):
        known |= {"in_proj.bias", "out_proj.bias"}
    found = {key for key, _ in (*network.named_parameters(), *network.named_buffers())}
    if strange := sorted(found - known):
        raise ValueError(f"{name} has {', '.join(strange)}, which is not recorded; supported: what its class makes")


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


def check_unquantised(model: PreTrainedModel) -> None:
    """Raise ValueError if another method quantises the model, whose replaced networks it would not know."""
    if (method := method_of(model.config)) not in (None, METHOD):
        raise ValueError(f"{type(model).__name__} is quantised by {method!r}; supported: no other method")


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the method that quantises a model of this configuration, "flashmhf" for FP8, or None."""
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
