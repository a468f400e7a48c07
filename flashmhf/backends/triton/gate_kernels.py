"""The router in Triton: R = gate(Q, w, eps) by one kernel, its gradients by two (flashmhf.reference.gate).

Legend as in kernels.py; P = Q w in fp32, s = sigmoid(P), R = s / total with total = sum over e of s, plus eps. The
sub-networks are taken BE at a time; the scores of the first ones are computed once, those of further ones twice.
"""

# ruff: noqa: N803, N806 (the paper's symbols; compile-time constants are upper case)
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Router
from ..tokens import token_count
from . import launch
from .configs import Config
from .kernels import load_columns, sigmoid

# Products of fp32 numbers by three of their halves: nearly as exact as plain FMAs, and on tensor cores.
PRECISION = tl.constexpr("tf32x3")
PIECE = tl.constexpr(32)
MIN_SHARE = 256  # tokens of the weights' gradient: a smaller share is not worth its workspace


@triton.jit
def load_router(w, h, d, e, E, D: tl.constexpr):
    """[columns d, sub-networks e] of w [H, D, E] in fp32; zero past D and E."""
    rows = w + h.to(tl.int64) * D * E + d * E
    return tl.load(rows[:, None] + e[None, :], mask=(d < D)[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)


@triton.jit
def block_of(t, h, column, T, H, columns):
    """Offsets and mask of [tokens t, column] of a head of contiguous x [T, H, columns]."""
    at = ((t.to(tl.int64) * H + h) * columns)[:, None] + column[None, :]
    return at, (t < T)[:, None] & (column < columns)[None, :]


@triton.jit
def scores(
    q, w, t, h, e, T, E, q_length, q_at, Q_LAYOUT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    BE: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    """sigmoid(P) [BT, BE]; zero past E. The sum over D goes by pieces, whose halves fit the registers; that of a single
    token at once, without a wait between them."""
    if BT == 1:
        d = tl.arange(0, BD)
        q_t = load_columns(q, t, h, T, q_length, q_at, Q_LAYOUT, D, d).to(tl.float32)
        p = tl.sum(q_t.reshape(BD, 1) * load_router(w, h, d, e, E, D), 0)[None, :]
    else:
        p = tl.zeros([BT, BE], dtype=tl.float32)
        for first in tl.static_range(0, BD, PIECE if PIECE < BD else BD):
            d = first + tl.arange(0, PIECE if PIECE < BD else BD)
            q_t = load_columns(q, t, h, T, q_length, q_at, Q_LAYOUT, D, d).to(tl.float32)
            p = tl.dot(q_t, load_router(w, h, d, e, E, D), p, input_precision=PRECISION)
    return tl.where((e < E)[None, :], sigmoid(p, RECIPROCAL), 0.0)


@triton.jit(do_not_specialize=["T", "q_length"])
def gate_kernel(
    q, w, r, T, H, E, eps, q_length, q_at, Q_LAYOUT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, ONE: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    """r [T, H, E], contiguous. Grid: token blocks, heads."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    further = 0 if ONE else E  # the end of the sub-networks past the first block
    e = tl.arange(0, BE)
    s = scores(q, w, t, h, e, T, E, q_length, q_at, Q_LAYOUT, D, BD, BT, BE, RECIPROCAL)
    total = tl.sum(s, 1) + eps
    for first in range(BE, further, BE):
        total += tl.sum(scores(q, w, t, h, first + e, T, E, q_length, q_at, Q_LAYOUT, D, BD, BT, BE, RECIPROCAL), 1)
    at, mask = block_of(t, h, e, T, H, E)
    tl.store(r + at, s / total[:, None], mask=mask)
    for first in range(BE, further, BE):
        s = scores(q, w, t, h, first + e, T, E, q_length, q_at, Q_LAYOUT, D, BD, BT, BE, RECIPROCAL)
        at, mask = block_of(t, h, first + e, T, H, E)
        tl.store(r + at, s / total[:, None], mask=mask)


@triton.jit(do_not_specialize=["T", "q_length"])
def token_grads_kernel(
    dr, q, w, dq_mixed, dq, dp, T, H, E, eps, q_length, q_at, Q_LAYOUT: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, ONE: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    """dP [T, H, E] and dq = dq_mixed + dP w^T. Grid: token blocks, heads."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    further = 0 if ONE else E  # the end of the sub-networks past the first block
    e = tl.arange(0, BE)
    s = scores(q, w, t, h, e, T, E, q_length, q_at, Q_LAYOUT, D, BD, BT, BE, RECIPROCAL)
    at, mask = block_of(t, h, e, T, H, E)
    grad = tl.load(dr + at, mask=mask, other=0.0)
    total = tl.sum(s, 1) + eps
    along = tl.sum(s * grad, 1)
    for first in range(BE, further, BE):
        more = scores(q, w, t, h, first + e, T, E, q_length, q_at, Q_LAYOUT, D, BD, BT, BE, RECIPROCAL)
        more_at, more_mask = block_of(t, h, first + e, T, H, E)
        total += tl.sum(more, 1)
        along += tl.sum(more * tl.load(dr + more_at, mask=more_mask, other=0.0), 1)
    along /= total
    tl.store(dp + at, (grad - along[:, None]) / total[:, None] * s * (1.0 - s), mask=mask)
    for first in range(BE, further, BE):
        s = scores(q, w, t, h, first + e, T, E, q_length, q_at, Q_LAYOUT, D, BD, BT, BE, RECIPROCAL)
        at, mask = block_of(t, h, first + e, T, H, E)
        grad = tl.load(dr + at, mask=mask, other=0.0)
        tl.store(dp + at, (grad - along[:, None]) / total[:, None] * s * (1.0 - s), mask=mask)
    tl.debug_barrier()  # dp is read again, by other threads
    for first_d in tl.static_range(0, BD, PIECE if PIECE < BD else BD):
        d = first_d + tl.arange(0, PIECE if PIECE < BD else BD)
        dq_at, inside = block_of(t, h, d, T, H, D)
        dq_t = tl.load(dq_mixed + dq_at, mask=inside, other=0.0)
        for first in range(0, E, BE):
            at, mask = block_of(t, h, first + e, T, H, E)
            dp_t = tl.load(dp + at, mask=mask, other=0.0)
            dq_t = tl.dot(dp_t, load_router(w, h, d, first + e, E, D).T, dq_t, input_precision=PRECISION)
        tl.store(dq + dq_at, dq_t.to(dq.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "share_tokens", "q_length"])
def weight_grads_kernel(
    dp, q, dw, T, H, E, share_tokens, q_length, q_at, Q_LAYOUT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """dw [shares, H, D, E] = Q^T dP. Grid: blocks of sub-networks, heads, shares of the tokens."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    h = tl.program_id(1)
    share = tl.program_id(2)
    d = tl.arange(0, BD)
    total = tl.zeros([BD, BE], dtype=tl.float32)
    start = share * share_tokens
    for t_first in range(start, tl.minimum(start + share_tokens, T), BT):
        t = t_first + tl.arange(0, BT)
        q_t = load_columns(q, t, h, T, q_length, q_at, Q_LAYOUT, D, d).to(tl.float32)
        at, mask = block_of(t, h, e, T, H, E)
        dp_t = tl.load(dp + at, mask=mask, other=0.0)
        total += tl.dot(q_t.T, dp_t, input_precision=PRECISION, max_num_imprecise_acc=1)
    rows = dw + (share.to(tl.int64) * H + h) * D * E + d * E
    tl.store(rows[:, None] + e[None, :], total, mask=(d < D)[:, None] & (e < E)[None, :])


def _block_shape(tokens: int, subnets: int, stages: int) -> Config:
    return Config(tokens, min(32, max(16, triton.next_power_of_2(subnets))), 4, stages)


@functools.lru_cache(launch.PLANS)
def _gate_plan(q: launch.Facts, w: launch.Facts, eps: float, device: torch.device) -> launch.Plan:
    tokens, (heads, head_dim, subnets), q_rows = token_count(q), w.shape, launch.rows(q)
    config = _block_shape(1 if tokens <= launch.FEW else 32, subnets, 1)
    return launch.Plan(
        gate_kernel, device, (triton.cdiv(tokens, config.tokens), heads, 1), config, T=tokens, H=heads, E=subnets,
        eps=eps, q_length=q_rows.length, q_at=q_rows.at, Q_LAYOUT=q_rows.layout, D=head_dim,
        BD=triton.next_power_of_2(head_dim), BT=config.tokens, BE=config.inter, ONE=subnets <= config.inter,
        RECIPROCAL=not launch.INTERPRETED,
    )  # fmt: skip


def gate(q: Tensor, router: Router) -> Tensor:
    """Return R [..., H, E] in fp32."""
    with launch.launching(q.device):
        r = torch.empty((*q.shape[:-1], router.w.shape[2]), dtype=torch.float32, device=q.device)
        _gate_plan(launch.facts(q), launch.facts(router.w), router.eps, q.device).start(q, router.w, r)
        return r


@functools.lru_cache(launch.PLANS)
def _token_grads_plan(q: launch.Facts, w: launch.Facts, eps: float, device: torch.device) -> launch.Plan:
    tokens, (heads, head_dim, subnets), q_rows = token_count(q), w.shape, launch.rows(q)
    config = _block_shape(32, subnets, 1)
    return launch.Plan(
        token_grads_kernel, device, (triton.cdiv(tokens, config.tokens), heads, 1), config, T=tokens, H=heads,
        E=subnets, eps=eps, q_length=q_rows.length, q_at=q_rows.at, Q_LAYOUT=q_rows.layout, D=head_dim,
        BD=triton.next_power_of_2(head_dim), BT=config.tokens, BE=config.inter, ONE=subnets <= config.inter,
        RECIPROCAL=not launch.INTERPRETED,
    )  # fmt: skip


@functools.lru_cache(launch.PLANS)
def _weight_grads_plan(q: launch.Facts, w: launch.Facts, device: torch.device) -> launch.Plan:
    tokens, (heads, head_dim, subnets), q_rows = token_count(q), w.shape, launch.rows(q)
    config = _block_shape(32, subnets, 2)
    blocks = triton.cdiv(subnets, config.inter)
    share = triton.cdiv(tokens, launch.shares(blocks * heads, device, config, most=triton.cdiv(tokens, MIN_SHARE)))
    share = triton.cdiv(share, config.tokens) * config.tokens
    return launch.Plan(
        weight_grads_kernel, device, (blocks, heads, triton.cdiv(tokens, share)), config, T=tokens, H=heads, E=subnets,
        share_tokens=share, q_length=q_rows.length, q_at=q_rows.at, Q_LAYOUT=q_rows.layout, D=head_dim,
        BD=triton.next_power_of_2(head_dim), BT=config.tokens, BE=config.inter,
    )  # fmt: skip


def gate_backward(
    dr: Tensor, q: Tensor, router: Router, dq_mixed: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Return dq in q's dtype, of the networks' part dq_mixed (fp32) and the router's, and dw in w's, contiguous; empty
    where ``needs`` (of tokens, of weights) leaves them out."""
    w, like = router.w, (launch.facts(q), launch.facts(router.w))
    with launch.launching(q.device):
        dq, dp = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(dr)
        _token_grads_plan(*like, router.eps, q.device).start(dr, q, w, dq_mixed, dq, dp)
        if not needs[1]:
            return dq, q.new_empty(0)
        plan = _weight_grads_plan(*like, q.device)
        parts = torch.empty((1, plan.grid[2], *w.shape), dtype=torch.float32, device=q.device)
        plan.start(dp, q, parts)
        return dq if needs[0] else q.new_empty(0), launch.add_shares(parts, w.dtype)[0]
