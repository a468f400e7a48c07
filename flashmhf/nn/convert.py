"""State dicts of the official modules ``MHFFNMoE`` and ``MHFFN`` from and to those of FlashMHF and MHFFN.

Official gate_weight, up_weight, down_weight [d_ff, H_kv d_h], row e * d_e + j and column h * d_h + i, hold k, u, v [h,
e, j, i]; router is the same; w_self and w_self_2 are in_proj and out_proj; q_norm.weight may be present although
unused. A network without gate has k, u, v [h, j, i] and no router. K, U and V carry the official scalings, rounded once
more to a 16-bit checkpoint's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from .. import checks
from ..checks import divisor, positive

_NAMES = {  # official names by ours
    "k": "gate_weight", "u": "up_weight", "v": "down_weight", "router": "router", "q_norm.weight": "q_norm.weight",
    "in_proj.weight": "w_self.weight", "out_proj.weight": "w_self_2.weight", "in_proj.bias": "w_self.bias",
    "out_proj.bias": "w_self_2.bias",
}  # fmt: skip
_SHAPES = {
    "router": ("H", "d_h", "E"), "q_norm.weight": ("H", "d_h"),
    **dict.fromkeys(("in_proj.weight", "out_proj.weight"), ("d_model", "d_model")),
    **dict.fromkeys(("in_proj.bias", "out_proj.bias"), ("d_model",)),
}  # fmt: skip
PREFIXES = {"mhffnmoe": "mhffnmoe_", "mhffn": "mhffn_"}  # of an official configuration's settings, by its model_type


def official_settings(config: Mapping[str, object]) -> dict[str, object]:
    """Return the network's settings in an official configuration. Raises ValueError for another model's."""
    model_type = config.get("model_type", "mhffnmoe")
    if model_type not in PREFIXES:
        raise ValueError(f"model_type is {model_type!r}; expected {', '.join(map(repr, PREFIXES))}")
    prefix = PREFIXES[model_type]
    return {name.removeprefix(prefix): value for name, value in config.items() if name.startswith(prefix)}


def official_scales(config: Mapping[str, object]) -> tuple[float, float]:
    """Return an official configuration's factors on Q K^T and Q U^T, and on the sum over the sub-networks, else 1.

    The first is sqrt(H) by apply_dot_scaling, H by apply_dot_scaling_theory; the second sqrt(3/8) by its own.
    """
    settings = official_settings(config)
    heads = positive("num_heads", settings.get("num_heads", 1))
    score = 1.0
    if settings.get("apply_dot_scaling"):
        score = float(heads) if settings.get("apply_dot_scaling_theory") else math.sqrt(heads)
    return score, math.sqrt(3 / 8) if settings.get("apply_final_scaling") else 1.0


def _check_names(
    state: Mapping[str, Tensor], names: Mapping[str, str], what: str, skip_linear: bool, gated: bool
) -> None:
    """Refuse unknown and missing ``names``: those in ``state`` by our own."""
    if unknown := sorted(state.keys() - set(names.values())):
        raise ValueError(f"unknown names in {what}: {unknown}; supported: {sorted(names.values())}")
    optional = {"q_norm.weight", "in_proj.bias", "out_proj.bias", *([] if gated else ["router"])}
    optional |= {"in_proj.weight", "out_proj.weight"} if skip_linear else set()
    if missing := sorted(name for ours, name in names.items() if name not in state and ours not in optional):
        raise KeyError(f"missing from {what}: {missing}")


def _check_shapes(
    state: Mapping[str, Tensor], names: Mapping[str, str], heads: int, subnets: int, head_dim: int
) -> None:
    """Refuse shapes that do not follow from H, E and d_h, or for u and v from k's."""
    sizes = {"H": heads, "E": subnets, "d_h": head_dim, "d_model": heads * head_dim}
    for ours, dims in _SHAPES.items():
        if (name := names[ours]) in state:
            meaning = f"[{', '.join(dims)}] with {', '.join(f'{dim} = {sizes[dim]}' for dim in dict.fromkeys(dims))}"
            checks.expect_shape(name, state[name], tuple(sizes[dim] for dim in dims), meaning)
    k = names["k"]
    for ours in "uv":
        checks.expect_shape(names[ours], state[names[ours]], tuple(state[k].shape), f"{k}'s shape")


def from_official(
    state: Mapping[str, Tensor], num_heads: int, num_subnets: int | None = None, *, num_kv_heads: int | None = None,
    skip_linear: bool = False, scales: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Tensor]:  # fmt: skip
    """Convert one module's official state dict to that of ``FlashMHF``, or of ``MHFFN`` if ``num_subnets`` is None.

    num_kv_heads: None for H. skip_linear: without W_in and W_out. scales: :func:`official_scales`, multiplied into K, U
    and V. ``q_norm.weight`` is kept when present; drop it when the configuration has it off. Raises KeyError for a
    missing tensor, ValueError for unknown names, a router without num_subnets and sizes that do not fit, TypeError if H
    or E is not an integer.
    """
    checks.tensors(**checks.instance("state", state, Mapping, "a mapping of names to tensors"))
    heads, gated = positive("num_heads", num_heads), num_subnets is not None
    subnets = positive("num_subnets", num_subnets) if gated else 1
    kv_heads = divisor("num_kv_heads", num_kv_heads, "num_heads", heads)
    _check_names(state, _NAMES, "the official state dict", skip_linear, gated)
    if not gated and "router" in state:
        found = list(state["router"].shape)
        raise ValueError(f"num_subnets is None, but the state dict has a router of shape {found}, [H, d_h, E]")
    shape = list(state["gate_weight"].shape)
    if len(shape) != 2 or shape[0] % subnets or shape[1] % kv_heads:
        expected = f"[d_ff, H_kv d_h], multiples of num_subnets = {subnets} and num_kv_heads = {kv_heads}"
        raise ValueError(f"gate_weight has shape {shape}; expected {expected}")
    _check_shapes(state, _NAMES, heads, subnets, shape[1] // kv_heads)
    result = {ours: state[theirs] for ours, theirs in _NAMES.items() if theirs in state}
    for name in "kuv":
        stacked = result[name].unflatten(1, (kv_heads, -1)).unflatten(0, (subnets, -1)).permute(2, 0, 1, 3)
        scale = scales[1] if name == "v" else scales[0]
        weight = stacked.contiguous() if scale == 1 else (stacked.double() * scale).to(stacked.dtype).contiguous()
        result[name] = weight if gated else weight.squeeze(1)
    return result


def to_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of ``FlashMHF`` or ``MHFFN`` to the official one of one module. Raises KeyError for a
    missing tensor, ValueError for unknown names and for shapes that do not fit each other.
    """
    checks.tensors(**checks.instance("state", state, Mapping, "a mapping of names to tensors"))
    own = {name: name for name in _NAMES}
    skip_linear = state.keys().isdisjoint(("in_proj.weight", "out_proj.weight"))
    gated = "k" not in state or state["k"].dim() != 3
    _check_names(state, own, "the state dict", skip_linear, gated)
    shape = list(state["k"].shape)
    if len(shape) not in (3, 4) or not all(shape):
        raise ValueError(f"k has shape {shape}; expected [H_kv, E, d_e, d_h], or [H_kv, d_ff, d_h] and no router")
    if not gated and "router" in state:
        raise ValueError(f"k has shape {shape}, but there is a router; expected [H_kv, E, d_e, d_h]")
    kv_heads, subnets, head_dim = shape[0], shape[1] if gated else 1, shape[-1]
    # heads of q: in the router, or in whatever else tells them
    heads = next((len(state[name]) for name in ("router", "q_norm.weight") if name in state), None)
    heads = len(state["in_proj.weight"]) // head_dim if heads is None and not skip_linear else heads or kv_heads
    if heads % kv_heads:
        raise ValueError(f"k has shape {shape}; H_kv = {kv_heads} must divide H = {heads} of the other weights")
    _check_shapes(state, own, heads, subnets, head_dim)
    result = {_NAMES[ours]: tensor for ours, tensor in state.items()}
    for name in "kuv":
        weight = state[name] if gated else state[name].unsqueeze(1)
        result[_NAMES[name]] = weight.permute(1, 2, 0, 3).reshape(-1, kv_heads * head_dim)
    return result
