"""The paper's three Triton kernels: forward; dQ and dR; dK, dU and dV (arXiv 2512.06989, appendix A).

Legend: T tokens, t a block of BT of them, D = d_h, j a block of BI inter units of one sub-network. m = q.k, n = q.u,
g = grad_out.v, a = SiLU(m) or another activation; every product accumulates in fp32. H heads h of q, of which GROUP
share a head of K, U and V. The columns of a tile are a tuple of parts, whose widths are powers of two: the only part is
BD wide, with zeros past D; where BD < D (64 of 96, 128 of 192) there is a second one with the rest.

One source, two families of tensor cores. PAIRED, for wgmma (9.0) and tcgen05 (10.x), whose right operands lie in shared
memory: K and U tiles lie on top of each other there ([2 BI, BD], K rows first), so one product gives [m | n] and one
product takes [dm | dn]: half as many waits on the tensor cores, and the left operand is read once for both. The two
halves of an accumulator belong to the same thread, so taking it apart and joining it costs no data movement. Not
PAIRED, for mma.sync (8.x and 12.x), whose operands are registers: there the halves would go through shared memory, so K
and U have products of their own, and the weights' gradients take the scores as [units, tokens]: what was computed is
then the left operand of their sums, and stays in registers.

Inter units past d_e read as zero rows (the descriptor's bound or a mask): m = n = g = 0 there, which adds nothing.
EVEN: d_e is a multiple of BI, so that there are none.
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
def load_columns(x, t, h, T, length, at, LAYOUT: tl.constexpr, D: tl.constexpr, d, INSIDE: tl.constexpr = False):
    """[BT, columns d] of x [T, H, D] in place, whatever its strides; zero past T and D. INSIDE: no column is past D."""
    mask = t < T
    rows = x + token_offsets(t, mask, length, at, LAYOUT) + h.to(tl.int64) * at[3]
    mask = mask[:, None] if INSIDE else mask[:, None] & (d < D)[None, :]
    return tl.load(rows[:, None] + (d.to(tl.int64) * at[4])[None, :], mask=mask, other=0.0)


@triton.jit
def load_tokens(x, t, h, T, length, at, LAYOUT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """A tile of tokens of x [T, H, D], by parts."""
    if BD >= D:
        return (load_columns(x, t, h, T, length, at, LAYOUT, D, tl.arange(0, BD), BD == D),)
    else:
        first = load_columns(x, t, h, T, length, at, LAYOUT, D, tl.arange(0, BD), True)
        return first, load_columns(x, t, h, T, length, at, LAYOUT, D, BD + tl.arange(0, D - BD), True)


@triton.jit
def load_pair(
    first, second, row, j, d_e, D: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """[2 BI, BD]: a tile of one matrix above the same tile of the other; row = (h // GROUP) E + e."""
    if DESCRIPTORS:
        return (first.load([row, 0, j * BI, 0]).reshape(2 * BI, BD),)
    else:
        i = tl.arange(0, 2 * BI)
        unit = j * BI + i % BI
        d = tl.arange(0, BD)
        rows = tl.where(i < BI, first, second) + row.to(tl.int64) * d_e * D + unit * D
        return (tl.load(rows[:, None] + d[None, :], mask=(unit < d_e)[:, None] & (d < D)[None, :], other=0.0),)


@triton.jit
def load_units(x, row, j, d_e, D: tl.constexpr, d, BI: tl.constexpr, EVEN: tl.constexpr, INSIDE: tl.constexpr):
    """[BI, columns d] of x [H_kv E, d_e, D]. INSIDE: no column is past D."""
    i = tl.arange(0, BI)
    tile = x + (row.to(tl.int64) * d_e + j * BI) * D + (i[:, None] * D + d[None, :])
    if EVEN and INSIDE:
        return tl.load(tile)
    elif EVEN:
        return tl.load(tile, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(tile, mask=(j * BI + i < d_e)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_tile(
    x, row, j, d_e, D: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr, EVEN: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """A tile of inter units of x [H_kv E, d_e, D], by parts."""
    if DESCRIPTORS:
        return (x.load([row, j * BI, 0]).reshape(BI, BD),)
    elif BD >= D:
        return (load_units(x, row, j, d_e, D, tl.arange(0, BD), BI, EVEN, BD == D),)
    else:
        first = load_units(x, row, j, d_e, D, tl.arange(0, BD), BI, EVEN, True)
        return first, load_units(x, row, j, d_e, D, BD + tl.arange(0, D - BD), BI, EVEN, True)


@triton.jit
def zeros(rows: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """A sum [rows, D] by parts."""
    if BD >= D:
        return (tl.zeros([rows, BD], dtype=tl.float32),)
    else:
        return tl.zeros([rows, BD], dtype=tl.float32), tl.zeros([rows, D - BD], dtype=tl.float32)


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
def scores(left, right):
    """left right^T [rows of left, rows of right], of two tiles."""
    total = tl.dot(left[0], right[0].T, input_precision="ieee")
    if len(left) == 2:
        total = tl.dot(left[1], right[1].T, total, input_precision="ieee")
    return total


@triton.jit
def add_dot(total, left, right, BY_BLOCKS: tl.constexpr):
    """total + left right. BY_BLOCKS: the product is summed on its own first, so that fp32's rounding grows with the
    number of blocks, not of terms (any max_num_imprecise_acc keeps the compiler from starting its sum at ``total``)."""
    if BY_BLOCKS:
        return total + tl.dot(left, right, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def add_product(total, left, right, BY_BLOCKS: tl.constexpr):
    """total + left right, by the parts of ``right``."""
    if len(right) == 1:
        return (add_dot(total[0], left, right[0], BY_BLOCKS),)
    else:
        return add_dot(total[0], left, right[0], BY_BLOCKS), add_dot(total[1], left, right[1], BY_BLOCKS)


@triton.jit
def load_weight(r_rows, e, t, T, r_at):
    """r[t, e] in fp32."""
    return tl.load(r_rows + e.to(tl.int64) * r_at[4], mask=t < T, other=0.0).to(tl.float32)


@triton.jit
def store(rows, mask, value, D: tl.constexpr, BD: tl.constexpr):
    """value, by parts, to rows of D columns."""
    d = tl.arange(0, BD)
    inside = mask[:, None] & (d < D)[None, :]
    tl.store(rows[:, None] + d[None, :], value[0].to(rows.dtype.element_ty), mask=inside)
    if len(value) == 2:
        d = BD + tl.arange(0, D - BD)
        tl.store(rows[:, None] + d[None, :], value[1].to(rows.dtype.element_ty), mask=mask[:, None])


@triton.jit(do_not_specialize=["T", "q_length", "r_length", "splits"])
def forward_kernel(
    q, first, second, v, r, out, T, H, E, d_e, splits, q_length, q_at, r_length, r_at,
    Q_LAYOUT: tl.constexpr, R_LAYOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, BI: tl.constexpr, EVEN: tl.constexpr, PAIRED: tl.constexpr, DESCRIPTORS: tl.constexpr,
    SWAPPED: tl.constexpr, ACTIVATION: tl.constexpr, RECIPROCAL: tl.constexpr, BY_BLOCKS: tl.constexpr,
    BEHIND: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over e, j of (r a n) V. Grid: token blocks, heads, shares of the tiles (each its own out).

    BEHIND: the product with V runs one tile behind, on the tensor cores beside the elementwise part of this tile, from
    which a branch would part it: the weight is then loaded for each tile, else for each sub-network.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    share = tl.program_id(2)
    tiles = tl.cdiv(d_e, BI)
    first_tile = (E * tiles).to(tl.int64) * share // splits
    end = (E * tiles).to(tl.int64) * (share + 1) // splits
    e_first = (first_tile // tiles).to(tl.int32)
    e = e_first
    j = (first_tile % tiles).to(tl.int32)
    q_t = load_tokens(q, t, h, T, q_length, q_at, Q_LAYOUT, D, BD)
    if r is not None:
        r_rows = r + token_offsets(t, t < T, r_length, r_at, R_LAYOUT) + h.to(tl.int64) * r_at[3]
        weight = load_weight(r_rows, e, t, T, r_at)
    total = zeros(BT, D, BD)
    p = tl.zeros([BT, BI], dtype=tl.float32)
    for _ in range((end - first_tile).to(tl.int32)):
        row = (h // GROUP) * E + e
        if PAIRED:
            mn = scores(q_t, load_pair(first, second, row, j, d_e, D, BD, BI, DESCRIPTORS))
        else:
            m = scores(q_t, load_tile(first, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS))
            n = scores(q_t, load_tile(second, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS))
        if BEHIND:
            # The first tile has nothing behind it: p is zero, and any row of V will do.
            j_behind = tl.where(j == 0, tl.where(e == e_first, 0, tiles - 1), j - 1)
            row_behind = tl.where((j == 0) & (e != e_first), row - 1, row)
            v_j = load_tile(v, row_behind, j_behind, d_e, D, BD, BI, EVEN, DESCRIPTORS)
            total = add_product(total, p.to(v_j[0].dtype), v_j, BY_BLOCKS)
        if PAIRED:
            m, n = halves(mn, BT, BI, SWAPPED)
        if ACTIVATION == "silu":
            p = m * n * sigmoid(m, RECIPROCAL)
        else:
            p = activate(m, ACTIVATION, RECIPROCAL)[0] * n
        if r is not None:
            if BEHIND:
                weight = load_weight(r_rows, e, t, T, r_at)
            elif j == 0:
                weight = load_weight(r_rows, e, t, T, r_at)
            p *= weight[:, None]
        if not BEHIND:
            v_j = load_tile(v, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS)
            total = add_product(total, p.to(v_j[0].dtype), v_j, BY_BLOCKS)
        last = j + 1 == tiles
        e = tl.where(last, e + 1, e)
        j = tl.where(last, 0, j + 1)
    if BEHIND:
        row = (h // GROUP) * E + ((end - 1) // tiles).to(tl.int32)
        v_j = load_tile(v, row, ((end - 1) % tiles).to(tl.int32), d_e, D, BD, BI, EVEN, DESCRIPTORS)
        total = add_product(total, p.to(v_j[0].dtype), v_j, BY_BLOCKS)
    rows = out + share.to(tl.int64) * T * H * D + (t.to(tl.int64) * H + h) * D
    store(rows, t < T, total, D, BD)


@triton.jit(do_not_specialize=["T", "q_length", "g_length", "r_length", "splits"])
def token_grads_kernel(
    grad_out, q, first, second, v, r, dq, dr, T, H, E, d_e, splits,
    g_length, g_at, q_length, q_at, r_length, r_at,
    G_LAYOUT: tl.constexpr, Q_LAYOUT: tl.constexpr, R_LAYOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr, EVEN: tl.constexpr, PAIRED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, SWAPPED: tl.constexpr, ACTIVATION: tl.constexpr, RECIPROCAL: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
):  # fmt: skip
    """dq = dm K + dn U and dr[e] = sum over j of g a n, with dm = g n r a'(m) and dn = g a r. Grid: token blocks,
    heads, shares of the sub-networks (each its own dq)."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    share = tl.program_id(2)
    e_first = E * share // splits
    e_end = E * (share + 1) // splits
    q_t = load_tokens(q, t, h, T, q_length, q_at, Q_LAYOUT, D, BD)
    grad_t = load_tokens(grad_out, t, h, T, g_length, g_at, G_LAYOUT, D, BD)
    if r is not None:
        r_rows = r + token_offsets(t, t < T, r_length, r_at, R_LAYOUT) + h.to(tl.int64) * r_at[3]
        dr_rows = dr + (t.to(tl.int64) * H + h) * E
        dr_sum = tl.zeros([BT], dtype=tl.float32)
        weight = load_weight(r_rows, e_first, t, T, r_at)
    tiles = tl.cdiv(d_e, BI)
    total = zeros(BT, D, BD)
    e = e_first
    j = 0
    for _ in range((e_end - e_first) * tiles):
        row = (h // GROUP) * E + e
        v_j = load_tile(v, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS)
        if PAIRED:
            ku = load_pair(first, second, row, j, d_e, D, BD, BI, DESCRIPTORS)
            mn = scores(q_t, ku)
            g = scores(grad_t, v_j)
            m, n = halves(mn, BT, BI, SWAPPED)
        else:
            k_j = load_tile(first, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS)
            u_j = load_tile(second, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS)
            m = scores(q_t, k_j)
            n = scores(q_t, u_j)
            g = scores(grad_t, v_j)
        a, slope = activate(m, ACTIVATION, RECIPROCAL)
        n_slope = n * slope
        last = j + 1 == tiles
        if r is not None:
            dr_sum += tl.sum(g * (a * n), axis=1)
            if last:
                tl.store(dr_rows + e, dr_sum.to(dr.dtype.element_ty), mask=t < T)
                dr_sum = tl.zeros([BT], dtype=tl.float32)
            if j == 0:
                weight = load_weight(r_rows, e, t, T, r_at)
            g *= weight[:, None]
        dm = (g * n_slope).to(q_t[0].dtype)
        dn = (g * a).to(q_t[0].dtype)
        if PAIRED:
            total = add_product(total, join_halves(dm, dn, BT, BI, SWAPPED), ku, BY_BLOCKS)
        else:
            total = add_product(total, dm, k_j, BY_BLOCKS)
            total = add_product(total, dn, u_j, BY_BLOCKS)
        e = tl.where(last, e + 1, e)
        j = tl.where(last, 0, j + 1)
    rows = dq + share.to(tl.int64) * T * H * D + (t.to(tl.int64) * H + h) * D
    store(rows, t < T, total, D, BD)


@triton.jit(do_not_specialize=["T", "share_tokens", "q_length", "g_length", "r_length"])
def weight_grads_kernel(
    grad_out, q, first, second, v, r, d_first, d_second, dv, T, H, E, d_e, share_tokens,
    g_length, g_at, q_length, q_at, r_length, r_at,
    G_LAYOUT: tl.constexpr, Q_LAYOUT: tl.constexpr, R_LAYOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr, EVEN: tl.constexpr, PAIRED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TOKEN_DESCRIPTORS: tl.constexpr, SWAPPED: tl.constexpr, ACTIVATION: tl.constexpr,
    RECIPROCAL: tl.constexpr, BY_BLOCKS: tl.constexpr,
):  # fmt: skip
    """dK = dm^T q, dU = dn^T q, dV = (a n r)^T grad_out. Grid: tiles of inter units, heads of K, shares of the tokens
    (each its own d_first, d_second, dv); a share sums over the heads of the group, too.

    PAIRED: the accumulators are the transposes [BD, 2 BI] and [BD, BI]: q and grad_out are then left operands read
    straight from where they were loaded, and what was computed here is the right one, which goes through shared memory
    anyway.
    """
    tiles = tl.cdiv(d_e, BI)
    j = tl.program_id(0) % tiles
    e = tl.program_id(0) // tiles
    kv = tl.program_id(1)
    share = tl.program_id(2)
    row = kv * E + e
    v_j = load_tile(v, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS)
    if PAIRED:
        ku = load_pair(first, second, row, j, d_e, D, BD, BI, DESCRIPTORS)
        dku = tl.zeros([BD, 2 * BI], dtype=tl.float32)
        dv_j = tl.zeros([BD, BI], dtype=tl.float32)
    else:
        k_j = load_tile(first, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS)
        u_j = load_tile(second, row, j, d_e, D, BD, BI, EVEN, DESCRIPTORS)
        dk_j = zeros(BI, D, BD)
        du_j = zeros(BI, D, BD)
        dv_j = zeros(BI, D, BD)
    start = share * share_tokens
    for member in range(GROUP):
        h = kv * GROUP + member
        if r is not None:
            r_of_e = r + h.to(tl.int64) * r_at[3] + e.to(tl.int64) * r_at[4]
        for t_first in range(start, tl.minimum(start + share_tokens, T), BT):
            t = t_first + tl.arange(0, BT)
            if TOKEN_DESCRIPTORS:
                q_t = (q.load([t_first, h * q_at[3]]),)
                grad_t = (grad_out.load([t_first, h * g_at[3]]),)
            else:
                q_t = load_tokens(q, t, h, T, q_length, q_at, Q_LAYOUT, D, BD)
                grad_t = load_tokens(grad_out, t, h, T, g_length, g_at, G_LAYOUT, D, BD)
            if PAIRED:
                mn = scores(q_t, ku)
                g = scores(grad_t, v_j)
                m, n = halves(mn, BT, BI, SWAPPED)
            else:  # [units, tokens]
                m = scores(k_j, q_t)
                n = scores(u_j, q_t)
                g = scores(v_j, grad_t)
            a, slope = activate(m, ACTIVATION, RECIPROCAL)
            n_slope = n * slope
            if r is not None:
                r_t = r_of_e + token_offsets(t, t < T, r_length, r_at, R_LAYOUT)
                weight = tl.load(r_t, mask=t < T, other=0.0).to(tl.float32)
                weight = weight[:, None] if PAIRED else weight[None, :]
                n_slope *= weight
                a *= weight
            p = (a * n).to(q_t[0].dtype)
            dm = (g * n_slope).to(q_t[0].dtype)
            dn = (g * a).to(q_t[0].dtype)
            if PAIRED:
                dv_j = add_dot(dv_j, grad_t[0].T, p, BY_BLOCKS)
                dku = add_dot(dku, q_t[0].T, join_halves(dm, dn, BT, BI, SWAPPED), BY_BLOCKS)
            else:
                dv_j = add_product(dv_j, p, grad_t, BY_BLOCKS)
                dk_j = add_product(dk_j, dm, q_t, BY_BLOCKS)
                du_j = add_product(du_j, dn, q_t, BY_BLOCKS)
    base = (share.to(tl.int64) * (H // GROUP) * E + row) * d_e * D
    unit = j * BI + tl.arange(0, BI)
    if PAIRED:
        i = tl.arange(0, 2 * BI)
        pair = j * BI + i % BI
        store(tl.where(i < BI, d_first, d_second) + base + pair * D, pair < d_e, (dku.T,), D, BD)
        store(dv + base + unit * D, unit < d_e, (dv_j.T,), D, BD)
    else:
        store(d_first + base + unit * D, unit < d_e, dk_j, D, BD)
        store(d_second + base + unit * D, unit < d_e, du_j, D, BD)
        store(dv + base + unit * D, unit < d_e, dv_j, D, BD)


@triton.jit(do_not_specialize=["shares"])
def add_shares_kernel(parts, out, size, shares, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """out [n, size] = parts [n, shares, size] added over the shares in order. Grid: blocks of ``size``, n."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = parts + tl.program_id(1).to(tl.int64) * shares * size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, shares, AT_ONCE):
        share = first + tl.arange(0, AT_ONCE)
        mask = (share < shares)[:, None] & (i < size)[None, :]
        total += tl.sum(tl.load(rows + share.to(tl.int64)[:, None] * size + i[None, :], mask=mask, other=0.0), 0)
    tl.store(out + tl.program_id(1).to(tl.int64) * size + i, total.to(out.dtype.element_ty), mask=i < size)
