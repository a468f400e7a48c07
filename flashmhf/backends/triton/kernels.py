"""The paper's three Triton kernels: forward; dQ and dR; dK, dU and dV (arXiv 2512.06989, appendix A).

Legend: T tokens, t a block of BT of them, D = d_h (BD: the next power of two, columns past D are zero), j a block of BI
inter units of one sub-network. m = q.k, n = q.u, g = grad_out.v, a = SiLU(m) or another activation; every product
accumulates in fp32. H heads h of q, of which GROUP share a head of K, U and V.

K and U tiles lie on top of each other in shared memory ([2 BI, BD], K rows first), so one product gives [m | n] and one
product takes [dm | dn]: half as many waits on the tensor cores, and the left operand is read once for both. The two
halves of an accumulator belong to the same thread, so taking it apart and joining it costs no data movement.

Inter units past d_e read as zero rows (the descriptor's bound or a mask): m = n = g = 0 there, which adds nothing.
"""

# ruff: noqa: N803, N806 (the paper's symbols; compile-time constants are upper case)
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def sigmoid(x, RECIPROCAL: tl.constexpr):
    """1 / (1 + exp(-x)); RECIPROCAL: by the hardware's approximate reciprocal (1 ulp), one instruction, not five."""
    denominator = 1.0 + tl.exp2(x * -LOG2_E)
    if RECIPROCAL:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / denominator


@triton.jit
def activate(m, ACTIVATION: tl.constexpr, RECIPROCAL: tl.constexpr):
    """(a, its slope)."""
    if ACTIVATION == "silu":
        s = sigmoid(m, RECIPROCAL)
        a = m * s
        return a, s + a * (1.0 - s)
    elif ACTIVATION == "gelu":
        cdf = 0.5 + 0.5 * tl.erf(m * SQRT_HALF)
        return m * cdf, cdf + m * tl.exp2(m * m * (-0.5 * LOG2_E)) * INVERSE_SQRT_2_PI
    elif ACTIVATION == "relu":
        return tl.maximum(m, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(m > 0, 1.0, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        a = tl.maximum(m, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return a * a, 2.0 * a


@triton.jit
def token_offsets(t, mask, length, at, LAYOUT: tl.constexpr):
    """Offsets (int64) of tokens t: a stride ("rows"), blocks of ``length`` tokens ("blocks"), or a lookup ("table").

    ``at`` is a tensor's addressing: (table, strides of blocks, tokens, heads, columns). ``length`` is no part of it:
    all elements of a tuple are specialised, so that another length of the sequences would compile another kernel.
    """
    table, outer, inner, _, _ = at
    if LAYOUT == "table":
        return tl.load(table + t, mask=mask, other=0)
    elif LAYOUT == "blocks":
        return (t // length).to(tl.int64) * outer + (t % length).to(tl.int64) * inner
    else:
        return t.to(tl.int64) * inner


@triton.jit
def load_tokens(x, t, h, T, length, at, LAYOUT: tl.constexpr, D: tl.constexpr, d):
    """[BT, columns d] of x [T, H, D] in place, whatever its strides; zero past T and D."""
    mask = t < T
    rows = x + token_offsets(t, mask, length, at, LAYOUT) + h.to(tl.int64) * at[3]
    return tl.load(rows[:, None] + (d.to(tl.int64) * at[4])[None, :], mask=mask[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_pair(
    first, second, row, j, d_e, D: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """[2 BI, BD]: a tile of one matrix above the same tile of the other; row = (h // GROUP) E + e."""
    if DESCRIPTORS:
        return first.load([row, 0, j * BI, 0]).reshape(2 * BI, BD)
    else:
        i = tl.arange(0, 2 * BI)
        unit = j * BI + i % BI
        d = tl.arange(0, BD)
        rows = tl.where(i < BI, first, second) + row.to(tl.int64) * d_e * D + unit * D
        return tl.load(rows[:, None] + d[None, :], mask=(unit < d_e)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_tile(x, row, j, d_e, D: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """[BI, BD] of x [H_kv E, d_e, D]."""
    if DESCRIPTORS:
        return x.load([row, j * BI, 0]).reshape(BI, BD)
    else:
        unit = j * BI + tl.arange(0, BI)
        d = tl.arange(0, BD)
        rows = x + row.to(tl.int64) * d_e * D + unit * D
        return tl.load(rows[:, None] + d[None, :], mask=(unit < d_e)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def halves(mn, BT: tl.constexpr, BI: tl.constexpr, SWAPPED: tl.constexpr):
    """(m, n) out of [m | n], or out of [n | m] where the pair lies the other way round."""
    first, second = mn.reshape(BT, 2, BI).permute(0, 2, 1).split()
    if SWAPPED:
        return second, first
    else:
        return first, second


@triton.jit
def join_halves(dm, dn, BT: tl.constexpr, BI: tl.constexpr, SWAPPED: tl.constexpr):
    """[dm | dn], in the order of the pair."""
    if SWAPPED:
        return tl.join(dn, dm).permute(0, 2, 1).reshape(BT, 2 * BI)
    else:
        return tl.join(dm, dn).permute(0, 2, 1).reshape(BT, 2 * BI)


@triton.jit
def add_product(total, left, right, BY_BLOCKS: tl.constexpr):
    """total + left right. BY_BLOCKS: the product is summed on its own first, so that fp32's rounding grows with the
    number of blocks, not of terms (any max_num_imprecise_acc keeps the compiler from starting its sum at ``total``)."""
    if BY_BLOCKS:
        return total + tl.dot(left, right, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def store_rows(x, value, t, h, T, H, D: tl.constexpr, BD: tl.constexpr):
    """value [BT, BD] into contiguous x [T, H, D]."""
    d = tl.arange(0, BD)
    rows = x + (t.to(tl.int64) * H + h) * D
    tl.store(rows[:, None] + d[None, :], value.to(x.dtype.element_ty), mask=(t < T)[:, None] & (d < D)[None, :])


@triton.jit
def store_weight_grad(rows, value, unit, d_e, D: tl.constexpr, BD: tl.constexpr):
    """value [units, BD] to the rows of a weight gradient."""
    d = tl.arange(0, BD)
    mask = (unit < d_e)[:, None] & (d < D)[None, :]
    tl.store(rows[:, None] + d[None, :], value.to(rows.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "q_length", "r_length", "splits"])
def forward_kernel(
    q, first, second, v, r, out, T, H, E, d_e, splits, q_length, q_at, r_length, r_at,
    Q_LAYOUT: tl.constexpr, R_LAYOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, BI: tl.constexpr, DESCRIPTORS: tl.constexpr, SWAPPED: tl.constexpr, ACTIVATION: tl.constexpr,
    RECIPROCAL: tl.constexpr, BY_BLOCKS: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over e, j of (r a n) V. Grid: token blocks, heads, shares of the sub-networks (each its own out).

    BEHIND: the product with V runs one tile behind, on the tensor cores beside the elementwise part of this tile.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    share = tl.program_id(2)
    e_first = E * share // splits
    e_end = E * (share + 1) // splits
    q_t = load_tokens(q, t, h, T, q_length, q_at, Q_LAYOUT, D, tl.arange(0, BD))
    if r is not None:
        r_rows = r + token_offsets(t, t < T, r_length, r_at, R_LAYOUT) + h.to(tl.int64) * r_at[3]
    tiles = tl.cdiv(d_e, BI)
    total = tl.zeros([BT, BD], dtype=tl.float32)
    p = tl.zeros([BT, BI], dtype=tl.float32)
    e = e_first
    j = 0
    for _ in range((e_end - e_first) * tiles):
        row = (h // GROUP) * E + e
        mn = tl.dot(q_t, load_pair(first, second, row, j, d_e, D, BD, BI, DESCRIPTORS).T, input_precision="ieee")
        if BEHIND:
            # The first tile has nothing behind it: p is zero, and any row of V will do.
            j_behind = tl.where(j == 0, tl.where(e == e_first, 0, tiles - 1), j - 1)
            row_behind = tl.where((j == 0) & (e != e_first), row - 1, row)
            v_j = load_tile(v, row_behind, j_behind, d_e, D, BD, BI, DESCRIPTORS)
            total = add_product(total, p.to(v_j.dtype), v_j, BY_BLOCKS)
        m, n = halves(mn, BT, BI, SWAPPED)
        if ACTIVATION == "silu":
            p = m * n * sigmoid(m, RECIPROCAL)
        else:
            p = activate(m, ACTIVATION, RECIPROCAL)[0] * n
        if r is not None:
            p *= tl.load(r_rows + e.to(tl.int64) * r_at[4], mask=t < T, other=0.0).to(tl.float32)[:, None]
        if not BEHIND:
            v_j = load_tile(v, row, j, d_e, D, BD, BI, DESCRIPTORS)
            total = add_product(total, p.to(v_j.dtype), v_j, BY_BLOCKS)
        last = j + 1 == tiles
        e = tl.where(last, e + 1, e)
        j = tl.where(last, 0, j + 1)
    if BEHIND:
        v_j = load_tile(v, (h // GROUP) * E + e_end - 1, tiles - 1, d_e, D, BD, BI, DESCRIPTORS)
        total = add_product(total, p.to(v_j.dtype), v_j, BY_BLOCKS)
    store_rows(out + share.to(tl.int64) * T * H * D, total, t, h, T, H, D, BD)


@triton.jit(do_not_specialize=["T", "q_length", "g_length", "r_length", "splits"])
def token_grads_kernel(
    grad_out, q, first, second, v, r, dq, dr, T, H, E, d_e, splits,
    g_length, g_at, q_length, q_at, r_length, r_at,
    G_LAYOUT: tl.constexpr, Q_LAYOUT: tl.constexpr, R_LAYOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr, DESCRIPTORS: tl.constexpr, SWAPPED: tl.constexpr,
    ACTIVATION: tl.constexpr, RECIPROCAL: tl.constexpr, BY_BLOCKS: tl.constexpr,
):  # fmt: skip
    """dq = dm K + dn U and dr[e] = sum over j of g a n, with dm = g n r a'(m) and dn = g a r. Grid as in forward."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    share = tl.program_id(2)
    e_first = E * share // splits
    e_end = E * (share + 1) // splits
    q_t = load_tokens(q, t, h, T, q_length, q_at, Q_LAYOUT, D, tl.arange(0, BD))
    grad_t = load_tokens(grad_out, t, h, T, g_length, g_at, G_LAYOUT, D, tl.arange(0, BD))
    if r is not None:
        r_rows = r + token_offsets(t, t < T, r_length, r_at, R_LAYOUT) + h.to(tl.int64) * r_at[3]
        dr_rows = dr + (t.to(tl.int64) * H + h) * E
        dr_sum = tl.zeros([BT], dtype=tl.float32)
    tiles = tl.cdiv(d_e, BI)
    total = tl.zeros([BT, BD], dtype=tl.float32)
    e = e_first
    j = 0
    for _ in range((e_end - e_first) * tiles):
        row = (h // GROUP) * E + e
        ku = load_pair(first, second, row, j, d_e, D, BD, BI, DESCRIPTORS)
        v_j = load_tile(v, row, j, d_e, D, BD, BI, DESCRIPTORS)
        mn = tl.dot(q_t, ku.T, input_precision="ieee")
        g = tl.dot(grad_t, v_j.T, input_precision="ieee")
        m, n = halves(mn, BT, BI, SWAPPED)
        a, slope = activate(m, ACTIVATION, RECIPROCAL)
        n_slope = n * slope
        last = j + 1 == tiles
        if r is not None:
            dr_sum += tl.sum(g * (a * n), axis=1)
            if last:
                tl.store(dr_rows + e, dr_sum.to(dr.dtype.element_ty), mask=t < T)
                dr_sum = tl.zeros([BT], dtype=tl.float32)
            g *= tl.load(r_rows + e.to(tl.int64) * r_at[4], mask=t < T, other=0.0).to(tl.float32)[:, None]
        dmn = join_halves((g * n_slope).to(ku.dtype), (g * a).to(ku.dtype), BT, BI, SWAPPED)
        total = add_product(total, dmn, ku, BY_BLOCKS)
        e = tl.where(last, e + 1, e)
        j = tl.where(last, 0, j + 1)
    store_rows(dq + share.to(tl.int64) * T * H * D, total, t, h, T, H, D, BD)


@triton.jit(do_not_specialize=["T", "share_tokens", "q_length", "g_length", "r_length"])
def weight_grads_kernel(
    grad_out, q, first, second, v, r, d_first, d_second, dv, T, H, E, d_e, share_tokens,
    g_length, g_at, q_length, q_at, r_length, r_at,
    G_LAYOUT: tl.constexpr, Q_LAYOUT: tl.constexpr, R_LAYOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr, DESCRIPTORS: tl.constexpr, TOKEN_DESCRIPTORS: tl.constexpr,
    SWAPPED: tl.constexpr, ACTIVATION: tl.constexpr, RECIPROCAL: tl.constexpr, BY_BLOCKS: tl.constexpr,
):  # fmt: skip
    """dK = dm^T q, dU = dn^T q, dV = (a n r)^T grad_out. Grid: tiles of inter units, heads of K, shares of the tokens
    (each its own d_first, d_second, dv); a share sums over the heads of the group, too.

    The accumulators are the transposes [BD, 2 BI] and [BD, BI]: q and grad_out are then left operands read straight
    from where they were loaded, and what was computed here is the right one, which goes through shared memory anyway.
    """
    tiles = tl.cdiv(d_e, BI)
    j = tl.program_id(0) % tiles
    e = tl.program_id(0) // tiles
    kv = tl.program_id(1)
    share = tl.program_id(2)
    row = kv * E + e
    ku = load_pair(first, second, row, j, d_e, D, BD, BI, DESCRIPTORS)
    v_j = load_tile(v, row, j, d_e, D, BD, BI, DESCRIPTORS)
    dku = tl.zeros([BD, 2 * BI], dtype=tl.float32)
    dv_j = tl.zeros([BD, BI], dtype=tl.float32)
    start = share * share_tokens
    for member in range(GROUP):
        h = kv * GROUP + member
        if r is not None:
            r_of_e = r + h.to(tl.int64) * r_at[3] + e.to(tl.int64) * r_at[4]
        for t_first in range(start, tl.minimum(start + share_tokens, T), BT):
            t = t_first + tl.arange(0, BT)
            if TOKEN_DESCRIPTORS:
                q_t = q.load([t_first, h * q_at[3]])
                grad_t = grad_out.load([t_first, h * g_at[3]])
            else:
                q_t = load_tokens(q, t, h, T, q_length, q_at, Q_LAYOUT, D, tl.arange(0, BD))
                grad_t = load_tokens(grad_out, t, h, T, g_length, g_at, G_LAYOUT, D, tl.arange(0, BD))
            mn = tl.dot(q_t, ku.T, input_precision="ieee")
            g = tl.dot(grad_t, v_j.T, input_precision="ieee")
            m, n = halves(mn, BT, BI, SWAPPED)
            a, slope = activate(m, ACTIVATION, RECIPROCAL)
            n_slope = n * slope
            if r is not None:
                r_t = r_of_e + token_offsets(t, t < T, r_length, r_at, R_LAYOUT)
                weight = tl.load(r_t, mask=t < T, other=0.0).to(tl.float32)[:, None]
                n_slope *= weight
                a *= weight
            dv_j = add_product(dv_j, grad_t.T, (a * n).to(grad_t.dtype), BY_BLOCKS)
            dmn = join_halves((g * n_slope).to(q_t.dtype), (g * a).to(q_t.dtype), BT, BI, SWAPPED)
            dku = add_product(dku, q_t.T, dmn, BY_BLOCKS)
    base = (share.to(tl.int64) * (H // GROUP) * E + row) * d_e * D
    i = tl.arange(0, 2 * BI)
    unit = j * BI + i % BI
    store_weight_grad(tl.where(i < BI, d_first, d_second) + base + unit * D, dku.T, unit, d_e, D, BD)
    unit = j * BI + tl.arange(0, BI)
    store_weight_grad(dv + base + unit * D, dv_j.T, unit, d_e, D, BD)
