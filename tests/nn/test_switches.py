"""The official module's switches: grouped heads, q_norm, skip_linear, activations, scalings and initialisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf import convert
from flashmhf.nn.init import GATED_VARIANCE, OfficialInit
from flashmhf.reference import ACTIVATIONS

D_MODEL, HEADS, SUBNETS, SUBNET_DIM = 48, 6, 4, 20
HEAD_DIM = D_MODEL // HEADS
SWITCHES = [
    {},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "q_norm": True, "q_norm_eps": 1e-3},
    {"skip_linear": True},
    {"skip_linear": True, "num_kv_heads": 3, "q_norm": True, "activation": "relu2"},
    {"activation": "gelu", "bias": True},
    {"activation": "relu"},
    {"q_norm": True, "q_norm_eps": 1e-3, "bias": True},
]
IDS = ["-".join(f"{name}={value}" for name, value in switches.items()) or "none" for switches in SWITCHES]


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module.double()


def formula(x, module):
    """Head by head; weights from the module's state."""
    s = dict(module.named_parameters())
    linear = lambda name, y: y if module.skip_linear else nn.functional.linear(y, s[f"{name}.weight"], s.get(f"{name}.bias"))  # noqa: E731
    q, heads = linear("in_proj", x).unflatten(-1, (HEADS, HEAD_DIM)), []
    for h in range(HEADS):
        q_h = q[..., h, :]
        if module.q_norm is not None:
            q_h = q_h / (q_h.square().mean(-1, keepdim=True) + module.q_norm.eps).sqrt() * s["q_norm.weight"][h]
        kv = h // (HEADS // module.num_kv_heads)
        k, u, v = (s[name][kv].reshape(-1, HEAD_DIM) for name in "kuv")
        p = ACTIVATIONS[module.activation][0](q_h @ k.T) * (q_h @ u.T)
        if "router" in s:
            gate = (q_h @ s["router"][h]).sigmoid()
            p = (p.unflatten(-1, (SUBNETS, -1)) * (gate / gate.sum(-1, keepdim=True))[..., None]).flatten(-2)
        heads.append(p @ v)
    return linear("out_proj", torch.cat(heads, -1))


def networks(**switches):
    yield flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, **switches)
    yield flashmhf.MHFFN(D_MODEL, HEADS, 50, **switches)
    yield flashmhf.MHFFN(D_MODEL, HEADS, 50, backend="naive", **switches)


@pytest.mark.parametrize("leading", [(), (7,), (2, 5), (2, 0)])
@pytest.mark.parametrize("switches", SWITCHES, ids=IDS)
def test_values_and_gradients(switches, leading):
    for module in map(randomised, networks(**switches)):
        x = torch.randn(*leading, D_MODEL, dtype=torch.float64, requires_grad=True)
        actual, expected = module(x), formula(x, module)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        inputs, grad = [x, *module.parameters()], torch.randn_like(expected)
        for a, b in zip(torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        with torch.inference_mode():
            torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)


def test_state_of_grouped_heads_without_projections():
    module = flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, num_kv_heads=2, skip_linear=True)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    weights = (2, SUBNETS, SUBNET_DIM, HEAD_DIM)
    assert shapes == {"k": weights, "u": weights, "v": weights, "router": (HEADS, HEAD_DIM, SUBNETS)}
    assert "num_kv_heads=2" in repr(module)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_balanced_variance_of_an_activation(activation):
    m, n = torch.randn(2, 1_000_000, dtype=torch.float64)
    torch.testing.assert_close((ACTIVATIONS[activation][0](m) * n).square().mean().item(), GATED_VARIANCE[activation], rtol=2e-2, atol=0)
    network = flashmhf.FlashMHF(256, 4, 4, 192, activation=activation, skip_linear=True)
    network.reset_parameters(num_layers=2)
    variance = network(torch.randn(512, 256)).var().item()
    assert 0.1 < variance < 0.6, "1 / (2 num_layers), without W_out too"


def test_official_initialisation_with_gains():
    torch.manual_seed(0)
    module = flashmhf.FlashMHF(256, 4, 4, 192, num_kv_heads=2)
    gains = OfficialInit(in_proj=0.5, k=2.0, u=3.0, v=0.25, router=4.0)
    module.reset_parameters("official", official=gains)
    stds = {name: getattr(module, name).std().item() for name in ("k", "u", "v", "router")}
    for name, expected in (("k", 0.04), ("u", 0.06), ("v", 0.005), ("router", 0.08)):
        assert stds[name] == pytest.approx(expected, rel=0.1), name  # a router of 1,024 numbers
    for linear, gain in ((module.in_proj, 0.5), (module.out_proj, 0.707)):
        bound = gain * (6 / 512) ** 0.5
        assert 0.99 * bound < linear.weight.abs().max().item() <= bound
    module.reset_parameters("official", official=OfficialInit(identity=True))
    assert torch.equal(module.in_proj.weight, torch.eye(256)) and torch.equal(module.out_proj.weight, torch.eye(256))


def test_padded_subnets_are_the_same_function_and_stay_padded():
    plain = randomised(flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, num_kv_heads=2))
    padded = flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, 32, num_kv_heads=2).double()
    padded.load_state_dict(convert.resize_subnets(plain.state_dict(), 32))
    x = torch.randn(3, 5, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(padded(x), plain(x), rtol=1e-12, atol=1e-12)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1) for module in (plain, padded)]
    for _ in range(3):
        for module, optimizer in zip((plain, padded), optimizers, strict=True):
            module(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in convert.resize_subnets(padded.state_dict(), SUBNET_DIM).items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"subnet_dim is 16; k of shape \[2, 4, 20, 8\] has rows beyond it that are not zero"):
        convert.resize_subnets(plain.state_dict(), 16)
    with pytest.raises(ValueError, match=r"k has shape \[6, 50, 8\]; expected \[H_kv, E, d_e, d_h\]"):
        convert.resize_subnets(flashmhf.MHFFN(D_MODEL, HEADS, 50).state_dict(), 64)
