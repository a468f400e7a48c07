"""FP8 through torchao's ``quantize_``, alone and beside torchao's own configurations."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf import quantize

ao = pytest.importorskip("torchao.quantization")
integration = pytest.importorskip("flashmhf.integrations.torchao")


@pytest.fixture
def model():
    blocks = (OrderedDict(attention=nn.Linear(64, 64), ffn=flashmhf.FlashMHF(64, 2, 3, 32)) for _ in range(2))
    return nn.Sequential(*map(nn.Sequential, blocks)).eval()


def test_is_what_to_fp8_makes(model):
    expected = [quantize.to_fp8(block.ffn) for block in model]
    ao.quantize_(model, integration.Fp8Config(), filter_fn=quantize.is_flashmhf)
    x = torch.randn(5, 64)
    with torch.no_grad():
        for block, network in zip(model, expected, strict=True):
            assert isinstance(block.ffn, quantize.Fp8FlashMHF) and type(block.attention) is nn.Linear
            assert torch.equal(block.ffn(x), network(x))


def test_beside_a_configuration_of_torchao(model):
    x = torch.randn(5, 64)
    with torch.no_grad():
        exact = model(x)
        ao.quantize_(model, integration.Fp8Config(), filter_fn=quantize.is_flashmhf)
        packed = [block.ffn.packed for block in model]
        ao.quantize_(model, ao.Int8WeightOnlyConfig())  # what is still linear, the networks' projections among it
        for block, before in zip(model, packed, strict=True):
            for layer in (block.attention, block.ffn.in_proj, block.ffn.out_proj):
                assert type(layer.weight) is not nn.Parameter
            assert all(
                map(torch.equal, *([x.view(torch.uint8) for x in each.tensors] for each in (block.ffn.packed, before)))
            )
        assert (model(x) - exact).norm() <= 0.2 * exact.norm()


def test_linear_layers_are_refused(model):
    with pytest.raises(ValueError, match="Fp8Config got a Linear; supported: FlashMHF, by quantize_"):
        ao.quantize_(model, integration.Fp8Config())
