"""Modules against float64 formulae, their state dicts, and the official layout both ways."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf import convert, reference

D_MODEL, HEADS, SUBNETS, SUBNET_DIM = 48, 3, 4, 20
HEAD_DIM = D_MODEL // HEADS


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module.double()


def rms_norm(q, weight, eps):
    return q / (q.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def flash_mhf_formula(x, s, *, q_norm_eps=None, bias=False):
    q = (x @ s["in_proj.weight"].T + (s["in_proj.bias"] if bias else 0)).unflatten(-1, (HEADS, HEAD_DIM))
    if q_norm_eps is not None:
        q = rms_norm(q, s["q_norm.weight"], q_norm_eps)
    p = torch.einsum("...hd,hde->...he", q, s["router"])
    r = p.sigmoid() / (p.sigmoid().sum(-1, keepdim=True) + 1e-20)
    m, n = (torch.einsum("...hd,hejd->...hej", q, s[name]) for name in "ku")
    mixed = torch.einsum("...he,...hej,hejd->...hd", r, m * m.sigmoid() * n, s["v"])
    return mixed.flatten(-2) @ s["out_proj.weight"].T + (s["out_proj.bias"] if bias else 0)


@pytest.mark.parametrize(("q_norm", "bias"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("leading", [(), (7,), (2, 5), (2, 0)])
def test_flash_mhf(q_norm, bias, leading):
    module = randomised(flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, q_norm=q_norm, q_norm_eps=1e-3, bias=bias))
    x = torch.randn(*leading, D_MODEL, dtype=torch.float64, requires_grad=True)
    expected = flash_mhf_formula(x, dict(module.named_parameters()), q_norm_eps=1e-3 if q_norm else None, bias=bias)
    actual = module(x)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    inputs = [x, *module.parameters()]
    grad = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_flash_mhf_state_and_default_width():
    module = flashmhf.FlashMHF(256, 2, 5, q_norm=True)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    assert shapes == {
        "in_proj.weight": (256, 256),
        "k": (2, 5, 384, 128),
        "u": (2, 5, 384, 128),
        "v": (2, 5, 384, 128),
        "router": (2, 128, 5),
        "out_proj.weight": (256, 256),
        "q_norm.weight": (2, 128),
    }
    assert [flashmhf.nn.default_subnet_dim(d) for d in (64, 96, 128, 256)] == [192, 256, 384, 704]
    assert "q_norm.weight" not in flashmhf.FlashMHF(256, 2, 5).state_dict()


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-5, ValueError), (1.5, TypeError), ("64", TypeError)])
def test_sizes_of_functions_are_checked(size, error):
    with pytest.raises(error, match="head_dim"):
        flashmhf.nn.default_subnet_dim(size)
    shard_placement = pytest.importorskip("flashmhf.distributed").shard_placement
    with pytest.raises(error, match="size"):
        shard_placement(size)


@pytest.mark.parametrize("backend", ["auto", "naive"])
def test_mhffn(backend):
    module = randomised(flashmhf.MHFFN(D_MODEL, HEADS, 50, backend=backend))
    s, x = dict(module.named_parameters()), torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    q = (x @ s["in_proj.weight"].T).unflatten(-1, (HEADS, HEAD_DIM))
    m, n = (torch.einsum("...hd,hjd->...hj", q, s[name]) for name in "ku")
    mixed = torch.einsum("...hj,hjd->...hd", m * m.sigmoid() * n, s["v"])
    torch.testing.assert_close(module(x), mixed.flatten(-2) @ s["out_proj.weight"].T, rtol=1e-10, atol=1e-10)
    assert set(module.state_dict()) == {"in_proj.weight", "k", "u", "v", "out_proj.weight"}


def test_swiglu():
    module = randomised(flashmhf.SwiGLU(D_MODEL, 50))
    s, x = dict(module.named_parameters()), torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    gate, up = x @ s["gate_proj.weight"].T, x @ s["up_proj.weight"].T
    torch.testing.assert_close(module(x), (gate * gate.sigmoid() * up) @ s["down_proj.weight"].T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("leading", [(), (5,), (2, 5), (2, 3, 5)])
def test_parametric_kv(leading):
    module = randomised(flashmhf.ParametricKV(D_MODEL, HEADS, 30))
    s, x = dict(module.named_parameters()), torch.randn(*leading, D_MODEL, dtype=torch.float64)
    q = (x @ s["in_proj.weight"].T).unflatten(-1, (HEADS, HEAD_DIM))
    attention = (torch.einsum("...hd,hnd->...hn", q, s["k"]) / HEAD_DIM**0.5).softmax(-1)
    expected = torch.einsum("...hn,hnd->...hd", attention, s["v"]).flatten(-2) @ s["out_proj.weight"].T
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)


def test_dense_moe():
    module = randomised(flashmhf.DenseMoE(D_MODEL, SUBNETS, SUBNET_DIM))
    s, x = dict(module.named_parameters()), torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    r = (x @ s["router"]).sigmoid()
    r = r / r.sum(-1, keepdim=True)
    expected = 0
    for e in range(SUBNETS):
        rows = slice(e * SUBNET_DIM, (e + 1) * SUBNET_DIM)
        gate, up = x @ s["gate_proj.weight"][rows].T, x @ s["up_proj.weight"][rows].T
        expected = expected + r[..., e : e + 1] * ((gate * gate.sigmoid() * up) @ s["down_proj.weight"][:, rows].T)
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)


MODULES = {
    "flash_mhf": lambda: flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, q_norm=True, bias=True),
    "mhffn": lambda: flashmhf.MHFFN(D_MODEL, HEADS, 500),
    "swiglu": lambda: flashmhf.SwiGLU(D_MODEL, 500, bias=True),
    "parametric_kv": lambda: flashmhf.ParametricKV(D_MODEL, HEADS, 500),
    "dense_moe": lambda: flashmhf.DenseMoE(D_MODEL, SUBNETS, 200),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_initialisation(make):
    module = make()
    for init, projection_std in (("normal", 0.05), ("official", None)):
        module.reset_parameters(init, initializer_range=0.05)
        for name, parameter in module.named_parameters():
            if name == "q_norm.weight":
                assert (parameter == 1).all()
            elif name.endswith("bias"):
                assert (parameter == 0).all()
            else:
                rows = parameter.shape[0] + parameter.shape[-1]
                expected = projection_std or (0.707 * (2 / rows) ** 0.5 if name.endswith("proj.weight") else 0.02)
                assert abs(parameter.std().item() / expected - 1) < 0.15, f"{name} under {init}"
    with pytest.raises(ValueError, match="init is 'xavier'"):
        module.reset_parameters("xavier")


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_state_survives_saving_and_meta_construction(make, tmp_path):
    module = make()
    torch.save(module.state_dict(), tmp_path / "state.pt")
    with torch.device("meta"):
        empty = make()
    empty.load_state_dict(torch.load(tmp_path / "state.pt"), assign=True)
    x = torch.randn(3, D_MODEL)
    assert torch.equal(module(x), empty(x))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_the_meta_device_gives_shapes(make, grad):
    with torch.device("meta"), torch.set_grad_enabled(grad):
        assert make()(torch.empty(3, D_MODEL)).shape == (3, D_MODEL)


def test_the_gate_on_the_meta_device():
    assert flashmhf.gate(torch.empty(3, 2, 8, device="meta"), torch.empty(2, 8, 5, device="meta")).shape == (3, 2, 5)


MISTAKES = [
    (torch.randn(3, 47), ValueError, r"x has shape \[3, 47\]; expected"),
    (torch.randn(3, D_MODEL).bfloat16(), TypeError, "x has dtype bfloat16; supported: float32, the module's dtype"),
    (torch.randn(3, D_MODEL).double(), TypeError, "x has dtype float64; supported: float32"),
    (torch.ones(3, D_MODEL, dtype=torch.long), TypeError, "x has dtype int64; supported: bfloat16"),
    (torch.randn(3, D_MODEL, device="meta"), ValueError, "x is on meta but the module is on cpu"),
    (torch.randn(3, D_MODEL).numpy(), TypeError, "x must be a torch.Tensor, got ndarray"),
]


@pytest.mark.parametrize(("x", "error", "message"), MISTAKES, ids=[message.split(";")[0] for _, _, message in MISTAKES])
@pytest.mark.parametrize(
    "make", [*MODULES.values(), lambda: flashmhf.FlashMHF(D_MODEL, HEADS, 2, 16, skip_linear=True)], ids=[*MODULES, "bare"]
)
def test_a_wrong_input_is_refused_by_name(make, x, error, message):
    with pytest.raises(error, match=message):
        make()(x)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_autocast_takes_any_input(make):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            make()(torch.randn(3, D_MODEL, dtype=dtype))


MAKERS = [functools.partial(kind, 48, 2, 16) for kind in (flashmhf.FlashMHF, flashmhf.MHFFN, flashmhf.DenseMoE)]
MAKERS += [functools.partial(flashmhf.SwiGLU, 48, 16), functools.partial(flashmhf.ParametricKV, 48, 2, 16)]


@pytest.mark.parametrize(
    ("make", "exception", "message"),
    [
        (lambda: flashmhf.FlashMHF(50, 3, 2), ValueError, "d_model is 50; it must be a multiple of num_heads = 3"),
        (lambda: flashmhf.FlashMHF(48, 3, 0), ValueError, "num_subnets is 0"),
        (lambda: flashmhf.FlashMHF(48, 3, 2, 1.5), TypeError, "subnet_dim must be an int"),
        (lambda: flashmhf.MHFFN(48, 0, 8), ValueError, "num_heads is 0"),
        (lambda: flashmhf.SwiGLU(48, -1), ValueError, "intermediate_dim is -1"),
        (lambda: flashmhf.ParametricKV(48, 3, 0), ValueError, "num_kv is 0"),
        (lambda: flashmhf.DenseMoE(48, 2, True), TypeError, "subnet_dim must be an int"),
        (
            lambda: flashmhf.param_groups(nn.Linear(2, 2).parameters(), 1e-3, 0.1),
            TypeError,
            "model must be a .*Module, got generator",
        ),
        (lambda: flashmhf.param_groups(nn.Linear(2, 2), "1e-3", 0.1), TypeError, "lr must be a float, got str"),
        (lambda: flashmhf.param_groups(nn.Linear(2, 2), 1e-3, -0.1), ValueError, "weight_decay is -0.1"),
        (lambda: flashmhf.Muon([], lr="1e-3"), TypeError, "lr must be a float, got str"),
        (lambda: convert.from_official([], 2, 3), TypeError, "state must be a mapping of names to tensors, got list"),
        (lambda: convert.to_official({"k": [1.0]}), TypeError, "k must be a torch.Tensor, got list"),
        (
            lambda: flashmhf.distributed.parallelize(nn.Linear(2, 2), "tp"),
            TypeError,
            "mesh must be a .*DeviceMesh, got str",
        ),
        *((lambda make=make: make(dtype="bfloat16"), TypeError, "dtype must be a torch.dtype or None, got str") for make in MAKERS),
        *((lambda make=make: make(dtype=torch.int8), TypeError, "dtype is int8; supported: bfloat16") for make in MAKERS),
    ],
)
def test_wrong_sizes_and_arguments(make, exception, message):
    with pytest.raises(exception, match=message):
        make()


def official_forward(x, state, subnets, q_norm_eps=None):
    """The official module's output, from its formulae over its own layout."""
    q = (x @ state["w_self.weight"].T).unflatten(-1, (HEADS, HEAD_DIM))
    if q_norm_eps is not None:
        q = rms_norm(q, state["q_norm.weight"], q_norm_eps)
    s = torch.einsum("...hd,hde->...he", q, state["router"]).sigmoid()
    r = s / s.sum(-1, keepdim=True).clamp(min=1e-20)
    outputs = []
    for h in range(HEADS):
        columns = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
        gate, up = (q[..., h, :] @ state[name][:, columns].T for name in ("gate_weight", "up_weight"))
        weights = r[..., h, :].repeat_interleave(gate.shape[-1] // subnets, -1)
        outputs.append((gate * gate.sigmoid() * up * weights) @ state["down_weight"][:, columns])
    return torch.cat(outputs, -1) @ state["w_self_2.weight"].T


@pytest.mark.parametrize("q_norm", [False, True])
def test_official_layout_both_ways(q_norm):
    width = SUBNETS * SUBNET_DIM
    state = {name: torch.randn(width, D_MODEL, dtype=torch.float64) / 5 for name in ("gate_weight", "up_weight", "down_weight")}
    state |= {name: torch.randn(D_MODEL, D_MODEL, dtype=torch.float64) / 7 for name in ("w_self.weight", "w_self_2.weight")}
    state["router"] = torch.randn(HEADS, HEAD_DIM, SUBNETS, dtype=torch.float64)
    if q_norm:
        state["q_norm.weight"] = torch.rand(HEADS, HEAD_DIM, dtype=torch.float64)
    module = flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, q_norm=q_norm, dtype=torch.float64)
    module.load_state_dict(convert.from_official(state, HEADS, SUBNETS))
    x = torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(module(x), official_forward(x, state, SUBNETS, 1e-5 if q_norm else None), rtol=1e-10, atol=1e-10)
    back = convert.to_official(module.state_dict())
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_official_layout_keeps_an_unused_q_norm_and_names_what_it_cannot_convert():
    module = flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM)
    official = convert.to_official(module.state_dict()) | {"q_norm.weight": torch.ones(HEADS, HEAD_DIM)}
    ours = convert.from_official(official, HEADS, SUBNETS)
    assert convert.to_official(ours).keys() == official.keys()
    with pytest.raises(ValueError, match="unknown names .*extra"):
        convert.from_official(official | {"extra": torch.ones(1)}, HEADS, SUBNETS)
    with pytest.raises(KeyError, match="up_weight"):
        convert.from_official({k: v for k, v in official.items() if k != "up_weight"}, HEADS, SUBNETS)
    with pytest.raises(ValueError, match="num_subnets = 7"):
        convert.from_official(official, HEADS, 7)
    biased = flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, bias=True).state_dict()
    assert convert.from_official(convert.to_official(biased), HEADS, SUBNETS).keys() == biased.keys()


@pytest.mark.parametrize("gated", [True, False])
def test_every_size_of_a_state_dict_is_checked_both_ways(gated):
    """One tensor of another size at a time, and other H, E and H_kv than the checkpoint's."""
    settings = {"q_norm": True, "bias": True, "num_kv_heads": 3}
    network = flashmhf.FlashMHF(48, 6, 3, 16, **settings) if gated else flashmhf.MHFFN(48, 6, 48, **settings)
    ours = network.state_dict()
    official, sizes = convert.to_official(ours), (6, 3 if gated else None)
    convert.from_official(official, *sizes, num_kv_heads=3)
    for state, call in ((ours, convert.to_official), (official, lambda s: convert.from_official(s, *sizes, num_kv_heads=3))):
        for name, value in state.items():
            for dim in range(value.dim()):
                with pytest.raises(ValueError, match="shape"):
                    call(state | {name: value.narrow(dim, 0, value.shape[dim] - 1)})
                with pytest.raises(ValueError, match="shape"):
                    call(state | {name: torch.cat([value, value], dim)})
            with pytest.raises((ValueError, KeyError), match="shape|router"):  # k of four dimensions is a gated network's
                call(state | {name: value[None]})
    for heads, subnets, kv_heads in ((6, 4, 3), (6, 1, 3), (6, 6, 3), (3, 3, 3), (6, 3, 6), (12, 3, 3), (6, None, 3)):
        if gated or subnets is None and heads != 6:
            with pytest.raises(ValueError, match="shape"):
                convert.from_official(official, heads, subnets, num_kv_heads=kv_heads)


def test_official_scales_and_activations():
    scales = convert.official_scales
    assert scales({"mhffnmoe_num_heads": 9}) == (1.0, 1.0)
    assert scales({"mhffnmoe_num_heads": 9, "mhffnmoe_apply_dot_scaling": True}) == (3.0, 1.0)
    theory = {"mhffnmoe_num_heads": 9, "mhffnmoe_apply_dot_scaling_theory": True}
    assert scales(theory) == (1.0, 1.0) and scales(theory | {"mhffnmoe_apply_dot_scaling": True}) == (9.0, 1.0)
    final = {"model_type": "mhffn", "mhffn_apply_final_scaling": True}
    assert scales(final) == (1.0, pytest.approx(0.375**0.5))
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        scales({"model_type": "llama"})
    assert [convert.official_activation({"hidden_act": name}) for name in ("swish", "gelu", "relu2")] == ["silu", "gelu", "relu2"]
    with pytest.raises(NotImplementedError, match="hidden_act='tanh' is not supported; supported: 'silu', 'gelu'"):
        convert.official_activation({"hidden_act": "tanh"})


def test_a_network_without_gate_or_projections_both_ways():
    for module in (
        flashmhf.MHFFN(D_MODEL, HEADS, 40, q_norm=True, num_kv_heads=1),
        flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, skip_linear=True),
    ):
        official = convert.to_official(module.state_dict())
        subnets = SUBNETS if "router" in official else None
        settings = {"num_kv_heads": module.num_kv_heads, "skip_linear": module.skip_linear}
        back = convert.from_official(official, HEADS, subnets, **settings)
        assert back.keys() == module.state_dict().keys()
        assert all(torch.equal(back[name], value) for name, value in module.state_dict().items())
    with pytest.raises(KeyError, match="w_self.weight"):
        convert.from_official(official, HEADS, SUBNETS)
    with pytest.raises(ValueError, match="num_kv_heads is 2; it must divide num_heads = 3"):
        convert.from_official(official, HEADS, SUBNETS, num_kv_heads=2, skip_linear=True)


def test_modules_are_one_function_of_the_operator():
    module = flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM)
    x = torch.randn(5, D_MODEL)
    q = module.split_heads(x)
    mixed = flashmhf.flash_mhf(q, module.k, module.u, module.v, flashmhf.gate(q, module.router))
    torch.testing.assert_close(module(x), module.out_proj(mixed.flatten(-2)))
    single = flashmhf.FlashMHF(D_MODEL, HEADS, 1, 32)
    plain = flashmhf.MHFFN(D_MODEL, HEADS, 32)
    plain.load_state_dict({n: p.squeeze(1) if n in "kuv" else p for n, p in single.state_dict().items() if n != "router"})
    torch.testing.assert_close(single(x), plain(x))
    assert reference.gate(q, single.router).eq(1).all()
