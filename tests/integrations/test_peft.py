"""K, U and V as parameters of three dimensions, and LoRA on them with PEFT (docs/lora.md)."""

import copy
from collections import OrderedDict

import pytest
import torch
from targets import randomised
from torch import nn

import flashmhf
from flashmhf import convert
from flashmhf.integrations.peft import stack_weights


def make() -> flashmhf.FlashMHF:
    return randomised(flashmhf.FlashMHF(32, 2, 3, 16), 0.3)  # d_model, H, E, d_e


def test_stacked_weights_are_the_same_memory_and_function():
    module, x = make(), torch.randn(5, 32)
    expected, before = module(x), module.k.data_ptr()
    gradient = torch.autograd.grad(expected.sum(), module.k)[0]
    assert stack_weights(module) is module
    assert module.k.shape == module.v.shape == (6, 16, 16) and module.k.data_ptr() == before
    actual = module(x)
    assert torch.equal(actual, expected)
    assert torch.equal(torch.autograd.grad(actual.sum(), module.k)[0], gradient.view(6, 16, 16))
    with torch.no_grad():
        assert torch.equal(module(x), expected)
    module.k.requires_grad_(False)
    assert stack_weights(module, False).k.shape == (2, 3, 16, 16) and torch.equal(module(x), expected)
    assert not module.k.requires_grad and module.u.requires_grad
    with pytest.raises(TypeError, match="stacked must be a bool"):
        stack_weights(module, 1)
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        network = make()
        getattr(network.v, register)(lambda _: None)
        with pytest.raises(ValueError, match="v has .*hooks, which its new parameter would lose"):
            stack_weights(network)
        assert network.k.dim() == 4


def test_state_dicts_hold_four_dimensions_either_way():
    plain, stacked = make(), stack_weights(make())
    shapes, others = ({name: x.shape for name, x in each.state_dict().items()} for each in (stacked, plain))
    assert shapes == others
    for assign in (False, True):
        stacked.load_state_dict(plain.state_dict(), assign=assign)
        assert stacked.k.shape == (6, 16, 16) and torch.equal(stacked.k.flatten(), plain.k.flatten())
    nested = nn.Sequential(make())
    nested.load_state_dict(nn.Sequential(stacked).state_dict())
    assert torch.equal(nested[0].u, plain.u)
    official = [convert.to_official(network.state_dict())["gate_weight"] for network in (stacked, plain)]
    assert torch.equal(*official)
    with pytest.raises(RuntimeError, match="size mismatch for k"):
        stacked.load_state_dict(flashmhf.FlashMHF(32, 2, 4, 16).state_dict())


def make_model() -> nn.Sequential:
    return nn.Sequential(OrderedDict(ffn=make(), plain=randomised(flashmhf.MHFFN(32, 2, 16)), head=nn.Linear(32, 4)))


def test_lora_of_every_weight_is_stored_and_merged(tmp_path):
    """MHFFN's, [H, intermediate_dim, d_h], have three dimensions as they are. examples/lora.py shows that it learns."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base, x = make_model(), torch.randn(64, 32)
    model = copy.deepcopy(base)
    stack_weights(model.ffn)
    weights = [f"{network}.{name}" for network in ("ffn", "plain") for name in "kuv"]
    settings = {"target_modules": ["in_proj", "out_proj"], "target_parameters": weights, "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **settings))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 20 and all("lora_" in name for name in trainable)
    after = model(x)
    after.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainable.values())
    model.save_pretrained(tmp_path)
    again = copy.deepcopy(base)
    stack_weights(again.ffn)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(again, tmp_path)(x), after)
    # PEFT leaves layers inside a module whose parameters it adapts: the second call takes these
    model.merge_and_unload()
    merged = model.merge_and_unload()
    stack_weights(merged.ffn, False)
    torch.testing.assert_close(merged(x), after, rtol=1e-4, atol=1e-5)
    fresh = make_model()
    fresh.load_state_dict(merged.state_dict())
    assert torch.equal(fresh(x), merged(x))
