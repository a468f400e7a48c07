"""The FP8 forward in Triton, interpreted where there is no GPU."""

import math

import ahead_of_time as aot
import pytest
import torch
from interpreter import DEVICE, HALF, INTERPRETED, far_apart, run_interpreted, runs_kernels, starts_interpreter

import flashmhf
from flashmhf import quantize
from flashmhf.backends.eager import fp8 as eager
from flashmhf.backends.triton import fp8 as triton
from flashmhf.testing import poisoned_memory, problem, relative_l2

# From the same quantised operands: fp32 sums in another order and the rounding of out; where A lies between two e4m3
# values, either.
DISTANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 4e-3}
HOPPER_SUMS = 1.2e-2  # Hopper's tensor cores add e4m3 products with fewer bits than fp32 has


@pytest.mark.slow
@pytest.mark.timeout(600)  # all tests of this file in one
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def draw(tokens=40, heads=2, subnets=3, subnet_dim=48, head_dim=32, *, group=1):
    return problem(tokens, heads, head_dim, subnets, subnet_dim, torch.float32, DEVICE, num_kv_heads=heads // group)


def make(*args, dtype=HALF, **sizes):
    """(q, packed, r)."""
    p = draw(*args, **sizes)
    return p.q.to(dtype), quantize.pack_fp8(p.k, p.u, p.v), p.r


def check(q, packed, r):
    with poisoned_memory():
        out = quantize.forward(q, packed, r, backend="triton")
    points = eager._forward(q, *packed.tensors, r, torch.float64)
    assert out.dtype == q.dtype and out.shape == q.shape
    assert relative_l2(out, points) <= (DISTANCE[q.dtype] if INTERPRETED else HOPPER_SUMS)


CASES = [
    *({"head_dim": head_dim, "subnets": 2} for head_dim in triton.HEAD_DIMS),
    *(
        {"subnet_dim": subnet_dim, "dtype": dtype}
        for subnet_dim in (16, 32, 80, 144)
        for dtype in (torch.float32, HALF)
    ),
    *({"tokens": tokens} for tokens in (1, 63, 64, 65)),
    *({"heads": heads, "group": group} for heads, group in ((4, 2), (3, 3))),
]


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case):
    q, packed, r = make(**case)
    for gate in (r, None, r.to(q.dtype)) if "tokens" in case else (r,):
        check(q, packed, gate)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "subnet_dim"), [(64, 512), (128, 2048), (256, 704)])
def test_long_sums_of_one_sign(head_dim, subnet_dim):
    """U = K, V = |V|: sums that are not promoted are 1e-2 to 3e-2 away on an H200."""
    p = draw(head_dim=head_dim, subnets=2, subnet_dim=subnet_dim)
    q, packed = p.q.to(HALF), quantize.pack_fp8(p.k, p.k, p.v.abs())
    out = quantize.forward(q, packed, p.r, backend="triton")
    assert relative_l2(out, eager._forward(q, *packed.tensors, p.r, torch.float64)) <= 5e-3


@runs_kernels
def test_strides_are_read_in_place(tmp_path):
    """Those of gates beyond 32 bits, too."""
    q, packed, r = make(24)
    expected = quantize.forward(q, packed, r, backend="triton")
    for view in (torch.stack([q, q], -1)[..., 0], q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert not view.is_contiguous()
        assert torch.equal(quantize.forward(view, packed, r, backend="triton"), expected)
    strided = torch.stack([q, q], 1).transpose(0, 1)
    assert torch.equal(quantize.forward(strided, packed, torch.stack([r, r]), backend="triton")[1], expected)
    q, packed, r = make(5, heads=1, subnets=3)
    r = r.to(q.dtype)
    outs = [quantize.forward(q, packed, gate, backend="triton") for gate in (r, far_apart(r, tmp_path))]
    assert torch.equal(*outs)


@runs_kernels
def test_the_gate_from_the_router():
    (q, packed, _), w = make(), draw().w
    out = torch.ops.flashmhf.fp8_gated_forward(q, *packed.tensors, w, 1e-20, backend="triton")
    expected = quantize.forward(q, packed, flashmhf.gate(q, w), backend="triton")
    assert relative_l2(out, expected.double()) <= DISTANCE[q.dtype]


@runs_kernels
def test_values_that_are_not_finite_stay_in_their_rows():
    q, packed, r = make()
    q[3, 1, 0], q[5, 0, 2], q[9] = math.nan, math.inf, 0
    out = quantize.forward(q, packed, r, backend="triton")
    assert out[3, 1].isnan().all() and out[5, 0].isnan().all() and (out[9] == 0).all()
    finite = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    finite[3, 1] = finite[5, 0] = False
    assert out[finite].isfinite().all()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel does not compile")
@pytest.mark.parametrize(("capability", "head_dim"), [
    (89, 256), (90, 96), (120, 64),
    *(pytest.param(*case, marks=pytest.mark.gpu)  # they need none, but minutes
      for case in ((89, 64), (89, 96), (90, 64), (90, 256), (120, 96), (120, 256))),
])  # fmt: skip
def test_compiles_to_e4m3_products(capability, head_dim, monkeypatch):
    """For the GPU families with e4m3 products, whatever GPU is here; within 99 KB of shared memory, the smallest of
    them."""
    from flashmhf.backends.triton import fp8_kernels as fp8

    aot.gpu(monkeypatch, capability)
    q, r = aot.facts(4096, 16, head_dim, dtype=torch.bfloat16), aot.facts(4096, 16, 22, dtype=torch.float32)
    k8, scales = aot.facts(16, 22, 384, head_dim, dtype=torch.float8_e4m3fn), aot.facts(3, 16, 22, dtype=torch.float32)
    plan = fp8.plan((q, k8, k8, k8, scales, r), None, aot.DEVICE)
    types = {"q": torch.bfloat16, "out": torch.bfloat16, "scales": torch.float32, "r": torch.float32}
    compiled = aot.compile_plan(plan, types | dict.fromkeys(("k8", "u8", "v8"), torch.float8_e4m3fn), capability)
    instruction = "wgmma.mma_async" if capability == 90 else "mma.sync"
    assert any(instruction in line and "e4m3.e4m3" in line for line in compiled.ptx.splitlines())
    assert compiled.shared <= 99 * 1024 and compiled.stack <= 256  # bytes of a thread


@runs_kernels
def test_saturation():
    q, packed, r = make()
    packed.k8.view(torch.uint8).fill_(0x7E)  # 448 everywhere: A goes beyond 448
    packed.u8.view(torch.uint8).fill_(0x7E)
    check(q, packed, r)
