"""The memory of parameters: state dicts share it, tools that give tensors other strides leave it contiguous."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf.integrations.peft import stack_weights

MODULES = {
    "flashmhf": lambda: flashmhf.FlashMHF(48, 3, 2, 20),
    "options": lambda: flashmhf.FlashMHF(48, 6, 2, 20, num_kv_heads=2, q_norm=True, bias=True),
    "no projections": lambda: flashmhf.FlashMHF(48, 3, 2, 20, q_norm=True, skip_linear=True),
    "stacked": lambda: stack_weights(flashmhf.FlashMHF(48, 6, 2, 20, num_kv_heads=2)),
    "mhffn": lambda: flashmhf.MHFFN(48, 6, 20, num_kv_heads=2, q_norm=True, bias=True),
    "swiglu": lambda: flashmhf.SwiGLU(48, 50, bias=True),
    "parametric kv": lambda: flashmhf.ParametricKV(48, 3, 20, bias=True),
    "dense moe": lambda: flashmhf.DenseMoE(48, 2, 20),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


@every_module
def test_a_state_dict_is_the_parameters_memory(make):
    """Weight averages, pruning and restored snapshots write into it."""
    module = make()
    for value in module.state_dict().values():
        value.fill_(0.25)
    assert all((parameter == 0.25).all() for parameter in module.parameters())
    assert module.state_dict().keys() == dict(module.named_parameters()).keys()


@every_module
@pytest.mark.parametrize("tool", ["to", "assign", "deepcopy", "grad"])
def test_weights_stay_contiguous(make, tool):
    """torch.channels_last, meant for images, changes the strides of every parameter of four dimensions, and checkpoints keep strides."""
    module, x = make(), torch.randn(5, 48)
    expected = module(x)
    if tool == "to":
        module.to(memory_format=torch.channels_last)
    elif tool == "grad":
        module(x).sum().backward()
        nn.Sequential(module).to(memory_format=torch.channels_last)
        assert all(parameter.grad.is_contiguous() for parameter in module.parameters())
    else:
        strided = {name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in module.state_dict().items()}
        module = copy.deepcopy(module) if tool == "deepcopy" else make()
        module.load_state_dict(strided, assign=True)
    assert all(parameter.is_contiguous() for name, parameter in module.named_parameters() if name in ("k", "u", "v"))
    torch.testing.assert_close(module(x), expected)


def test_packed_weights_stay_contiguous():
    network = flashmhf.quantize.to_fp8(flashmhf.FlashMHF(128, 2, 3, 32))
    x = torch.randn(5, 128)
    expected = network(x)
    network.to(memory_format=torch.channels_last)
    assert torch.equal(network(x), expected)
    strided = {name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in network.state_dict().items()}
    network.load_state_dict(strided, assign=True)
    assert all(buffer.is_contiguous() for buffer in network.buffers())
    torch.testing.assert_close(network(x), expected)  # the projections keep a checkpoint's strides, as any linear layer does
    for value in network.state_dict().values():
        value.zero_()
    assert not any(buffer.float().any() for buffer in network.buffers())
