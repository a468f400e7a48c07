"""Values of every operator on every back end, against float64, by the one numeric rule."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import RESULTS, VIEWS, Target, as_tuple, call

from benchmarks.harness import timing
from flashmhf import backends, reference
from flashmhf.testing import assert_accurate, fixed_limit, problem, relative_l2

# Leading dimensions, H, d_h, E, d_e, H_kv: ragged token counts, one of everything, tails of d_e that are no multiple of
# a tile, more sub-networks than a CTA's chunk; then heads that share weights, in groups of 2, 3, 4 and 8 and all in
# one, blocks side by side
SHAPES = [
    ((1000,), 2, 64, 3, 192, 2), ((3, 65), 2, 128, 3, 80, 2), ((2, 2, 33), 1, 64, 1, 16, 1), ((129,), 2, 128, 9, 64, 2),
    ((64,), 4, 64, 2, 48, 4), ((200,), 2, 96, 3, 112, 2), ((130,), 2, 256, 2, 144, 2), ((200,), 1, 64, 35, 16, 1),
    ((1000,), 4, 64, 3, 192, 2), ((3, 65), 6, 128, 3, 80, 2), ((129,), 4, 128, 9, 64, 1), ((64,), 8, 64, 2, 48, 2),
    ((200,), 4, 96, 3, 112, 1), ((130,), 4, 256, 2, 144, 2), ((33,), 8, 64, 35, 16, 1), ((300,), 16, 128, 22, 48, 4),
    ((100,), 4, 256, 6, 48, 1),
]  # fmt: skip
grouped_or_not = pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])


def check_all(target, p, names=tuple(RESULTS), fixed_limits=None):
    fixed_limits = target.fixed_limits if fixed_limits is None else fixed_limits
    few_tokens = p.q[..., 0, 0].numel() < 64
    for name in names:
        results = target.call(name, p), *map(as_tuple, getattr(p, name)())
        for output, a, b, e in zip(RESULTS[name], *results, strict=True):
            assert a.is_contiguous(), f"{name}: {output} is not contiguous"
            assert a.dtype == b.dtype, f"{name}: {output} has dtype {a.dtype}, expected {b.dtype}"
            assert_accurate(f"{name}: {output}", a, b, e, fixed_limits=fixed_limits, few_tokens=few_tokens)


def dtypes_of(target):
    # fp16 products on CPUs are emulated: one case
    return [d for d in target.dtypes if not (target.device == "cpu" and d == torch.float16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(target, shape):
    for dtype in dtypes_of(target):
        check_all(target, problem(*shape[:-1], dtype, target.device, num_kv_heads=shape[-1]))


@grouped_or_not
@pytest.mark.parametrize("gate", ["same", None])
def test_values_with_16_bit_gate_and_without(target, gate, heads, kv_heads):
    for dtype in target.dtypes:
        check_all(target, problem(300, heads, 64, 3, 48, dtype, target.device, gate=gate, num_kv_heads=kv_heads))


@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2"])
def test_other_activations(target, activation):
    for dtype in dtypes_of(target):
        why_not, device = backends.BACKENDS[target.backend].why_not, torch.device(target.device)
        if reason := why_not(device, dtype, d_h=64, d_e=48, activation=activation):
            pytest.skip(f"{target.backend}: {reason}")
        for shape, kwargs in ((((3, 65), 2, 64, 3, 48), {}), ((130, 4, 64, 2, 80), {"gate": None, "num_kv_heads": 2})):
            p = problem(*shape, dtype, target.device, **kwargs)
            check_all(target, dataclasses.replace(p, activation=activation))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 16, 63, 64, 65, 128, 1000])
def test_token_counts(target, tokens, heads):
    dtype = target.dtypes[-1] if target.device == "cuda" else torch.float32
    check_all(target, problem(tokens, heads, 64, 2, 64, dtype, target.device, num_kv_heads=2))


@pytest.mark.parametrize("gate", ["float32", "same"])
@pytest.mark.parametrize("shape", [
    (1, 8, 128, 22, 96, 2), (16, 16, 64, 20, 128, 4), (13, 8, 96, 35, 64, 1), (32, 8, 128, 22, 96, 4),
    (16, 12, 128, 6, 384, 2), (9, 8, 256, 4, 128, 2),
], ids=str)  # fmt: skip
def test_few_tokens_and_many_tiles(target, shape, gate):
    """Heads of a group in one row tile, and clusters that divide its inter range."""
    dtype = target.dtypes[-1] if target.device == "cuda" else torch.float32
    p = problem(*shape[:-1], dtype, target.device, gate=gate, num_kv_heads=shape[-1])
    check_all(target, p, names=("forward", "gated_forward"))
    assert torch.equal(*target.call("gated_forward", p), *target.call("gated_forward", p))


@pytest.mark.parametrize(("scale", "mean_score"), [(1e-3, 0.0), (8.0, 0.0), (1.0, -6.0), (1.0, 6.0)])
def test_magnitudes(target, scale, mean_score):
    # A mean score of -6 leaves SiLU in its exponential tail, where a sigmoid of too few bits shows; the 1.0x rule
    # decides there.
    for dtype in dtypes_of(target):
        p = problem(512, 2, 64, 2, 96, dtype, target.device, scale=scale, mean_score=mean_score)
        # Tiny scores make fp16 results subnormal, where even rounding the exact result exceeds the fixed limit.
        fixed = target.fixed_limits and mean_score == 0.0 and not (dtype == torch.float16 and scale < 1)
        check_all(target, p, ("forward", "backward"), fixed)


# what every back end reads in place
OF_Q = ("split of a projection", "heads before length", "leading dimensions reversed")
OF_GRAD_OUT = (*OF_Q, *(name for name in VIEWS if "expanded" in name))


@grouped_or_not
@pytest.mark.parametrize(
    ("operand", "view"),
    [*(("q", view) for view in OF_Q), *(("grad_out", view) for view in OF_GRAD_OUT), ("r", "padded columns")],
)
def test_strides_are_read_in_place(target, operand, view, heads, kv_heads):
    p = problem((3, 70), heads, 64, 2, 64, target.dtype, target.device, num_kv_heads=kv_heads)
    viewed = VIEWS[view](getattr(p, operand))
    assert not viewed.is_contiguous()
    names = {"q": RESULTS, "grad_out": ("backward", "gated_backward"), "r": ("forward", "backward")}[operand]
    check_all(target, dataclasses.replace(p, **{operand: viewed}), names)


@pytest.mark.parametrize("needs", [[True, False], [False, True], [False, False]])
@grouped_or_not
def test_needs_skip_results_and_keep_the_others(target, needs, heads, kv_heads):
    p = problem(130, heads, 64, 3, 64, target.dtype, target.device, num_kv_heads=kv_heads)
    for name, groups in (("backward", (0, 1, 1, 1, 0)), ("gated_backward", (0, 1, 1, 1, 1))):
        for actual, group, b, e in zip(target.call(name, p, needs=needs), groups, *getattr(p, name)(), strict=True):
            if needs[group]:
                assert_accurate(name, actual, b, e, fixed_limits=target.fixed_limits)
            else:
                assert actual.numel() == 0


@pytest.mark.parametrize("shape", [
    (1000, 2, 64, 3, 80, 2), (1000, 8, 128, 3, 192, 2),
    pytest.param((3000, 5, 128, 7, 80, 5), marks=pytest.mark.gpu, id="two kernels"),
    pytest.param((2500, 40, 128, 2, 192, 40), marks=pytest.mark.gpu, id="ordered sums"),
], ids=str)  # fmt: skip
def test_forward_is_bitwise_repeatable_and_backward_where_asked(target, shape):
    p = problem(*shape[:-1], target.dtype, target.device, num_kv_heads=shape[-1])

    def run(deterministic):
        gradients = (target.call(name, p, deterministic=True) for name in ("backward", "gated_backward"))
        return sum(gradients, target.call("forward", p, deterministic=deterministic))

    first, different = run(False), torch.zeros((), dtype=torch.int64, device=target.device)
    for i in range(500 if target.fixed_limits else 50 if target.device == "cuda" else 4):
        # other sizes in between move the workspace around
        torch.full((1 << (12 + i % 12),), torch.nan, device=target.device)
        for actual, expected in zip(run(bool(i % 2)), first, strict=True):
            different += (actual != expected).any()
    assert different.item() == 0


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_stride_dtype_and_gate(target, data):
    head_dims = {
        "eager": st.integers(1, 40), "triton": st.sampled_from([16, 32, 64, 96]),
        "hopper": st.sampled_from([64, 96, 128, 256]),
    }  # fmt: skip
    subnet_dims = st.integers(1, 40) if target.backend == "eager" else st.integers(1, 9).map(lambda n: 16 * n)
    leading = data.draw(st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple), label="leading")
    heads, subnets = data.draw(st.integers(1, 3), label="H"), data.draw(st.integers(1, 5), label="E")
    head_dim, subnet_dim = data.draw(head_dims[target.backend], label="d_h"), data.draw(subnet_dims, label="d_e")
    dtype = data.draw(st.sampled_from(target.dtypes), label="dtype")
    gate = data.draw(st.sampled_from(["float32", "same", None]), label="gate")
    sizes, seed = (leading, heads, head_dim, subnets, subnet_dim), data.draw(st.integers(0, 99))
    p = problem(*sizes, dtype, target.device, gate=gate, seed=seed)
    if len(leading) >= 2 and data.draw(st.booleans(), label="transposed"):
        p.q = p.q.transpose(0, 1).contiguous().transpose(0, 1)
        if len(leading) == 3 and target.backend == "hopper":
            p.q = p.q.contiguous()
    check_all(target, p)


def check_heads(name, p, gradients):
    """One head at a time, by the fixed limits: the materialising code takes tens of GiB here."""
    for head in range(p.k.shape[0]):
        for output, whole, exact in zip(RESULTS[name], gradients, getattr(p, f"exact_{name}")(head), strict=True):
            actual = whole[..., head, :] if output in ("dq", "dr") else whole[head]
            error, allowed = relative_l2(actual, exact), fixed_limit(exact.numel(), actual.dtype)
            assert error <= allowed, f"{name}: {output} of head {head}: {error:.3e} exceeds {allowed:.3e}"


@pytest.mark.parametrize(("deterministic", "shape"), [
    pytest.param(False, ((3, 16400), 17, 64, 14, 320), id="fused"),
    pytest.param(True, ((4, 32000), 11, 64, 22, 192), id="pair"),
    pytest.param(True, ((2, 32760), 40, 128, 3, 64), id="in_turns"),
])  # fmt: skip
def test_hopper_backward_in_groups_of_heads(needs_hopper, deterministic, shape):
    """Enough work that the planner takes the heads in two groups: of eight and nine, of five and six, of twenty."""
    target = Target("hopper", "cuda")
    p = problem(*shape, torch.bfloat16, "cuda")
    p.q, p.r = VIEWS["split of a projection"](p.q), VIEWS["padded columns"](p.r)
    grads = target.call("gated_backward", p, deterministic=deterministic)
    peak = timing.peak_memory(lambda: target.call("gated_backward", p, deterministic=deterministic), p.q.device)
    workspace = peak - sum(x.nbytes for x in grads)
    assert workspace < 0.75 * 4 * p.q.numel() * (1 + 2 * p.k.shape[1] / p.k.shape[3]), (
        "the workspace is that of all heads"
    )
    check_heads("gated_backward", p, grads)
    if deterministic:
        assert all(map(torch.equal, grads, target.call("gated_backward", p, deterministic=True)))
    else:
        check_heads("backward", p, target.call("backward", p))


@pytest.mark.slow
def test_offsets_past_2_to_the_31(needs_hopper):
    """T H d_h = 1,048,577 x 16 x 128: a 32-bit offset would miss the last rows."""
    tokens, p = 1_048_577, problem(1, 16, 128, 2, 64, torch.bfloat16, "cuda")
    q, grad_out = (torch.randn(tokens, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    r = torch.rand(tokens, 16, 2, device="cuda")
    rows = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1], device="cuda")
    few = dataclasses.replace(p, q=q[rows], grad_out=grad_out[rows], r=r[rows])
    out = torch.ops.flashmhf.forward(q, *p.operands[1:], r, backend="hopper")[rows]
    assert_accurate("out", out, *few.forward(), fixed_limits=True)
    dq = torch.ops.flashmhf.backward(grad_out, q, *p.operands[1:], r, backend="hopper", needs=[True, False])[0][rows]
    (baseline, *_), (exact, *_) = few.backward()
    assert_accurate("dq", dq, baseline, exact, fixed_limits=True)


@pytest.mark.parametrize("gate", [None, "float32"])
def test_fp16_on_the_cpu_is_computed_in_float32(gate):
    """Products of scores above 65,504, the largest fp16, whose results and gradients fit."""
    p = problem(20, 2, 16, 2, 48, torch.float16, gate=gate, num_kv_heads=1)
    p.q, p.v, p.grad_out = 400 * p.q, 1e-3 * p.v, 1e-2 * p.grad_out
    assert reference.forward(*(x.double() for x in p.operands), p.r).abs().max() < 65504
    assert not reference.forward(*p.operands, p.r).isfinite().all()
    exact = [reference.forward(*(x.double() for x in p.operands), p.r), *p.backward()[1]]
    out = call("forward", p, backend="eager") + call("backward", p, backend="eager")
    for name, actual, e in zip(("out", *RESULTS["backward"]), out, exact, strict=True):
        assert relative_l2(actual, e) < 1e-3, name


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("hopper", torch.bfloat16), *(("triton", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))],
)
def test_errors_do_not_grow_with_tokens(backend, dtype):
    check_all(Target(backend, "cuda"), problem(129_024, 1, 128, 1, 64, dtype, "cuda"), ("forward", "backward"))
