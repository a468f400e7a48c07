"""Blockwise PyTorch back end: any device, any floating dtype, any sizes.

A block is some tokens of the heads of a group times a chunk of the inter dimension [E * d_e]. Its intermediate is
recomputed in backward and stays within ``BLOCK_BYTES``. Sums over blocks are formed in fp32 (fp64 for fp64 inputs).

Legend: t rows of a block, J width of an inter chunk, D = d_h.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import reference
from ...reference import accumulate_dtype
from .. import gating
from ..contract import DEFAULTS, Gate, Gradients, Settings, layer, why_not  # noqa: F401  (layer and why_not are this back end's too)
from ..tokens import TokenRows, token_count

# One intermediate of a block [t, J]: smaller ones make the products and the thread barriers between them less
# efficient, larger ones cost memory and gain nothing (measured on two cores).
BLOCK_BYTES = 3 << 20
TOKENS = 2048
MIN_TOKENS = 64


# name -> (in place, gradient from that of the activation and m)
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (lambda m: torch.nn.functional.silu(m, inplace=True), torch.ops.aten.silu_backward),
    "gelu": (torch.nn.functional.gelu, torch.ops.aten.gelu_backward),
    "relu": (torch.relu_, lambda grad, m: torch.ops.aten.threshold_backward(grad, m, 0)),
    "relu2": (lambda m: m.relu_().square_(), lambda grad, m: grad * m.relu().mul_(2)),
}


def _block_sizes(tokens: int, subnets: int, subnet_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return (tokens, inter units) of a block in ``dtype``; a chunk is whole sub-networks, or a slice of one."""
    budget = BLOCK_BYTES // dtype.itemsize
    t = min(tokens, TOKENS)
    width = budget // max(t, 1)
    if width >= subnet_dim:
        return t, min(subnets, width // subnet_dim) * subnet_dim
    t = max(min(tokens, MIN_TOKENS), min(t, budget // subnet_dim))
    return t, min(subnet_dim, max(1, budget // t))


def _chunks(subnets: int, subnet_dim: int, width: int) -> list[tuple[slice, slice]]:
    """Return slices of the inter axis [E * d_e], each with that of its sub-networks: whole ones, or a part of one."""
    period = subnet_dim if width < subnet_dim else subnets * subnet_dim
    chunks = []
    for start in range(0, subnets * subnet_dim, period):
        for low in range(start, start + period, width):
            high = min(low + width, start + period)
            chunks.append((slice(low, high), slice(low // subnet_dim, -(-high // subnet_dim))))
    return chunks


def _by_subnet(x: Tensor, gates: Tensor) -> Tensor:
    """View x [t, J] as [t, e, width] for gates [t, e, 1]."""
    return x.unflatten(1, (gates.shape[1], -1))


def forward(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Gate, settings: Settings = DEFAULTS) -> Tensor:
    """Return S [..., H, d_h] in q's dtype, contiguous (paper, section 3.2)."""
    r = gating.values(q, r)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kv_heads, subnets, subnet_dim, head_dim = k.shape
    heads, tokens = q.shape[-2], token_count(q)
    group = heads // kv_heads
    q_rows, r_rows = TokenRows(q), None if r is None else TokenRows(r)
    out_rows = out.view(tokens, heads, head_dim)
    k, u, v = (x.view(kv_heads, subnets * subnet_dim, head_dim) for x in (k, u, v))
    dtype, operand = accumulate_dtype(q.dtype), _operand_dtype(q)
    activate, _ = _ACTIVATIONS[settings.activation]
    rows, width = _block_sizes(tokens * group, subnets, subnet_dim, dtype)
    step, chunks = max(rows // group, 1), _chunks(subnets, subnet_dim, width)
    for start in range(0, tokens, step):
        block = slice(start, min(start + step, tokens))
        q_block = q_rows[block]
        r_block = None if r is None else r_rows[block].to(dtype)
        for kv in range(kv_heads):
            members = slice(kv * group, (kv + 1) * group)
            q_h = q_block[:, members].reshape(-1, head_dim).to(operand)
            r_h = None if r_block is None else r_block[:, members].reshape(-1, subnets)
            total = torch.zeros(q_h.shape, dtype=dtype, device=q.device)
            for chunk, of_chunk in chunks:
                k_c, u_c, v_c = (x[kv, chunk].to(operand) for x in (k, u, v))
                p = activate(_product(q_h, k_c.T, dtype))
                p *= _product(q_h, u_c.T, dtype)
                if r_h is not None:
                    gates = r_h[:, of_chunk, None]
                    _by_subnet(p, gates).mul_(gates)
                _add_product(total, p.to(operand), v_c)
            out_rows[block, members] = total.view(-1, group, head_dim)
    return out


@gating.through_router
def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None, settings: Settings,
    dq_dtype: torch.dtype,
) -> Gradients:  # fmt: skip
    """Return (dq, dk, du, dv, dr)."""
    needs_tokens, needs_weights = settings.needs
    kv_heads, subnets, subnet_dim, head_dim = k.shape
    heads, tokens = q.shape[-2], token_count(q)
    group = heads // kv_heads
    dtype, operand = accumulate_dtype(q.dtype), _operand_dtype(q)

    def empty(x: Tensor | None, needed: bool, of: torch.dtype) -> Tensor:
        return torch.empty(x.shape, dtype=of, device=q.device) if x is not None and needed else q.new_empty(0)

    dq, dr = empty(q, needs_tokens, dq_dtype), empty(r, needs_tokens, q.dtype if r is None else r.dtype)
    weight_grads = [empty(k, needs_weights, k.dtype) for _ in range(3)]
    q_rows, grad_rows, r_rows = TokenRows(q), TokenRows(grad_out), None if r is None else TokenRows(r)
    rows, width = _block_sizes(tokens * group, subnets, subnet_dim, dtype)
    step, chunks = max(rows // group, 1), _chunks(subnets, subnet_dim, width)
    for kv in range(kv_heads):
        members = slice(kv * group, (kv + 1) * group)
        weights = [x[kv].view(-1, head_dim) for x in (k, u, v)]
        # Sums of one head at a time: the only buffers that grow with d_ff.
        targets = [x[kv].view(-1, head_dim) for x in weight_grads] if needs_weights else []
        sums = [torch.zeros_like(x, dtype=dtype) if x.dtype != dtype else x.zero_() for x in targets]
        for start in range(0, tokens, step):
            block = slice(start, min(start + step, tokens))
            # The rows side by side: the products that sum over tokens read them faster.
            rows_h = (x[block][:, members].reshape(-1, head_dim).contiguous() for x in (q_rows, grad_rows))
            q_h, grad_h = (x.to(operand) for x in rows_h)
            r_h = None if r is None else r_rows[block][:, members].reshape(-1, subnets).to(dtype)
            dq_h, dr_h = _block_grads(q_h, grad_h, r_h, weights, chunks, settings.activation, needs_tokens, sums)
            if dq_h is not None:
                dq.view(tokens, heads, head_dim)[block, members] = dq_h.view(-1, group, head_dim)
            if dr_h is not None:
                dr.view(tokens, heads, subnets)[block, members] = dr_h.view(-1, group, subnets)
        if dtype != k.dtype:
            for target, total in zip(targets, sums, strict=True):
                target.copy_(total)
    return dq, *weight_grads, dr


def _block_grads(
    q: Tensor, grad_out: Tensor, r: Tensor | None, weights: list[Tensor], chunks: list[tuple[slice, slice]],
    activation: str, needs_tokens: bool, sums: list[Tensor],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dq [t, D] and dr [t, E] of a block q, grad_out [t, D], r [t, E], or None for what is not needed. Add the
    gradients of the ``weights`` k, u, v [E d_e, D] to ``sums``, which is empty where they are not.

    With m = q k, n = q u, a = activation(m), g = grad_out v: dr = sum g a n, dn = g a r, dm = g n r a'(m),
    dq = dm K + dn U, dk = dm^T q, du = dn^T q, dv = (a n r)^T grad_out.
    """
    dtype = accumulate_dtype(q.dtype)
    dq = q.new_zeros(q.shape, dtype=dtype) if needs_tokens else None
    dr = r.new_zeros(r.shape) if needs_tokens and r is not None else None
    for chunk, of_chunk in chunks:
        k, u, v = (x[chunk].to(q.dtype) for x in weights)
        m, n, g = (_product(x, weight.T, dtype) for x, weight in ((q, k), (q, u), (grad_out, v)))
        a = reference.ACTIVATIONS[activation][0](m)
        p = a * n
        if r is not None:
            gates = r[:, of_chunk, None]
            if dr is not None:
                dr[:, of_chunk].add_(_by_subnet(g * p, gates).sum(-1))
            _by_subnet(g, gates).mul_(gates)
            _by_subnet(p, gates).mul_(gates)
        dm = _ACTIVATIONS[activation][1](n.mul_(g), m).to(q.dtype)
        dn = g.mul_(a).to(q.dtype)
        if dq is not None:
            _add_product(dq, dm, k)
            _add_product(dq, dn, u)
        if sums:
            dk, du, dv = (x[chunk] for x in sums)
            _add_product(dk, dm.T, q)
            _add_product(du, dn.T, q)
            _add_product(dv, p.to(q.dtype).T, grad_out)
    return dq, dr


def _operand_dtype(q: Tensor) -> torch.dtype:
    """Return the products' dtype: q's, but float32 for fp16 (at most 65,504) where :func:`_product` rounds to it."""
    exact = q.is_cuda and torch.version.hip is None
    return q.dtype if exact or q.dtype != torch.float16 else torch.float32


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right in ``dtype``, if the library can without rounding to the factors' 16 bits."""
    if left.dtype != dtype and left.is_cuda and torch.version.hip is None:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total, summed in total's precision even if the factors have fewer bits."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right, total.dtype)
