"""State dicts of the official modules (``MHFFNMoE``, ``MHFFN``) <-> :class:`flashmhf.FlashMHF`, :class:`flashmhf.MHFFN`.

Official layout: gate_weight, up_weight, down_weight [d_ff, H_kv d_h] with row e * d_e + j and column h * d_h + i hold k, u, v
[h, e, j, i]; router is the same; w_self.weight and w_self_2.weight are in_proj and out_proj; q_norm.weight may be present
although unused, and then survives the round trip. A network without gate has k, u, v [h, j, i] and no router.

The official scalings multiply Q K^T and Q U^T by one constant, and the sum over the sub-networks by another. Here K, U and V carry them:
exactly in float32 to rounding, and rounded once more to the dtype of a 16-bit checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from ..reference import ACTIVATIONS
from .arguments import divisor, positive

_STACKED = {"gate_weight": "k", "up_weight": "u", "down_weight": "v"}
_RENAMED = {
    "w_self.weight": "in_proj.weight",
    "w_self_2.weight": "out_proj.weight",
    "router": "router",
    "q_norm.weight": "q_norm.weight",
    "w_self.bias": "in_proj.bias",
    "w_self_2.bias": "out_proj.bias",
}
_OPTIONAL = {"q_norm.weight", "w_self.bias", "w_self_2.bias"}
_LINEAR = {"w_self.weight", "w_self_2.weight"}
SILU = ("silu", "swish")  # transformers' names of x sigmoid(x)
PREFIXES = {"mhffnmoe": "mhffnmoe_", "mhffn": "mhffn_"}  # of an official configuration's settings, by its model_type


def official_settings(config: Mapping[str, object]) -> dict[str, object]:
    """The network's settings in an official configuration, without their prefix. ValueError for another model type."""
    model_type = config.get("model_type", "mhffnmoe")
    if model_type not in PREFIXES:
        raise ValueError(f"model_type is {model_type!r}; expected {', '.join(map(repr, PREFIXES))}")
    prefix = PREFIXES[model_type]
    return {name.removeprefix(prefix): value for name, value in config.items() if name.startswith(prefix)}


def official_activation(config: Mapping[str, object]) -> str:
    """Our name of an official configuration's ``hidden_act``. NotImplementedError for a function that no back end has."""
    name = config.get("hidden_act", "silu")
    if name in SILU:
        return "silu"
    if name not in ACTIVATIONS:
        raise NotImplementedError(f"hidden_act={name!r} is not supported; supported: {', '.join(map(repr, [*ACTIVATIONS, *SILU[1:]]))}")
    return name


def official_scales(config: Mapping[str, object]) -> tuple[float, float]:
    """(scale of Q K^T and Q U^T, scale of the sum over the sub-networks) of an official configuration.

    apply_dot_scaling: sqrt(H), or H with apply_dot_scaling_theory, which does nothing alone; apply_final_scaling: sqrt(3/8).
    """
    settings = official_settings(config)
    heads = positive("num_heads", settings.get("num_heads", 1))
    score = 1.0
    if settings.get("apply_dot_scaling"):
        score = float(heads) if settings.get("apply_dot_scaling_theory") else math.sqrt(heads)
    return score, math.sqrt(3 / 8) if settings.get("apply_final_scaling") else 1.0


def _check_names(state: Mapping[str, Tensor], known: Mapping[str, str], optional: set[str], what: str) -> None:
    """``known``: every name that ``state`` may hold, with its name on the other side."""
    unknown = sorted(set(state) - set(known))
    if unknown:
        raise ValueError(f"unknown names in {what}: {unknown}; supported: {sorted(known)}")
    missing = sorted(name for name, other in known.items() if name not in state and not {name, other} & optional)
    if missing:
        raise KeyError(f"missing from {what}: {missing}")


def _check_dimensions(state: Mapping[str, Tensor], name: str, shape: str, dimensions: tuple[int, ...]) -> None:
    if state[name].dim() not in dimensions:
        raise ValueError(f"{name} has shape {list(state[name].shape)}; expected {shape}")


def _check_equal_shapes(state: Mapping[str, Tensor], first: str, *others: str) -> None:
    for name in others:
        if state[name].shape != state[first].shape:
            raise ValueError(f"{name} has shape {list(state[name].shape)}; expected {list(state[first].shape)} ({first}'s shape)")


def _optional_names(skip_linear: bool, gated: bool) -> set[str]:
    return _OPTIONAL | (_LINEAR if skip_linear else set()) | (set() if gated else {"router"})


def from_official(
    state: Mapping[str, Tensor],
    num_heads: int,
    num_subnets: int | None = None,
    *,
    num_kv_heads: int | None = None,
    skip_linear: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Tensor]:
    """Official state dict of one module -> state dict of ``FlashMHF`` with these H and E, or of ``MHFFN`` where ``num_subnets`` is None.

    num_kv_heads: heads of K, U and V; None for H. skip_linear: the module has no W_in and W_out. scales: of
    :func:`official_scales`, which K, U and V take in.

    ``q_norm.weight`` is kept when present; load it into a module with q_norm=True, or drop it when the checkpoint's configuration
    has it off. Raises KeyError for a missing tensor, ValueError for unknown names, other shapes, and sizes that H and E do not divide,
    TypeError and ValueError for an H or E that is no positive integer.
    """
    num_heads, gated = positive("num_heads", num_heads), num_subnets is not None
    subnets = positive("num_subnets", num_subnets) if gated else 1
    kv_heads = divisor("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    _check_names(state, {**_STACKED, **_RENAMED}, _optional_names(skip_linear, gated), "the official state dict")
    result = {ours: state[theirs] for theirs, ours in _RENAMED.items() if theirs in state}
    for theirs, ours in _STACKED.items():
        _check_dimensions(state, theirs, "[d_ff, H_kv d_h]", (2,))
        rows, columns = state[theirs].shape
        if rows % subnets or columns % kv_heads:
            raise ValueError(
                f"{theirs} has shape [{rows}, {columns}]; expected multiples of num_subnets = {subnets} and num_kv_heads = {kv_heads}"
            )
        stacked = state[theirs].view(subnets, rows // subnets, kv_heads, columns // kv_heads).permute(2, 0, 1, 3)
        scale = scales[1] if ours == "v" else scales[0]
        weight = stacked.contiguous() if scale == 1 else (stacked.double() * scale).to(stacked.dtype).contiguous()
        result[ours] = weight if gated else weight.squeeze(1)
    _check_equal_shapes(state, *_STACKED)
    return result


def to_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of ``FlashMHF`` or ``MHFFN`` -> official state dict of one module.

    Raises KeyError for a missing tensor, ValueError for unknown names and other shapes.
    """
    known = {ours: theirs for theirs, ours in (_STACKED | _RENAMED).items()}
    skip_linear = not any(_RENAMED[name] in state for name in _LINEAR)
    gated = "k" not in state or state["k"].dim() != 3
    _check_names(state, known, _optional_names(skip_linear, gated), "the state dict")
    result = {theirs: state[ours] for theirs, ours in _RENAMED.items() if ours in state}
    for theirs, ours in _STACKED.items():
        _check_dimensions(state, ours, "[H_kv, E, d_e, d_h] or, without router, [H_kv, d_ff, d_h]", (4,) if gated else (3,))
        weight = state[ours] if gated else state[ours].unsqueeze(1)
        heads, subnets, subnet_dim, head_dim = weight.shape
        result[theirs] = weight.permute(1, 2, 0, 3).reshape(subnets * subnet_dim, heads * head_dim)
    _check_equal_shapes(state, *_STACKED.values())
    return result
