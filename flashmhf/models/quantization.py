"""What a model of transformers is made of beside its class: which networks are FlashMHF, and which of them in FP8.

It is recorded as ``quantization_config``: transformers' one mechanism by which a package changes modules before weights
are loaded. Importing this module registers the method "flashmhf" and wraps four methods of PreTrainedModel, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..nn import FlashMHF, SwiGLU
from ..nn.init import INITIALIZER_RANGE, Projection
from ..nn.multihead import HeadRMSNorm
from ..nn.network import Network
from ..nn.weights import check_held, mark_drawn
from ..quantize import LAYOUT, Fp8FlashMHF, quantize_
from ..quantize.modules import METHOD, own_method, quantise_named
from ..quantize.packing import check_layout
from .configuration import FlashMHFConfig
from .modeling import check_complete, feed_forward

_SETTINGS = ("d_model", "num_heads", "num_subnets", "subnet_dim", "router_eps", "backend", "deterministic")
_TRANSPARENT = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # state dicts leave these names out
_DEFAULTS = {"skip_linear": False, "activation": "silu"}
_STORED_DTYPES = {"k8": "F8_E4M3", "u8": "F8_E4M3", "v8": "F8_E4M3", "scales": "F32", "layout": "U8"}
# a fusion in the configuration, which transformers by itself does not know and refuses in these words
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


@register_quantizer(METHOD)
class FlashMHFQuantizer(HfQuantizer):
    """Put the recorded networks into an empty model, and check that each has got its weights. A loaded model counts as
    quantised only if it has networks in FP8: others are trained and converted as any model.
    """

    quantization_config: FlashMHFRecord
    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Take the guard off, and what is to be quantised later: no other hook comes before the model is built."""
        _guard(config, False)
        if not self.pre_quantized:
            config.__dict__.pop("quantization_config", None)
        return config

    update_tp_plan = update_attn_implementation  # which earlier versions call in its place

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        record = self.quantization_config
        if record.fp8 and getattr(model.config, "distributed_config", None) is not None:
            found = "an FP8 model on several processes (tp_plan, distributed_config)"
            raise NotImplementedError(f"{found}; supported: one process, device_map")
        if self.pre_quantized:
            _build(model, record, whole=True)
        _check_dtypes(_networks(model, Fp8FlashMHF), checkpoint_files or ())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.pre_quantized:
            lost = [
                f"{name}.{key}"
                for name, network in _networks(model, FlashMHF | Fp8FlashMHF).items()
                for key, tensor in (*network.named_parameters(), *network.named_buffers())
                if not (tensor.is_meta or getattr(tensor, "_is_hf_initialized", False))
            ]
            check_complete(f"the checkpoint of this {type(model).__name__}", lost)
        elif self.quantization_config.fp8:
            quantize_(model)
        packed = _networks(model, Fp8FlashMHF)
        for network in packed.values():
            if not network.layout.is_meta:
                check_layout(network.layout)
        record(model)
        if packed:
            model.requires_grad_(False)  # the FP8 operators refuse inputs that require a gradient
            return
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                part.config.__dict__.pop("_is_quantized", None)
                for name in ("hf_quantizer", "is_quantized", "quantization_method"):
                    part.__dict__.pop(name, None)


def _build(model: nn.Module, record: FlashMHFRecord, whole: bool = False) -> None:
    """Put the recorded networks that are not there yet into a model as its class builds it; they are drawn, or empty.

    Raises ValueError if the model lacks some of them, but for all of them only if it is ``whole``, and not a part.
    """
    listed = record.fp8 if isinstance(record.fp8, list) else []
    names = {recorded: _name_in(model, recorded) for recorded in (*record.networks, *listed)}
    lost = [recorded for recorded, name in names.items() if name is None]
    if lost and (whole or len(lost) < len(names)):
        raise ValueError(f"{type(model).__name__} has no {lost[0]}, which its configuration records")
    if lost:
        return
    layers = max(len(record.networks), getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    for recorded, settings in record.networks.items():
        present = model.get_submodule(names[recorded])
        if isinstance(present, FlashMHF | Fp8FlashMHF) and _settings(present) == settings:
            continue
        like = next(present.parameters())
        network = FlashMHF(**settings, device=like.device, dtype=like.dtype)
        deviation = getattr(model.config, "initializer_range", INITIALIZER_RANGE)
        network.reset_parameters(initializer_range=deviation, num_layers=layers)
        mark_drawn(network)
        model.set_submodule(names[recorded], network)
    if record.fp8:
        packed = {names[recorded] for recorded in listed} or _networks(model, FlashMHF)
        quantise_named(model, [name for name in _networks(model, FlashMHF) if name in packed])


def _networks(model: nn.Module, kinds: Any) -> dict[str, nn.Module]:
    return {name: each for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, kinds)}


def _name_in(model: nn.Module, recorded: str) -> str | None:
    """Return the recorded name, with or without the name of the inner model, of which either may be loaded alone."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    names = (recorded, prefix + recorded, recorded.removeprefix(prefix))
    modules = dict(model.named_modules(remove_duplicate=False))
    return next((name for name in names if name in modules), None)


def _check_dtypes(networks: Iterable[str], files: Iterable[str]) -> None:
    """Raise ValueError if safetensors files have a packed tensor in another dtype: transformers would convert it."""
    for file in (each for each in files if networks and each.endswith(".safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a mapping
                network, _, key = name.rpartition(".")
                if not any(network.endswith(each) or each.endswith(network) for each in networks):
                    continue
                dtype, expected = opened.get_slice(name).get_dtype(), _STORED_DTYPES.get(key)
                if expected not in (None, dtype):
                    raise ValueError(f"{name} has dtype {dtype} in the checkpoint; supported: {expected}")


def _settings(network: FlashMHF | Fp8FlashMHF) -> dict[str, Any]:
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


def described(model: PreTrainedModel, changes: bool = False) -> FlashMHFRecord | None:
    """Return the record of the FlashMHF networks that the model's class does not build and of those in FP8, if any.

    Raises ValueError for a network that a record does not describe, and for a model that another method quantises
    while there is something to record, or will be after ``changes``.
    """
    config, networks, packed = model.config, {}, []
    with torch.device("meta"):
        built = feed_forward(config) if isinstance(config, FlashMHFConfig) else None
    usual = _compared(_settings(built)) if isinstance(built, FlashMHF) else None
    for name, network in _networks(model, Network | Fp8FlashMHF).items():
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
        if _method(config) in (None, METHOD):
            _check_parts(name, network)
        settings = _settings(network)
        if _compared(settings) != usual:
            networks[name] = settings
        if isinstance(network, Fp8FlashMHF):
            packed.append(name)
    if not (networks or packed or changes):
        return None
    if _method(config) not in (None, METHOD):
        raise ValueError(f"{type(model).__name__} is quantised by {_method(config)!r}; supported: no other method")
    some = len(packed) < len(_networks(model, FlashMHF | Fp8FlashMHF))
    return FlashMHFRecord(networks=networks, fp8=packed if packed and some else bool(packed))


def record(model: PreTrainedModel) -> None:
    """Write :func:`described` into the model's configuration, as ``save_pretrained`` does; raises what that raises."""
    found = described(model)
    for part in model.modules():  # what is recorded of a part has other names, and may be no longer so
        if isinstance(part, PreTrainedModel):
            _guard(part.config, False)
            if _method(part.config) == METHOD:
                del part.config.quantization_config
    if found is not None:
        model.config.quantization_config = found
        _guard(model.config, not isinstance(model.config, FlashMHFConfig))  # whose type is unknown without the import


def _guard(config: PreTrainedConfig, on: bool) -> None:
    fusions = config.__dict__.pop("fusion_config", None) or {}
    others = {name: options for name, options in fusions.items() if name != GUARD}
    if on or others:
        config.fusion_config = others | ({GUARD: True} if on else {})


def models_in(module: nn.Module) -> list[PreTrainedModel]:
    """Return transformers' models within a module, itself included, but none that is a part of another."""
    found, inner = [], set()
    for part in module.modules():
        if part not in inner and isinstance(part, PreTrainedModel):
            inner.update(part.modules())
            found.append(part)
    return found


def _compared(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the function: a back end that was set on a module of our own models is not recorded."""
    return {name: value for name, value in settings.items() if name not in ("backend", "deterministic")}


def _method(config: PreTrainedConfig) -> str | None:
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)


def is_fp8(model: nn.Module) -> bool:
    """Return whether networks of the model are in FP8."""
    return bool(_networks(model, Fp8FlashMHF))


def quantise(model: PreTrainedModel) -> None:
    """Quantise the FlashMHF networks that are not in FP8 already, in place. Raises as ``quantize.quantize_`` does."""
    if _networks(model, FlashMHF) or not is_fp8(model):
        quantize_(model)


def _wrapped(ours: Callable) -> None:
    """Have the function run in place of PreTrainedModel's method of its name, which it gets first."""
    method = getattr(PreTrainedModel, ours.__name__)
    setattr(PreTrainedModel, ours.__name__, wraps(method)(lambda *args, **kwargs: ours(method, *args, **kwargs)))


@_wrapped
def save_pretrained(method: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Record what the model is made of, whatever has put it there."""
    if not getattr(self, "_hf_peft_config_loaded", False):  # else it stores adapters, and no configuration
        record(self)
    return method(self, *args, **kwargs)


@_wrapped
def post_init(method: Callable, self: PreTrainedModel) -> None:
    """Build what the configuration records: from_config and the classes do not ask a quantizer, which would."""
    method(self)
    if _method(self.config) == METHOD:
        stored = self.config.quantization_config
        _build(self, FlashMHFRecord.from_dict(stored) if isinstance(stored, dict) else stored)


@_wrapped
def mark_tied_weights_as_initialized(method: Callable, self: PreTrainedModel, report: Any) -> None:
    """Refuse a checkpoint with networks that the configuration lacks: others would be drawn, with a warning alone."""
    for name in sorted(report.unexpected_keys):
        network, _, key = name.rpartition(".")
        if key in ("k", "k8") and _name_in(self, network):
            found = f"the checkpoint has {name}, and the configuration no network that takes it"
            raise ValueError(f"{found}; supported: save_pretrained's record, or 0.1's by flashmhf.models.load")
    method(self, report)


@_wrapped
def _initialize_weights(method: Callable, self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Have our networks draw themselves: transformers knows no K, U and V, and has another deviation for the rest."""
    if not isinstance(module, (Network, Projection, HeadRMSNorm)):
        method(self, module, *args, **kwargs)
    elif not getattr(module, "_is_hf_initialized", False):
        module.reset_parameters()  # transformers has torch.nn.init leave loaded tensors alone
        module._is_hf_initialized = True
