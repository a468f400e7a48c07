"""Launches of the Triton kernels: how tensors are addressed, how small problems are split, which block shapes run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import driver
from ..contract import Settings
from ..tokens import collapse, token_count
from . import kernels
from .configs import TABLE, Config

_LOCK = threading.RLock()
INTERPRETED = not isinstance(kernels.forward_kernel, triton.JITFunction)
TMA_ALIGNMENT = 16  # bytes: base addresses and strides of a tensor map
TMA_STRIDE_LIMIT = 1 << 40  # bytes
TMA_SIZE_LIMIT = 1 << 31  # elements of an axis: Triton passes sizes and coordinates as 32-bit integers
WAVES = 2  # programs a multiprocessor should get before a launch is worth splitting no further
MIN_SHARE = 1024  # tokens: a smaller share of the weight gradients' sum is not worth its workspace


@functools.cache
def _architecture(device: torch.device) -> tuple[str, int]:
    """Return (row of the config table, multiprocessors)."""
    if device.type != "cuda":
        return "other", 1
    properties = torch.cuda.get_device_properties(device)
    return "sm90" if properties.major == 9 else "other", properties.multi_processor_count


@contextlib.contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Run one thread at a time, on ``device`` with its context current.

    Triton is not ready for several threads: one that comes while another loads a kernel launches a null function, and
    the interpreter keeps coordinates in global variables.
    """
    with _LOCK:
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            driver.make_context_current(device.index)
            yield


def _config(q: Tensor, kernel: str, subnet_dim: int) -> Config:
    config = TABLE[_architecture(q.device)[0], 8 * q.element_size(), q.shape[-1]][kernel]
    return Config(**{**vars(config), "inter": min(config.inter, triton.next_power_of_2(subnet_dim))})


class Rows:
    """Kernel arguments that address x [..., H, columns] in place: one token stride, blocks of tokens, or a table."""

    def __init__(self, x: Tensor, name: str):
        axes = collapse(x)
        self.x, self.name, self.table = x, name, None
        self.outer, self.length, self.inner = 0, 1, 0
        if len(axes) <= 1:
            self.layout = "rows"
            self.inner = axes[0][1] if axes else 0
        elif len(axes) == 2:
            self.layout = "blocks"
            (_, self.outer), (self.length, self.inner) = axes
        else:
            self.layout = "table"
            self.table = torch.zeros((), dtype=torch.int64, device=x.device)
            for size, stride in axes:
                self.table = self.table[..., None] + torch.arange(size, device=x.device) * stride
            self.table = self.table.flatten()

    def arguments(self) -> dict[str, object]:
        head, column = self.x.stride()[-2:]
        at = (self.table, self.outer, self.inner, head, column)
        return {f"{self.name}_length": self.length, f"{self.name}_at": at, f"{self.name.upper()}_LAYOUT": self.layout}

    def descriptor(self, block: tuple[int, int]) -> TensorDescriptor | None:
        """Return [tokens, columns of all heads] for the TMA unit, the head an offset; None where it cannot be one."""
        head, column = self.x.stride()[-2:]
        heads, width = self.x.shape[-2:]
        columns = (heads - 1) * head + width
        is_map = self.layout == "rows" and column == 1 and head >= 0 and block[1] == width
        if not is_map or columns >= TMA_SIZE_LIMIT or not _tma_strides(self.x, self.inner):
            return None
        return TensorDescriptor(self.x, [token_count(self.x), columns], [self.inner, 1], list(block))


def _tma_strides(x: Tensor, *strides: int) -> bool:
    size = x.element_size()
    return x.data_ptr() % TMA_ALIGNMENT == 0 and all(
        stride * size % TMA_ALIGNMENT == 0 and 0 < stride * size < TMA_STRIDE_LIMIT for stride in strides
    )


def has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


class _Weights:
    """Kernel arguments for K, U and V: as tensor maps where the device and the addresses allow, else as pointers.

    One map covers K and U: their distance is the stride of an axis of length 2. A stride is positive, so the pair
    begins with the lower address. ``swapped``: this is U, and dq's sum gets another order, which ``ordered`` rules out.
    """

    def __init__(self, k: Tensor, u: Tensor, v: Tensor, inter: int, *, ordered: bool = False):
        heads, subnets, subnet_dim, head_dim = k.shape
        low, high = sorted((k, u), key=Tensor.data_ptr)
        distance, remainder = divmod(high.data_ptr() - low.data_ptr(), k.element_size())
        tensor_cores = k.element_size() == 2  # fp32 products are plain FMAs, for which ptxas spills beside tensor maps
        aligned = remainder == 0 and _tma_strides(low, distance) and _tma_strides(v)
        self.descriptors = tensor_cores and aligned and has_tma(k.device) and not (ordered and low is u)
        self.swapped = self.descriptors and low is u
        self.first, self.second, self.v = k, u, v
        if self.descriptors:
            matrix, width = subnet_dim * head_dim, triton.next_power_of_2(head_dim)
            shape, strides = [heads * subnets, 2, subnet_dim, head_dim], [matrix, distance, head_dim, 1]
            block = [1, 2, inter, width]
            self.first, self.second = TensorDescriptor(low, shape, strides, block), high
            self.v = TensorDescriptor(v, *([x[0], *x[2:]] for x in (shape, strides, block)))

    def arguments(self) -> dict[str, object]:
        settings = {"DESCRIPTORS": self.descriptors, "SWAPPED": self.swapped}
        return {"first": self.first, "second": self.second, "v": self.v, **settings}


def _shapes(q: Tensor, k: Tensor, config: Config) -> dict[str, object]:
    kv_heads, subnets, subnet_dim, head_dim = k.shape
    return {
        "T": token_count(q), "H": q.shape[-2], "GROUP": q.shape[-2] // kv_heads, "E": subnets, "d_e": subnet_dim,
        "D": head_dim, "BD": triton.next_power_of_2(head_dim), "BT": config.tokens, "BI": config.inter,
        "RECIPROCAL": not INTERPRETED, "BY_BLOCKS": q.dtype == torch.float32, "num_warps": config.warps,
        "num_stages": config.stages,
    }  # fmt: skip


def _splits(programs: int, device: torch.device, most: int) -> int:
    """Return the shares of a sum with too few programs to fill the device; their fp32 results are added in order."""
    return max(1, min(most, WAVES * _architecture(device)[1] // programs))


def token_result(
    kernel, q: Tensor, k: Tensor, config: Config, arguments: dict[str, object], name: str, dtype: torch.dtype
) -> Tensor:
    """Run a kernel whose programs own a token block of a head; sum the shares of sub-networks where it was split."""
    tokens, heads = token_count(q), q.shape[-2]
    blocks = triton.cdiv(tokens, config.tokens)
    splits = _splits(blocks * heads, q.device, most=k.shape[1])
    result = torch.empty((splits, *q.shape), dtype=dtype if splits == 1 else torch.float32, device=q.device)
    kernel[blocks, heads, splits](**arguments, **_shapes(q, k, config), splits=splits, **{name: result})
    return result[0] if splits == 1 else result.sum(0).to(dtype)


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, activation: str = "silu") -> Tensor:
    with launching(q.device):
        config = _config(q, "forward", k.shape[2])
        arguments = _Weights(k, u, v, config.inter).arguments() | Rows(q, "q").arguments() | gate_arguments(r)
        arguments |= {"q": q, "ACTIVATION": activation, "BEHIND": config.behind}
        return token_result(kernels.forward_kernel, q, k, config, arguments, "out", q.dtype)


def gate_arguments(r: Tensor | None) -> dict[str, object]:
    if r is not None:
        return {"r": r, **Rows(r, "r").arguments()}
    return {"r": None, "r_length": None, "r_at": None, "R_LAYOUT": "rows"}


def token_grads(
    grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, settings: Settings,
    dq_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (dq, dr), empty if ``settings.needs`` leaves them out; dr is empty if r is None."""
    if not settings.needs[0]:
        return q.new_empty(0), q.new_empty(0)
    with launching(q.device):
        config = _config(q, "token_grads", k.shape[2])
        dr = None if r is None else torch.empty(r.shape, dtype=r.dtype, device=r.device)
        arguments = {"grad_out": grad_out, "q": q, "dr": dr, "ACTIVATION": settings.activation, **gate_arguments(r)}
        arguments |= Rows(grad_out, "g").arguments() | Rows(q, "q").arguments()
        arguments |= _Weights(k, u, v, config.inter, ordered=settings.deterministic).arguments()
        dq = token_result(kernels.token_grads_kernel, q, k, config, arguments, "dq", dq_dtype)
        return dq, q.new_empty(0) if dr is None else dr


def weight_grads(
    grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, activation: str = "silu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dk, du, dv) in k's dtype."""
    with launching(q.device):
        config = _config(q, "weight_grads", k.shape[2])
        weights = _Weights(k, u, v, config.inter)
        heads, subnets, subnet_dim, head_dim = k.shape
        tokens = token_count(q)
        tiles = subnets * triton.cdiv(subnet_dim, config.inter)
        share = triton.cdiv(tokens, _splits(tiles * heads, q.device, most=max(1, tokens // MIN_SHARE)))
        share = triton.cdiv(share, config.tokens) * config.tokens
        splits = triton.cdiv(tokens, share)
        if splits > 1:
            results = torch.empty((3, splits, *k.shape), dtype=torch.float32, device=k.device)
        else:
            results = tuple(torch.empty_like(k) for _ in range(3))
        dk, du, dv = results
        q_rows, g_rows = Rows(q, "q"), Rows(grad_out, "g")
        block = (config.tokens, triton.next_power_of_2(head_dim))
        maps = [rows.descriptor(block) for rows in (q_rows, g_rows)] if weights.descriptors else [None]
        by_maps = None not in maps
        kernels.weight_grads_kernel[tiles, heads, splits](
            **dict(zip(("q", "grad_out"), maps if by_maps else (q, grad_out), strict=True)),
            d_first=du if weights.swapped else dk, d_second=dk if weights.swapped else du, dv=dv, share_tokens=share,
            **weights.arguments(), **g_rows.arguments(), **q_rows.arguments(), **gate_arguments(r),
            **_shapes(q, k, config), TOKEN_DESCRIPTORS=by_maps, ACTIVATION=activation,
        )  # fmt: skip
        return results if splits == 1 else tuple(results.sum(1).to(k.dtype))
