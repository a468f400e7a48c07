"""Forward with K, U and V in e4m3, in Triton: the quantisation points of :mod:`flashmhf.backends.eager.fp8`.

The last dimension of k8, u8 and v8 is permuted in blocks of 16 (:mod:`flashmhf.backends.fp8_layout`). The columns of Q
are loaded in that order, and so are the rows of K and U, so that the columns of A follow those of V. V lies transposed:
both right operands have the summed index contiguous, which the e4m3 tensor-core instructions need.
"""

# ruff: noqa: N803, N806 (the paper's symbols; compile-time constants are upper case)
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tokens import token_count
from . import launch
from .configs import Config
from .kernels import load_columns, sigmoid, store, token_offsets

E4M3_MAX = tl.constexpr(448.0)
TINIEST = tl.constexpr(1e-18)  # instead of max |q| of a row of zeros
SMALLEST_BLOCK = 32  # of the summed index in a product of e4m3 operands


@triton.jit
def column_at(place):
    """The column that stands at a place: 4t + i holds 2t + i for i < 2, else 8 + 2t + i - 2, in each block of 16."""
    i = place % 4
    return place // 16 * 16 + (place % 16) // 4 * 2 + tl.where(i < 2, i, i + 6)


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """Rounds to nearest even; saturates; NaN stays. Triton's interpreter truncates: there the rounding comes first."""
    x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        # 3 bits of the mantissa
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        subnormal = (x + 24576.0) - 24576.0  # a multiple of 2^-9, the last place of 1.5 * 2^14 in fp32
        x = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["T", "q_length", "r_length", "splits"])
def forward_kernel(
    q, k8, u8, v8, scales, r, out, T, H, E, d_e, matrices, splits, q_length, q_at, r_length, r_at,
    Q_LAYOUT: tl.constexpr, R_LAYOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, BI: tl.constexpr, RECIPROCAL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over e of r_e factor_e (a8 v8). Grid: token blocks, heads, shares of the sub-networks (each its own
    out [T, H, D]).

    scales [3, matrices], matrices = H_kv E. Hopper's tensor cores add e4m3 products with fewer bits than fp32 has, so
    that a long sum of one sign loses some: the sum of a block is promoted (max_num_imprecise_acc), and that of a
    sub-network has an accumulator of its own. 4 is the largest norm of a row of q8 (Q_NORM of the eager back end).
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    share = tl.program_id(2)
    d = tl.arange(0, BD)
    q_t = load_columns(q, t, h, T, q_length, q_at, Q_LAYOUT, D, column_at(d)).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q_t), 1), TINIEST)
    scaled = q_t / largest[:, None]
    squares = tl.sum(scaled * scaled, 1)
    ratio = tl.rsqrt(tl.maximum(squares, 1.0))  # of the largest and the norm
    limit = 4.0 * (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of q8: a power of two
    q8 = to_e4m3(scaled * limit[:, None], INTERPRETED)
    # a row of q with NaN or inf has the unit NaN, and so has its row of out
    unit = tl.where(squares == squares, largest / limit, squares)
    if r is not None:
        r_rows = r + token_offsets(t, t < T, r_length, r_at, R_LAYOUT) + h.to(tl.int64) * r_at[3]
    total = tl.zeros([BT, BD], dtype=tl.float32)
    i = tl.arange(0, BI)
    for e in range(E * share // splits, E * (share + 1) // splits):
        row = (h // GROUP) * E + e
        k_scale = tl.load(scales + row)
        matrix = row.to(tl.int64) * d_e * D
        part = tl.zeros([BT, BD], dtype=tl.float32)
        for j in range(0, d_e, BI):
            unit_at = column_at(j + i)
            rows = matrix + unit_at[:, None] * D + d[None, :]
            mask = (unit_at < d_e)[:, None] & (d < D)[None, :]
            m = tl.dot(q8, tl.load(k8 + rows, mask=mask, other=0.0).T)
            n = tl.dot(q8, tl.load(u8 + rows, mask=mask, other=0.0).T)
            a = 2.0 * m * sigmoid((unit * k_scale)[:, None] * m, RECIPROCAL) * n
            columns = matrix + d[:, None] * d_e + (j + i)[None, :]
            v_j = tl.load(v8 + columns, mask=(d < D)[:, None] & (j + i < d_e)[None, :], other=0.0)
            part = tl.dot(to_e4m3(a, INTERPRETED), v_j.T, part, max_num_imprecise_acc=BI)
        factor = unit * unit / 2.0 * (k_scale * tl.load(scales + matrices + row) * tl.load(scales + 2 * matrices + row))
        if r is not None:
            factor *= tl.load(r_rows + tl.cast(e, tl.int64) * r_at[4], mask=t < T, other=0.0).to(tl.float32)
        total += factor[:, None] * part
    rows = out + share.to(tl.int64) * T * H * D + (t.to(tl.int64) * H + h) * D
    store(rows, t < T, (total,), D, BD)


def block_shape(head_dim: int, subnet_dim: int) -> Config:
    """Block shapes; no candidates were timed."""
    inter, warps = (64, 4) if head_dim <= 128 else (32, 8)
    return Config(64, max(SMALLEST_BLOCK, min(inter, triton.next_power_of_2(subnet_dim))), warps, 2)


@functools.lru_cache(launch.PLANS)
def plan(operands: tuple[launch.Facts | None, ...], config: Config | None, device: torch.device) -> launch.Plan:
    q, k8, *_, r = operands
    tokens, heads, (kv_heads, subnets, subnet_dim, head_dim) = token_count(q), q.shape[-2], k8.shape
    config = config or block_shape(head_dim, subnet_dim)
    blocks = triton.cdiv(tokens, config.tokens)
    splits = launch.shares(blocks * heads, device, config, most=subnets)
    return launch.Plan(
        forward_kernel, device, (blocks, heads, splits), config, T=tokens, H=heads, E=subnets, d_e=subnet_dim,
        matrices=kv_heads * subnets, splits=splits, GROUP=heads // kv_heads, D=head_dim,
        BD=triton.next_power_of_2(head_dim), BT=config.tokens, BI=config.inter, RECIPROCAL=not launch.INTERPRETED,
        INTERPRETED=launch.INTERPRETED, **launch.addressing(q=q, r=r),
    )  # fmt: skip


def forward(
    q: Tensor, k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, r: Tensor | None, config: Config | None = None
) -> Tensor:
    """S [..., H, d_h] in q's dtype, contiguous, for operands of :func:`flashmhf.quantize.pack_fp8`, r [..., H, E]."""
    with launch.launching(q.device):
        planned = plan(tuple(map(launch.facts, (q, k8, u8, v8, scales, r))), config, q.device)
        memory, out = launch.sums(planned, q, q.dtype)
        planned.start(q, k8, u8, v8, scales, r, *out)
        return launch.totals(memory, out, q.dtype)[0]
