"""Modules against float64 formulae, their state dicts, and the official layout both ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf import convert

D_MODEL, HEADS, SUBNETS, SUBNET_DIM = 48, 3, 4, 20
HEAD_DIM = D_MODEL // HEADS


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module.double()


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


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_autocast_takes_any_input(make):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            make()(torch.randn(3, D_MODEL, dtype=dtype))


def test_official_layout_keeps_an_unused_q_norm_and_biases():
    module = flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM)
    official = convert.to_official(module.state_dict()) | {"q_norm.weight": torch.ones(HEADS, HEAD_DIM)}
    ours = convert.from_official(official, HEADS, SUBNETS)
    assert convert.to_official(ours).keys() == official.keys()
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
    with pytest.raises(ValueError, match="num_kv_heads is 2; it must divide num_heads = 3"):
        convert.from_official(official, HEADS, SUBNETS, num_kv_heads=2, skip_linear=True)


def test_one_subnet_is_a_network_without_gate():
    x = torch.randn(5, D_MODEL)
    single = flashmhf.FlashMHF(D_MODEL, HEADS, 1, 32)
    plain = flashmhf.MHFFN(D_MODEL, HEADS, 32)
    plain.load_state_dict({n: p.squeeze(1) if n in "kuv" else p for n, p in single.state_dict().items() if n != "router"})
    torch.testing.assert_close(single(x), plain(x))
