"""How a model of transformers gets again what record.py records of it: built as its class is, saved as it is now.

Importing this module wraps two methods of PreTrainedModel, each with its reason.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel, initialization

from ..nn import FlashMHF
from ..nn.init import INITIALIZER_RANGE
from ..nn.weights import mark_drawn
from ..quantize import Fp8FlashMHF
from ..quantize.modules import METHOD, quantise_named
from .record import NETWORKS, FlashMHFFp8Config, networks_in, record


def build(model: PreTrainedModel) -> None:
    """Put what the configuration records into a model as its class builds it: networks that are drawn, or empty.

    Raises ValueError for a record of networks that are none, and if the model lacks some of them.
    """
    networks, stored = getattr(model.config, NETWORKS, None) or {}, getattr(model.config, "quantization_config", None)
    if not isinstance(networks, dict):
        raise ValueError(f"{NETWORKS} is {networks!r}; supported: arguments of FlashMHF by name")
    layers = max(len(networks), getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    for recorded, name in names_in(model, networks).items():
        present = model.get_submodule(name)
        if isinstance(present, FlashMHF | Fp8FlashMHF):  # a model within this one has the same configuration
            continue
        like = next(present.parameters())
        try:  # accumulate_main_grad: 0.1 wrote it
            settings = {key: value for key, value in networks[recorded].items() if key != "accumulate_main_grad"}
            network = FlashMHF(**settings, device=like.device, dtype=like.dtype)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{NETWORKS} has no FlashMHF for {recorded}: {error}") from error
        deviation = getattr(model.config, "initializer_range", INITIALIZER_RANGE)
        network.reset_parameters(initializer_range=deviation, num_layers=layers)
        network.placed = True
        mark_drawn(network)
        model.set_submodule(name, network)
    if any(network.placed and network.k.is_meta for network in networks_in(model, FlashMHF).values()):
        model.initialize_weights = functools.partial(_draw_missing, model)
    # a dict is what is recorded; FlashMHFFp8Config asks for quantisation after the weights are loaded, by a quantizer
    if isinstance(stored, dict) and stored.get("quant_method") == METHOD:
        fp8 = FlashMHFFp8Config.from_dict(stored).fp8
        quantise_named(model, fp8_names(model, fp8))


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


def fp8_names(model: nn.Module, fp8: bool | list[str], whole: bool = False) -> list[str]:
    """Return the names of the FlashMHF networks that are recorded as in FP8 and are not."""
    present = networks_in(model, FlashMHF)
    if isinstance(fp8, list):
        return [name for name in names_in(model, fp8, whole).values() if name in present]
    return list(present) if fp8 else []


def _draw_missing(model: PreTrainedModel) -> None:
    """Draw what a checkpoint lacks of replaced networks; transformers, which reports it, knows no K, U and V and would
    leave their memory as it is. Takes the place of ``initialize_weights`` once, of a model that is built empty.
    """
    for part in model.modules():
        part.__dict__.pop("initialize_weights", None)
    with initialization.guard_torch_init_functions():  # leaves alone what is loaded
        for network in networks_in(model, FlashMHF).values():
            tensors = [*network.parameters()]
            if network.placed and not all(each.is_meta or hasattr(each, "_is_hf_initialized") for each in tensors):
                network.reset_parameters()
                mark_drawn(network)
    model.initialize_weights()


def missing(feature: str, error: Exception) -> None:
    """Warn that transformers has renamed what a feature needs."""
    warnings.warn(f"{feature} needs what transformers {transformers.__version__} lacks: {error!r}", stacklevel=3)


def _wrapped(feature: str) -> Callable:
    """Have a function run in place of PreTrainedModel's method of its name, which it gets first."""

    def wrap(ours: Callable) -> Callable:
        try:
            method = getattr(PreTrainedModel, ours.__name__)
        except AttributeError as error:
            missing(feature, error)
        else:
            call = functools.wraps(method)(lambda *args, **kwargs: ours(method, *args, **kwargs))
            setattr(PreTrainedModel, ours.__name__, call)
        return ours

    return wrap


# Without it LlamaForCausalLM of a swapped model's configuration would be a SwiGLU model, and from_pretrained would draw
# SwiGLU networks and drop the weights of ours.
@_wrapped("building models with replaced networks")
def post_init(method: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    method(self, *args, **kwargs)
    build(self)


# Without it a file would record what replace_ffn and quantize_ found in a model, not what it holds now: nothing of what
# they put into a list of its layers, networks that have been taken out, other parts than those of pruned ones.
@_wrapped("recording replaced and FP8 networks")
def save_pretrained(method: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    if not getattr(self, "_hf_peft_config_loaded", False):  # else it stores adapters, and no configuration
        record(self)
    return method(self, *args, **kwargs)


try:
    from transformers.fusion_mapping import _FUSION_REGISTRY, ModuleFusionSpec

    _FUSION_REGISTRY.setdefault(METHOD, ModuleFusionSpec())  # what the configuration of a swapped model names
except ImportError as _error:
    missing("from_pretrained of models with replaced networks", _error)
