"""Loading transformers models whose feed-forward networks :func:`flashmhf.replace_ffn` has replaced."""

from __future__ import annotations

from pathlib import Path

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..nn.swap import NETWORKS, rebuild


def has_replaced(config: PreTrainedConfig) -> bool:
    """Whether a configuration records networks that ``replace_ffn`` put into the model."""
    return bool(getattr(config, NETWORKS, None))


def load_replaced(directory: str | Path, model_class: type[PreTrainedModel] | None = None, **kwargs):
    """``from_pretrained`` for a model that was saved after :func:`flashmhf.replace_ffn`.

    transformers' own ``from_pretrained`` does not know of the replacement: it leaves the FlashMHF weights out and draws SwiGLU
    networks at random, with a warning.

    Args:
        directory: where ``save_pretrained`` wrote the model, or a name of the Hugging Face hub.
        model_class: the class to load; None for the one that saved it.
        kwargs: of ``from_pretrained`` (dtype, device_map, …).

    Returns what ``from_pretrained`` does: a model of transformers' class in eval mode. Raises ValueError for a model without replaced
    networks and for recorded names that it has not, NotImplementedError for a class that is not transformers' own.
    """
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(directory)
    if not has_replaced(config):
        raise ValueError(f"the configuration of {directory} records no networks that replace_ffn put there; load it with from_pretrained")
    base = model_class or _saving_class(config)

    class Replaced(base):
        def __init__(self, config: PreTrainedConfig, *args, **settings):
            super().__init__(config, *args, **settings)
            _put_networks(self, getattr(config, NETWORKS))

    Replaced.__name__ = base.__name__  # transformers chooses by the name what it converts in stored weights
    loaded = Replaced.from_pretrained(directory, config=config, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = base
    return loaded


def _saving_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    name = (config.architectures or ["none"])[0]
    found = getattr(transformers, name, None)
    if found is None:
        raise NotImplementedError(
            f"architectures of the configuration is {name!r}; supported: classes of transformers, or give model_class"
        )
    return found


def _put_networks(model: PreTrainedModel, networks: dict[str, dict]) -> None:
    for recorded, settings in networks.items():
        name = _name_in(model, recorded)
        old = model.get_submodule(name)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, rebuild(settings, like=next(old.parameters())))


def _name_in(model: nn.Module, recorded: str) -> str:
    """The recorded name, with or without the name of the inner model: replace_ffn may have seen that one alone."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    candidates = (recorded, prefix + recorded, recorded.removeprefix(prefix))
    modules = dict(model.named_modules())
    for name in candidates:
        if name in modules:
            return name
    raise ValueError(f"{type(model).__name__} has no {recorded}, which its configuration records as replaced")
