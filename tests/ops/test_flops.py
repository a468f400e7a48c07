"""FlopCounterMode counts the operators as the definition's products, whatever the back end does."""

from collections.abc import Callable

import pytest
import torch
from targets import RESULTS, call
from torch.utils.flop_counter import FlopCounterMode

import flashmhf
from flashmhf.ops import layer
from flashmhf.testing import problem

ops = torch.ops.flashmhf
LEADING, T, H, D_H, E, D_E = (3, 7), 21, 2, 8, 3, 5
PRODUCT, ROUTER = 2 * T * H * D_H * E * D_E, 2 * T * H * D_H * E


def count(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_the_operators_count_what_the_definition_multiplies():
    p = problem(LEADING, H, D_H, E, D_E, torch.float32)
    definition = {name: count(lambda name=name: getattr(p, name)()) // 2 for name in RESULTS}  # each in two precisions
    assert definition["forward"] == 3 * PRODUCT and definition["backward"] == 8 * PRODUCT
    assert definition["gated_forward"] == 3 * PRODUCT + ROUTER
    # the definition's own backward computes the gate once more
    assert definition["gated_backward"] == 8 * PRODUCT + 4 * ROUTER
    for name in RESULTS:
        assert count(lambda name=name: call(name, p)) == definition[name] - (ROUTER if name == "gated_backward" else 0)
    assert count(lambda: ops.forward(*p.operands)) == definition["forward"]


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_modules(backend):
    d_model = H * D_H
    x = torch.randn(T, d_model, requires_grad=True)
    linear = 2 * 2 * T * d_model**2  # in_proj and out_proj
    ffn, plain = (
        flashmhf.FlashMHF(d_model, H, E, D_E, backend=backend), flashmhf.MHFFN(d_model, H, D_E, backend=backend),
    )  # fmt: skip
    forward = linear + 3 * PRODUCT + ROUTER
    assert count(lambda: ffn(x)) == forward
    # autograd's own backward of the definition saves what the operator computes again
    products, routers = (8, 3) if backend == "eager" else (6, 2)
    backward = 2 * linear + products * PRODUCT + routers * ROUTER
    assert count(lambda: ffn(x).sum().backward()) == forward + backward
    assert count(lambda: plain(x)) == linear + 3 * PRODUCT // E


def test_modules_at_inference():
    """A counter sees the parts of a module; compiled and exported layers are one operator. FP8 counts as 16 bits do."""
    ffn = flashmhf.FlashMHF(128, 2, 3, 16)
    served, x = flashmhf.quantize.to_fp8(ffn), torch.randn(*LEADING, 128)
    with torch.no_grad():
        # the weights before: the counter's global hooks are one of the reasons to give none
        given = [each._plain_weights() for each in (ffn, served)]
        operators = [lambda weights=weights: layer.call(x, weights) for weights in given]
        assert [count(run) for run in (lambda: ffn(x), lambda: served(x), *operators)] == 4 * [
            T * (4 * 128 * 128 + 6 * 128 * 3 * 16 + 2 * 128 * 3)
        ]
        q = torch.randn(*LEADING, 2, 64)
        assert count(lambda: flashmhf.quantize.forward(q, served.packed)) == 6 * q.numel() * 3 * 16
