"""FlashMHF in place of the SwiGLU networks of an existing model (Llama, Mistral, Qwen and the like)."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from . import checks
from .checks import positive
from .nn.flashmhf import FlashMHF, default_num_heads, default_subnet_dim
from .nn.init import INITIALIZER_RANGE, Projection
from .nn.weights import check_held, check_whole, mark_drawn

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
WIDTH_MULTIPLE = 16  # what the kernels want of d_e


def is_swiglu(module: nn.Module) -> bool:
    """Return whether ``module`` is SiLU(x gate) * (x up) down, as wide as x, of three linear layers alone."""
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    linear = all(type(child) in (nn.Linear, Projection) for child in children.values()) and not _has_other_part(module)
    whole = next(module.parameters(recurse=False), None) is None and set(children) == set(_PROJECTIONS)
    return linear and whole and module.down_proj.out_features == module.gate_proj.in_features


def _has_other_part(module: nn.Module) -> bool:
    """Return whether a gated network holds a module or function that is not a linear layer, SiLU or dropout."""
    for name, part in {**vars(module), **module._modules}.items():
        known = isinstance(part, (nn.Linear, nn.SiLU, nn.Dropout, nn.Identity)) or part is nn.functional.silu
        # what Module.compile, accelerate and Liger set on the instance
        known = known or type(part).__name__ == "SiLUActivation" or hasattr(nn.Module, name) or name == "_old_forward"
        if callable(part) and not known:
            return True
    return False


def _experts(block: nn.Module) -> list[nn.Module]:
    """Return the SwiGLU networks that ``block`` chooses among, and those that it runs beside its experts. Its router is
    a matrix of a row per expert, beside as many networks or one tensor of the weights of all.
    """
    parts = []
    for child, module in block.named_children():
        held = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        parts += [(f"{child}.{key}", each) for key, each in module.named_children()] if held else [(child, module)]
    networks = [part for _, part in parts if is_swiglu(part)]
    if not networks or isinstance(block, nn.Sequential):
        return []
    d_model = networks[0].gate_proj.in_features
    tensors = [(block, each) for each in block.parameters(recurse=False)]
    tensors += [(part, each) for _, part in parts if part not in networks for each in part.parameters()]
    matrices = [(owner, {*each.shape}) for owner, each in tensors if each.dim() == 2]
    routers = {(owner, *(shape - {d_model})) for owner, shape in matrices if d_model in shape}
    fused = {(owner, each.shape[0]) for owner, each in tensors if each.dim() == 3 and d_model in each.shape[1:]}
    for owner, *count in routers:
        beside = any([size] == count and other is not owner for other, size in fused)
        # as many networks, or one or two more that run for every token
        if count and count[0] > 1 and (beside or 0 <= len(networks) - count[0] <= 2):
            return networks
    return []


def equal_parameter_sizes(
    d_model: int, parameters: int, num_heads: int, num_kv_heads: int | None = None, skip_linear: bool = False
) -> tuple[int, int]:
    """Return (E, d_e) of the FlashMHF whose count comes closest. Raises ValueError if W_in and W_out take them all."""
    remaining = parameters - (0 if skip_linear else 2 * d_model**2)
    kv_model = d_model * (num_kv_heads or num_heads) // num_heads  # of a row of K, all heads together
    smallest = 3 * kv_model * WIDTH_MULTIPLE + d_model
    if remaining < smallest // 2:
        missing = f"beside W_in and W_out ({2 * d_model**2:,}) for K, U, V and the router ({smallest:,} at least)"
        raise ValueError(f"{parameters:,} parameters at d_model = {d_model} leave too few {missing}")
    usual = default_subnet_dim(d_model // num_heads)
    subnets = max(1, round(remaining / (3 * kv_model * usual + d_model)))
    width = (remaining / subnets - d_model) / (3 * kv_model)
    return subnets, max(WIDTH_MULTIPLE, round(width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def replace_ffn(
    model: nn.Module, num_heads: int | None = None, num_subnets: int | None = None, subnet_dim: int | None = None, *,
    num_layers: int | None = None, **kwargs: Any,
) -> list[str]:  # fmt: skip
    """Replace every SwiGLU network of ``model``, in place, by a FlashMHF with fresh weights; return their names.

    Args:
        model: any module with networks of gate_proj, up_proj, down_proj as in Llama, Mistral and Qwen, whole or a part.
            Mixtures of experts are left alone; a network under several names stays one.
        num_heads: H; None for heads of 128 (the paper's choice), or of 64, 96, 32 or 16.
        num_subnets, subnet_dim: E and d_e, both or neither; None for equal parameters.
        num_layers: of the whole model; None for what a configuration within ``model`` says, or the number of networks.
        kwargs: further arguments of :class:`flashmhf.FlashMHF`.

    Weights are drawn by ``reset_parameters("balanced")``. The configuration records the networks: other models made of
    the same object have them, too, and ``from_pretrained`` builds them once ``flashmhf.models`` is imported. Its
    ``name_or_path`` becomes "": whoever loads the model once more by that name is refused; save and load it to name it.

    Raises TypeError if ``model`` is not a module; ValueError if there is nothing to replace, if it is the network
    itself, for sharded, offloaded or parametrised networks, for adapters, and if sizes do not fit. The model is then as
    it was.
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    if (num_subnets is None) != (subnet_dim is None):
        raise ValueError(f"num_subnets is {num_subnets} and subnet_dim is {subnet_dim}; give both or neither")
    check_whole("", model)
    empty = all(parameter.is_meta for parameter in model.parameters())
    experts = {id(network) for block in model.modules() for network in _experts(block)}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            supported = "models without, as before get_peft_model or after merge_and_unload()"
            raise ValueError(f"{name} is held by an adapter; supported: {supported}")
    # the names of each network; ids, so that a replaced network's memory is free at once
    shared: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        projections = [module._modules.get(each) for each in _PROJECTIONS]
        if None in projections or id(module) in experts:
            continue
        for each, projection in zip(_PROJECTIONS, projections, strict=True):
            held = f"{name}.{each}".lstrip(".")
            check_held(held, projection, empty)
        if is_swiglu(module):
            if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
                raise ValueError(f"{name} has forward hooks, which would be lost; supported: hooks set afterwards")
            shared.setdefault(id(module), []).append(name)
    names = [name for members in shared.values() for name in members]
    if not names:
        found = f"{type(model).__name__} has no SwiGLU network"
        raise ValueError(f"{found}; supported: gate_proj, up_proj and down_proj that are linear layers")
    if "" in names:
        found = f"model is itself a SwiGLU network ({type(model).__name__})"
        raise ValueError(f"{found}, which cannot be replaced in place; supported: the module that holds it")
    initializer_range = getattr(getattr(model, "config", None), "initializer_range", INITIALIZER_RANGE)
    if num_layers is None:
        found = (getattr(getattr(part, "config", None), "num_hidden_layers", None) for part in model.modules())
        num_layers = max([len(names), *(count for count in found if isinstance(count, int))])
    sizes = (num_heads, num_subnets, subnet_dim, initializer_range, positive("num_layers", num_layers))
    for name in names:  # whatever is refused is refused before the model changes
        _counterpart(model.get_submodule(name), sizes, {**kwargs, "device": "meta"})
    models = []
    if "transformers.modeling_utils" in sys.modules:  # else there can be none
        from .models import record

        swapped = [model.get_submodule(name) for name in names]
        models = [each for each in record.models_in(model) if not {*swapped}.isdisjoint(each.modules())]
        for each in models:
            record.described(each, changes=True)
    for members in shared.values():
        network = _counterpart(model.get_submodule(members[0]), sizes, kwargs)
        mark_drawn(network)
        for name in members:
            model.set_submodule(name, network)
    for each in models:
        record.record(each)
    for part in (part for each in models or [model] for part in each.modules()):
        for named in (part, getattr(part, "config", None)):  # a part of a model has the model's configuration
            if hasattr(named, "name_or_path"):
                named.name_or_path = ""
    return names


def _counterpart(swiglu: nn.Module, sizes: tuple[Any, ...], kwargs: dict[str, Any]) -> FlashMHF:
    num_heads, num_subnets, subnet_dim, initializer_range, num_layers = sizes
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
