"""main_grad accumulation: the gradients of an ordinary network, in buffers."""

import copy

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf.integrations.megatron import accumulate_main_grad
from flashmhf.testing import relative_l2


def test_a_model_without_a_network_is_refused():
    with pytest.raises(ValueError, match="model is a Linear without a FlashMHF network"):
        accumulate_main_grad(nn.Linear(2, 2))


def pair(buffers: str = "kuv", **options) -> tuple[flashmhf.FlashMHF, flashmhf.FlashMHF]:
    """A module with these buffers, and an ordinary one with its weights."""
    plain = flashmhf.FlashMHF(64, 4, 3, 32, **options)
    module = accumulate_main_grad(nn.Sequential(copy.deepcopy(plain)))[0]
    for name in buffers:
        weight = getattr(module, name)
        weight.main_grad = torch.zeros(weight.shape)
    return module, plain


def test_main_grad_accumulation():
    (module, plain), x = pair(), torch.randn(2, 9, 64)
    for weight in (module.k, module.u, module.v):
        weight.main_grad += 1
    for _ in range(2):
        module(x).square().sum().backward()
        plain(x).square().sum().backward()
    for name in "kuv":
        weight = getattr(module, name)
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad - 1, getattr(plain, name).grad, rtol=1e-4, atol=1e-5)
    for name in ("router", "in_proj.weight", "out_proj.weight"):
        torch.testing.assert_close(
            module.get_parameter(name).grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6
        )
    # Megatron's convention: parameters that carry the flag keep their hooks firing.
    fired = []
    module.k.grad_added_to_main_grad = False
    module.k.register_post_accumulate_grad_hook(fired.append)
    module(x).sum().backward()
    assert module.k.grad_added_to_main_grad and fired
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain(x))
    del module.k.main_grad
    with pytest.raises(ValueError, match="k.main_grad is missing"):
        module(x)


@pytest.mark.parametrize("skip_linear", [False, True])
def test_main_grad_accumulation_under_autocast(skip_linear):
    """With skip_linear q is float32 where the operator computes in bf16."""
    module, plain = pair(skip_linear=skip_linear)
    inputs = [torch.randn(9, 64, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2)]
    for network, x in zip((module, plain), inputs, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = network(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    for name in "kuv":
        assert relative_l2(getattr(module, name).main_grad, getattr(plain, name).grad.double()) < 0.01
    assert relative_l2(module.router.grad, plain.router.grad.double()) < 0.01
    assert relative_l2(inputs[0].grad, inputs[1].grad.double()) < 0.01


@pytest.mark.parametrize("frozen", ["u", "ku", "kuv"])
def test_main_grad_of_frozen_weights(frozen):
    """A frozen weight needs no buffer, and one that it has stays as it was."""
    trained = set("kuv") - set(frozen)
    module, plain = pair("".join(trained) + frozen[0])
    x = torch.randn(9, 64)
    for network in (module, plain):
        for name in frozen:
            getattr(network, name).requires_grad_(False)
        network(x).square().sum().backward()
    for name in trained:
        torch.testing.assert_close(getattr(module, name).main_grad, getattr(plain, name).grad, rtol=1e-4, atol=1e-5)
    assert not getattr(module, frozen[0]).main_grad.any()
    torch.testing.assert_close(module.in_proj.weight.grad, plain.in_proj.weight.grad, rtol=1e-4, atol=1e-6)
