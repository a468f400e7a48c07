"""Launches of the Triton kernels: how tensors are addressed, how small problems are split, which block shapes run.

A launch is planned once for the shapes, strides and dtypes of its tensors, and whether they are aligned: a plan has the
grid and all arguments but the tensors themselves, and remembers the kernel that Triton compiled for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import driver
from ..tokens import collapse, token_count
from . import kernels
from .configs import TABLE, Config, row_of

_LOCK = threading.RLock()
_THREAD = threading.local()
INTERPRETED = not isinstance(kernels.forward_kernel, triton.JITFunction)
ALIGNMENT = 16  # bytes: of vector loads, and of base addresses and strides of a tensor map
TMA_STRIDE_LIMIT = 1 << 40  # bytes
TMA_SIZE_LIMIT = 1 << 31  # elements of an axis: Triton passes sizes and coordinates as 32-bit integers
FEW = 64  # tokens, up to which a forward is bound by reading the weights, and has block shapes for that
MIN_SHARE = 1024  # tokens: a smaller share of the weight gradients' sum is not worth its workspace
PLANS = 1024  # kept of each kind


class Gpu(NamedTuple):
    capability: tuple[int, int]
    multiprocessors: int


@functools.cache
def gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu((8, 0), 1)
    properties = torch.cuda.get_device_properties(device)
    return Gpu((properties.major, properties.minor), properties.multi_processor_count)


@contextlib.contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Run one thread at a time, on ``device`` with its context current.

    Triton is not ready for several threads: one that comes while another loads a kernel launches a null function, and
    the interpreter keeps coordinates in global variables.
    """
    with _LOCK:
        ready = _THREAD.__dict__.setdefault("ready", set())  # devices whose context this thread has had
        if device.type != "cuda" or (device.index in ready and torch.cuda.current_device() == device.index):
            yield
            return
        with torch.cuda.device(device):
            driver.make_context_current(device.index)
            ready.add(device.index)
            yield


class Facts(NamedTuple):
    """What a plan depends on of a tensor x [..., H, columns]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    def stride(self) -> tuple[int, ...]:
        return self.strides


def facts(x: Tensor | None) -> Facts | None:
    return None if x is None else Facts(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT == 0)


class Box(NamedTuple):
    """What the TMA unit reads of a tensor, as blocks of ``block``."""

    shape: list[int]
    strides: list[int]
    block: list[int]


class Plan:
    """A launch of ``kernel`` on ``device`` but for its tensors, which come first in the kernel's signature. ``boxes``:
    of the tensors, by their places, that the kernel reads by tensor maps.
    """

    def __init__(
        self, kernel, device: torch.device, grid: tuple[int, int, int], config: Config,
        boxes: dict[int, Box] | None = None, **arguments: Any,
    ):  # fmt: skip
        self.kernel, self.device, self.grid, self.config, self.arguments = kernel, device, grid, config, arguments
        self.boxes = boxes or {}
        self.maps: dict[int, TensorDescriptor] = {}
        self.values: tuple[Any, ...] = ()
        self.compiled, self.launch = None, None

    def start(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream. The first time Triton finds or compiles the kernel by all its arguments."""
        if self.boxes:
            tensors = self._as_maps(tensors)
        if self.launch is not None:
            self.launch(*tensors, *self.values)
        else:
            tables = {name: x.with_table(self.device) for name, x in self.arguments.items() if isinstance(x, Rows)}
            how = {"num_warps": self.config.warps, "num_stages": self.config.stages}
            compiled = self.kernel[self.grid](*tensors, **(self.arguments | tables), **how)
            if not INTERPRETED and not tables:
                self.values = tuple(self.arguments[name] for name in self.kernel.arg_names[len(tensors) :])
                self.compiled, self.launch = compiled, compiled[self.grid]
        for x in self.maps.values():
            x.base = None  # no tensor lives on for them

    def _as_maps(self, tensors: tuple[Tensor | None, ...]) -> list[Tensor | TensorDescriptor | None]:
        found: list[Tensor | TensorDescriptor | None] = list(tensors)
        for i, box in self.boxes.items():
            if i not in self.maps:  # whose constructor checks what is known of this and all further tensors
                self.maps[i] = TensorDescriptor(tensors[i], *box)
            self.maps[i].base = tensors[i]
            found[i] = self.maps[i]
        return found


class Rows(NamedTuple):
    """How a kernel finds the tokens of x [..., H, columns] in place: one token stride, blocks of tokens, or a table.

    ``at``: the table, the strides of blocks, tokens, heads and columns; this itself where the table has to be made.
    """

    layout: str
    length: int | None
    strides: tuple[int | None, ...] | None
    axes: list[tuple[int, int]] | None = None

    @property
    def at(self) -> Any:
        return self.strides if self.axes is None else self

    def with_table(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return ``at`` with the offset of every token (int64)."""
        table = torch.zeros((), dtype=torch.int64, device=device)
        for size, stride in self.axes:
            table = table[..., None] + torch.arange(size, device=device) * stride
        return table.flatten(), *self.strides[1:]


def rows(x: Facts | None) -> Rows:
    if x is None:
        return Rows("rows", None, None)
    axes, columns = collapse(x), x.strides[-2:]
    if len(axes) <= 1:
        return Rows("rows", 1, (None, 0, axes[0][1] if axes else 0, *columns))
    if len(axes) == 2:
        (_, outer), (length, inner) = axes
        return Rows("blocks", length, (None, outer, inner, *columns))
    return Rows("table", 1, (None, 0, 0, *columns), axes)


def addressing(**tensors: Facts | None) -> dict[str, Any]:
    """Return a kernel's arguments for where tensors of tokens lie, by the letters that it has for them."""
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        at = rows(x)
        found |= {f"{name.upper()}_LAYOUT": at.layout, f"{name}_length": at.length, f"{name}_at": at.at}
    return found


def _token_box(x: Facts, block: list[int]) -> Box | None:
    """Return x as [tokens, columns of all heads] for the TMA unit, the head an offset; None where it cannot be one."""
    x_rows, (heads, width) = rows(x), x.shape[-2:]
    _, _, inner, head, column = x_rows.strides
    columns = (heads - 1) * head + width
    is_map = x.aligned and x_rows.layout == "rows" and column == 1 and head >= 0 and block[1] == width
    if not is_map or columns >= TMA_SIZE_LIMIT:
        return None
    stride = inner * x.dtype.itemsize
    is_stride = stride % ALIGNMENT == 0 and 0 < stride < TMA_STRIDE_LIMIT
    return Box([token_count(x), columns], [inner, 1], block) if is_stride else None


def has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and gpu(device).capability[0] >= 9


class Place(NamedTuple):
    """How K, U and V lie in memory: on aligned addresses; so that tensor maps can take them; U before K."""

    aligned: tuple[bool, ...]
    maps: bool = False
    swapped: bool = False


def place(k: Tensor, u: Tensor, v: Tensor) -> Place:
    """One map covers K and U: their distance is the stride of an axis of length 2. A stride is positive, so the pair
    begins with the lower address."""
    aligned = k.data_ptr() % ALIGNMENT == 0, u.data_ptr() % ALIGNMENT == 0, v.data_ptr() % ALIGNMENT == 0
    # fp32 products are plain FMAs, for which ptxas spills beside tensor maps
    if k.element_size() != 2 or not has_tma(k.device):
        return Place(aligned)
    distance = u.data_ptr() - k.data_ptr()
    return Place(aligned, all(aligned) and 0 < abs(distance) < TMA_STRIDE_LIMIT, distance < 0)


def _pair(plan: Plan, k: Tensor, u: Tensor, v: Tensor, at: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (first, second, v) of a kernel, which stand at the place ``at`` of its signature."""
    if not plan.arguments["DESCRIPTORS"]:
        return k, u, v
    low, high = (u, k) if plan.arguments["SWAPPED"] else (k, u)
    plan.boxes[at].strides[1] = (high.data_ptr() - low.data_ptr()) // k.element_size()
    return low, high, v


def shares(programs: int, device: torch.device, config: Config, most: int) -> int:
    """Return the shares of a sum with too few programs to fill the device; their fp32 results are added in order."""
    return max(1, min(most, config.waves * gpu(device).multiprocessors // programs))


def in_shares(tokens: int, programs: int, device: torch.device, config: Config, most: int) -> tuple[int, int]:
    """Return the tokens of a share of a sum over them, in whole blocks, and how many shares there are."""
    share = triton.cdiv(tokens, shares(programs, device, config, most))
    share = triton.cdiv(share, config.tokens) * config.tokens
    return share, triton.cdiv(tokens, share)


def block_shape(kernel: str, q: Facts, k: Facts, device: torch.device, config: Config | None) -> Config:
    """Return the table's, or the given one, no larger than the problem."""
    if config is None:
        config = TABLE[row_of(gpu(device).capability), 8 * q.dtype.itemsize, q.shape[-1]][kernel]
    inter = min(config.inter, triton.next_power_of_2(k.shape[2]))
    tokens = config.tokens if config.paired else min(config.tokens, max(16, triton.next_power_of_2(token_count(q))))
    return dataclasses.replace(config, inter=inter, tokens=tokens)


class Case(NamedTuple):
    """What the plans of a call depend on: its tensors, the activation, another block shape than the table's."""

    q: Facts
    k: Facts
    r: Facts | None
    grad_out: Facts | None
    where: Place
    activation: str
    device: torch.device
    config: Config | None = None


@functools.lru_cache(PLANS)
def plans(case: Case) -> Callable[[str, torch.dtype], Plan]:
    """Return :func:`plan` of a case, which remembers: a case's many numbers are compared once for several kernels."""
    return functools.cache(functools.partial(plan, case))


def plan(case: Case, kernel: str, out: torch.dtype) -> Plan:
    """Return a launch of one of the three kernels, whose results have the dtype ``out``."""
    q, k, r, g, where, activation, device, config = case
    tokens, heads, (kv_heads, subnets, subnet_dim, head_dim) = token_count(q), q.shape[-2], k.shape
    few = "_few" if kernel == "forward" and tokens <= FEW else ""
    config = block_shape(kernel + few, q, k, device, config)
    blocks, tiles = triton.cdiv(tokens, config.tokens), triton.cdiv(subnet_dim, config.inter)
    own = {"BEHIND": config.behind} if kernel == "forward" else addressing(g=g)
    maps, boxes = config.paired and where.maps, {}
    # of a tile's first part: all in pairs, whose box of a tensor map is one, else a power of two, and a second part
    columns = triton.next_power_of_2(head_dim) if config.paired else 1 << (head_dim.bit_length() - 1)
    if kernel == "weight_grads":
        programs = subnets * tiles, kv_heads
        share, splits = in_shares(tokens, math.prod(programs), device, config, most=max(1, tokens // MIN_SHARE))
        of_tokens = [_token_box(x, [config.tokens, columns]) for x in (g, q)] if maps else [None]
        own |= {"share_tokens": share, "TOKEN_DESCRIPTORS": None not in of_tokens}
        if own["TOKEN_DESCRIPTORS"]:
            boxes |= enumerate(of_tokens)
    else:
        programs = blocks, heads
        splits = shares(blocks * heads, device, config, most=subnets * tiles if kernel == "forward" else subnets)
        own["splits"] = splits
    if maps:
        shape, strides = [kv_heads * subnets, 2, subnet_dim, head_dim], [subnet_dim * head_dim, 0, head_dim, 1]
        block = [1, 2, config.inter, columns]
        at = 1 if kernel == "forward" else 2
        boxes |= {at: Box(shape, strides, block), at + 2: Box(*(x[:1] + x[2:] for x in (shape, strides, block)))}
    return Plan(
        getattr(kernels, f"{kernel}_kernel"), device, (*programs, splits), config, boxes, T=tokens, H=heads, E=subnets,
        d_e=subnet_dim, GROUP=heads // kv_heads, D=head_dim, BD=columns, BT=config.tokens,
        BI=config.inter, EVEN=subnet_dim % config.inter == 0, PAIRED=config.paired, DESCRIPTORS=maps,
        SWAPPED=maps and where.swapped, ACTIVATION=activation, RECIPROCAL=not INTERPRETED,
        BY_BLOCKS=q.dtype == torch.float32, **own, **addressing(q=q, r=r),
    )  # fmt: skip


@functools.lru_cache(PLANS)
def _add_shares_plan(count: int, splits: int, size: int, out: torch.dtype, device: torch.device) -> Plan:
    block = 64 if count * size < 1 << 20 else 512  # few results are many programs, for the latency of the reads
    grid, config = (triton.cdiv(size, block), count, 1), Config(0, block, 2, 1)
    at_once = min(16, triton.next_power_of_2(splits))
    return Plan(kernels.add_shares_kernel, device, grid, config, size=size, shares=splits, AT_ONCE=at_once, BLOCK=block)


def add_shares(parts: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    """Return parts [n, splits, ...] added over the splits in order, n tensors; a single one is no view, which autograd
    would not let anybody write to in place."""
    count, splits, *shape = parts.shape
    out = parts.new_empty(shape if count == 1 else (count, *shape), dtype=dtype)
    _add_shares_plan(count, splits, math.prod(shape), dtype, parts.device).start(parts, out)
    return (out,) if count == 1 else out.unbind()


def empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory of the shape of ``like``, contiguous: torch.empty looks three times as long at its arguments."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def sums(planned: Plan, like: Tensor, dtype: torch.dtype, count: int = 1) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Return memory of the shares of a launch's results [count, splits, ...], None where it is not split, and what the
    launch writes to."""
    splits = planned.grid[2]
    if splits == 1:
        return None, [empty(like, dtype) for _ in range(count)]
    memory = like.new_empty((count, splits, *like.shape), dtype=torch.float32)
    return memory, memory.unbind()


def totals(memory: Tensor | None, parts: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the results for which :func:`sums` made memory."""
    return parts if memory is None else add_shares(memory, dtype)


class Call:
    """Launches the kernels of one call. ``config``: another block shape than the table's, to be timed."""

    def __init__(
        self, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, activation: str = "silu",
        grad_out: Tensor | None = None, config: Config | None = None,
    ):  # fmt: skip
        self.q, self.weights, self.r, self.grad_out = q, (k, u, v), r, grad_out
        where = place(k, u, v)
        self.case = Case(facts(q), facts(k), facts(r), facts(grad_out), where, activation, q.device, config)
        self.plan = plans(self.case)

    def forward(self) -> Tensor:
        """Return S."""
        with launching(self.q.device):
            planned = self.plan("forward", self.q.dtype)
            memory, out = sums(planned, self.q, self.q.dtype)
            planned.start(self.q, *_pair(planned, *self.weights, 1), self.r, *out)
            return totals(memory, out, self.q.dtype)[0]

    def token_grads(self, dtype: torch.dtype, deterministic: bool = False) -> tuple[Tensor, Tensor]:
        """Return dq in ``dtype`` and dr, which is empty if r is None."""
        q, r, where, plan = self.q, self.r, self.case.where, self.plan
        if deterministic and where.swapped:  # a swapped pair gives dq's sum another order
            plan = plans(self.case._replace(where=Place(where.aligned)))
        with launching(q.device):
            planned = plan("token_grads", dtype)
            dr = None if r is None else empty(r, r.dtype)
            memory, dq = sums(planned, q, dtype)
            planned.start(self.grad_out, q, *_pair(planned, *self.weights, 2), r, *dq, dr)
            return totals(memory, dq, dtype)[0], q.new_empty(0) if dr is None else dr

    def weight_grads(self) -> Sequence[Tensor]:
        """Return dk, du, dv in k's dtype."""
        k, *_ = self.weights
        with launching(k.device):
            planned = self.plan("weight_grads", k.dtype)
            memory, parts = sums(planned, k, k.dtype, count=3)
            dk, du, dv = parts
            pair = (du, dk) if planned.arguments["SWAPPED"] else (dk, du)
            planned.start(self.grad_out, self.q, *_pair(planned, *self.weights, 2), self.r, *pair, dv)
            return totals(memory, parts, k.dtype)
