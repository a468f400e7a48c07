"""Activations other than SiLU: values and gradients on the back ends that have them, refusals on the one that has not."""

from __future__ import annotations

import functools

import pytest
import torch
from test_operator import check_all, dtypes_of

import flashmhf
from flashmhf import backends, reference
from flashmhf.testing import problem

OTHERS = ["gelu", "relu", "relu2"]


def make(activation, *args, **kwargs):
    p = problem(*args, **kwargs)
    p.activation = activation
    return p


@pytest.mark.parametrize("activation", OTHERS)
def test_values(target, activation):
    for dtype in dtypes_of(target):
        reason = backends.BACKENDS[target.backend].why_not(torch.device(target.device), dtype, d_h=64, d_e=48, activation=activation)
        if reason:
            pytest.skip(f"{target.backend}: {reason}")
        check_all(target, make(activation, (3, 65), 2, 64, 3, 48, dtype, target.device))
        check_all(target, make(activation, 130, 4, 64, 2, 80, dtype, target.device, gate=None, num_kv_heads=2))


@pytest.mark.parametrize("activation", list(reference.ACTIVATIONS))
def test_gradients(activation):
    p = make(activation, (2, 3), 2, 4, 3, 5, torch.float64, gate="same")
    operator = functools.partial(flashmhf.flash_mhf, activation=activation)
    assert torch.autograd.gradcheck(operator, [x.requires_grad_() for x in (*p.operands, p.r)])
    gated = functools.partial(torch.ops.flashmhf.gated_forward, eps=0.1, activation=activation)
    assert torch.autograd.gradcheck(gated, [x.detach().requires_grad_() for x in (*p.operands, p.w)])


@pytest.mark.parametrize("activation", list(reference.ACTIVATIONS))
def test_the_definition_is_transformers_function(activation):
    functions = pytest.importorskip("transformers.activations").ACT2FN
    m = torch.linspace(-9, 9, 181, dtype=torch.float64, requires_grad=True)
    expected = functions[activation](m)
    a, slope = reference.ACTIVATIONS[activation][1](m)
    torch.testing.assert_close(reference.ACTIVATIONS[activation][0](m), expected)
    torch.testing.assert_close(a, expected)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), m)[0])


def test_compiled_and_reference():
    p = make("gelu", 5, 2, 8, 2, 16, torch.float32)
    operator = functools.partial(flashmhf.flash_mhf, activation="gelu")
    expected = operator(*p.operands, p.r)
    torch.testing.assert_close(torch.compile(operator, fullgraph=True, backend="aot_eager")(*p.operands, p.r), expected)
    torch.testing.assert_close(operator(*p.operands, p.r, backend="reference"), expected)
    assert not torch.allclose(flashmhf.flash_mhf(*p.operands, p.r), expected)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_refusals(backend):
    p = problem(5, 2, 8, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="activation is 'tanh'; supported: 'silu', 'gelu', 'relu', 'relu2'"):
        flashmhf.flash_mhf(*p.operands, p.r, backend=backend, activation="tanh")


def test_hopper_names_the_back_ends_that_have_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = backends.hopper.why_not(torch.device("cuda", 0), torch.bfloat16, d_h=128, d_e=64, activation="gelu")
    assert reason == "activation is 'gelu'; supported: 'silu' (the triton and eager back ends have all)"
