"""Tensor parallelism of the modules: heads over the ranks of a mesh dimension, by PyTorch's styles and DTensor."""

from __future__ import annotations

import dis
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .. import checks, torch_private
from ..checks import positive
from ..nn import MHFFN, DenseMoE, FlashMHF, SwiGLU
from ..nn.multihead import MultiHead
from ..nn.weights import check_held, check_whole
from ..quantize import Fp8FlashMHF

torch_private.register("sharding rules", lambda: importlib.import_module(f"{__package__}.sharding"))
_DIVIDED = (FlashMHF, MHFFN, SwiGLU)
_PROPERTIES = {"device", "dim", "dtype", "is_cuda", "ndim", "numel", "requires_grad", "shape", "size"}
_NOT_REPLICATED = (nn.MultiheadAttention, nn.RNNBase, nn.modules.batchnorm._BatchNorm)


def _check_divides(size: int, name: str, count: int, parts: str, of: str) -> None:
    if count % size:
        raise ValueError(f"{name or 'module'} has {parts} on a mesh of size {size}; supported: sizes that divide {of}")


def check_heads(name: str, module: FlashMHF | MHFFN, size: int) -> None:
    heads = module.num_kv_heads
    _check_divides(size, name, heads, f"H = {heads} heads{'' if heads == module.num_heads else ' of K, U and V'}", "H")


def _check_weights(module: nn.Module) -> None:
    """Refuse, before anything changes, weights that are elsewhere, belong to something else or are quantised."""
    check_whole("", module)
    check_held("", module, empty=True)
    if packed := [name or "module" for name, child in module.named_modules() if isinstance(child, Fp8FlashMHF)]:
        found = f"{packed[0]} is a network in FP8"
        raise NotImplementedError(f"{found}; supported: 16 and 32 bits, or flashmhf.distributed.shard")
    for name, parameter in module.named_parameters():
        if type(parameter.data) is not Tensor:
            found = f"{name} is a {type(parameter.data).__name__}"
            raise NotImplementedError(f"{found}; supported: plain tensors: parallelize before quantising")


class _Placed(ParallelStyle):
    """Place a module's parameters by name, and its input, what it computes with, and its result.

    Replicated modules have DTensor parameters, too: ``clip_grad_norm_`` takes no tensors beside DTensors. PyTorch's
    RowwiseParallel hands out an embedding's result before its all-reduce: a compiled block loses the placement.
    """

    def __init__(
        self, placement: Callable[[str], Placement], inputs: Placement, within: Placement, outputs: Placement,
        use_local_output: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.placement, self.inputs, self.within, self.outputs = placement, inputs, within, outputs
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            where = [self.placement(name)]
            sharded = distribute_tensor(parameter, device_mesh, where, src_data_rank=self.src_data_rank)
            _register(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

        def before(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            taken = (self._take(x, device_mesh) for x in args)
            return tuple(taken), {name: self._take(x, device_mesh) for name, x in keywords.items()}

        module.register_forward_pre_hook(before, with_kwargs=True)
        # other hooks see the result
        module.register_forward_hook(lambda _, args, out: self._return(out, module, device_mesh), prepend=True)
        return module

    def _take(self, x: Any, mesh: DeviceMesh) -> Any:
        """Return an argument as the module computes with it."""
        if not isinstance(x, Tensor):
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.inputs], run_check=False)
        return x.redistribute(mesh, [self.within])

    def _return(self, out: Any, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Return a result of ``module``, or each of several, as its caller gets it."""
        if isinstance(out, tuple | list):
            parts = [self._return(part, module, mesh) for part in out]
            return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
        if not isinstance(out, DTensor):
            return out
        is_sum = type(out.placements[0]) is Partial and self.outputs.is_replicate()  # no embedding's masked sum
        kept = torch.compiler.is_compiling() or torch.is_grad_enabled()
        if is_sum and not (kept or any(part._forward_hooks for part in module.children())):
            out = _sum_in_place(out, mesh)
        out = out.redistribute(mesh, [self.outputs])
        return out.to_local() if self.use_local_output else out


def _sum_in_place(parts: DTensor, mesh: DeviceMesh) -> DTensor:
    """Return the sum over the ranks in the memory of ``parts``: DTensor's own all-reduce would copy them first."""
    local = parts.to_local().contiguous()
    dist.all_reduce(local, group=mesh.get_group())
    sizes = {"shape": parts.shape, "stride": parts.stride()}
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False, **sizes)


class HeadParallel(_Placed):
    """Divide the heads of a FlashMHF or an MHFFN over the ranks: a style for ``parallelize_module``.

    input_layouts and output_layouts are the placements of the module's input and output: Replicate(), or Shard(dim) of
    a leading dimension for sequence parallelism. use_local_output: return a tensor, not a DTensor. Raises TypeError for
    another module, ValueError if the mesh's size does not divide H, and what :func:`parallelize` raises for weights.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:  # fmt: skip
        inputs, outputs = input_layouts or Replicate(), output_layouts or Replicate()
        super().__init__(_placement_of, inputs, Replicate(), outputs, use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (FlashMHF, MHFFN)):
            raise TypeError(f"module is a {type(module).__name__}; supported: FlashMHF, MHFFN")
        _check_weights(module)
        check_heads("module", module, device_mesh.size())
        return super()._apply(module, device_mesh)


def _placement_of(name: str) -> Placement:
    """Return where a multi-head network's parameter ``name`` lies on a mesh dimension of tensor parallelism."""
    return Shard(MultiHead.SHARDED[name]) if name in MultiHead.SHARDED else Replicate()


def _everywhere(placement: Placement, activations: Placement) -> _Placed:
    """Return the style of a module whose parameters have one placement, and its input and result one."""
    return _Placed(lambda name: placement, activations, activations, activations)


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    module.get_submodule(owner).register_parameter(attribute, parameter)


def _path(prefix: str, name: str) -> str:
    """Return the path of a child; the root's own path is empty."""
    return f"{prefix}.{name}" if prefix else name


def _attention_styles(prefix: str, module: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Return the styles that divide Llama's attention by heads; its forward counts what the projections return."""
    projections, head_dim = ("q_proj", "k_proj", "v_proj"), getattr(module, "head_dim", None)
    styles = {_path(prefix, name): ColwiseParallel() for name in projections}
    styles[_path(prefix, "o_proj")] = RowwiseParallel()
    # Qwen3's q_norm and k_norm of [..., H, d_h]: their gradient is a sum over all ranks' heads
    for name, child in module.named_children():
        shapes = [tuple(parameter.shape) for parameter in child.parameters()]
        if shapes and all(shape == (head_dim,) for shape in shapes):
            styles[_path(prefix, name)] = _everywhere(Replicate(), Shard(-2))
    others = [name for name, _ in module.named_parameters() if _path(prefix, name.rpartition(".")[0]) not in styles]
    # DiffLlama subtracts the upper half of the heads from the lower: a rank would pair others
    if head_dim is None or others:
        found = f"{prefix} is a {type(module).__name__} with {', '.join(others) or 'no head_dim'}"
        raise ValueError(f"{found}; supported: Llama's attention, q_proj, k_proj, v_proj, o_proj and norms of one head")
    for name in projections:
        heads = module.get_submodule(name).out_features // head_dim
        _check_divides(size, _path(prefix, name), heads, f"{heads} heads", "them")
    return styles


def plan(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Return a style for every module of ``model`` that holds parameters, for ``parallelize_module``.

    Sharded are multi-head and SwiGLU networks (gate_proj, up_proj, down_proj), Llama's attention (q_proj, k_proj,
    v_proj, o_proj), and the embedding and head of a causal model of transformers; all else is replicated. Raises
    ValueError if ``size`` does not divide heads or widths, if the model has no such network or one of them has
    parameters of its own, and for an attention that is not Llama's.
    """
    size = positive("size", size)
    if not any(isinstance(child, _DIVIDED) for child in model.modules()):
        raise ValueError(f"module is a {type(model).__name__} without a FlashMHF, MHFFN or SwiGLU network")
    ends: dict[int, ParallelStyle] = {}
    if hasattr(model, "get_output_embeddings"):
        ends[id(model.get_output_embeddings())] = ColwiseParallel(output_layouts=Replicate())
    if hasattr(model, "get_input_embeddings"):
        ends[id(model.get_input_embeddings())] = _everywhere(Shard(0), Replicate())
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if name not in styles and not any(name.startswith(_path(done, "")) for done in styles):
            styles |= _styles_of(name, module, size, ends.get(id(module)))
    return styles


def _styles_of(name: str, module: nn.Module, size: int, end: ParallelStyle | None) -> dict[str, ParallelStyle]:
    """Return the styles of one module, or of its parts; ``end``: that of the model's embedding or head, if it is."""
    children, own = dict(module.named_children()), [key for key, _ in module.named_parameters(recurse=False)]
    gated = {"gate_proj", "up_proj", "down_proj"} <= children.keys() and not isinstance(module, DenseMoE)
    if isinstance(module, (FlashMHF, MHFFN)):
        check_heads(name, module, size)
        return {name: HeadParallel()}
    if {"q_proj", "k_proj", "v_proj", "o_proj"} <= children.keys():
        return _attention_styles(name, module, size)
    if own and (gated or any(isinstance(child, _DIVIDED) for child in module.modules())):
        found = f"{name or 'module'} has parts to divide and parameters of its own, {', '.join(own)}"
        # to replicate them is to replicate the parts, too
        raise ValueError(f"{found}; supported: own parameters in a child module")
    if gated:
        width = module.get_submodule("gate_proj").out_features
        _check_divides(size, name, width, f"a width of {width}", "the width")
        first = {_path(name, part): ColwiseParallel() for part in ("gate_proj", "up_proj")}
        return first | {_path(name, "down_proj"): RowwiseParallel()}
    if end is not None:
        return {name: end}
    if own and isinstance(module, _NOT_REPLICATED):
        supported = "modules that take and return one tensor and have parameters alone, and Llama's attention"
        raise ValueError(f"{name} is a {type(module).__name__}; supported: {supported}")
    return {name: _everywhere(Replicate(), Replicate())} if own else {}


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard ``module`` in place over the ranks of ``mesh`` and return it.

    module: a FlashMHF, an MHFFN or a model that has some (:func:`plan`). Parameters become DTensors with the values of
    the mesh's first rank. mesh: a device mesh of one dimension, such as ``init_device_mesh("cuda", (2, 4),
    mesh_dim_names=("dp", "tp"))["tp"]``.

    Then apply activation checkpointing, ``torch.compile``, and ``fully_shard`` with :func:`shard_placement`. Raises
    ValueError for a mesh that does not fit, a model without such a network, one parameter in two placements, and
    weights that are sharded, offloaded, parametrised, held by an adapter or read by the forward of another module;
    NotImplementedError for quantised weights.
    """
    checks.instance("module", module, nn.Module, "a torch.nn.Module")
    checks.instance("mesh", mesh, DeviceMesh, "a torch.distributed.DeviceMesh")
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions; supported: 1, such as mesh['tp']")
    _check_weights(module)
    styles = plan(module, mesh.size())
    _check_functions(module)
    names: dict[int, list[str]] = {}  # by ids, so that a whole parameter is freed once it is sharded
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parallelize_module(module, mesh, styles)
    for first, *others in names.values():
        parameter = module.get_parameter(first)
        for name in others:  # distributed each by itself, such as embedding and head: one parameter again
            other = module.get_parameter(name)
            if parameter.placements != other.placements:
                found = f"{parameter.placements} and {other.placements}"
                raise ValueError(f"{first} and {name} are one parameter, placed as {found}; untie them")
            _register(module, name, parameter)
    return module


def _check_functions(model: nn.Module) -> None:
    """Refuse a forward that reads a parameter of another module: it becomes a DTensor, which functions do not take
    beside plain tensors.
    """
    for name, module in model.named_modules():
        if isinstance(module, MultiHead) or type(module).__module__.startswith(("torch.nn.", "flashmhf.")):
            continue
        others = {path for path, _ in module.named_parameters(remove_duplicate=False) if "." in path}
        if read := sorted(others & _read_by_forward(type(module))):
            found = f"{_path(name, read[0])} is read by the forward of {type(module).__name__}"
            raise ValueError(f"{found}; supported: parameters that the forward of their own module reads")


def _read_by_forward(kind: type[nn.Module]) -> set[str]:
    """Return what the forward of a class reads, or a method that it calls, such as "norm.weight"."""
    functions: list[Any] = [kind.forward]
    codes: list[CodeType] = []
    for function in functions:  # which grow
        code = inspect.unwrap(function).__code__ if inspect.isfunction(function) else function
        if isinstance(code, CodeType) and code not in codes:
            codes.append(code)
            functions += [*code.co_consts, *(vars(each).get(name) for each in kind.__mro__ for name in code.co_names)]
    return {path for code in codes for path in _paths_in(code)}


def _paths_in(code: CodeType) -> Iterator[str]:
    """Yield the attributes of attributes in a function's code: also "norm.weight" of "norm.weight.T", but not of
    "norm.weight.dtype".
    """
    steps = itertools.groupby(dis.get_instructions(code), lambda step: step.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    for names in ([step.argval for step in path] for is_path, path in steps if is_path):
        if names[-1] not in _PROPERTIES:
            yield from (".".join(names), ".".join(names[:-1]))


def shard_placement(size: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return a ``shard_placement_fn`` for ``fully_shard`` over ``size`` ranks: the first dimension that it divides.

    FSDP2 shards and pads the first, H of K, U, V and the router: 16 heads over 64 ranks take four times the memory.
    Raises TypeError if ``size`` is not an integer, ValueError if it is below 1.
    """
    size = positive("size", size)

    def placement(parameter: nn.Parameter) -> Shard | None:
        shape: Sequence[int] = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        return next((Shard(dim) for dim, length in enumerate(shape) if length and length % size == 0), None)

    return placement
