"""How transformers builds, loads and saves what record.py records, of bf16 and FP8 networks alike.

Importing this module registers the method "flashmhf" and wraps four methods of PreTrainedModel, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantizer

from ..nn import FlashMHF
from ..nn.init import INITIALIZER_RANGE, Projection
from ..nn.multihead import HeadRMSNorm
from ..nn.network import Network
from ..nn.weights import mark_drawn
from ..quantize import Fp8FlashMHF, quantize_
from ..quantize.modules import METHOD, quantise_named
from ..quantize.packing import check_layout
from .modeling import check_complete
from .record import FlashMHFRecord, guard, is_fp8, method_of, networks_in, record, settings_of

_STORED_DTYPES = {"k8": "F8_E4M3", "u8": "F8_E4M3", "v8": "F8_E4M3", "scales": "F32", "layout": "U8"}


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

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a record for a checkpoint that has none of its own: it names networks that are not there."""
        given = self.quantization_config
        if not self.pre_quantized and (given.networks or given.fp8 is not True):
            found = "quantization_config is a FlashMHFRecord, and the checkpoint's configuration has none"
            raise ValueError(f"{found}; supported: FlashMHFFp8Config(), or a config= that holds the record")

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Take the guard off, and what is to be quantised later: no other hook comes before the model is built."""
        guard(config, False)
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
        _check_dtypes(networks_in(model, Fp8FlashMHF), checkpoint_files or ())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.pre_quantized:
            lost = [
                f"{name}.{key}"
                for name, network in networks_in(model, FlashMHF | Fp8FlashMHF).items()
                for key, tensor in (*network.named_parameters(), *network.named_buffers())
                if not (tensor.is_meta or getattr(tensor, "_is_hf_initialized", False))
            ]
            check_complete(f"the checkpoint of this {type(model).__name__}", lost)
        elif self.quantization_config.fp8:
            quantize_(model)
        packed = networks_in(model, Fp8FlashMHF)
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
        if isinstance(present, FlashMHF | Fp8FlashMHF) and settings_of(present) == settings:
            continue
        like = next(present.parameters())
        network = FlashMHF(**settings, device=like.device, dtype=like.dtype)
        deviation = getattr(model.config, "initializer_range", INITIALIZER_RANGE)
        network.reset_parameters(initializer_range=deviation, num_layers=layers)
        mark_drawn(network)
        model.set_submodule(names[recorded], network)
    if record.fp8:
        packed = {names[recorded] for recorded in listed} or networks_in(model, FlashMHF)
        quantise_named(model, [name for name in networks_in(model, FlashMHF) if name in packed])


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
                ours = any(network.endswith(each) or each.endswith(network) for each in networks)
                dtype, expected = opened.get_slice(name).get_dtype(), _STORED_DTYPES.get(key)
                if ours and expected not in (None, dtype):
                    raise ValueError(f"{name} has dtype {dtype} in the checkpoint; supported: {expected}")


def quantise(model: PreTrainedModel) -> None:
    """Quantise the FlashMHF networks that are not in FP8 already, in place. Raises as ``quantize.quantize_`` does."""
    if networks_in(model, FlashMHF) or not is_fp8(model):
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
    if method_of(self.config) == METHOD:
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
