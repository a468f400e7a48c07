"""Subjects of measurement: each makes a layer, calls it and gives its exact result.

``exact(weights, x)`` is the float64 function of the layer's named weights, so that every subject is checked on the very
weights it is timed with. A subject that cannot run here says why.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import flashmhf
from flashmhf import reference

from ..harness import proxy
from ..harness.environment import brief
from .shapes import Shape

BACKENDS = tuple(flashmhf.info().reasons)
Weights = Mapping[str, Tensor]
Call = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """What a subject's layer depends on, besides the shape. official: checkout of the official code."""

    device: torch.device
    dtype: torch.dtype
    official: pathlib.Path | None = None


@dataclass(frozen=True)
class Subject:
    """One subject of measurement.

    make: a layer for a shape; its weights are overwritten by :func:`randomise`.
    exact: the layer's function in the weights' dtype. flops: of one forward over T tokens. layers: of the model that it
    is in.
    caller: made once per shape and length, so that a compiled subject compiles for exactly that one.
    """

    name: str
    title: str
    make: Callable[[Shape, Settings], nn.Module]
    exact: Callable[[Shape, Weights, Tensor], Tensor]
    layers: Callable[[Shape], int]
    flops: Callable[[Shape, int], int]
    why_missing: Callable[[Shape, Settings], str | None] = lambda shape, settings: None
    caller: Callable[[], Call] = field(default=lambda: lambda module, x: module(x))
    backward_flops: Callable[[Shape, int], int] | None = None  # None: twice the forward's


def _fan_in(name: str, weight: Tensor) -> int:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "v":
        return weight.shape[-2]
    return weight.shape[-2] if leaf == "router" else weight.shape[-1]


@torch.no_grad()
def randomise(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Every weight from N(0, 1/fan_in): activations of order one, as in training, where zeros would run faster."""
    for name, weight in module.named_parameters():
        weight.copy_(
            torch.randn(weight.shape, device=weight.device, generator=generator) / _fan_in(name, weight) ** 0.5
        )
    return module


# Ours


def _make_flashmhf(backend: str, shape: Shape, settings: Settings) -> nn.Module:
    size, like = (shape.d_model, shape.heads, shape.subnets, shape.subnet_dim), {"dtype": settings.dtype}
    return flashmhf.FlashMHF(*size, backend=backend, device=settings.device, **like)


def _exact_flashmhf(shape: Shape, w: Weights, x: Tensor) -> Tensor:
    q = (x @ w["in_proj.weight"].T).unflatten(-1, (shape.heads, shape.head_dim))
    mixed = reference.forward(q, w["k"], w["u"], w["v"], reference.gate(q, w["router"]))
    return mixed.flatten(-2) @ w["out_proj.weight"].T


def why_no_backend(backend: str, device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int) -> str | None:
    like = {"device": device, "dtype": dtype}
    return flashmhf.info(torch.empty(1, 1, d_h, **like), torch.empty(1, 1, d_e, d_h, **like)).reasons[backend]


def _why_no_backend(backend: str, shape: Shape, settings: Settings) -> str | None:
    return why_no_backend(backend, settings.device, settings.dtype, d_h=shape.head_dim, d_e=shape.subnet_dim)


def _exact_mhffn(shape: Shape, w: Weights, x: Tensor) -> Tensor:
    q = (x @ w["in_proj.weight"].T).unflatten(-1, (shape.heads, shape.head_dim))
    return reference.forward(q, *(w[name].unsqueeze(1) for name in "kuv")).flatten(-2) @ w["out_proj.weight"].T


def _exact_dense_moe(shape: Shape, w: Weights, x: Tensor) -> Tensor:
    r = reference.gate(x.unsqueeze(-2), w["router"].unsqueeze(0)).squeeze(-2)
    activation = nn.functional.silu(x @ w["gate_proj.weight"].T) * (x @ w["up_proj.weight"].T)
    return (activation.unflatten(-1, (shape.subnets, shape.subnet_dim)) * r[..., None]).flatten(-2) @ w[
        "down_proj.weight"
    ].T


def _make_mhffn(shape: Shape, settings: Settings) -> nn.Module:
    size, like = (shape.d_model, shape.heads, shape.d_ff), {"device": settings.device, "dtype": settings.dtype}
    return flashmhf.MHFFN(*size, backend="naive", **like)


def _make_dense_moe(shape: Shape, settings: Settings) -> nn.Module:
    size, like = (shape.d_model, shape.subnets, shape.subnet_dim), {"device": settings.device, "dtype": settings.dtype}
    return flashmhf.DenseMoE(*size, **like)


class _Operator(nn.Module):
    """The heads' networks alone, with given gates: r [H, E] stands for those of every token."""

    def __init__(self, shape: Shape, settings: Settings, backend: str):
        super().__init__()
        self.shape, self.backend, like = shape, backend, {"device": settings.device, "dtype": settings.dtype}
        size = shape.heads, shape.subnets, shape.subnet_dim, shape.head_dim
        self.k, self.u, self.v = (nn.Parameter(torch.empty(size, **like)) for _ in range(3))
        self.r = nn.Parameter(torch.empty(shape.heads, shape.subnets, device=settings.device))

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (self.shape.heads, -1))
        r = self.r.expand(*x.shape[:-1], -1, -1).contiguous()
        return torch.ops.flashmhf.forward(q, self.k, self.u, self.v, r, backend=self.backend).flatten(-2)


def _exact_operator(shape: Shape, w: Weights, x: Tensor) -> Tensor:
    r = w["r"].expand(*x.shape[:-1], -1, -1)
    q = x.unflatten(-1, (shape.heads, -1))
    return reference.forward(q, w["k"], w["u"], w["v"], r).flatten(-2)


def _compiled_module() -> Call:
    """One graph serves all weight sets."""
    torch._dynamo.reset()
    return torch.compile(lambda module, x: module(x), dynamic=False, options=proxy.options())


# SwiGLU and its relatives


def _make_swiglu(shape: Shape, settings: Settings) -> nn.Module:
    return flashmhf.SwiGLU(shape.d_model, shape.swiglu_dim, device=settings.device, dtype=settings.dtype)


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    linear = nn.functional.linear
    return linear(nn.functional.silu(linear(x, gate)) * linear(x, up), down)


def _exact_swiglu(shape: Shape, w: Weights, x: Tensor) -> Tensor:
    return _swiglu(x, w["gate_proj.weight"], w["up_proj.weight"], w["down_proj.weight"])


def _compiled_caller() -> Call:
    """Compile for static shapes without earlier graphs. One graph serves all weight sets."""
    torch._dynamo.reset()
    compiled = torch.compile(_swiglu, dynamic=False, fullgraph=True, options=proxy.options())
    return lambda module, x: compiled(x, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)


def _checkpointed_caller() -> Call:
    return lambda module, x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)


def _why_no_package(distribution: str, module: str, shape: Shape, settings: Settings) -> str | None:
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return f"{distribution} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # another package may raise anything while it loads; the row shows it as the reason
        return f"{distribution} does not load: {brief(error)}"
    return None if settings.device.type == "cuda" else f"{distribution} needs a CUDA device"


def _make_liger(shape: Shape, settings: Settings) -> nn.Module:
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    config = types.SimpleNamespace(hidden_size=shape.d_model, intermediate_size=shape.swiglu_dim, hidden_act="silu")
    with settings.device:
        return LigerSwiGLUMLP(config).to(settings.dtype)


# The official kernels


def _official_kernel(official: pathlib.Path):
    """``FlashMLPMoE`` of the checkout's Triton kernel: (Q, K, U, V, R) with heads before tokens."""
    path = official / "kernels" / "triton" / "flash_mlp_moe.py"
    name = "flashmhf_bench_official"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # Triton finds the source of kernels through sys.modules
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name].FlashMLPMoE()


def _why_no_official(shape: Shape, settings: Settings) -> str | None:
    if settings.official is None:
        return "no checkout of the official code given (--official PATH)"
    if settings.device.type != "cuda":
        return "the official kernels need a CUDA device"
    try:
        _official_kernel(settings.official)
    except Exception as error:
        return f"the official kernel does not load: {brief(error)}"
    return None


class _Official(nn.Module):
    """The checkout's Triton kernel as its model calls it: copies in its layout, the router in fp32."""

    def __init__(self, shape: Shape, settings: Settings):
        super().__init__()
        like = {"device": settings.device, "dtype": settings.dtype}
        self.kernel = _official_kernel(settings.official)
        self.heads, self.subnets = shape.heads, shape.subnets
        self.w_self, self.w_self_2 = (nn.Linear(shape.d_model, shape.d_model, bias=False, **like) for _ in range(2))
        for name in ("gate_weight", "up_weight", "down_weight"):
            setattr(self, name, nn.Parameter(torch.empty(shape.d_ff, shape.d_model, **like)))
        self.router = nn.Parameter(torch.empty(shape.heads, shape.head_dim, shape.subnets, **like))

    def _split(self, weight: Tensor) -> Tensor:
        """[d_ff, H d_h] -> [H, E, d_e, d_h], contiguous."""
        return weight.unflatten(1, (self.heads, -1)).unflatten(0, (self.subnets, -1)).permute(2, 0, 1, 3).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        q = self.w_self(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
        score = (q.float() @ self.router.float()).sigmoid()
        r = (score / score.sum(-1, keepdim=True).clamp(min=1e-20)).contiguous()
        mixed = self.kernel(q, *(self._split(w) for w in (self.gate_weight, self.up_weight, self.down_weight)), r)
        return self.w_self_2(mixed.transpose(1, 2).flatten(-2))


def _exact_official(shape: Shape, w: Weights, x: Tensor) -> Tensor:
    def split(weight: Tensor) -> Tensor:
        return weight.unflatten(1, (shape.heads, -1)).unflatten(0, (shape.subnets, -1)).permute(2, 0, 1, 3)

    ours = {name: split(w[theirs]) for name, theirs in (("k", "gate_weight"), ("u", "up_weight"), ("v", "down_weight"))}
    ours |= {"router": w["router"], "in_proj.weight": w["w_self.weight"], "out_proj.weight": w["w_self_2.weight"]}
    return _exact_flashmhf(shape, ours, x)


# The list


_layers, _swiglu_layers = map(operator.attrgetter, ("layers", "swiglu_layers"))
_FLASHMHF = {"exact": _exact_flashmhf, "layers": _layers, "flops": Shape.flashmhf_flops}
_SWIGLU = {"exact": _exact_swiglu, "layers": _swiglu_layers, "flops": Shape.swiglu_flops}
_LIGER = functools.partial(_why_no_package, "liger-kernel", "liger_kernel.transformers.swiglu")


def _backward_flops(shape: Shape, tokens: int) -> int:
    """Eight products; the forward has three. Two of the eight are recomputed instead of stored."""
    return (8 * shape.kernel_flops(tokens)) // 3 + 8 * tokens * shape.d_model**2


def _ours(backend: str) -> Subject:
    return Subject(
        f"flashmhf_{backend}", f"FlashMHF ({backend})", functools.partial(_make_flashmhf, backend),
        why_missing=functools.partial(_why_no_backend, backend), backward_flops=_backward_flops, **_FLASHMHF,
    )  # fmt: skip


_ALL = (
    *(_ours(backend) for backend in BACKENDS),
    replace(
        _ours("triton"), name="flashmhf_triton_compiled", title="FlashMHF (triton, torch.compile)",
        caller=_compiled_module,
    ),
    Subject(
        "flashmhf_triton_operator", "the heads' networks (triton)",
        lambda shape, settings: _Operator(shape, settings, "triton"), _exact_operator, _layers, Shape.kernel_flops,
        functools.partial(_why_no_backend, "triton"),
        backward_flops=lambda shape, tokens: 8 * shape.kernel_flops(tokens) // 3,
    ),
    Subject("swiglu", "SwiGLU (eager)", _make_swiglu, **_SWIGLU),
    Subject("swiglu_compiled", "SwiGLU (torch.compile)", _make_swiglu, caller=_compiled_caller, **_SWIGLU),
    Subject("swiglu_checkpointed", "SwiGLU (checkpointed)", _make_swiglu, caller=_checkpointed_caller, **_SWIGLU),
    Subject("swiglu_liger", "SwiGLU (Liger)", _make_liger, why_missing=_LIGER, **_SWIGLU),
    Subject("mhffn_naive", "MH-FFN (naive)", _make_mhffn, **(_FLASHMHF | {"exact": _exact_mhffn})),
    Subject("dense_moe", "Dense-MoE", _make_dense_moe, _exact_dense_moe, _swiglu_layers, Shape.kernel_flops),
    Subject(
        "official", "official FlashMHF (Triton)", _Official, why_missing=_why_no_official,
        backward_flops=_backward_flops, **(_FLASHMHF | {"exact": _exact_official}),
    ),
)  # fmt: skip
SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in _ALL}


def first_backend(shape: Shape, settings: Settings) -> str:
    """The back end that ``backend="auto"`` chooses."""
    return next(name for name in BACKENDS if _why_no_backend(name, shape, settings) is None)
