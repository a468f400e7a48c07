"""State dicts of the official FlashMHF module (``MHFFNMoE``) <-> :class:`flashmhf.FlashMHF`.

Official layout: gate_weight, up_weight, down_weight [d_ff, H * d_h] with row e * d_e + j and column h * d_h + i hold k, u, v
[h, e, j, i]; router is the same; w_self.weight and w_self_2.weight are in_proj and out_proj; q_norm.weight may be present
although unused, and then survives the round trip.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .arguments import positive

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
SILU = ("silu", "swish")  # transformers' names of x sigmoid(x)
_UNSUPPORTED_FLAGS = (
    "mhffnmoe_skip_linear",
    "mhffnmoe_apply_dot_scaling",
    "mhffnmoe_apply_dot_scaling_theory",
    "mhffnmoe_apply_final_scaling",
)


def check_official_config(config: Mapping[str, object]) -> None:
    """NotImplementedError, by name, for official settings that change the function and have no counterpart here."""
    for flag in _UNSUPPORTED_FLAGS:
        if config.get(flag):
            raise NotImplementedError(f"{flag}={config[flag]!r} of the official configuration is not supported; supported: off")
    heads, groups = config.get("mhffnmoe_num_heads"), config.get("mhffnmoe_num_kuv_heads")
    if groups is not None and groups != heads:
        raise NotImplementedError(
            f"mhffnmoe_num_kuv_heads={groups!r} with mhffnmoe_num_heads={heads!r} (grouped KUV heads) is not supported; "
            "supported: one K, U, V per head"
        )
    if config.get("hidden_act", "silu") not in SILU:
        raise NotImplementedError(f"hidden_act={config['hidden_act']!r} is not supported; supported: 'silu' and its other name 'swish'")


def _check_names(state: Mapping[str, Tensor], known: Mapping[str, str], what: str) -> None:
    """``known``: every name that ``state`` may hold, with its name on the other side."""
    unknown = sorted(set(state) - set(known))
    if unknown:
        raise ValueError(f"unknown names in {what}: {unknown}; supported: {sorted(known)}")
    missing = sorted(name for name, other in known.items() if name not in state and not {name, other} & _OPTIONAL)
    if missing:
        raise KeyError(f"missing from {what}: {missing}")


def _check_dimensions(state: Mapping[str, Tensor], name: str, shape: str, dimensions: int) -> None:
    if state[name].dim() != dimensions:
        raise ValueError(f"{name} has shape {list(state[name].shape)}; expected {shape}")


def from_official(state: Mapping[str, Tensor], num_heads: int, num_subnets: int) -> dict[str, Tensor]:
    """Official state dict of one module -> state dict of ``FlashMHF`` with these H and E.

    ``q_norm.weight`` is kept when present; load it into a module with q_norm=True, or drop it when the checkpoint's configuration
    has it off. Raises KeyError for a missing tensor, ValueError for unknown names, other shapes, and sizes that H and E do not divide,
    TypeError and ValueError for an H or E that is no positive integer.
    """
    num_heads, num_subnets = positive("num_heads", num_heads), positive("num_subnets", num_subnets)
    _check_names(state, {**_STACKED, **_RENAMED}, "the official state dict")
    result = {ours: state[theirs] for theirs, ours in _RENAMED.items() if theirs in state}
    for theirs, ours in _STACKED.items():
        _check_dimensions(state, theirs, "[d_ff, H d_h]", 2)
        rows, columns = state[theirs].shape
        if rows % num_subnets or columns % num_heads:
            raise ValueError(
                f"{theirs} has shape [{rows}, {columns}]; expected multiples of num_subnets = {num_subnets} and num_heads = {num_heads}"
            )
        stacked = state[theirs].view(num_subnets, rows // num_subnets, num_heads, columns // num_heads)
        result[ours] = stacked.permute(2, 0, 1, 3).contiguous()
    return result


def to_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of ``FlashMHF`` -> official state dict of one module.

    Raises KeyError for a missing tensor, ValueError for unknown names and other shapes.
    """
    _check_names(state, {ours: theirs for theirs, ours in (_STACKED | _RENAMED).items()}, "the state dict")
    result = {theirs: state[ours] for theirs, ours in _RENAMED.items() if ours in state}
    for theirs, ours in _STACKED.items():
        _check_dimensions(state, ours, "[H, E, d_e, d_h]", 4)
        heads, subnets, subnet_dim, head_dim = state[ours].shape
        result[theirs] = state[ours].permute(1, 2, 0, 3).reshape(subnets * subnet_dim, heads * head_dim)
    return result
