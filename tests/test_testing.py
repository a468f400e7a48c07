"""flashmhf.testing accepts the right result and rejects deliberately wrong kernels."""

import contextlib
import gc
import math
from functools import partial

import pytest
import torch
from targets import RESULTS

from flashmhf import reference
from flashmhf.backends import eager
from flashmhf.testing import assert_accurate, capturing, problem, relative_l2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def case(dtype):
    p = problem(512, 2, 64, 3, 192, dtype)
    return p, *p.forward()


def forward_summed_in_working_precision(q, k, u, v, r):
    """Correct but for its accumulator, which is rounded after every 64 inter units."""
    out = torch.zeros_like(q)
    for e in range(k.shape[1]):
        for j in range(0, k.shape[2], 64):
            piece = slice(j, j + 64)
            out = out + reference.forward(q, *(x[:, e : e + 1, piece] for x in (k, u, v)), r[..., e : e + 1])
    return out


def fused_forward(p):
    """What a fused kernel computes: everything in fp32 but for the inputs and the one rounding of the result."""
    return eager.forward(*(x.float() for x in p.operands), p.r).to(p.q.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accepts_what_is_right(dtype):
    p, baseline, exact = case(dtype)
    assert_accurate("out", fused_forward(p), baseline, exact, fixed_limits=True)
    assert_accurate("out", eager.forward(*p.operands, p.r), baseline, exact, fixed_limits=False)


def with_a_row_of(value, p):
    out = fused_forward(p)
    out[7, 1] = value
    return out


def as_tf32(p):
    return eager.forward(*((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in p.operands), p.r)


WRONG = {  # by name: what is computed, and the dtypes that it is wrong in
    "no gate": (lambda p: eager.forward(*p.operands, None), DTYPES),
    "gate of the neighbouring sub-network": (lambda p: eager.forward(*p.operands, p.r.roll(1, -1)), DTYPES),
    "unwritten row": (partial(with_a_row_of, math.nan), DTYPES),
    "zero row": (partial(with_a_row_of, 0.0), DTYPES),
    "accumulation in working precision": (lambda p: forward_summed_in_working_precision(*p.operands, p.r), DTYPES[:2]),
    "products in tf32": (as_tf32, DTYPES[2:]),
}


@pytest.mark.parametrize(
    ("wrong", "dtype"), [(name, dtype) for name, (_, dtypes) in WRONG.items() for dtype in dtypes], ids=str
)
def test_rejects_what_is_wrong(wrong, dtype):
    p, baseline, exact = case(dtype)
    for fixed_limits in (True, False) if wrong == "no gate" else (True,):
        with pytest.raises(AssertionError, match="relative L2 error"):
            assert_accurate("out", WRONG[wrong][0](p), baseline, exact, fixed_limits=fixed_limits)


def test_relative_l2_is_infinite_for_shapes_and_values_that_cannot_be_compared():
    x = torch.ones(3, dtype=torch.float64)
    assert relative_l2(torch.ones(4), x) == math.inf
    assert relative_l2(torch.full((3,), math.nan), x) == math.inf
    assert relative_l2(torch.ones(3), torch.zeros_like(x)) == math.inf
    assert relative_l2(torch.zeros(3), torch.zeros_like(x)) == 0.0


@pytest.mark.parametrize(("name", "gate"), [("backward", "float32"), ("backward", None), ("gated_backward", "float32")])
def test_partial_references_agree_with_the_whole_ones(name, gate):
    p = problem((3, 5), 2, 32, 3, 16, torch.bfloat16, gate=gate)
    rows, whole = torch.tensor([0, 7, 14]), getattr(p, name.replace("backward", "forward"))()[1]
    part = (p.routed() if "gated" in name else p).exact_forward(rows)
    torch.testing.assert_close(part, whole.flatten(0, 1)[rows], rtol=1e-12, atol=1e-14)
    for output, part, whole in zip(RESULTS[name], getattr(p, f"exact_{name}")(1), getattr(p, name)()[1], strict=True):
        if whole.numel():
            whole = whole[..., 1, :] if output in ("dq", "dr") else whole[1]
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-14)


def test_no_garbage_is_collected_during_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda _: contextlib.nullcontext())
    try:
        for switch, enabled in ((gc.disable, False), (gc.enable, True)):
            switch()
            with capturing(None):
                assert not gc.isenabled()
            assert gc.isenabled() is enabled
            with pytest.raises(ValueError, match="in the capture"), capturing(None):
                raise ValueError("in the capture")
            assert gc.isenabled() is enabled
    finally:
        gc.enable()
