"""What a model of transformers is made of beside its class: which networks are FlashMHF, and which of them in FP8.

It is recorded as ``quantization_config``: transformers' one mechanism by which a package changes modules before weights
are loaded. quantization.py reads it there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..nn import FlashMHF, SwiGLU
from ..nn.network import Network
from ..nn.weights import check_held
from ..quantize import LAYOUT, Fp8FlashMHF
from ..quantize.modules import METHOD, own_method
from .configuration import FlashMHFConfig
from .modeling import FlashMHFDecoderLayer, feed_forward

_SETTINGS = ("d_model", "num_heads", "num_subnets", "subnet_dim", "router_eps", "backend", "deterministic")
_TRANSPARENT = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # state dicts leave these names out
_DEFAULTS = {"skip_linear": False, "activation": "silu"}
GUARD = "load this model with its quantization_config after `import flashmhf.models` (pip install 'flashmhf[lm]')"


@register_quantization_config(METHOD)
class FlashMHFRecord(QuantizationConfigMixin):
    """Record the FlashMHF networks of a model, as its ``quantization_config``.

    networks: FlashMHF's arguments by the names of the networks that the model's class does not build. fp8: the names of
    those in FP8, or whether all are. layout: the version of packed weights. Raises ValueError for another layout or
    method and for other entries, which a later version may have written.
    """

    def __init__(
        self, *, networks: dict[str, dict[str, Any]] | None = None, fp8: bool | list[str] = False, layout: int = LAYOUT,
        quant_method: str = METHOD, **others: Any,
    ) -> None:  # fmt: skip
        if others:
            raise ValueError(f"the record of the networks has {sorted(others)}, which this version does not know")
        if layout != LAYOUT:
            found = f"layout of the packed weights is {layout!r}"
            raise ValueError(f"{found}; supported: {LAYOUT}. Pack them again with this version")
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}; supported: {METHOD!r}")
        self.quant_method, self.networks, self.fp8, self.layout = quant_method, networks or {}, fp8, layout

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, as a dict would: transformers asks so where it is given a loaded model's configuration."""
        return getattr(self, name, default)


class FlashMHFFp8Config(FlashMHFRecord):
    """Have ``from_pretrained(directory, quantization_config=FlashMHFFp8Config())`` quantise every FlashMHF network. For
    models without a record; :func:`flashmhf.quantize.quantize_` quantises any model after it is loaded.
    """

    def __init__(self) -> None:
        super().__init__(fp8=True)


def described(model: PreTrainedModel, changes: bool = False) -> FlashMHFRecord | None:
    """Return the record of the FlashMHF networks that the model's class does not build and of those in FP8, if any.

    Raises ValueError for a network that cannot be recorded, and if another method quantises a model with networks that
    are recorded, or will be after ``changes``.
    """
    config, networks, packed = model.config, {}, []
    with torch.device("meta"):
        built = feed_forward(config) if isinstance(config, FlashMHFConfig) else None
    usual = _compared(settings_of(built)) if isinstance(built, FlashMHF) else None
    for name, layer in networks_in(model, FlashMHFDecoderLayer).items():
        if not (networks_in(layer.mlp, Network | Fp8FlashMHF) or isinstance(built, SwiGLU)):
            raise ValueError(f"{name}.mlp is a {type(layer.mlp).__name__}, which is not recorded; supported: FlashMHF")
    for name, network in networks_in(model, Network | Fp8FlashMHF).items():
        if not isinstance(network, FlashMHF | Fp8FlashMHF):
            if isinstance(network, SwiGLU if built is None else type(built)):
                continue
            raise ValueError(f"{name} is a {type(network).__name__}, which is not recorded; supported: FlashMHF")
        check_held(name, network, empty=True, offloaded=True)
        if method := own_method(network):
            raise ValueError(f"{name} is a {type(network).__name__} with a {method} of its own, which is not recorded")
        if "_orig_mod" in name.split("."):
            raise ValueError(f"{name} is compiled, and no model has this name; supported: compiled by .compile()")
        name = ".".join(part for part in name.split(".") if part not in _TRANSPARENT)
        if method_of(config) in (None, METHOD):
            _check_parts(name, network)
        settings = settings_of(network)
        if _compared(settings) != usual:
            networks[name] = settings
        if isinstance(network, Fp8FlashMHF):
            packed.append(name)
    if not (networks or packed or changes):
        return None
    if method_of(config) not in (None, METHOD):
        raise ValueError(f"{type(model).__name__} is quantised by {method_of(config)!r}; supported: no other method")
    some = len(packed) < len(networks_in(model, FlashMHF | Fp8FlashMHF))
    return FlashMHFRecord(networks=networks, fp8=packed if packed and some else bool(packed))


def record(model: PreTrainedModel) -> None:
    """Write :func:`described` into the model's configuration, as ``save_pretrained`` does; raises what that raises."""
    found = described(model)
    for part in model.modules():  # what is recorded of a part has other names, and may be no longer so
        if isinstance(part, PreTrainedModel):
            guard(part.config, False)
            if method_of(part.config) == METHOD:
                del part.config.quantization_config
    if found is not None:
        model.config.quantization_config = found
        guard(model.config, not isinstance(model.config, FlashMHFConfig))  # whose type is unknown without the import


def settings_of(network: FlashMHF | Fp8FlashMHF) -> dict[str, Any]:
    """Return the arguments that make such a network again, without device and dtype; JSON can hold them."""
    settings = {name: getattr(network, name) for name in _SETTINGS}
    settings["bias"] = not network.skip_linear and network.in_proj.bias is not None
    defaults = {"num_kv_heads": network.num_heads, **_DEFAULTS}
    settings |= {name: value for name, usual in defaults.items() if (value := getattr(network, name)) != usual}
    return settings if network.q_norm is None else settings | {"q_norm": True, "q_norm_eps": network.q_norm.eps}


def _compared(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the function: a back end that was set on a module of our own models is not recorded."""
    return {name: value for name, value in settings.items() if name not in ("backend", "deterministic")}


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


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the method that quantises a model of this configuration, "flashmhf" for a record, or None."""
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)


def guard(config: PreTrainedConfig, on: bool) -> None:
    """Put GUARD among a configuration's fusions, or take it away: transformers alone refuses an unknown one."""
    fusions = config.__dict__.pop("fusion_config", None) or {}
    others = {name: options for name, options in fusions.items() if name != GUARD}
    if on or others:
        config.fusion_config = others | ({GUARD: True} if on else {})
