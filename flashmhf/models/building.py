"""How a model of transformers gets again what record.py records of it, and is recorded as it is saved: importing this
module wraps two methods of PreTrainedModel, each with its reason.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedModel, initialization

from ..nn import FlashMHF
from ..nn.init import INITIALIZER_RANGE
from ..nn.weights import mark_drawn
from ..quantize import Fp8FlashMHF
from ..quantize.modules import METHOD, quantise_named
from .modeling import gathered
from .quantization import FlashMHFFp8Config, names_in
from .record import LAYERS, NETWORKS, layers_of, networks_in, record


def build(model: PreTrainedModel) -> None:
    """Put what the configuration records into a model as its class builds it: networks that are drawn, or empty.

    Raises ValueError for a record of networks that are none, and if the model lacks some of them.
    """
    networks, stored = getattr(model.config, NETWORKS, None) or {}, getattr(model.config, "quantization_config", None)
    if not isinstance(networks, dict):
        raise ValueError(f"{NETWORKS} is {networks!r}; supported: arguments of FlashMHF by name")
    layers, recorded_layers = layers_of(model.config), getattr(model.config, LAYERS, None)
    if isinstance(recorded_layers, int) and len(networks) >= recorded_layers < layers:
        found = f"num_hidden_layers is {layers}, of which {NETWORKS} has networks for {recorded_layers}"
        raise ValueError(f"{found}; supported: no more layers, or replace_ffn of a larger model")
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
        # ZeRO stage 3 has partitioned them, where transformers makes the functions of torch.nn.init do nothing
        with initialization.guard_torch_init_functions(), gathered(network):
            network.reset_parameters(initializer_range=deviation, num_layers=max(len(networks), layers))
        network.placed = True
        mark_drawn(network)
        model.set_submodule(name, network)
    if any(network.placed and network.k.is_meta for network in networks_in(model, FlashMHF).values()):
        model.initialize_weights = functools.partial(_draw_missing, model)
    # a dict is what is recorded; the class asks for quantisation after the weights are loaded, by the quantizer
    if isinstance(stored, dict) and stored.get("quant_method") == METHOD:
        quantise_named(model, FlashMHFFp8Config.from_dict(stored).names(model))


def _draw_missing(model: PreTrainedModel) -> None:
    """Draw what a checkpoint lacks of replaced networks; transformers, which reports it, knows no K, U and V and would
    leave their memory as it is. Takes the place of ``initialize_weights`` once, of a model that is built empty.
    """
    for part in model.modules():
        part.__dict__.pop("initialize_weights", None)
    with initialization.guard_torch_init_functions():  # leaves alone what is loaded
        for network in networks_in(model, FlashMHF).values():
            here = (each.is_meta or hasattr(each, "_is_hf_initialized") for each in network.parameters())
            if network.placed and not all(here):
                network.reset_parameters()
                mark_drawn(network)
    model.initialize_weights()


def _building(post_init: Callable) -> Callable:
    """Without it LlamaForCausalLM of a swapped model's configuration would be a SwiGLU model, and from_pretrained would
    draw SwiGLU networks and drop the weights of ours.
    """

    @functools.wraps(post_init)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        build(self)

    return wrapper


def _recording(save_pretrained: Callable) -> Callable:
    """Without it files would record what replace_ffn and quantize_ found in a model, not what it holds now: nothing of
    what they put into a list of its layers, and networks that have been taken out since.
    """

    @functools.wraps(save_pretrained)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_hf_peft_config_loaded", False):  # else it stores adapters, and no configuration
            record(self)
        return save_pretrained(self, *args, **kwargs)

    return wrapper


def register() -> None:
    """Wrap the two methods, and make the fusion known that the configuration of a model with replaced networks names:
    all or nothing. Where transformers has renamed one of these, it goes on refusing such models.
    """
    try:
        from transformers.fusion_mapping import _FUSION_REGISTRY, ModuleFusionSpec

        post_init, save_pretrained = (vars(PreTrainedModel)[name] for name in ("post_init", "save_pretrained"))
    except (KeyError, ImportError) as error:
        lost = f"transformers {transformers.__version__} refuses to load models with replaced networks"
        warnings.warn(f"{lost}: {error}", stacklevel=2)
    else:
        PreTrainedModel.post_init, PreTrainedModel.save_pretrained = _building(post_init), _recording(save_pretrained)
        _FUSION_REGISTRY.setdefault(METHOD, ModuleFusionSpec())


register()
