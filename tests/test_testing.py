"""flashmhf.testing accepts the right result and rejects deliberately wrong kernels."""

from __future__ import annotations

import math

import pytest
import torch

from flashmhf import reference
from flashmhf.backends import eager
from flashmhf.testing import LIMITS, assert_accurate, fixed_limit, limit, problem, relative_l2


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def case(request):
    p = problem(512, 2, 64, 3, 192, request.param)
    return p, *p.forward()


def forward_summed_in_working_precision(q, k, u, v, r):
    """Correct but for its accumulator, which is rounded after every 64 inter units."""
    out = torch.zeros_like(q)
    for e in range(k.shape[1]):
        for j in range(0, k.shape[2], 64):
            piece = slice(j, j + 64)
            out = out + reference.forward(q, *(x[:, e : e + 1, piece] for x in (k, u, v)), r[..., e : e + 1])
    return out


def reject(actual, baseline, exact, fixed_limits=True):
    with pytest.raises(AssertionError, match="relative L2 error"):
        assert_accurate("out", actual, baseline, exact, fixed_limits=fixed_limits)


def fused_forward(p):
    """What a fused kernel computes: everything in fp32 but for the inputs and the one rounding of the result."""
    return eager.forward(*(x.float() for x in p.operands), p.r).to(p.q.dtype)


def test_accepts_fused_forward(case):
    p, baseline, exact = case
    assert_accurate("out", fused_forward(p), baseline, exact, fixed_limits=True)


def test_accepts_blockwise_forward(case):
    p, baseline, exact = case
    assert_accurate("out", eager.forward(*p.operands, p.r), baseline, exact, fixed_limits=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rejects_accumulation_in_working_precision(dtype):
    p = problem(512, 2, 64, 3, 192, dtype)
    reject(forward_summed_in_working_precision(*p.operands, p.r), *p.forward())


@pytest.mark.parametrize("fixed_limits", [True, False])
def test_rejects_missing_gate(case, fixed_limits):
    p, baseline, exact = case
    reject(eager.forward(*p.operands, None), baseline, exact, fixed_limits)


def test_rejects_gate_of_the_neighbouring_subnet(case):
    p, baseline, exact = case
    reject(eager.forward(*p.operands, p.r.roll(1, -1)), baseline, exact)


def test_rejects_one_unwritten_row_and_one_zero_row(case):
    p, baseline, exact = case
    for value in (math.nan, 0.0):
        out = fused_forward(p)
        out[7, 1] = value
        reject(out, baseline, exact)


def test_rejects_tf32_like_float32():
    p = problem(512, 2, 64, 3, 192, torch.float32)
    baseline, exact = p.forward()
    rounded = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in p.operands]
    reject(eager.forward(*rounded, p.r), baseline, exact)


def test_relative_l2_is_infinite_for_shapes_and_values_that_cannot_be_compared():
    x = torch.ones(3, dtype=torch.float64)
    assert relative_l2(torch.ones(4), x) == math.inf
    assert relative_l2(torch.full((3,), math.nan), x) == math.inf
    assert relative_l2(torch.ones(3), torch.zeros_like(x)) == math.inf
    assert relative_l2(torch.zeros(3), torch.zeros_like(x)) == 0.0


def test_limits_are_above_the_rounding_of_an_exact_result():
    exact = torch.randn(1 << 16, dtype=torch.float64)
    for dtype, allowed in LIMITS.items():
        assert relative_l2(exact.to(dtype), exact) < allowed


@pytest.mark.parametrize("gate", ["float32", None])
def test_partial_references_agree_with_the_whole_ones(gate):
    p = problem((3, 5), 2, 32, 3, 16, torch.bfloat16, gate=gate)
    _, out = p.forward()
    rows = torch.tensor([0, 7, 14])
    torch.testing.assert_close(p.exact_forward(rows), out.flatten(0, 1)[rows], rtol=1e-12, atol=1e-14)
    _, (dq, dk, du, dv, dr) = p.backward()
    expected = (dq[..., 1, :], dk[1], du[1], dv[1], dr if gate is None else dr[..., 1, :])
    for part, whole in zip(p.exact_backward(1), expected, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-14)


def test_partial_references_of_the_router_agree_with_the_whole_ones():
    p = problem(7, 2, 32, 3, 16, torch.float64)
    rows = torch.arange(7)
    torch.testing.assert_close(p.routed().exact_forward(rows), p.gated_forward()[1], rtol=1e-12, atol=1e-14)
    dq, dk, du, dv, dw = p.gated_backward()[1]
    for part, whole in zip(p.exact_gated_backward(0), (dq[:, 0], dk[0], du[0], dv[0], dw[0]), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-14)


def test_fixed_limit_is_the_limit_of_a_worse_baseline():
    for shape in ((100,), (1000,), (1 << 14,)):
        exact = torch.randn(shape, dtype=torch.float64)
        for dtype, few in ((torch.bfloat16, False), (torch.float32, False)):
            assert limit(exact * 1.01, exact, dtype, fixed_limits=True, few_tokens=few) >= fixed_limit(exact.numel(), dtype)
