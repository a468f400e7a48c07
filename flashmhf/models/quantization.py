"""FP8 models through transformers' own mechanism: ``quantization_config``, an argument of ``from_pretrained`` and a
part of config.json.

Importing this module registers the method "flashmhf_fp8" with transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..nn.flashmhf import FlashMHF
from ..quantize import LAYOUT, Fp8FlashMHF, quantize_
from ..quantize.modules import METHOD
from ..quantize.packing import check_layout

_STORED_DTYPES = {"k8": "F8_E4M3", "u8": "F8_E4M3", "v8": "F8_E4M3", "scales": "F32", "layout": "U8"}


@register_quantization_config(METHOD)
class FlashMHFFp8Config(QuantizationConfigMixin):
    """Describe a model whose FlashMHF networks are in FP8, as its ``quantization_config``
    (:func:`flashmhf.quantize.to_fp8`).

    ``from_pretrained(directory, quantization_config=FlashMHFFp8Config())`` quantises while it loads;
    ``save_pretrained`` then stores the packed weights and this configuration, and ``from_pretrained`` of that directory
    needs no argument. Such a model serves inference: no parameter requires a gradient.

    Args:
        layout: the version of the packed weights' layout; only this version's loads.
        quant_method: "flashmhf_fp8", as config.json has it.
        projections: must be False; W_in and W_out are not quantised.

    Raises ValueError for another value of any of them.
    """

    def __init__(self, *, layout: int = LAYOUT, quant_method: str = METHOD, projections: bool = False) -> None:
        if projections is not False:
            raise ValueError(
                f"projections of the quantization_config is {projections!r}; supported: False, W_in and W_out in the model's dtype. "
                "Quantise the original model again"
            )
        if layout != LAYOUT:
            raise ValueError(
                f"layout of the packed weights is {layout!r}; supported: {LAYOUT}. Pack the weights again with this version"
            )
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}; supported: {METHOD!r}")
        self.quant_method, self.layout = quant_method, layout


@register_quantizer(METHOD)
class FlashMHFFp8Quantizer(HfQuantizer):
    """Pack after the weights are loaded, or load packed weights into empty FP8 networks."""

    quantization_config: FlashMHFFp8Config
    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs
    ) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise NotImplementedError(
                "an FP8 model on several processes (tp_plan, distributed_config); supported: one process, device_map"
            )
        if self.pre_quantized:
            quantize_(model)  # empty networks on the meta device
            if checkpoint_files and all(file.endswith(".safetensors") for file in checkpoint_files):
                check_stored(model, checkpoint_files)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs) -> None:
        model.requires_grad_(False)  # the FP8 operators refuse inputs that require a gradient
        if self.pre_quantized:
            for module in model.modules():
                if isinstance(module, Fp8FlashMHF):
                    check_layout(module.layout)
            return
        for name, module in model.named_modules():
            if isinstance(module, FlashMHF) and module.k.is_meta:
                raise ValueError(
                    f"device_map offloads {name}; supported when from_pretrained quantises: GPUs, or the CPU alone"
                )
        quantize_(model)
        model.config.quantization_config = self.quantization_config


def quantise(model: PreTrainedModel) -> None:
    """Quantise a model's FlashMHF networks in place, unless it has them in FP8 already.

    Raises ValueError for a model without FlashMHF and for one that is quantised otherwise.
    """
    found = getattr(model.config, "quantization_config", None)
    if found is None:
        quantize_(model)
    elif not isinstance(found, FlashMHFFp8Config):
        raise ValueError(
            f"the model is quantised already, by {dict(found).get('quant_method')!r}; supported: a model that is not"
        )


def check_stored(model: PreTrainedModel, files: Iterable[str | Path]) -> None:
    """Raise ValueError if safetensors files lack a tensor of the model's FP8 networks, or have one of another shape,
    dtype or layout.

    transformers itself draws a missing tensor at random, with a warning.
    """
    conversions, own, stored = get_model_conversion_mapping(model), model.state_dict(), {}
    rules = [[rule for rule in conversions if isinstance(rule, kind)] for kind in (WeightRenaming, WeightConverter)]
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a mapping
                if name.endswith(".layout"):
                    check_layout(opened.get_tensor(name))
                renamed, _ = rename_source_key(name, *rules, model.base_model_prefix, own)  # as the loading itself does
                tensor = opened.get_slice(name)
                stored[name if renamed not in own and name in own else renamed] = (
                    list(tensor.get_shape()),
                    tensor.get_dtype(),
                )
    networks = {name: module for name, module in model.named_modules() if isinstance(module, Fp8FlashMHF)}
    for network, module in networks.items():
        for key, tensor in module.state_dict().items():
            name = f"{network}.{key}"
            if name not in stored:
                raise ValueError(f"the checkpoint lacks {name}, which its quantization_config promises")
            shape, dtype = stored[name]
            if shape != list(tensor.shape):
                raise ValueError(f"{name} has shape {shape} in the checkpoint; expected {list(tensor.shape)}")
            expected = _STORED_DTYPES.get(key.rpartition(".")[2], dtype)
            if dtype != expected:
                raise ValueError(f"{name} has dtype {dtype} in the checkpoint; supported: {expected}")
