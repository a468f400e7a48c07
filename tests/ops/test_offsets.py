"""Tensors that begin inside a storage: slices of the tokens, weights in one flat buffer. Each must give what a copy of it gives."""

import copy

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf import quantize

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
D_MODEL, OFFSET = 256, 512


def into_one_buffer(module: nn.Module) -> None:
    """Moves every parameter into one flat buffer, behind NaN."""
    sizes = [-(-parameter.numel() // OFFSET) * OFFSET for parameter in module.parameters()]
    flat = next(module.parameters()).new_full((OFFSET + sum(sizes),), float("nan"))
    for parameter, begin in zip(module.parameters(), (OFFSET + sum(sizes[:i]) for i in range(len(sizes))), strict=True):
        flat[begin : begin + parameter.numel()] = parameter.detach().flatten()
        parameter.data = flat[begin : begin + parameter.numel()].view(parameter.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [2, 100, 300])
@pytest.mark.parametrize("what", ["tokens", "tokens of fp8", "weights"])
def test_what_lies_behind_other_values(device, tokens, what):
    network = flashmhf.FlashMHF(D_MODEL, 4, 3, 32, bias=True, q_norm=True, device=device, dtype=torch.bfloat16)
    module = quantize.to_fp8(network) if "fp8" in what else copy.deepcopy(network)
    x = torch.full((3 * tokens, D_MODEL), float("nan"), device=device, dtype=torch.bfloat16)
    x[tokens : 2 * tokens] = torch.randn(tokens, D_MODEL, device=device)
    x = x[tokens : 2 * tokens]
    with torch.no_grad():
        expected = module(x.clone())
        if what == "weights":
            into_one_buffer(module)
            x = x.clone()
        actual = module(x)
    assert actual.isfinite().all() and torch.equal(actual, expected)
