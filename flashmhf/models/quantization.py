"""FP8 networks as transformers' quantisation method "flashmhf"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..backends.fp8_layout import check_packed
from ..nn import FlashMHF
from ..nn.weights import check_held
from ..quantize import LAYOUT, Fp8FlashMHF, quantize_
from ..quantize.modules import METHOD, quantise_named
from ..quantize.packing import check_layout
from .modeling import check_complete
from .record import is_fp8, networks_in, record

_STORED_DTYPES = {"k8": "F8_E4M3", "u8": "F8_E4M3", "v8": "F8_E4M3", "scales": "F32", "layout": "U8"}


@register_quantization_config(METHOD)
class FlashMHFFp8Config(QuantizationConfigMixin):
    """Have ``from_pretrained(directory, quantization_config=FlashMHFFp8Config())`` quantise the FlashMHF networks.

    :func:`flashmhf.quantize.quantize_` quantises any model after it is loaded. fp8: True for all networks, or the names
    of some. layout: the version of packed weights. Raises ValueError for another value and for other entries, which a
    later version may have written.
    """

    def __init__(
        self, *, fp8: bool | list[str] = True, layout: int = LAYOUT, quant_method: str = METHOD, **others: Any
    ) -> None:
        if others:
            raise ValueError(f"quantization_config has {sorted(others)}, which this version does not know")
        if layout != LAYOUT:
            raise ValueError(f"layout of the packed weights is {layout!r}; supported: {LAYOUT}. Pack them again")
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}; supported: {METHOD!r}")
        if not isinstance(fp8, bool) and not (isinstance(fp8, list) and all(isinstance(name, str) for name in fp8)):
            raise ValueError(f"fp8 is {fp8!r}; supported: True, False, or a list of names")
        self.quant_method, self.fp8, self.layout = quant_method, fp8, layout

    def names(self, model: nn.Module, whole: bool = False) -> list[str]:
        """Return which FlashMHF networks of ``model`` are to be in FP8 and are not. Raises what names_in raises."""
        present = networks_in(model, FlashMHF)
        if isinstance(self.fp8, list):
            return [name for name in names_in(model, self.fp8, whole).values() if name in present]
        return list(present) if self.fp8 else []


@register_quantizer(METHOD)
class FlashMHFQuantizer(HfQuantizer):
    """Put the FP8 networks into an empty model, and check that each has got its weights; or quantise a loaded one."""

    quantization_config: FlashMHFFp8Config
    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if getattr(model.config, "distributed_config", None) is not None:  # of tp_plan, too
            raise NotImplementedError("an FP8 model on several processes; supported: one process, device_map")
        if self.pre_quantized:
            quantise_named(model, self.quantization_config.names(model, whole=True))
            _check_dtypes(networks_in(model, Fp8FlashMHF), checkpoint_files or ())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not self.pre_quantized:
            if not (names := self.quantization_config.names(model, whole=True)):
                raise ValueError("model holds no FlashMHF")
            for name in names:
                check_held(name, model.get_submodule(name))
            quantise_named(model, names)
        for name, network in networks_in(model, Fp8FlashMHF).items() if self.pre_quantized else ():
            tensors = (*network.named_parameters(), *network.named_buffers())
            lost = [key for key, each in tensors if not (each.is_meta or hasattr(each, "_is_hf_initialized"))]
            check_complete(f"the checkpoint of this {type(model).__name__}", [f"{name}.{key}" for key in lost])
            if not network.layout.is_meta:
                check_layout(network.layout)
                check_packed(*network.packed.tensors)  # transformers 5.17 takes other shapes
        record(model)
        model.requires_grad_(False)  # the FP8 operators refuse inputs that require a gradient


def names_in(model: nn.Module, recorded: Iterable[str], whole: bool = False) -> dict[str, str]:
    """Return the names of recorded networks in a model, or in one that is a part of it or holds it; either may be
    loaded alone. Raises ValueError if some are missing; of a part, and not the ``whole``, all may be.
    """
    modules, prefix = dict(model.named_modules(remove_duplicate=False)), getattr(model, "base_model_prefix", "") + "."
    names = {name: (name, prefix + name, name.removeprefix(prefix)) for name in recorded}
    found = {name: next((each for each in ways if each in modules), None) for name, ways in names.items()}
    lost = [name for name, each in found.items() if each is None]
    if lost and (whole or len(lost) < len(found)):
        raise ValueError(f"{type(model).__name__} has no {lost[0]}, which its configuration records")
    return {} if lost else found


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
