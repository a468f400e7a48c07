"""The Triton back end, interpreted where there is no GPU."""

import dataclasses

import pytest
import torch
from interpreter import DEVICE, HALF, INTERPRETED, far_apart, run_interpreted, runs_kernels, starts_interpreter
from targets import VIEWS, shifted

from flashmhf.backends import triton as back_end
from flashmhf.backends.contract import Settings
from flashmhf.backends.triton import launch
from flashmhf.testing import assert_accurate, poisoned_memory, problem, relative_l2

NAMES = ("dq", "dk", "du", "dv", "dr")


@pytest.mark.slow
@pytest.mark.timeout(900)  # all tests of this file in one
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def make(*args, **kwargs):
    return problem(*args, device=DEVICE, **kwargs)


def run(p, **changes):
    """(out, dq, dk, du, dv, dr) on NaN-poisoned memory; ``changes`` replace inputs."""
    x = {"q": p.q, "k": p.k, "u": p.u, "v": p.v, "r": p.r, **changes}
    grad_out = x.pop("grad_out", p.grad_out)
    with poisoned_memory():
        settings = Settings(deterministic=True, activation=p.activation)
        return back_end.forward(**x, settings=settings), *back_end.backward(grad_out, **x, settings=settings)


def check(p):
    for name, actual, baseline, exact in zip(
        ("out", *NAMES), run(p), *((f, *b) for f, b in zip(p.forward(), p.backward(), strict=True)), strict=True
    ):
        if exact.numel():
            assert_accurate(name, actual, baseline, exact, fixed_limits=True)


def same(left, right):
    for name, a, b in zip(("out", *NAMES), left, right, strict=True):
        assert torch.equal(a, b), f"{name}: {relative_l2(a, b.double()):.3e}"


CASES = [  # arguments of problem, and p.activation; the interpreter takes seconds for a hundred tokens
    *(
        {"shape": (70 if INTERPRETED else 130, 2, head_dim, 3, 80), "dtype": dtype}
        for head_dim in back_end.HEAD_DIMS
        for dtype in (torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16]))
    ),
    *({"shape": (tokens, 1, 32, 2, 48)} for tokens in (1, 63, 64, 65, 200 if INTERPRETED else 1000)),
    *({"shape": (70, 2, 64, 2, subnet_dim)} for subnet_dim in (16, 32, 64, 112, 384)),
    *({"shape": ((3, 23), 2, 64, subnets, 48), "gate": gate} for subnets in (1, 5) for gate in (None, "same")),
    *(
        {"shape": (70, 2, 32, 3, 48), "dtype": dtype, "activation": name}
        for dtype in (torch.float32, HALF)
        for name in ("gelu", "relu", "relu2")
    ),
    *(
        {"shape": ((3, 50), heads, 32, 3, 48), "gate": gate, "num_kv_heads": kv_heads}
        for heads, kv_heads in ((4, 2), (3, 1))
        for gate in (None, "float32")
    ),
    *(  # fp16 has not the range
        {
            "shape": (100 if INTERPRETED else 200, 2, 64, 2, 64),
            "dtype": torch.float32 if INTERPRETED else torch.bfloat16,
            "scale": scale,
        }
        for scale in (1e-3, 30.0)
    ),
    *(
        {"shape": (100 if INTERPRETED else 300, 2, 64, 2, 64), "dtype": dtype, "mean_score": -6.0}
        for dtype in (torch.float32, HALF)
    ),
]


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case):
    """Head dimensions, tails of tokens and of d_e, gates, activations, grouped heads, magnitudes, scores in SiLU's
    exponential tail."""
    case = {"dtype": HALF, "activation": "silu"} | case
    activation = case.pop("activation")
    check(dataclasses.replace(make(*case.pop("shape"), case.pop("dtype"), **case), activation=activation))


@runs_kernels
@pytest.mark.parametrize("view", VIEWS)
def test_strides_are_read_in_place(view):
    p = make((3, 5, 7), 2, 32, 2, 48, HALF)
    viewed = {name: VIEWS[view](getattr(p, name)) for name in ("q", "grad_out", "r")}
    assert not any(x.is_contiguous() for x in viewed.values())
    same(run(p, **viewed), run(p, **{name: x.contiguous() for name, x in viewed.items()}))


@runs_kernels
@pytest.mark.parametrize("descriptors", [False, True])
def test_pair_of_weights_in_either_order_of_addresses(descriptors, monkeypatch):
    monkeypatch.setattr(launch, "has_tma", lambda device: descriptors)
    if descriptors and DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no tensor maps before Hopper")
    p = make(70, 2, 32, 2, 48, HALF)

    def agree(left, right):
        if DEVICE == "cuda":
            return same(left, right)
        for a, b in zip(left, right, strict=True):  # the interpreter's products round a column by its position
            assert relative_l2(a, b.double()) < 1e-4

    expected = run(p)
    lower, higher = torch.empty((2, *p.k.shape), dtype=HALF, device=DEVICE)
    for k, u in ((lower, higher), (higher, lower)):
        agree(run(p, k=k.copy_(p.k), u=u.copy_(p.u)), expected)
    agree(run(p, k=p.k, u=p.k), run(p, k=p.k, u=p.k.clone()))


@runs_kernels
def test_weights_and_tokens_off_alignment():
    p = make(70, 2, 64, 2, 48, HALF)
    moved = {name: shifted(getattr(p, name)) for name in ("q", "k", "u", "v", "grad_out")}
    assert all(x.data_ptr() % 16 for x in moved.values())
    for actual, expected in zip(run(p, **moved), run(p), strict=True):
        assert relative_l2(actual, expected.double()) < 1e-3


@runs_kernels
def test_needs_and_dq_dtype():
    p = make(70, 2, 32, 2, 48, HALF)
    full = run(p)[1:]
    for tokens, weights in ((True, False), (False, True), (False, False)):
        parts = back_end.backward(p.grad_out, *p.operands, p.r, Settings(needs=(tokens, weights)))
        for part, whole, needed in zip(parts, full, (tokens, weights, weights, weights, tokens), strict=True):
            assert torch.equal(part, whole) if needed else part.shape == (0,)
    dq, _ = launch.token_grads(p.grad_out, *p.operands, p.r, Settings(), torch.float32)
    assert dq.dtype == torch.float32 and torch.equal(dq.to(HALF), full[0])
    assert back_end.backward(p.grad_out, *p.operands, None, Settings())[4].shape == (0,)


@runs_kernels
@pytest.mark.parametrize("waves", [0, 1000])
def test_split_and_unsplit_sums(waves, monkeypatch):
    monkeypatch.setattr(launch, "WAVES", waves)
    monkeypatch.setattr(launch, "MIN_SHARE", 32)
    p = make(200, 1, 32, 3, 48, HALF)
    check(p)
    assert back_end.backward(p.grad_out, *p.operands, p.r, Settings(needs=(False, True)))[0].shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "swapped"])
def test_offsets_beyond_32_bits(layout):
    """T x H x d_h past 2^31 elements; only the last tokens have a gradient, so the weight gradients are theirs
    alone."""
    tokens, tail = 1_048_578, 2
    small = problem(tail, 16, 128, 1, 16, torch.bfloat16, device="cuda")

    def embedded(x):
        shape = (2, tokens // 2, *x.shape[1:])
        whole = torch.zeros(shape, dtype=x.dtype, device="cuda")
        if layout == "swapped":
            whole = torch.zeros((2, shape[2], shape[1], shape[3]), dtype=x.dtype, device="cuda").transpose(1, 2)
        whole[1, -tail:] = x
        return whole

    operands = {"q": embedded(small.q), "k": small.k, "u": small.u, "v": small.v, "r": embedded(small.r)}
    with poisoned_memory():
        out = back_end.forward(**operands)[1, -tail:].clone()  # the whole of it takes 4 GiB, as each of the backward's
        gradients = back_end.backward(embedded(small.grad_out), **operands, settings=Settings(deterministic=True))
    for name, actual, want in zip(("out", *NAMES), (out, *gradients), run(small), strict=True):
        if name in ("dq", "dr"):
            actual = actual[1, -tail:]
        assert relative_l2(actual, want.double()) < 1e-3, name


@runs_kernels
def test_gates_beyond_32_bits(tmp_path):
    p = make(5, 1, 16, 3, 16, HALF, gate="same")
    same(run(p, r=far_apart(p.r, tmp_path)), run(p))
