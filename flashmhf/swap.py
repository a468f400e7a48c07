"""FlashMHF in place of the SwiGLU networks of an existing model (Llama, Mistral, Qwen and the like)."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import checks, extras
from .nn.arguments import positive
from .nn.flashmhf import FlashMHF, default_num_heads, default_subnet_dim, other_part
from .nn.init import INITIALIZER_RANGE, Projection

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_OF_MIXTURES = (".experts", "shared_expert", "shared_mlp")  # in the names of networks inside mixtures of experts
WIDTH_MULTIPLE = 16  # what the kernels want of d_e


def is_swiglu(module: nn.Module) -> bool:
    """Return whether ``module`` is SiLU(x gate) * (x up) down, as wide as x, of three linear layers and nothing else
    with parameters.
    """
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    linear = all(type(child) in (nn.Linear, Projection) for child in children.values()) and other_part(module) is None
    whole = next(module.parameters(recurse=False), None) is None and set(children) == set(_PROJECTIONS)
    return linear and whole and module.down_proj.out_features == module.gate_proj.in_features


def equal_parameter_sizes(
    d_model: int, parameters: int, num_heads: int, num_kv_heads: int | None = None, skip_linear: bool = False
) -> tuple[int, int]:
    """Return (E, d_e) of the FlashMHF whose count comes closest: E near d_ff / (8/3 d_h), d_e a multiple of 16.

    Raises ValueError if W_in and W_out alone take more than ``parameters``.
    """
    remaining = parameters - (0 if skip_linear else 2 * d_model**2)
    kv_model = d_model * (num_kv_heads or num_heads) // num_heads  # of a row of K, all heads together
    smallest = 3 * kv_model * WIDTH_MULTIPLE + d_model
    if remaining < smallest // 2:
        raise ValueError(
            f"{parameters:,} parameters at d_model = {d_model} leave too few beside W_in and W_out (2 d_model^2 = {2 * d_model**2:,}) "
            f"for K, U, V and the router ({smallest:,} at least)"
        )
    usual = default_subnet_dim(d_model // num_heads)
    subnets = max(1, round(remaining / (3 * kv_model * usual + d_model)))
    width = (remaining / subnets - d_model) / (3 * kv_model)
    return subnets, max(WIDTH_MULTIPLE, round(width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def replace_ffn(
    model: nn.Module,
    num_heads: int | None = None,
    num_subnets: int | None = None,
    subnet_dim: int | None = None,
    **kwargs: Any,
) -> list[str]:
    """Replace every SwiGLU network of ``model``, in place, by a FlashMHF with fresh weights; return their names.

    A network that the model holds under several names is replaced by one FlashMHF under all of them.

    Args:
        model: any module with SwiGLU networks as transformers' Llama, Mistral and Qwen models have them (gate_proj,
            up_proj, down_proj; with biases the FlashMHF has biases too). Networks inside mixtures of experts are left
            alone.
        num_heads: H; None for heads of 128 (the paper's choice), or of 64, 32 or 16 if d_model is not a multiple of
            128.
        num_subnets: E; None for equal parameters, up to the granularity of d_e. Give num_subnets and subnet_dim both or
            neither.
        subnet_dim: d_e; give it together with num_subnets.
        kwargs: further arguments of :class:`flashmhf.FlashMHF`.

    Weights are drawn by ``reset_parameters("balanced")`` for as many layers as there are networks, the router with the
    initializer_range of ``model.config``. The configuration of a transformers model, ``model`` or a part of it, records
    all of its FlashMHF networks, so that :func:`flashmhf.models.load_replaced` loads what the model's own
    ``save_pretrained`` stores, and its ``init_weights`` draws them too. Raises TypeError if ``model`` is not a module,
    ValueError if there is nothing to replace, if ``model`` itself is the network to replace, and if sizes do not fit.
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    if (num_subnets is None) != (subnet_dim is None):
        raise ValueError(f"num_subnets is {num_subnets} and subnet_dim is {subnet_dim}; give both or neither")
    # the names of each network; ids, so that a replaced network's memory is free at once
    shared: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_swiglu(module) and not any(part in name for part in _OF_MIXTURES):
            shared.setdefault(id(module), []).append(name)
    names = [name for members in shared.values() for name in members]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no SwiGLU network of gate_proj, up_proj, down_proj linear layers to replace"
        )
    if "" in names:
        raise ValueError(
            f"model is itself a SwiGLU network ({type(model).__name__}), and a module cannot be replaced in place within itself; "
            "FlashMHF.from_swiglu(model) makes a FlashMHF of it"
        )
    initializer_range = getattr(getattr(model, "config", None), "initializer_range", INITIALIZER_RANGE)
    sizes = (num_heads, num_subnets, subnet_dim, initializer_range, len(names))
    for name in names:  # whatever is refused is refused before the model changes
        _counterpart(model.get_submodule(name), *sizes, {**kwargs, "device": "meta"})
    for members in shared.values():
        network = _counterpart(model.get_submodule(members[0]), *sizes, kwargs)
        for name in members:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, network)
    for part in extras.pretrained_models(model, FlashMHF):
        from .models import replaced

        replaced.adopt(part)
    return names


def _counterpart(
    swiglu: nn.Module, num_heads, num_subnets, subnet_dim, initializer_range, num_layers, kwargs
) -> FlashMHF:
    weight = swiglu.gate_proj.weight
    d_model = weight.shape[1]
    heads = default_num_heads(d_model) if num_heads is None else positive("num_heads", num_heads)
    if num_subnets is None:
        matrices = sum(getattr(swiglu, name).weight.numel() for name in _PROJECTIONS)
        shared = {name: kwargs[name] for name in ("num_kv_heads", "skip_linear") if name in kwargs}
        num_subnets, subnet_dim = equal_parameter_sizes(d_model, matrices, heads, **shared)
    bias = any(getattr(swiglu, name).bias is not None for name in _PROJECTIONS)
    settings = {"bias": bias, "device": weight.device, "dtype": weight.dtype, **kwargs}
    module = FlashMHF(d_model, heads, num_subnets, subnet_dim, **settings)
    module.reset_parameters(initializer_range=initializer_range, num_layers=num_layers)
    return module.train(swiglu.training)
