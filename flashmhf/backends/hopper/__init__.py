"""Hopper back end: the CUDA kernels of ``csrc/``, a library on LibTorch's stable ABI that is loaded on first use."""

from __future__ import annotations

import functools
import json
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import torch_private
from ...checks import name_of
from ...version import __version__
from .. import driver
from ..contract import Gate, Gradients, LayerWeights, Router, Settings
from ..tokens import collapse
from . import fakes

LIBRARY = pathlib.Path(__file__).parents[2] / "libflashmhf_hopper.so"
NO_LIBRARY = LIBRARY.with_name("_no_library.txt")  # written by setup.py: why it built none
CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
# what each direction has (csrc/common/head_dims.h); an operator that may be differentiated needs both
FORWARD_HEAD_DIMS = (64, 96, 128, 256)
BACKWARD_HEAD_DIMS = (64, 96, 128, 256)
HEAD_DIMS = tuple(d_h for d_h in FORWARD_HEAD_DIMS if d_h in BACKWARD_HEAD_DIMS)
SUBNET_DIM_MULTIPLE = 16
TMA_ALIGNMENT = 16  # bytes: base addresses and strides of a tensor map
_LOADING = threading.RLock()  # a cached function runs in every thread that comes at first; operators register once


def library() -> str | None:
    """Load the op library. Return None if it is usable, else the reason why not."""
    with _LOADING:
        return _load()


@functools.cache
def _load() -> str | None:
    if torch.version.cuda is None:
        return "this PyTorch has no CUDA"
    if not LIBRARY.exists():
        reason = NO_LIBRARY.read_text("utf-8").strip() if NO_LIBRARY.exists() else "it was not built"
        return f"flashmhf was installed without its CUDA library: {reason}"
    supported = driver.version()
    if not supported:  # before the library is loaded: what is refused defines no operators
        return "there is no NVIDIA driver"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"its CUDA library does not load: {error}"
    info = build_info()
    if info["version"] not in ("0", __version__):  # "0": built by CMake alone, which does not know it
        return f"its CUDA library has version {info['version']}, the package has {__version__}; install flashmhf again"
    runtime = info["cuda_version"]
    if supported // 1000 < int(runtime.split(".")[0]):
        found = f"CUDA {supported // 1000}.{supported % 1000 // 10} but the library was built with CUDA {runtime}"
        return f"the NVIDIA driver supports {found}; update the driver or rebuild with an older nvcc (12.4 or later)"
    fakes.register()
    return None


def build_info() -> dict:
    """Return what the loaded library says of itself: version, kernel table, headers, CUDA version."""
    return json.loads(torch.ops.flashmhf_hopper.build_info())


def why_not(device: torch.device, dtype: torch.dtype, *, d_h: int, d_e: int, activation: str = "silu") -> str | None:
    """Return None if the Hopper kernels can run, else why not: the argument, its value and what is supported."""
    if device.type != "cuda":
        return f"device is {device.type}; supported: an NVIDIA GPU of compute capability 9.0"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return f"device has compute capability {capability[0]}.{capability[1]}; supported: 9.0 (H100, H200)"
    if dtype not in DTYPES:
        return f"dtype is {name_of(dtype)}; supported: {', '.join(map(name_of, DTYPES))}"
    if d_h not in HEAD_DIMS:
        return f"d_h is {d_h}; supported: {', '.join(map(str, HEAD_DIMS))}"
    if d_e % SUBNET_DIM_MULTIPLE:
        return f"d_e is {d_e}; supported: multiples of {SUBNET_DIM_MULTIPLE}"
    if activation != "silu":
        return f"activation is {activation!r}; supported: 'silu' (the triton and eager back ends have all)"
    return library()


def _is_aligned(x: Tensor) -> bool:
    return torch_private.address(x) % TMA_ALIGNMENT == 0


def check_layout(q: Tensor, r: Gate, networks: Sequence[Tensor]) -> None:
    """Raise ValueError that names a tensor which the kernels cannot read in place: q, R if ``r`` is one, a weight."""
    axes, size, reason = collapse(q), q.element_size(), None
    strides = [stride for _, stride in axes] + ([q.stride(-2)] if q.shape[-2] > 1 else [])
    if not q.numel():
        pass
    elif q.shape[-1] > 1 and q.stride(-1) != 1:
        reason = f"the last dimension has stride {q.stride(-1)}; supported: 1"
    elif len(axes) > 2:
        found = f"the leading dimensions of shape {list(q.shape)} and strides {list(q.stride())}"
        reason = f"{found} do not collapse to one or two token strides"
    elif not _is_aligned(q) or any(stride * size % TMA_ALIGNMENT or stride <= 0 for stride in strides):
        found = f"the strides {list(q.stride())} or the storage offset {q.storage_offset()}"
        reason = f"{found} are not positive multiples of {TMA_ALIGNMENT} bytes ({TMA_ALIGNMENT // size} elements)"
    if reason is not None:
        advice = "pass q.contiguous() or backend='triton'"
        raise ValueError(f"q cannot be read in place by the hopper back end: {reason}; {advice}")
    for name, x in zip(("k8", "u8", "v8") if len(networks) == 4 else "kuv", networks, strict=False):
        if not _is_aligned(x):
            supported = f"the hopper back end supports multiples of {TMA_ALIGNMENT} bytes"
            raise ValueError(f"{name} has storage offset {x.storage_offset()}; {supported}")
    if isinstance(r, Tensor) and r.shape[-1] > 1 and r.stride(-1) != 1:
        raise ValueError(f"r has stride {r.stride(-1)} in its last dimension; the hopper back end supports 1")


def reads(q: Tensor, r: Gate, networks: Sequence[Tensor]) -> bool:
    """Return whether :func:`check_layout` raises nothing for fakes; False if sizes are known at run time alone."""
    try:
        check_layout(q, r, networks)
    except (ValueError, torch_private.find("torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode", ())):
        return False
    return True


def call(op: Callable, operands: tuple, q: Tensor, r: Gate, *networks: Tensor) -> Any:
    """Call a C++ operator, which checks its operands; name a tensor that it refused to read in place."""
    try:
        return op(*operands)
    except RuntimeError:
        check_layout(q, r, networks)
        raise


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings) -> Tensor:
    ops = torch.ops.flashmhf_hopper
    op, gate = (ops.gated_forward, r) if isinstance(r, Router) else (ops.forward, (r,))
    return call(op, (q, k, u, v, *gate, settings.deterministic), q, r, k, u, v)


def backward(grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings) -> Gradients:
    ops = torch.ops.flashmhf_hopper
    op, gate = (ops.gated_backward, r) if isinstance(r, Router) else (ops.backward, (r,))
    return call(op, (grad_out, q, k, u, v, *gate, settings.deterministic, *settings.needs), q, r, k, u, v)


def layer(x: Tensor, weights: LayerWeights) -> Tensor | None:
    """Return out_proj(S(q_norm(in_proj(x)))) for x [..., d_model], queued by one call, whose operator checks the
    tensors. Returns None if the network has no gate or a tensor's dtype, shape or layout is not what the kernels read.
    """
    in_w, in_bias, networks, router, eps, out_w, out_bias, q_norm, q_norm_eps = weights
    if router is None:
        return None
    op = torch.ops.flashmhf_hopper.fp8_layer if len(networks) == 4 else torch.ops.flashmhf_hopper.layer
    return op(x, in_w, in_bias, q_norm, q_norm_eps, *networks, router, eps, out_w, out_bias)


def graph_layer(x: Tensor, weights: LayerWeights) -> Tensor | None:
    """Return the same for fake tensors whose dtypes and shapes are checked, by the operator of compiled graphs."""
    in_w, in_bias, networks, router, eps, out_w, out_bias, q_norm, q_norm_eps = weights
    tensors = (in_w, in_bias, q_norm, *networks, router, out_w, out_bias)
    if router is None or not all(w is None or (w.is_contiguous() and _is_aligned(w)) for w in tensors):
        return None
    ops = torch.ops.flashmhf_hopper
    op = ops.graph_fp8_layer if len(networks) == 4 else ops.graph_layer
    return op(x, in_w, in_bias, q_norm, q_norm_eps, *networks, router, eps, out_w, out_bias)
