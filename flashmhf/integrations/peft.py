"""K, U and V as parameters of three dimensions, for tools such as LoRA in PEFT that adapt no others (docs/lora.md)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import checks
from ..checks import flag
from ..nn import FlashMHF
from ..nn.weights import check_held, check_whole, hooks_of

_WEIGHTS = ("k", "u", "v")


def stack_weights(network: FlashMHF, stacked: bool = True) -> FlashMHF:
    """Store k, u and v of ``network`` as [H_kv E, d_e, d_h] (True) or [H_kv, E, d_e, d_h] (False) in place; return it.

    State dicts hold four dimensions in either case. Call this before an optimizer takes the parameters: they are new
    objects. Raises TypeError for others, ValueError for weights that are sharded, offloaded, parametrised or hooked.
    """
    checks.instance("network", network, FlashMHF, "a flashmhf.FlashMHF")
    check_held("", network, empty=True)
    check_whole("", network)
    for name in _WEIGHTS:
        if hooks := hooks_of(getattr(network, name)):
            raise ValueError(f"{name} has {hooks}, which its new parameter would lose; supported: hooks set afterwards")
    shape = network.weight_shape
    if flag("stacked", stacked) and network.k.dim() == 4:
        network.register_state_dict_post_hook(_unstack)
        network.register_load_state_dict_pre_hook(_stack)
    for name in _WEIGHTS:
        weight = getattr(network, name)
        stored = weight.detach().view(-1, *shape[2:]) if stacked else weight.detach().view(shape)
        setattr(network, name, nn.Parameter(stored, requires_grad=weight.requires_grad))
    return network


def _unstack(network: FlashMHF, state: dict[str, Any], prefix: str, _: object) -> None:
    for name in _WEIGHTS:
        state[prefix + name] = state[prefix + name].view(network.weight_shape)


def _stack(network: FlashMHF, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name in _WEIGHTS:
        value, stored = state.get(prefix + name), getattr(network, name)
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape == network.weight_shape:
            state[prefix + name] = value.reshape(stored.shape)
