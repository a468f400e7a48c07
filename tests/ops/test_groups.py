"""Grouped heads: H heads of q share H_kv heads of K, U and V, head h reading head h // (H / H_kv)."""

from __future__ import annotations

import functools

import pytest
import torch
from test_operator import FORWARD_GRADS, check_all, dtypes_of, token_views

import flashmhf
from flashmhf import reference
from flashmhf.testing import problem

# (leading dimensions, H, d_h, E, d_e), H_kv: groups of 2, 3, 4 and 8, all heads one group, ragged tokens, tails of d_e, many sub-networks,
# blocks side by side
GROUPS = [
    (((1000,), 4, 64, 3, 192), 2),
    (((3, 65), 6, 128, 3, 80), 2),
    (((129,), 4, 128, 9, 64), 1),
    (((64,), 8, 64, 2, 48), 2),
    (((200,), 4, 96, 3, 112), 1),
    (((130,), 4, 256, 2, 144), 2),
    (((33,), 8, 64, 35, 16), 1),
    (((300,), 16, 128, 22, 48), 4),
    (((100,), 4, 256, 6, 48), 1),
]
IDS = [f"{'x'.join(map(str, s[0]))}-H{s[1]}-kv{kv}-dh{s[2]}-E{s[3]}-de{s[4]}" for s, kv in GROUPS]


def repeated(x, heads):
    """A weight head for each of q's heads, by the definition."""
    return torch.stack([x[h // (heads // x.shape[0])] for h in range(heads)])


@pytest.mark.parametrize(("shape", "kv_heads"), GROUPS, ids=IDS)
def test_values(target, shape, kv_heads):
    for dtype in dtypes_of(target):
        check_all(target, problem(*shape, dtype, target.device, num_kv_heads=kv_heads))


@pytest.mark.parametrize("gate", ["same", None])
def test_16_bit_gate_and_none(target, gate):
    for dtype in target.dtypes:
        check_all(target, problem(300, 4, 64, 3, 48, dtype, target.device, gate=gate, num_kv_heads=2))


@pytest.mark.parametrize("tokens", [0, 1, 16, 63, 64, 65, 128, 1000])
def test_token_counts(target, tokens):
    dtype = target.dtypes[-1] if target.device == "cuda" else torch.float32
    p = problem(tokens, 8, 64, 2, 64, dtype, target.device, num_kv_heads=2)
    if tokens:
        check_all(target, p)
        return
    dq, dk, du, dv, dr = target.call("backward", p.grad_out, *p.operands, p.r)
    assert dq.shape == p.q.shape and dr.shape == p.r.shape and dk.shape == p.k.shape
    assert not any(x.any() for x in (dk, du, dv))


@pytest.mark.parametrize("gate", ["float32", "same"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "subnets", "subnet_dim"),
    [
        (1, 8, 2, 128, 22, 96),
        (16, 16, 4, 64, 20, 128),
        (13, 8, 1, 96, 35, 64),
        (32, 8, 4, 128, 22, 96),
        (16, 12, 2, 128, 6, 384),
        (9, 8, 2, 256, 4, 128),
    ],
)
def test_few_tokens_and_many_tiles(target, tokens, heads, kv_heads, head_dim, subnets, subnet_dim, gate):
    """Heads of a group in one row tile, and clusters that divide its inter range."""
    dtype = target.dtypes[-1] if target.device == "cuda" else torch.float32
    p = problem(tokens, heads, head_dim, subnets, subnet_dim, dtype, target.device, gate=gate, num_kv_heads=kv_heads)
    check_all(target, p, names=("forward", "gated_forward"))
    args = (*p.operands, p.w, p.eps)
    assert torch.equal(target.call("gated_forward", *args), target.call("gated_forward", *args))


def test_the_definition_repeats_the_weight_heads():
    p = problem((2, 3), 6, 4, 3, 5, torch.float64, num_kv_heads=2)
    inputs = [x.requires_grad_() for x in (*p.operands, p.r)]
    q, k, u, v, r = inputs
    m, n = (torch.einsum("...hd,hejd->...hej", q, repeated(x, 6)) for x in (k, u))
    expected = torch.einsum("...he,...hej,hejd->...hd", r, torch.nn.functional.silu(m) * n, repeated(v, 6))
    torch.testing.assert_close(reference.forward(*inputs), expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(reference.backward(p.grad_out, *inputs), torch.autograd.grad(expected, inputs, p.grad_out), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients():
    p = problem((2, 3), 4, 4, 3, 5, torch.float64, gate="same", num_kv_heads=2)
    assert torch.autograd.gradcheck(flashmhf.flash_mhf, [x.requires_grad_() for x in (*p.operands, p.r)])
    gated = functools.partial(torch.ops.flashmhf.gated_forward, eps=0.1)
    assert torch.autograd.gradcheck(gated, [x.detach().requires_grad_() for x in (*p.operands, p.w)])


def test_strided_q_and_grad_out(target):
    dtype = torch.float32 if target.device == "cpu" else torch.bfloat16
    p = problem((3, 70), 4, 64, 2, 64, dtype, target.device, num_kv_heads=2)
    for view in token_views(p.q).values():
        p.q = view
        check_all(target, p)
    p.q = p.q.contiguous()
    for view in token_views(p.grad_out).values():
        p.grad_out = view
        check_all(target, p, names=("backward", "gated_backward"))


def test_accumulation_and_what_is_not_needed(target):
    p = problem(300, 4, 64, 2, 64, target.dtypes[-1], target.device, num_kv_heads=2)
    expected = target.call("backward", p.grad_out, *p.operands, p.r)
    accumulate = reference.accumulate_dtype(p.q.dtype)
    buffers = [torch.ones(p.k.shape, dtype=accumulate, device=target.device) for _ in range(3)]
    dq, dr = target.call("backward_accumulate_", p.grad_out, *p.operands, p.r, *buffers)
    for got, grad in zip((dq, *(b - 1 for b in buffers), dr), expected, strict=True):
        torch.testing.assert_close(got.double(), grad.double(), rtol=2e-2, atol=2e-2)
    for needs in ((True, False), (False, True)):
        grads = target.call("backward", p.grad_out, *p.operands, p.r, needs=needs)
        for name, got, grad in zip(FORWARD_GRADS, grads, expected, strict=True):
            if got.numel():
                torch.testing.assert_close(got.double(), grad.double(), rtol=2e-2, atol=2e-2, msg=lambda m, name=name: f"{name}: {m}")
            else:
                assert needs[name in ("dk", "du", "dv")] is False


@pytest.mark.parametrize("gated", [False, True])
def test_deterministic_gradients_have_equal_bits(target, gated):
    p = problem(700, 8, 128, 3, 192, target.dtypes[-1], target.device, num_kv_heads=2)
    name, last = ("gated_backward", (p.w, p.eps)) if gated else ("backward", (p.r,))
    first = target.call(name, p.grad_out, *p.operands, *last, deterministic=True)
    for _ in range(3):
        for a, b in zip(first, target.call(name, p.grad_out, *p.operands, *last, deterministic=True), strict=True):
            assert torch.equal(a, b)


def test_compiled_vmapped_and_under_autocast():
    p = problem((3, 5), 4, 8, 2, 16, torch.float32, num_kv_heads=2)
    expected = flashmhf.flash_mhf(*p.operands, p.r)
    compiled = torch.compile(flashmhf.flash_mhf, fullgraph=True, backend="aot_eager")(*p.operands, p.r)
    torch.testing.assert_close(compiled, expected)
    batched = torch.vmap(flashmhf.flash_mhf, in_dims=(0, None, None, None, 0))(*p.operands, p.r)
    torch.testing.assert_close(batched, expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = flashmhf.flash_mhf(*p.operands, p.r)
    assert out.dtype == torch.bfloat16 and out.shape == p.q.shape
    torch.library.opcheck(torch.ops.flashmhf.forward.default, (*p.operands, p.r))


@pytest.mark.parametrize("kv_heads", [3, 8])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_number_of_heads_that_the_weight_heads_do_not_divide(kv_heads, backend):
    p = problem(5, 4, 8, 2, 16, torch.float32)
    weights = [torch.zeros(kv_heads, 2, 16, 8) for _ in range(3)]
    with pytest.raises(ValueError, match=rf"k has shape \[{kv_heads}, 2, 16, 8\]; expected \[H_kv, .* divides H = 4"):
        flashmhf.flash_mhf(p.q, *weights, p.r, backend=backend)
