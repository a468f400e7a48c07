"""The Triton back end, interpreted where there is no GPU."""

import dataclasses

import ahead_of_time as aot
import pytest
import torch
from interpreter import DEVICE, HALF, INTERPRETED, far_apart, run_interpreted, runs_kernels, starts_interpreter
from targets import VIEWS, shifted

from benchmarks import tune_triton
from flashmhf import reference
from flashmhf.backends import triton as back_end
from flashmhf.backends.contract import Router, Settings
from flashmhf.backends.triton import configs, gate_kernels, launch
from flashmhf.testing import assert_accurate, poisoned_memory, problem, relative_l2

NAMES = ("dq", "dk", "du", "dv", "dr")
SPILLED = 128  # bytes of a thread that may be spilled


@pytest.fixture(autouse=True)
def planned_anew():
    """Plans made for another GPU than this one, and by other constants, do not stay."""
    yield
    launch.plans.cache_clear()


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
    *({"shape": (130, 2, d_h, 3, 80), "dtype": dtype} for d_h in back_end.HEAD_DIMS for dtype in (HALF, torch.float32)),
    *({"shape": (130, 2, d_h, 3, 80), "dtype": torch.float16} for d_h in (32, 96, 256)),
    *({"shape": (tokens, 1, 32, 2, 48)} for tokens in (1, 63, 64, 65, 1000)),
    *({"shape": (70, 2, 64, 2, subnet_dim)} for subnet_dim in (16, 112, 384)),
    *({"shape": ((3, 23), 2, 64, subnets, 48), "gate": gate} for subnets, gate in ((1, None), (5, "same"))),
    *({"shape": (70, 2, 32, 3, 48), "activation": name} for name in ("gelu", "relu", "relu2")),
    {"shape": (70, 2, 32, 3, 48), "dtype": torch.float32, "activation": "gelu"},
    *(
        {"shape": ((3, 50), heads, 32, 3, 48), "gate": gate, "num_kv_heads": kv_heads}
        for heads, kv_heads, gate in ((4, 2, None), (3, 1, "float32"))
    ),
    # fp16 has not the range
    *({"shape": (200, 2, 64, 2, 64), "dtype": torch.bfloat16, "scale": scale} for scale in (1e-3, 30.0)),
    *({"shape": (300, 2, 64, 2, 64), "dtype": dtype, "mean_score": -6.0} for dtype in (torch.float32, HALF)),
]
if INTERPRETED:  # each promise once
    CASES = [
        *(
            {"shape": (35, 1, d_h, 2, 48), "dtype": (torch.float16, torch.float32)[i % 2]}
            for i, d_h in enumerate(back_end.HEAD_DIMS)
        ),
        {"shape": (1, 1, 32, 2, 48)},
        {"shape": (70, 1, 64, 2, 112)},
        {"shape": ((3, 11), 2, 32, 1, 48), "gate": None},
        {"shape": ((3, 11), 4, 32, 3, 16), "gate": "same", "num_kv_heads": 2},
        *({"shape": (20, 1, 32, 2, 16), "activation": name} for name in ("gelu", "relu", "relu2")),
        *({"shape": (20, 1, 32, 2, 16), "dtype": torch.float32, "scale": scale} for scale in (1e-3, 30.0)),
        *({"shape": (40, 1, 32, 2, 32), "dtype": dtype, "mean_score": -6.0} for dtype in (torch.float32, HALF)),
    ]


def of_family(capability, monkeypatch, *, maps=False):
    """Block shapes, and with them the kind of products, of a GPU of ``capability``."""
    monkeypatch.setattr(launch, "gpu", lambda device: launch.Gpu(capability, 1))
    monkeypatch.setattr(launch, "has_tma", lambda device: maps)


@runs_kernels
@pytest.mark.parametrize(
    ("capability", "case"), [*(((8, 0), case) for case in CASES), *(((9, 0), case) for case in CASES[1::3])], ids=str
)
def test_values(capability, case, monkeypatch):
    """Head dimensions, tails of tokens and of d_e, gates, activations, grouped heads, magnitudes, scores in SiLU's
    exponential tail; K and U by products of their own, and in pairs."""
    of_family(capability, monkeypatch)
    case = {"dtype": HALF, "activation": "silu"} | case
    activation = case.pop("activation")
    check(dataclasses.replace(make(*case.pop("shape"), case.pop("dtype"), **case), activation=activation))


@runs_kernels
@pytest.mark.parametrize("view", VIEWS)
def test_strides_are_read_in_place(view):
    p = make((3, 2, 3), 2, 32, 2, 16, HALF)
    viewed = {name: VIEWS[view](getattr(p, name)) for name in ("q", "grad_out", "r")}
    assert not any(x.is_contiguous() for x in viewed.values())
    same(run(p, **viewed), run(p, **{name: x.contiguous() for name, x in viewed.items()}))


@runs_kernels
@pytest.mark.parametrize("descriptors", [False, True])
def test_pair_of_weights_in_either_order_of_addresses(descriptors, monkeypatch):
    of_family((9, 0), monkeypatch, maps=descriptors)
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
    p = make(40, 2, 32, 2, 48, HALF)
    router = Router(p.w, p.eps)
    for r in (router, p.r):
        full = back_end.backward(p.grad_out, *p.operands, r, Settings(deterministic=True))
        for tokens, weights in ((True, False), (False, True), (False, False)):
            settings, of_gate = Settings(True, (tokens, weights)), weights if r is router else tokens
            parts = back_end.backward(p.grad_out, *p.operands, r, settings)
            for part, whole, needed in zip(parts, full, (tokens, weights, weights, weights, of_gate), strict=True):
                assert torch.equal(part, whole) if needed else part.shape == (0,)
    dq, _ = launch.Call(*p.operands, p.r, grad_out=p.grad_out).token_grads(torch.float32, deterministic=True)
    assert dq.dtype == torch.float32 and torch.equal(dq.to(HALF), full[0])
    assert back_end.backward(p.grad_out, *p.operands, None, Settings())[4].shape == (0,)


@runs_kernels
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("multiprocessors", [0, 1000])
def test_split_and_unsplit_sums(capability, multiprocessors, monkeypatch):
    monkeypatch.setattr(launch, "gpu", lambda device: launch.Gpu(capability, multiprocessors))
    monkeypatch.setattr(launch, "has_tma", lambda device: False)
    monkeypatch.setattr(launch, "MIN_SHARE", 32)
    p = make(200, 1, 32, 3, 48, HALF)
    check(p)
    assert back_end.backward(p.grad_out, *p.operands, p.r, Settings(needs=(False, True)))[0].shape == (0,)
    p = make(20, 1, 32, 3, 16, HALF)
    for gate, how in ((p.r, {}), (p.w, {"eps": p.eps})):  # autograd lets nobody write to a view that was made inside
        leaves = [x.detach().requires_grad_() for x in (*p.operands, gate)]
        forward = torch.ops.flashmhf.gated_forward if how else torch.ops.flashmhf.forward
        gradients = torch.autograd.grad(forward(*leaves, **how, backend="triton").mul_(2), leaves, p.grad_out)
        expected = (p.gated_backward if how else p.backward)()[1]
        for actual, exact in zip(gradients, expected, strict=True):
            assert relative_l2(actual, 2 * exact) < 1e-2


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


@runs_kernels
@pytest.mark.parametrize(("tokens", "subnets"), [(1, 22), (3, 1), (35, 40)])
def test_router(tokens, subnets):
    """Its values and gradients; more sub-networks than one block holds; q in place."""
    for dtype in (torch.float32, HALF):
        p = make((2, tokens), 1, 32, subnets, 16, dtype)
        q = torch.stack([p.q, p.q], -2)[..., 0, :]
        for w in (p.w, p.w.to(dtype)):
            exact = reference.gate(p.q.double(), w.double(), p.eps)
            assert_accurate(
                "r", gate_kernels.gate(q, Router(w, p.eps)), reference.gate(p.q, w, p.eps), exact, fixed_limits=True
            )
        with poisoned_memory():
            dq, *_, dw = back_end.backward(p.grad_out, q, p.k, p.u, p.v, Router(p.w, p.eps), Settings())
        for name, actual, i in (("dq", dq, 0), ("dw", dw, 4)):
            baseline, exact = (x[i] for x in p.gated_backward())
            assert_accurate(name, actual, baseline, exact, fixed_limits=True, few_tokens=tokens < 100)


@runs_kernels
@pytest.mark.parametrize("kernel", (*tune_triton.KERNELS, "fp8"))
def test_block_shapes_that_are_timed_are_right(kernel):
    p, other = (make(70, 1, 32, 2, 48, HALF, seed=seed) for seed in range(2))
    results, wrong = (tune_triton.call(kernel, configs.Config(64, 32, 4, 2), x) for x in (p, other))
    assert tune_triton.why_wrong(kernel, results, p) is None
    assert tune_triton.why_wrong(kernel, results, p, results) is None
    for expected in (None, results):
        assert "wrong" in tune_triton.why_wrong(kernel, wrong, p, expected)


def test_block_shapes_are_printed_as_the_table_has_them():
    for config in {config for row in configs.TABLE.values() for config in row.values()}:
        assert eval(tune_triton.written(config), vars(configs)) == config


MATRIX_INSTRUCTION = {90: "wgmma.mma_async", 100: "tcgen05.mma"}  # else mma.sync
TARGETS = (80, 86, 89, 90, 100, 120)
BITS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}
SOME = [  # of each GPU and kernel, of other head widths
    (capability, kernel, (128, 64, 96)[(i + j) % 3], torch.bfloat16)
    for i, capability in enumerate(TARGETS)
    for j, kernel in enumerate(configs.KERNELS)
    if (i + j) % 2 == 0
]


def plan_and_types(kernel, d_h, dtype):
    """A launch of many tokens, or of few, with maps where the GPU has pairs; and the types of its tensors."""
    heads, subnets, subnet_dim, tokens = 16, 22, 384, 16 if kernel == "forward_few" else 4096
    q = aot.facts(tokens, heads, d_h, dtype=dtype)
    k, r = (
        aot.facts(heads, subnets, subnet_dim, d_h, dtype=dtype),
        aot.facts(tokens, heads, subnets, dtype=torch.float32),
    )
    maps = BITS[dtype] == 16
    where = launch.Place((True, True, True), maps)
    of_weights = {name: dtype for name in ("q", "first", "second", "v")}
    is_forward = kernel.startswith("forward")
    case = launch.Case(q, k, r, None if is_forward else q, where, "silu", aot.DEVICE)
    plan = launch.plan(case, "forward" if is_forward else kernel, dtype)
    if is_forward:
        types = {**of_weights, "r": torch.float32, "out": dtype if plan.grid[2] == 1 else torch.float32}
    elif kernel == "token_grads":
        types = {"grad_out": dtype, **of_weights, "r": torch.float32, "dq": dtype, "dr": torch.float32}
    else:
        types = {"grad_out": dtype, **of_weights, "r": torch.float32}
        types |= {name: dtype for name in ("d_first", "d_second", "dv")}
    for place, box in plan.boxes.items():
        types[plan.kernel.arg_names[place]] = f"tensordesc<{aot.NAMES[dtype]}{box.block}>".replace(" ", "")
    return plan, types


def check_row(capability, kernel, d_h, dtype, monkeypatch):
    aot.gpu(monkeypatch, capability)
    monkeypatch.setattr(launch, "has_tma", lambda device: capability >= 90)
    plan, types = plan_and_types(kernel, d_h, dtype)
    compiled = aot.compile_plan(plan, types, capability)
    assert compiled.shared <= aot.SHARED_KB[capability] << 10
    if configs.row_of(divmod(capability, 10)) in configs.HOW_CHOSEN:  # where nobody timed what spilling costs
        assert compiled.stack <= SPILLED
    if BITS[dtype] == 16:
        instruction = MATRIX_INSTRUCTION.get(capability, "mma.sync") if plan.config.paired else "mma.sync"
        assert instruction in compiled.ptx
    return plan, compiled


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel does not compile")
@pytest.mark.parametrize(("capability", "kernel", "d_h", "dtype"), SOME)
def test_block_shapes_compile(capability, kernel, d_h, dtype, monkeypatch):
    """For a GPU of each family, whatever GPU is here: within its shared memory and registers, by its matrix
    instructions."""
    check_row(capability, kernel, d_h, dtype, monkeypatch)


@pytest.mark.gpu  # it needs none, but minutes; the rows above run everywhere
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel does not compile")
@pytest.mark.parametrize("d_h", back_end.HEAD_DIMS)
@pytest.mark.parametrize("capability", TARGETS)
def test_all_block_shapes_compile(capability, d_h, monkeypatch):
    for kernel in configs.KERNELS:
        for dtype in (torch.bfloat16, torch.float32):
            check_row(capability, kernel, d_h, dtype, monkeypatch)


@pytest.mark.gpu
def test_a_launch_is_planned_once(monkeypatch):
    """The second call of a shape gives Triton no arguments to look at, and reads the tensors it is given."""
    p, other = make(70, 2, 64, 3, 48, HALF), make(70, 2, 64, 3, 48, HALF, seed=1)
    expected = run(p), run(other)

    def refuse(self, *args, **kwargs):
        raise AssertionError("a kernel was looked up again")

    monkeypatch.setattr(type(launch.kernels.forward_kernel), "run", refuse)
    same(run(other), expected[1])
    same(run(p), expected[0])
    with pytest.raises(AssertionError, match="looked up again"):
        run(make(71, 2, 64, 3, 48, HALF))
