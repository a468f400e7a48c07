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


@functools.lru_cache(launch.PLANS)
def _plans(q: launch.Facts, w: launch.Facts, eps: float, device: torch.device) -> tuple[launch.Plan, ...]:
    """Return the launches of the three kernels."""
    tokens, (heads, head_dim, subnets) = token_count(q), w.shape
    block = min(32, max(16, triton.next_power_of_2(subnets)))
    sizes = {"T": tokens, "H": heads, "E": subnets, "D": head_dim, "BD": triton.next_power_of_2(head_dim), "BE": block}
    sizes |= launch.addressing(q=q)
    by_scores = sizes | {"eps": eps, "ONE": subnets <= block, "RECIPROCAL": not launch.INTERPRETED}
    of_scores = (
        launch.Plan(kernel, device, (triton.cdiv(tokens, bt), heads, 1), Config(bt, block, 4, 1), BT=bt, **by_scores)
        for kernel, bt in ((gate_kernel, 1 if tokens <= launch.FEW else 32), (token_grads_kernel, 32))
    )
    config, blocks = Config(32, block, 4, 2), triton.cdiv(subnets, block)
    share, splits = launch.in_shares(tokens, blocks * heads, device, config, most=triton.cdiv(tokens, MIN_SHARE))
    grid = blocks, heads, splits
    return *of_scores, launch.Plan(weight_grads_kernel, device, grid, config, share_tokens=share, BT=32, **sizes)


def gate(q: Tensor, router: Router) -> Tensor:
    """Return R [..., H, E] in fp32."""
    with launch.launching(q.device):
        r = q.new_empty((*q.shape[:-1], router.w.shape[2]), dtype=torch.float32)
        plan, _, _ = _plans(launch.facts(q), launch.facts(router.w), router.eps, q.device)
        plan.start(q, router.w, r)
        return r


def gate_backward(
    dr: Tensor, q: Tensor, router: Router, dq_mixed: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Return dq in q's dtype, of the networks' part dq_mixed (fp32) and the router's, and dw in w's, contiguous; empty
    where ``needs`` (of tokens, of weights) leaves them out."""
    w = router.w
    with launch.launching(q.device):
        _, of_tokens, of_weights = _plans(launch.facts(q), launch.facts(w), router.eps, q.device)
        dq, dp = launch.empty(q, q.dtype), torch.empty_like(dr)
        of_tokens.start(dr, q, w, dq_mixed, dq, dp)
        if not needs[1]:
            return dq, q.new_empty(0)
        parts = w.new_empty((1, of_weights.grid[2], *w.shape), dtype=torch.float32)
        of_weights.start(dp, q, parts)
        return dq if needs[0] else q.new_empty(0), launch.add_shares(parts, w.dtype)[0]
