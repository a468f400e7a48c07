"""Tensors that begin inside a storage: slices of the tokens, weights in one flat buffer. Each must give what a copy of it gives."""

import copy

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf import quantize

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
D_MODEL, OFFSET = 256, 512


@pytest.fixture
def network(device) -> flashmhf.FlashMHF:
    return flashmhf.FlashMHF(D_MODEL, 4, 3, 32, bias=True, q_norm=True, device=device, dtype=torch.bfloat16)


def into_one_buffer(module: nn.Module) -> None:
    """Moves every parameter into one flat buffer, behind NaN."""
    sizes = [-(-parameter.numel() // OFFSET) * OFFSET for parameter in module.parameters()]
    flat = next(module.parameters()).new_full((OFFSET + sum(sizes),), float("nan"))
    for parameter, begin in zip(module.parameters(), (OFFSET + sum(sizes[:i]) for i in range(len(sizes))), strict=True):
        flat[begin : begin + parameter.numel()] = parameter.detach().flatten()
        parameter.data = flat[begin : begin + parameter.numel()].view(parameter.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [2, 100, 300])
@pytest.mark.parametrize("fp8", [False, True])
def test_tokens_behind_others(network, device, tokens, fp8):
    module = quantize.to_fp8(network) if fp8 else network
    x = torch.full((3 * tokens, D_MODEL), float("nan"), device=device, dtype=torch.bfloat16)
    x[tokens : 2 * tokens] = torch.randn(tokens, D_MODEL, device=device)
    with torch.no_grad():
        expected, actual = module(x[tokens : 2 * tokens].clone()), module(x[tokens : 2 * tokens])
    assert actual.isfinite().all() and torch.equal(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [2, 100, 300])
def test_weights_in_one_buffer(network, device, tokens):
    moved, x = copy.deepcopy(network), torch.randn(tokens, D_MODEL, device=device).bfloat16()
    into_one_buffer(moved)
    assert all(parameter.storage_offset() > 0 for parameter in moved.parameters())
    with torch.no_grad():
        expected, actual = network(x), moved(x)
    assert actual.isfinite().all() and torch.equal(actual, expected)
