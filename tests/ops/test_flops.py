"""FlopCounterMode counts the operators: as many operations as the definition's products, whatever the back end does them with."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashmhf
from flashmhf import flops, reference
from flashmhf.testing import problem

ops = torch.ops.flashmhf
LEADING, T, H, D_H, E, D_E = (3, 7), 21, 2, 8, 3, 5


def count(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.fixture
def p():
    return problem(LEADING, H, D_H, E, D_E, torch.float32)


def test_the_operators_count_what_the_definition_multiplies(p):
    gate = count(lambda: reference.gate(p.q, p.w))
    gate_backward = count(lambda: reference.gate_backward(p.r, p.q, p.w))
    forward = count(lambda: reference.forward(*p.operands, p.r))
    backward = count(lambda: reference.backward(p.grad_out, *p.operands, p.r))
    assert forward == 6 * T * H * D_H * E * D_E and backward == 16 * T * H * D_H * E * D_E and gate == 2 * T * H * D_H * E
    buffers = [torch.zeros(p.k.shape) for _ in range(3)]
    assert count(lambda: ops.forward(*p.operands, p.r)) == forward
    assert count(lambda: ops.forward(*p.operands)) == forward
    assert count(lambda: ops.gated_forward(*p.operands, p.w, p.eps)) == forward + gate
    assert count(lambda: ops.backward(p.grad_out, *p.operands, p.r)) == backward
    assert count(lambda: ops.backward_accumulate_(p.grad_out, *p.operands, p.r, *buffers)) == backward
    assert count(lambda: ops.gated_backward(p.grad_out, *p.operands, p.w, p.eps)) == backward + gate_backward


@pytest.mark.parametrize("needs", [*itertools.product((True, False), repeat=2)])
def test_frozen_inputs_and_weights_spare_products(p, needs):
    products = {(True, True): 8, (True, False): 5, (False, True): 6, (False, False): 0}[needs]
    router_products = {(True, True): 3, (True, False): 2, (False, True): 2, (False, False): 0}[needs]
    one, router = 2 * T * H * D_H * E * D_E, 2 * T * H * D_H * E
    assert count(lambda: ops.backward(p.grad_out, *p.operands, p.r, needs=needs)) == products * one
    gated = count(lambda: ops.gated_backward(p.grad_out, *p.operands, p.w, p.eps, needs=needs))
    assert gated == products * one + router_products * router


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_modules(backend):
    d_model = H * D_H
    x = torch.randn(T, d_model, requires_grad=True)
    linear = 2 * 2 * T * d_model**2  # in_proj and out_proj
    ffn = flashmhf.FlashMHF(d_model, H, E, D_E, backend=backend)
    product, router = 2 * T * H * D_H * E * D_E, 2 * T * H * D_H * E
    forward = linear + 3 * product + router
    assert count(lambda: ffn(x)) == forward
    # autograd's own backward of the definition saves what the operator computes again
    backward = 2 * linear + (8 if backend == "eager" else 6) * product + (3 if backend == "eager" else 2) * router
    assert count(lambda: ffn(x).sum().backward()) == forward + backward
    plain = flashmhf.MHFFN(d_model, H, D_E, backend=backend)
    assert count(lambda: plain(x)) == linear + 3 * product // E


def test_a_module_at_inference(monkeypatch):
    """The chunks of a long input do not change the count."""
    ffn = flashmhf.FlashMHF(64, 1, 2, 16, dtype=torch.bfloat16)
    x = torch.randn(20, 64).bfloat16()
    one = count(lambda: ffn(x))
    monkeypatch.setattr(flashmhf.ops.layer, "CHUNK_TOKENS", 8)
    with torch.no_grad():
        assert count(lambda: ffn(x)) == one == 20 * (4 * 64 * 64 + 6 * 64 * 2 * 16 + 2 * 64 * 2)


def test_networks_in_fp8_count_what_the_module_counts(monkeypatch):
    ffn = flashmhf.FlashMHF(128, 2, 3, 16)
    served, x = flashmhf.quantize.to_fp8(ffn), torch.randn(*LEADING, 128)
    with torch.no_grad():
        expected = count(lambda: ffn(x))
        assert count(lambda: served(x)) == count(lambda: served._forward_parts(x)) == expected > 0
        monkeypatch.setattr(flashmhf.ops.layer, "CHUNK_TOKENS", 8)
        assert count(lambda: served(x)) == expected
        q = torch.randn(*LEADING, 2, 64)
        assert count(lambda: flashmhf.quantize.forward(q, served.packed)) == 6 * q.numel() * 3 * 16


def test_projection():
    assert flops.projection((5, 128), (64, 128), None, True) == 2 * 5 * 128 * 64
