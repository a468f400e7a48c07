"""transformers models whose feed-forward networks :func:`flashmhf.replace_ffn` has replaced:

their record, drawing and loading.
"""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..nn import FlashMHF
from ..nn.init import INITIALIZER_RANGE, Projection, Scheme
from ..nn.multihead import HeadRMSNorm

NETWORKS = "flashmhf_networks"  # in a model's configuration: names of replaced networks and their arguments of FlashMHF
# where files come from
_SOURCE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def adopt(model: PreTrainedModel) -> None:
    """Record every FlashMHF of a model in its configuration, and have its ``init_weights`` draw them."""
    record = {
        name: _settings(part)
        for name, part in model.named_modules(remove_duplicate=False)
        if isinstance(part, FlashMHF)
    }
    setattr(model.config, NETWORKS, record)
    _draw_with_model(model)


def _draw_with_model(model: PreTrainedModel) -> None:
    for part in model.modules():  # transformers calls that of the innermost model
        if isinstance(part, PreTrainedModel):
            part._init_weights = MethodType(_init_weights, part)


def _init_weights(self: PreTrainedModel, module: nn.Module) -> None:
    """Draw FlashMHF networks, which the model's own method does not know.

    transformers leaves loaded tensors alone, whatever draws them.
    """
    if isinstance(module, (FlashMHF, Projection, HeadRMSNorm)):
        module.reset_parameters()
    else:
        type(self)._init_weights(self, module)


def _settings(network: FlashMHF) -> dict[str, Any]:
    """Return the arguments that make such a network again, without device and dtype; JSON can hold them."""
    names = ("d_model", "num_heads", "num_subnets", "subnet_dim", "router_eps", "backend", "deterministic")
    bias = not network.skip_linear and network.in_proj.bias is not None
    settings = {name: getattr(network, name) for name in names} | {"bias": bias}
    defaults = {"num_kv_heads": network.num_heads, "skip_linear": False, "activation": "silu"}
    settings |= {
        name: getattr(network, name) for name, default in defaults.items() if getattr(network, name) != default
    }
    return settings if network.q_norm is None else settings | {"q_norm": True, "q_norm_eps": network.q_norm.eps}


def load_replaced(directory: str | Path, model_class: type[PreTrainedModel] | None = None, **kwargs):
    """Load a model that was saved after :func:`flashmhf.replace_ffn`, which transformers' own ``from_pretrained``
    cannot.

    A missing weight is drawn as ``replace_ffn`` draws it, and reported as ``from_pretrained`` does;
    :func:`flashmhf.models.load` refuses.

    Args:
        directory: the directory that ``save_pretrained`` wrote, or a name of the Hugging Face hub.
        model_class: the class to load; None for the one that saved it.
        kwargs: further arguments of ``from_pretrained`` (dtype, device_map, revision, …), settings of the configuration
            too.

    Returns what ``from_pretrained`` does: a model of transformers' class in eval mode. Raises ValueError for a model
    without replaced networks and for recorded names that it lacks, NotImplementedError for a class that is not
    transformers' own, TypeError for a
    ``model_class`` that is no model's.
    """
    if model_class is not None and not issubclass(model_class, PreTrainedModel):
        raise TypeError(
            f"model_class is {model_class.__name__}; supported: subclasses of transformers.PreTrainedModel, and None"
        )
    base = model_class
    if base is None:
        source = {name: kwargs[name] for name in _SOURCE if name in kwargs}
        config = kwargs.get("config") or AutoConfig.from_pretrained(directory, **source)
        name = (config.architectures or ["none"])[0]
        base = getattr(transformers, name, None)
        if base is None:
            raise NotImplementedError(
                f"architectures of the configuration is {name!r}; supported: transformers' own; give model_class"
            )

    class Replaced(base):
        def __init__(self, config: PreTrainedConfig, *args, **settings):
            super().__init__(config, *args, **settings)
            # If replace_ffn got only the language model within a larger model, that one's own configuration has the
            # record.
            models = {
                id(part.config): part for part in reversed(list(self.modules())) if isinstance(part, PreTrainedModel)
            }
            recorded = [
                (part, networks) for part in models.values() if (networks := getattr(part.config, NETWORKS, None))
            ]
            if not recorded:
                found = f"the configuration of {directory} records no networks that replace_ffn put there"
                raise ValueError(f"{found}; load it with from_pretrained")
            for part, networks in recorded:
                _put_networks(part, networks)

    # by which transformers converts stored weights
    Replaced.__name__, Replaced.__module__ = base.__name__, base.__module__
    loaded = Replaced.from_pretrained(directory, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = base
    return loaded


def _put_networks(model: PreTrainedModel, networks: dict[str, dict]) -> None:
    for recorded, settings in networks.items():
        name = _name_in(model, recorded)
        # which 0.1 recorded
        settings = {key: value for key, value in settings.items() if key != "accumulate_main_grad"}
        like = next(model.get_submodule(name).parameters())
        network = FlashMHF(**settings, device=like.device, dtype=like.dtype)
        initializer_range = getattr(model.config, "initializer_range", INITIALIZER_RANGE)
        network.set_scheme(Scheme(num_layers=len(networks), initializer_range=initializer_range))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, network)
    _draw_with_model(model)


def _name_in(model: nn.Module, recorded: str) -> str:
    """Return the recorded name, with or without the name of the inner model:

    replace_ffn may have seen that one alone.
    """
    prefix = getattr(model, "base_model_prefix", "") + "."
    candidates = (recorded, prefix + recorded, recorded.removeprefix(prefix))
    modules = dict(model.named_modules())
    for name in candidates:
        if name in modules:
            return name
    raise ValueError(f"{type(model).__name__} has no {recorded}, which its configuration records as replaced")
