"""Values of every operator on every back end, against float64, by the one numeric rule."""

import dataclasses
import functools

import pytest
import torch
from conftest import Target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashmhf
from flashmhf import backends, reference
from flashmhf.testing import assert_accurate, problem

FORWARD_GRADS = ("dq", "dk", "du", "dv", "dr")
GATED_GRADS = ("dq", "dk", "du", "dv", "dw")

# (leading dimensions, H, d_h, E, d_e), H_kv: ragged token counts, one of everything, tails of d_e that are no multiple of a tile, more
# sub-networks than a CTA's chunk; then heads that share weights, in groups of 2, 3, 4 and 8 and all in one, blocks side by side
SHAPES = [
    (((1000,), 2, 64, 3, 192), 2),
    (((3, 65), 2, 128, 3, 80), 2),
    (((2, 2, 33), 1, 64, 1, 16), 1),
    (((129,), 2, 128, 9, 64), 2),
    (((64,), 4, 64, 2, 48), 4),
    (((200,), 2, 96, 3, 112), 2),
    (((130,), 2, 256, 2, 144), 2),
    (((200,), 1, 64, 35, 16), 1),
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
SHAPE_IDS = [f"{'x'.join(map(str, s[0]))}-H{s[1]}-kv{kv}-dh{s[2]}-E{s[3]}-de{s[4]}" for s, kv in SHAPES]
grouped_or_not = pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])


def check_all(target, p, names=("forward", "backward", "gated_forward", "gated_backward")):
    calls = {
        "forward": ((*p.operands, p.r), ("out",)),
        "backward": ((p.grad_out, *p.operands, p.r), FORWARD_GRADS),
        "gated_forward": ((*p.operands, p.w, p.eps), ("out",)),
        "gated_backward": ((p.grad_out, *p.operands, p.w, p.eps), GATED_GRADS),
    }
    for name in names:
        args, outputs = calls[name]
        baseline, exact = getattr(p, name)()
        actual = target.call(name, *args, activation=p.activation)
        if len(outputs) == 1:
            actual, baseline, exact = (actual,), (baseline,), (exact,)
        for output, a, b, e in zip(outputs, actual, baseline, exact, strict=True):
            assert a.is_contiguous(), f"{name}: {output} is not contiguous"
            assert a.dtype == b.dtype, f"{name}: {output} has dtype {a.dtype}, expected {b.dtype}"
            if output == "dr" and p.r is None:
                assert a.numel() == 0
                continue
            few_tokens = p.q[..., 0, 0].numel() < 64
            assert_accurate(f"{name}: {output}", a, b, e, fixed_limits=target.fixed_limits, few_tokens=few_tokens)


def dtypes_of(target):
    return [d for d in target.dtypes if not (target.device == "cpu" and d == torch.float16)]  # fp16 products on CPUs are emulated: one case


@pytest.mark.parametrize(("shape", "kv_heads"), SHAPES, ids=SHAPE_IDS)
def test_values(target, shape, kv_heads):
    for dtype in dtypes_of(target):
        check_all(target, problem(*shape, dtype, target.device, num_kv_heads=kv_heads))


@grouped_or_not
@pytest.mark.parametrize("gate", ["same", None])
def test_values_with_16_bit_gate_and_without(target, gate, heads, kv_heads):
    for dtype in target.dtypes:
        check_all(target, problem(300, heads, 64, 3, 48, dtype, target.device, gate=gate, num_kv_heads=kv_heads))


@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2"])
def test_other_activations(target, activation):
    for dtype in dtypes_of(target):
        reason = backends.BACKENDS[target.backend].why_not(torch.device(target.device), dtype, d_h=64, d_e=48, activation=activation)
        if reason:
            pytest.skip(f"{target.backend}: {reason}")
        for shape, kwargs in ((((3, 65), 2, 64, 3, 48), {}), ((130, 4, 64, 2, 80), {"gate": None, "num_kv_heads": 2})):
            check_all(target, dataclasses.replace(problem(*shape, dtype, target.device, **kwargs), activation=activation))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 16, 63, 64, 65, 128, 1000])
def test_token_counts(target, tokens, heads):
    dtype = target.dtypes[-1] if target.device == "cuda" else torch.float32
    p = problem(tokens, heads, 64, 2, 64, dtype, target.device, num_kv_heads=2)
    if tokens:
        check_all(target, p)
        return
    assert target.call("forward", *p.operands, p.r).shape == p.q.shape
    dq, dk, du, dv, dr = target.call("backward", p.grad_out, *p.operands, p.r)
    assert dq.shape == p.q.shape and dr.shape == p.r.shape
    for grad in (dk, du, dv):
        assert grad.shape == p.k.shape and not grad.any()
    assert not target.call("gated_backward", p.grad_out, *p.operands, p.w, p.eps)[4].any()


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


@pytest.mark.parametrize(("scale", "mean_score"), [(1e-3, 0.0), (8.0, 0.0), (1.0, -6.0), (1.0, 6.0)])
def test_magnitudes(target, scale, mean_score):
    # A mean score of -6 leaves SiLU in its exponential tail, where a sigmoid of too few bits shows; the 1.0x rule decides there.
    for dtype in dtypes_of(target):
        p = problem(512, 2, 64, 2, 96, dtype, target.device, scale=scale, mean_score=mean_score)
        # Tiny scores make fp16 results subnormal, where even rounding the exact result exceeds the fixed limit.
        fixed = target.fixed_limits and mean_score == 0.0 and not (dtype == torch.float16 and scale < 1)
        baseline, exact = p.forward()
        assert_accurate("out", target.call("forward", *p.operands, p.r), baseline, exact, fixed_limits=fixed)
        actual = target.call("backward", p.grad_out, *p.operands, p.r)
        for name, a, b, e in zip(FORWARD_GRADS, actual, *p.backward(), strict=True):
            assert_accurate(name, a, b, e, fixed_limits=fixed)


def token_views(q):
    """The same values as q [B, L, H, d_h] in other strides, with what each exercises."""
    batch, length, heads, head_dim = q.shape
    wide = torch.full((batch, length, 3 * heads * head_dim), float("nan"), dtype=q.dtype, device=q.device)
    split = wide.view(batch, length, 3, heads, head_dim)[:, :, 1]
    split.copy_(q)
    return {
        "split of a projection": split,
        "[B, H, L, d] transposed": q.transpose(1, 2).contiguous().transpose(1, 2),
        "[L, B, H, d] transposed": q.transpose(0, 1).contiguous().transpose(0, 1),
    }


@grouped_or_not
def test_strided_q_and_grad_out_are_read_in_place(target, heads, kv_heads):
    p = problem((3, 70), heads, 64, 2, 64, target.dtype, target.device, num_kv_heads=kv_heads)
    for view in token_views(p.q).values():
        p.q = view
        check_all(target, p)
    for view in token_views(p.grad_out).values():
        p.grad_out = view
        check_all(target, p, ("backward", "gated_backward"))


@pytest.mark.parametrize("expand", ["everywhere", "tokens", "last"])
def test_expanded_grad_out(target, expand):
    p = problem(130, 2, 64, 2, 64, target.dtype, target.device)
    source = {"everywhere": p.grad_out[:1, :1, :1], "tokens": p.grad_out[:1], "last": p.grad_out[..., :1]}[expand]
    p.grad_out = source.expand_as(p.grad_out)
    check_all(target, p, ("backward", "gated_backward"))


def test_strided_gate(target):
    p = problem((2, 65), 2, 64, 3, 64, target.dtype, target.device)
    padded = torch.full((2, 65, 2, 5), float("nan"), device=target.device)
    padded[..., :3] = p.r
    p.r = padded[..., :3]
    check_all(target, p, ("forward", "backward"))


@pytest.mark.parametrize("needs", [[True, False], [False, True], [False, False]])
@grouped_or_not
def test_needs_skip_results_and_keep_the_others(target, needs, heads, kv_heads):
    p = problem(130, heads, 64, 3, 64, target.dtype, target.device, num_kv_heads=kv_heads)
    for name, args, groups in (
        ("backward", (p.grad_out, *p.operands, p.r), (0, 1, 1, 1, 0)),
        ("gated_backward", (p.grad_out, *p.operands, p.w, p.eps), (0, 1, 1, 1, 1)),
    ):
        baseline, exact = getattr(p, name)()
        for actual, group, b, e in zip(target.call(name, *args, needs=needs), groups, baseline, exact, strict=True):
            if needs[group]:
                assert_accurate(name, actual, b, e, fixed_limits=target.fixed_limits)
            else:
                assert actual.numel() == 0


@grouped_or_not
def test_backward_accumulate_adds_in_float32(target, heads, kv_heads):
    for gate in ("float32", None):
        p = problem(300, heads, 64, 3, 80, target.dtype, target.device, gate=gate, num_kv_heads=kv_heads)
        start = [torch.randn(p.k.shape, device=target.device) for _ in range(3)]
        buffers = [x.clone() for x in start]
        dq, dr = target.call("backward_accumulate_", p.grad_out, *p.operands, p.r, *buffers)
        baseline, exact = p.backward()
        assert_accurate("dq", dq, baseline[0], exact[0], fixed_limits=target.fixed_limits)
        if gate:
            assert_accurate("dr", dr, baseline[4], exact[4], fixed_limits=target.fixed_limits)
        for name, buffer, before, b, e in zip(("dk", "du", "dv"), buffers, start, baseline[1:4], exact[1:4], strict=True):
            # Judged as a 16-bit gradient before it was added: the addition itself is in fp32.
            assert_accurate(name, buffer - before, b, e, fixed_limits=False)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "subnet_dim"), [(2, 2, 64, 80), (8, 2, 128, 192)])
def test_forward_is_bitwise_repeatable_and_backward_where_asked(target, heads, kv_heads, head_dim, subnet_dim):
    p = problem(1000, heads, head_dim, 3, subnet_dim, target.dtype, target.device, num_kv_heads=kv_heads)
    given, gated = (p.grad_out, *p.operands, p.r), (p.grad_out, *p.operands, p.w, p.eps)

    def run(deterministic):
        forward = target.call("forward", *p.operands, p.r, deterministic=deterministic)
        return forward, *target.call("backward", *given, deterministic=True), *target.call("gated_backward", *gated, deterministic=True)

    first = run(False)
    for i in range(4 if target.device == "cpu" else 50):
        for a, b in zip(first, run(bool(i % 2)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_grouped_heads_compiled_vmapped_and_under_autocast(activation):
    p = problem((3, 5), 4, 8, 2, 16, torch.float32, num_kv_heads=2)
    operator = functools.partial(flashmhf.flash_mhf, activation=activation)
    expected = operator(*p.operands, p.r)
    torch.testing.assert_close(operator(*p.operands, p.r, backend="reference"), expected)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")(*p.operands, p.r)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(torch.vmap(operator, in_dims=(0, None, None, None, 0))(*p.operands, p.r), expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = operator(*p.operands, p.r)
    assert out.dtype == torch.bfloat16 and out.shape == p.q.shape
    torch.library.opcheck(torch.ops.flashmhf.forward.default, (*p.operands, p.r), {"activation": activation})


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_stride_dtype_and_gate(target, data):
    head_dims = {"eager": st.integers(1, 40), "triton": st.sampled_from([16, 32, 64, 96]), "hopper": st.sampled_from([64, 96, 128, 256])}
    subnet_dims = st.integers(1, 40) if target.backend == "eager" else st.integers(1, 9).map(lambda n: 16 * n)
    leading = data.draw(st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple), label="leading")
    heads, subnets = data.draw(st.integers(1, 3), label="H"), data.draw(st.integers(1, 5), label="E")
    head_dim, subnet_dim = data.draw(head_dims[target.backend], label="d_h"), data.draw(subnet_dims, label="d_e")
    dtype = data.draw(st.sampled_from(target.dtypes), label="dtype")
    gate = data.draw(st.sampled_from(["float32", "same", None]), label="gate")
    p = problem(leading, heads, head_dim, subnets, subnet_dim, dtype, target.device, gate=gate, seed=data.draw(st.integers(0, 99)))
    if len(leading) >= 2 and data.draw(st.booleans(), label="transposed"):
        p.q = p.q.transpose(0, 1).contiguous().transpose(0, 1)
        if len(leading) == 3 and target.backend == "hopper":
            p.q = p.q.contiguous()
    check_all(target, p)


def check_heads(p, actual, reference_of, piece=16384):
    """Gradients of all heads, head by head and ``piece`` tokens at a time: the references of all take tens of GiB.

    Those of the weights are sums over the pieces, made in float64; the baseline's are then rounded to its dtype.
    """
    of_token = (0, 4) if reference_of == "backward" else (0,)  # results that have a row for each token
    for head in range(p.k.shape[0]):
        one = slice(head, head + 1)
        tokens = {name: getattr(p, name)[..., one, :].flatten(0, -3).split(piece) for name in ("q", "grad_out", "r")}
        weights = {name: getattr(p, name)[one] for name in "kuvw"}
        sums: list[list] = []
        for parts in zip(*tokens.values(), strict=True):
            here = dataclasses.replace(p, **dict(zip(tokens, parts, strict=True)), **weights)
            for i, results in enumerate(zip(*getattr(here, reference_of)(), strict=True)):
                if len(sums) <= i:
                    sums.append([[] if i in of_token else 0.0 for _ in results])
                for which, result in enumerate(results):
                    sums[i][which] = sums[i][which] + ([result] if i in of_token else result.double())
        for i, (a, (baseline, exact)) in enumerate(zip(actual, sums, strict=True)):
            if i in of_token:
                a, baseline, exact = a[..., one, :].flatten(0, -3), torch.cat(baseline), torch.cat(exact)
            else:
                a, baseline = a[one], baseline.to(a.dtype)
            assert_accurate(f"{reference_of}: result {i}, head {head}", a, baseline, exact, fixed_limits=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("deterministic", "leading", "heads", "head_dim", "subnets", "subnet_dim"),
    [
        pytest.param(False, (3, 16400), 17, 64, 14, 320, id="fused"),
        pytest.param(True, (4, 32000), 11, 64, 22, 192, id="pair"),
        pytest.param(True, (2, 32760), 40, 128, 3, 64, id="in_turns"),
    ],
)
def test_hopper_backward_in_groups_of_heads(needs_hopper, deterministic, leading, heads, head_dim, subnets, subnet_dim):
    """Enough work that the planner takes the heads in two groups: of eight and nine, of five and six, of twenty."""
    target = Target("hopper", "cuda")
    p = problem(leading, heads, head_dim, subnets, subnet_dim, torch.bfloat16, "cuda")
    p.q = token_views(p.q)["split of a projection"]
    padded = torch.full((*leading, heads, subnets + 2), float("nan"), device="cuda")
    padded[..., :subnets] = p.r
    p.r = padded[..., :subnets]

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = target.call("gated_backward", p.grad_out, *p.operands, p.w, p.eps, deterministic=deterministic)
    workspace = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in grads)
    assert workspace < 0.75 * 4 * p.q.numel() * (1 + 2 * subnets / head_dim), "the workspace is that of all heads"
    check_heads(p, grads, "gated_backward")
    if deterministic:
        for a, b in zip(grads, target.call("gated_backward", p.grad_out, *p.operands, p.w, p.eps, deterministic=True), strict=True):
            assert torch.equal(a, b)
        return
    grads = target.call("backward", p.grad_out, *p.operands, p.r)
    check_heads(p, grads, "backward")
    buffers = [torch.ones(p.k.shape, device="cuda") for _ in range(3)]
    dq, dr = target.call("backward_accumulate_", p.grad_out, *p.operands, p.r, *buffers)
    assert_accurate("dr", dr, grads[4], grads[4].double(), fixed_limits=True)
    for name, a, b in zip(("dq", "dk", "du", "dv"), (dq, *(x - 1 for x in buffers)), grads, strict=False):
        assert (a - b).norm() <= 5e-3 * b.norm(), name


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_offsets_past_2_to_the_31(backend):
    """T = 1,048,577 at H = 16, d_h = 128 has more than 2^31 elements; the last rows are those that a 32-bit offset would miss."""
    tokens, heads, head_dim = 1_048_577, 16, 128
    p = problem(1, heads, head_dim, 2, 64, torch.bfloat16, "cuda")
    q = torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    r = torch.rand(tokens, heads, 2, device="cuda")
    out = torch.ops.flashmhf.forward(q, *p.operands[1:], r, backend=backend)
    rows = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1], device="cuda")
    exact = reference.forward(q[rows].double(), *(x.double() for x in p.operands[1:]), r[rows].double())
    assert_accurate("out", out[rows], reference.forward(q[rows], *p.operands[1:], r[rows]), exact, fixed_limits=True)
    del out  # 4 GiB, as each tensor of the backward
    grad_out = torch.randn_like(q)
    dq = torch.ops.flashmhf.backward(grad_out, q, *p.operands[1:], r, backend=backend, needs=[True, False])[0]
    exact = reference.backward(grad_out[rows].double(), q[rows].double(), *(x.double() for x in p.operands[1:]), r[rows].double())[0]
    baseline = reference.backward(grad_out[rows], q[rows], *p.operands[1:], r[rows])[0]
    assert_accurate("dq", dq[rows], baseline, exact, fixed_limits=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"), [("hopper", torch.bfloat16), *(("triton", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))]
)
def test_errors_do_not_grow_with_tokens(backend, dtype):
    p = problem(129_024, 1, 128, 1, 64, dtype, "cuda")
    out = torch.ops.flashmhf.forward(*p.operands, p.r, backend=backend)
    assert_accurate("out", out, *p.forward(), fixed_limits=True)
    grads = torch.ops.flashmhf.backward(p.grad_out, *p.operands, p.r, backend=backend)
    for name, a, b, e in zip(FORWARD_GRADS, grads, *p.backward(), strict=True):
        assert_accurate(name, a, b, e, fixed_limits=True)
