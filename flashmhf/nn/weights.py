"""Whether a module has its weights itself, for functions that read or replace them."""

from __future__ import annotations

from torch import Tensor, nn

from ..torch_private import is_dtensor


def check_held(name: str, module: nn.Module, empty: bool = False, offloaded: bool = False) -> None:
    """Raise ValueError, with the way out, unless ``module`` itself holds the values of its weights.

    Refused are modules that are, or have a part that is, parametrised, pruned or held by an adapter (PEFT), those that
    accelerate offloads or DeepSpeed partitions (ZeRO stage 3) unless ``offloaded``, those on the meta device unless
    ``empty``. ``name``: within its model.
    """
    shown = name or type(module).__name__
    parts = [(f"{name}.{part}".strip(".") or shown, each) for part, each in module.named_modules()]
    for part, each in parts:
        if part.rpartition(".")[2] == "base_layer" or hasattr(each, "base_layer"):
            raise ValueError(f"{part} is held by an adapter; supported: modules without, as after merge_and_unload()")
        # pruning and the older norms of torch.nn.utils leave what they compute beside the parameters
        computed = any(f"{key}{end}" in each._parameters for key in vars(each) for end in ("_orig", "_g"))
        if computed or hasattr(each, "parametrizations"):
            supported = "plain parameters, as after torch.nn.utils.parametrize.remove_parametrizations or prune.remove"
            raise ValueError(f"{part} has parametrised weights; supported: {supported}")
        if not offloaded and getattr(getattr(each, "_hf_hook", None), "offload", False):
            raise ValueError(f"{shown} is offloaded; supported: models loaded without offloading (device_map)")
    if not offloaded and partitioned(module):
        supported = "models loaded before TrainingArguments(deepspeed=...), outside of deepspeed.zero.Init"
        raise ValueError(f"{shown} is partitioned by DeepSpeed's ZeRO stage 3; supported: {supported}")
    if not empty and any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        supported = "weights that are loaded or drawn, and not offloaded"
        raise ValueError(f"{shown} has no values, its weights are on the meta device; supported: {supported}")


def partitioned(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``module`` that are empty since DeepSpeed's ZeRO stage 3 has partitioned them."""
    # a lazy parameter has no shape to ask for
    return [each for each in module.parameters() if hasattr(each, "ds_shape") and each.shape != each.ds_shape]


def check_whole(name: str, module: nn.Module) -> None:
    """Raise ValueError if a parameter of ``module`` is sharded (DTensor), or if DDP or FSDP1 wraps a part of it: they
    keep the parameters that they found, or one flat parameter in the place of all.
    """
    for part, each in module.named_modules():
        shown = f"{name}.{part}".strip(".") or type(module).__name__
        if type(each).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise ValueError(f"{shown} is a {type(each).__name__}; supported: the model before it is wrapped")
        if any(map(is_dtensor, each.parameters(recurse=False))):
            raise ValueError(f"{shown} is sharded (DTensor); supported: models before parallelize or fully_shard")


def check_not_compiled(name: str) -> None:
    """Raise ValueError if torch.compile wraps the module of this name itself: it would go on calling that one."""
    if name.rpartition(".")[2] == "_orig_mod":
        found = f"{name} is within torch.compile's module, which would go on calling the network that it compiled"
        raise ValueError(f"{found}; supported: compiled afterwards, or by module.compile()")


def hooks_of(*parts: nn.Module | Tensor) -> str | None:
    """Return which hooks one of ``parts`` has, in words, or None: whatever takes its place would lose them."""
    tensor_hooks = "_backward_hooks", "_post_accumulate_grad_hooks"
    kinds = ((part, tensor_hooks if isinstance(part, Tensor) else vars(part)) for part in parts)
    found = (name for part, names in kinds for name in names if name.endswith("_hooks") and getattr(part, name))
    return next((name.strip("_").replace("_", " ") for name in found), None)


def mark_drawn(module: nn.Module) -> None:
    """Have transformers' ``init_weights``, which a model calls for new parts, leave ``module`` alone unless on meta."""
    if not any(parameter.is_meta for parameter in module.parameters()):
        for part in module.modules():
            part._is_hf_initialized = True
