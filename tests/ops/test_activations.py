"""Activations other than SiLU: their definition, and refusals by the operator and by the back end that has SiLU alone."""

from __future__ import annotations

import functools

import pytest
import torch

import flashmhf
from flashmhf import backends, reference
from flashmhf.testing import problem


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
    p = problem(5, 2, 8, 2, 16, torch.float32)
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
