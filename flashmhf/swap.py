"""FlashMHF in place of the SwiGLU networks of an existing model (Llama, Mistral, Qwen and the like)."""

from __future__ import annotations

import copy
import sys
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from .checks import positive
from .nn.flashmhf import FlashMHF, default_num_heads, default_subnet_dim
from .nn.init import INITIALIZER_RANGE
from .nn.weights import check_held, check_not_compiled, check_whole, hooks_of

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
WIDTH_MULTIPLE = 16  # what the kernels want of d_e


def _why_not_swiglu(module: nn.Module) -> str | None:
    """Return why ``module`` is not SiLU(x gate) * (x up) down, as wide as x, of three linear layers alone, or None."""
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if lacking := set(_PROJECTIONS) - children.keys():
        return f"has no {', '.join(sorted(lacking))}"
    if others := sorted({*own, *children} - set(_PROJECTIONS)):
        return f"has {', '.join(others)} beside its projections"
    if others := [name for name in _PROJECTIONS if type(children[name]) is not nn.Linear]:
        return f"has a {type(children[others[0]]).__name__} as {others[0]}"
    sizes = module.gate_proj.in_features, module.down_proj.out_features
    if sizes[0] != sizes[1]:
        return f"takes {sizes[0]} features and returns {sizes[1]}"
    # Liger's kernels, which need a GPU, compute what the name says
    if type(module).__name__.startswith("LigerSwiGLUMLP") or _computes_swiglu(module):
        return None
    parts = {**vars(module), **module._modules}.items()
    others = {name: part for name, part in parts if name[0] != "_" and name not in _PROJECTIONS and callable(part)}
    shown = [f"{name} = {getattr(part, '__name__', None) or type(part).__name__}" for name, part in others.items()]
    shown += [f"{name} = {part}" for name, part in parts if isinstance(part, float)]
    return f"computes something else than SwiGLU with the activation SiLU ({', '.join(shown) or 'by its forward'})"


@torch.no_grad()
def _computes_swiglu(module: nn.Module) -> bool:
    """Return whether the class's forward computes SwiGLU on a small copy, on small and on large values, so that
    multipliers and clamps show.
    """
    with torch.random.fork_rng([]), torch.autocast("cpu", enabled=False):
        torch.default_generator.manual_seed(0)
        small, shape, cpu = _small_copy(module), (1, 8, 2), {"device": "cpu", "dtype": torch.float32}
        return all(_agrees(small, scale * torch.randn(shape, **cpu)) for scale in (1.0, 1e4))


def _small_copy(module: nn.Module) -> nn.Module:
    """Return ``module`` on the CPU without dropout, with layers of two and three features in place of its own."""
    sizes = {module.gate_proj.out_features: 3, module.gate_proj.in_features: 2}
    small = copy.copy(module)
    for name, value in vars(module).items():
        if type(value) is int:
            vars(small)[name] = sizes.get(value, value)
    small.training, small._modules = False, dict(module._modules)
    for name, part in module._modules.items():
        if name in _PROJECTIONS:
            shape = sizes[part.in_features], sizes[part.out_features], part.bias is not None
            small._modules[name] = nn.Linear(*shape, "cpu", torch.float32)
        elif isinstance(part, nn.Dropout):
            small._modules[name] = nn.Identity()
    return small


def _agrees(module: nn.Module, x: Tensor) -> bool:
    """Return whether the forward of the class of ``module`` gives SwiGLU's values for x."""
    expected = module.down_proj(nn.functional.silu(module.gate_proj(x)) * module.up_proj(x))
    try:
        y = type(module).forward(module, x)
    except Exception:  # a forward of other arguments
        return False
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return False
    return bool((y - expected).norm() <= 1e-3 * expected.norm())


def _experts(block: nn.Module) -> list[nn.Module]:
    """Return the SwiGLU networks that ``block`` chooses among, and those that it runs beside its experts. Its router is
    a matrix of a row per expert, beside as many networks or one tensor of the weights of all.
    """
    parts = []
    for child in block.children():
        parts += child.children() if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else [child]
    networks = [part for part in parts if _is_gated(part) and _why_not_swiglu(part) is None]
    if not networks or isinstance(block, nn.Sequential):
        return []
    d_model = networks[0].gate_proj.in_features
    others = [(block, each) for each in block.parameters(recurse=False)]
    others += [(part, each) for part in parts if part not in networks for each in part.parameters()]
    for owner, router in others:
        if router.dim() != 2 or d_model not in router.shape:
            continue
        count = router.numel() // d_model
        fused = any(
            each.dim() == 3 and each.shape[0] == count and d_model in each.shape[1:] and other is not owner
            for other, each in others
        )
        # as many networks, or one or two more that run for every token
        if 1 < count != d_model and (fused or 0 <= len(networks) - count <= 2):
            return networks
    return []


def _is_gated(module: nn.Module) -> bool:
    return module._modules.keys() >= set(_PROJECTIONS)


def _check_replaceable(name: str, network: nn.Module) -> None:
    """Refuse what a network carries beside its weights, which would be lost."""
    check_not_compiled(name)
    if hooks := hooks_of(*network.modules(), *network.parameters()):
        raise ValueError(f"{name} has {hooks}, which would be lost; supported: hooks set afterwards")
    forward = vars(network).get("forward")
    # accelerate's and Liger's are put there by libraries
    of_library = hasattr(network, "_hf_hook") or getattr(forward, "__module__", "").startswith("liger_kernel")
    if forward is not None and not of_library:
        raise ValueError(f"{name} has a forward of its own, which would be lost; supported: its class's")


def _check_held_by_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse an attribute that holds a network or a method of it, and so would go on calling it."""
    replaced = {id(part): name for name in names for part in model.get_submodule(name).modules()}
    for path, owner in model.named_modules():
        if id(owner) in replaced:
            continue
        for key, value in vars(owner).items():
            if key == "_modules":
                continue
            values = value if isinstance(value, list | tuple) else [value]
            values = value.values() if isinstance(value, dict) else values
            for each in values:
                if name := replaced.get(id(getattr(each, "__self__", each))):
                    found = f"{f'{path}.{key}'.lstrip('.')} holds {name}, too, and would go on calling it"
                    raise ValueError(f"{found}; supported: networks that modules alone hold")


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
    if adapted := [name for name, module in model.named_modules() if hasattr(module, "base_layer")]:
        supported = "models without, as before get_peft_model or after merge_and_unload()"
        raise ValueError(f"{adapted[0]} is held by an adapter; supported: {supported}")
    shared = _swiglu_names(model)
    names = [name for members in shared.values() for name in members]
    for name in names:
        _check_replaceable(name, model.get_submodule(name))
    _check_held_by_modules(model, names)
    sizes, drawn = (num_heads, num_subnets, subnet_dim), _drawing(model, len(names), num_layers)
    device = kwargs.pop("device", None)
    # without memory: whatever is refused is refused before the model changes
    networks = [_counterpart(model.get_submodule(members[0]), sizes, drawn, kwargs) for members in shared.values()]
    models = _models_with(model, shared)
    for members, network in zip(shared.values(), networks, strict=True):
        where = device or model.get_submodule(members[0]).gate_proj.weight.device
        if torch.device(where).type != "meta":
            network.to_empty(device=where)  # and draws its weights
        for name in members:
            model.set_submodule(name, network)
    if models:
        from .models.record import record

        for each in models:
            record(each)
    for part in (part for each in models or [model] for part in each.modules()):
        for named in (part, getattr(part, "config", None)):  # a part of a model has the model's configuration
            if hasattr(named, "name_or_path"):
                named.name_or_path = ""
    return names


def _drawing(model: nn.Module, networks: int, num_layers: int | None) -> dict[str, Any]:
    """Return what ``reset_parameters`` of each of the new ``networks`` of ``model`` takes."""
    if num_layers is None:
        found = (getattr(getattr(part, "config", None), "num_hidden_layers", None) for part in model.modules())
        num_layers = max([networks, *(count for count in found if isinstance(count, int))])
    initializer_range = getattr(getattr(model, "config", None), "initializer_range", INITIALIZER_RANGE)
    return {"initializer_range": initializer_range, "num_layers": positive("num_layers", num_layers)}


def _models_with(model: nn.Module, networks: Container[int]) -> list[nn.Module]:
    """Return transformers' models within ``model`` that hold one of these networks, by their ids. Raises ValueError if
    one of them cannot record what takes their place.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return []  # there can be none
    from .models import record

    models = [each for each in record.models_in(model) if any(id(part) in networks for part in each.modules())]
    for each in models:
        record.recorded(each, changes=True)
    return models


def _swiglu_names(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each SwiGLU network but experts, by its id: a replaced network's memory is then free at once.
    Raises ValueError if there is none, or if the model is one itself.
    """
    empty = all(parameter.is_meta for parameter in model.parameters())
    experts = {id(network) for block in model.modules() for network in _experts(block)}
    found: dict[int, list[str]] = {}
    reasons = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not _is_gated(module) or id(module) in experts:
            continue
        check_held(name, module, empty)
        if reason := _why_not_swiglu(module):
            reasons.append(f"{name or 'model'} {reason}")
        elif not name:
            lacking = f"model is itself a SwiGLU network ({type(model).__name__}), which cannot be replaced in place"
            raise ValueError(f"{lacking}; supported: the module that holds it")
        else:
            found.setdefault(id(module), []).append(name)
    if not found:
        why = f" but experts of mixtures, {len(experts)} of them, which are left alone" if experts else ""
        why += f": {reasons[0]}" if reasons else ""
        supported = "gate_proj, up_proj and down_proj that are linear layers, with SiLU between them"
        raise ValueError(f"{type(model).__name__} has no SwiGLU network{why}; supported: {supported}")
    return found


def _counterpart(
    swiglu: nn.Module, sizes: tuple[int | None, ...], drawn: dict[str, Any], kwargs: dict[str, Any]
) -> FlashMHF:
    """Return the network that takes the place of ``swiglu``, on the meta device. ``drawn``: how its weights will be."""
    num_heads, num_subnets, subnet_dim = sizes
    weight = swiglu.gate_proj.weight
    d_model = weight.shape[1]
    heads = default_num_heads(d_model) if num_heads is None else positive("num_heads", num_heads)
    if num_subnets is None:
        matrices = sum(getattr(swiglu, name).weight.numel() for name in _PROJECTIONS)
        shared = {name: kwargs[name] for name in ("num_kv_heads", "skip_linear") if name in kwargs}
        num_subnets, subnet_dim = equal_parameter_sizes(d_model, matrices, heads, **shared)
    bias = not kwargs.get("skip_linear") and any(getattr(swiglu, name).bias is not None for name in _PROJECTIONS)
    settings = {"bias": bias, "dtype": weight.dtype, **kwargs, "device": "meta"}
    network = FlashMHF(d_model, heads, num_subnets, subnet_dim, **settings)
    network.reset_parameters(**drawn)
    network.placed = True
    return network.train(swiglu.training)
