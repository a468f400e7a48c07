"""What the main command measures: errors against float64, and time and memory of the feed-forward modules at equal parameters."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import backends, ops, reference  # noqa: F401  (ops registers the operators)
from ..nn import MHFFN, FlashMHF, SwiGLU

LIMITS = {torch.bfloat16: 2.6e-3, torch.float16: 3.5e-4, torch.float32: 1e-5}  # of the fused GPU back ends
FLOOR = 1e-6  # what summing in fp32 costs in any order
WIDTH_MULTIPLE = 8  # elements: 16-byte rows in 16-bit, which cuBLAS wants of SwiGLU's width


@dataclass(frozen=True)
class Setting:
    """Device, dtype and sizes of one machine's run."""

    device: torch.device
    dtype: torch.dtype
    d_model: int
    num_heads: int
    num_subnets: int
    subnet_dim: int
    batch: int
    lengths: tuple[int, ...]
    repeats: int
    seconds: float  # after so long no further length is begun


def default_setting(device: torch.device) -> Setting:
    """The paper's efficiency table on a GPU; its 128M model's layer on a CPU, as far as two cores go in half a minute."""
    if device.type == "cuda":
        return Setting(device, torch.bfloat16, 2048, 16, 22, 384, 8, (192, 384, 768, 1536, 2880, 4032), 10, 60.0)
    return Setting(device, torch.float32, 768, 6, 8, 256, 1, (256, 512, 1024, 2048, 4096), 3, 30.0)


# Errors


@dataclass(frozen=True)
class Accuracy:
    """Relative L2 errors against float64 of one tensor; ``plain`` is that of PyTorch code in the same precision."""

    backend: str
    dtype: torch.dtype
    tensor: str
    error: float
    plain: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # false for nan


def check(device: torch.device, *, backend: str | None = None, tokens: int = 500, seed: int = 0) -> Iterator[Accuracy]:
    """Forward and gradients of every usable back end (or one) in every dtype it supports there, on fresh random inputs."""
    sizes = {"d_h": 128, "d_e": 384, "E": 3, "H": 2}
    for name in backends.BACKENDS if backend is None else (backend,):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if backends.BACKENDS[name].why_not(device, dtype, **sizes) is None:
                yield from _check_one(name, dtype, device, tokens, seed, **sizes)


def _check_one(backend: str, dtype: torch.dtype, device: torch.device, tokens: int, seed: int, *, d_h: int, d_e: int, E: int, H: int):  # noqa: N803
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(device, dtype)

    q, grad_out = normal(tokens, H, d_h), normal(tokens, H, d_h)
    k, u = (normal(H, E, d_e, d_h, std=d_h**-0.5) for _ in range(2))
    v = normal(H, E, d_e, d_h, std=(E * d_e) ** -0.5)
    r = reference.gate(q, normal(H, d_h, E, std=d_h**-0.5))
    operands = (q, k, u, v, r)
    exact_operands = tuple(x.double() for x in operands)
    exact = (reference.forward(*exact_operands), *reference.backward(grad_out.double(), *exact_operands))
    plain = (reference.forward(*operands), *reference.backward(grad_out, *operands))
    leaves = tuple(x.requires_grad_() for x in operands)
    out = ops.flash_mhf(*leaves, backend=backend)
    ours = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
    for name, actual, same_precision, truth in zip(("out", "dq", "dk", "du", "dv", "dr"), ours, plain, exact, strict=True):
        error, baseline = (((x.double() - truth).norm() / truth.norm()).item() for x in (actual, same_precision))
        limit = max(baseline, FLOOR)
        if backend != "eager":
            limit = min(limit, LIMITS[actual.dtype])
        yield Accuracy(backend, dtype, name, error, baseline, limit)


# Time and memory


def equal_parameter_modules(
    d_model: int, num_heads: int, num_subnets: int, subnet_dim: int, **factory
) -> dict[str, Callable[[], nn.Module]]:
    """Constructors of SwiGLU, naive MH-FFN and FlashMHF, the first two as wide as FlashMHF's parameters allow."""
    mixing, router = 3 * d_model * num_subnets * subnet_dim, d_model * num_subnets
    projections = 2 * d_model * d_model

    def width(parameters: int) -> int:
        return round(parameters / (3 * d_model) / WIDTH_MULTIPLE) * WIDTH_MULTIPLE

    return {
        "SwiGLU": lambda: SwiGLU(d_model, width(projections + mixing + router), **factory),
        "naive MH-FFN": lambda: MHFFN(d_model, num_heads, width(mixing + router), backend="naive", **factory),
        "FlashMHF": lambda: FlashMHF(d_model, num_heads, num_subnets, subnet_dim, **factory),
    }


@dataclass(frozen=True)
class Measurement:
    """Milliseconds (medians) and the peak of memory allocated during a training step, in MiB; nan where it did not fit."""

    module: str
    parameters: int
    length: int
    forward_ms: float
    step_ms: float
    peak_mib: float


def compare(setting: Setting) -> Iterator[Measurement]:
    """Measures every module at every length; all see the same input and upstream gradient."""
    modules = equal_parameter_modules(
        setting.d_model, setting.num_heads, setting.num_subnets, setting.subnet_dim, device=setting.device, dtype=setting.dtype
    )
    start = time.perf_counter()
    for length in setting.lengths:
        if time.perf_counter() - start > setting.seconds:
            return
        generator = torch.Generator().manual_seed(length)
        x, grad = (
            torch.randn(setting.batch, length, setting.d_model, generator=generator).to(setting.device, setting.dtype) for _ in range(2)
        )
        x.requires_grad_()
        for name, construct in modules.items():
            module = construct()
            parameters = sum(p.numel() for p in module.parameters())
            try:
                figures = _measure(module, x, grad, setting.repeats)
            except torch.OutOfMemoryError:
                figures = (float("nan"),) * 3
                torch.cuda.empty_cache()
            yield Measurement(name, parameters, length, *figures)


def _measure(module: nn.Module, x: Tensor, grad: Tensor, repeats: int) -> tuple[float, float, float]:
    leaves = [x, *module.parameters()]

    def forward():
        with torch.no_grad():
            module(x)

    def step():
        torch.autograd.grad(module(x), leaves, grad)

    peak = _peak_mib(step, x.device)  # warms up, too
    return _median_ms(forward, x.device, repeats), _median_ms(step, x.device, repeats), peak


def _median_ms(call: Callable[[], None], device: torch.device, repeats: int) -> float:
    def synchronised() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    call()
    times = []
    for _ in range(repeats):
        start = synchronised()
        call()
        times.append(synchronised() - start)
    return 1e3 * statistics.median(times)


def _peak_mib(call: Callable[[], None], device: torch.device) -> float:
    """The most memory that PyTorch's allocator held during the call, above what it held before."""
    if device.type == "cuda":
        call()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return _peak_resident_mib(call)


def _peak_resident_mib(call: Callable[[], None]) -> float:
    """Growth of the resident set's high-water mark, which Linux resets on request; nan elsewhere. PyTorch's CPU allocator keeps none."""

    def status(field: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))

    try:
        call()
        ctypes.CDLL(None).malloc_trim(0)  # else the call would reuse freed pages that are still counted
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS:")
    except (OSError, AttributeError):
        return float("nan")
    call()
    return (status("VmHWM:") - before) / 1024
