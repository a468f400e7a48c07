"""recompute_q: a layer keeps x and S for the backward, and no bit of a gradient changes."""

import pytest
import torch
from targets import Calls, randomised
from torch import nn
from torch.utils.checkpoint import checkpoint

import flashmhf

TOKENS, D_MODEL = 300, 64
OPTIONS = {"plain": {}, "options": {"q_norm": True, "bias": True, "num_kv_heads": 1}}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def make(recompute_q: bool = True, dtype: torch.dtype = torch.float32, **options) -> flashmhf.FlashMHF:
    torch.manual_seed(0)
    return randomised(flashmhf.FlashMHF(D_MODEL, 4, 3, 32, recompute_q=recompute_q, dtype=dtype, **options), 0.2)


def train(module, call=None, autocast=False):
    """What a step keeps for its backward, in sizes of x in the dtype of the result, and its result and gradients."""
    kept = {}

    def keep(tensor):
        if tensor.shape and tensor.shape[0] == TOKENS:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, D_MODEL, generator=generator, dtype=module.k.dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = (module if call is None else call)(x * 1)
    gradients = torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])
    return sum(kept.values()) / (TOKENS * D_MODEL * out.element_size()), (out, *gradients)


@options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"], ids=str)
def test_keeps_two_of_three_and_every_bit(options, dtype):
    autocast = dtype == "autocast"
    settings = {"dtype": torch.float32 if autocast else dtype, **options}
    kept, results = train(make(**settings), autocast=autocast)
    kept_otherwise, expected = train(make(False, **settings), autocast=autocast)
    assert kept == 2 and kept_otherwise >= 3
    assert all(map(torch.equal, results, expected))


@options
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled(options, autocast, fresh_dynamo):
    """The partitioner, which would keep a product's result, computes this one again."""
    module = make(**options)
    kept, results = train(module, torch.compile(module, fullgraph=True, backend="aot_eager"), autocast)
    _, expected = train(make(False, **options), autocast=autocast)
    assert kept == 2
    torch.testing.assert_close(results, expected, rtol=2e-2, atol=2e-2 * expected[1].abs().max().item())


def test_with_checkpointing_around_it(fresh_dynamo):
    module = make()
    _, expected = train(module)
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        kept, results = train(module, lambda x, call=call: checkpoint(call, x, use_reentrant=False))
        assert kept == 1
        torch.testing.assert_close(results, expected)


def test_weights_of_other_strides_are_read_from_a_copy():
    """As an optimizer may leave them, and as without recompute_q."""
    modules = make(), make(False)
    for weight in (each for module in modules for each in (module.k, module.v, module.router)):
        weight.data = weight.data.mT.contiguous().mT
    assert not modules[0].k.is_contiguous()
    (_, results), (_, expected) = map(train, modules)
    assert all(map(torch.equal, results, expected))


class Doubling(nn.Parameter):
    """A weight that changes the product it is in, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return 2 * out if function is nn.functional.linear else out


ORDINARY = {  # in_proj is then called once, by its own call
    "hook": lambda module: module.in_proj.register_forward_hook(lambda part, args, out: 2 * out),
    "hook of the backward": lambda module: module.in_proj.register_full_backward_hook(lambda *args: None),
    "replaced": lambda module: setattr(module, "in_proj", nn.Sequential(module.in_proj)),
    "patched": lambda module: setattr(module.in_proj, "forward", lambda x: 2 * nn.Linear.forward(module.in_proj, x)),
    "parametrised": lambda module: nn.utils.parametrizations.weight_norm(module.in_proj),
    "of a class": lambda module: setattr(module.in_proj, "weight", Doubling(module.in_proj.weight.data)),
    "part": lambda module: setattr(module, "query", lambda x: 2 * flashmhf.FlashMHF.query(module, x)),
}


@pytest.mark.parametrize("change", ORDINARY)
def test_what_changes_in_proj_takes_the_ordinary_way(change):
    results = []
    for recompute_q in (True, False):
        module = make(recompute_q)
        ORDINARY[change](module)
        kept, values = train(module)
        assert kept >= 3
        results.append(values)
    assert all(map(torch.equal, *results))


def test_modes_see_the_parts():
    module, x = make(), torch.randn(5, D_MODEL, requires_grad=True)
    with Calls() as calls:
        module(x).sum().backward()
    assert len(calls.of(torch.ops.flashmhf.gated_forward)) == 1


def test_frozen_weights_and_second_derivatives():
    module = make(q_norm=True)
    x = torch.randn(5, D_MODEL, requires_grad=True)
    expected = torch.autograd.grad(make(False, q_norm=True)(x).sum(), x)
    for trained in ("in_proj.weight", "k", "q_norm.weight", None):
        module.requires_grad_(False)
        if trained:
            module.get_parameter(trained).requires_grad_()
        out = module(x)
        out.sum().backward(inputs=[x, *([module.get_parameter(trained)] if trained else [])])
        assert torch.equal(x.grad, *expected)
        x.grad = None
    module.requires_grad_(True)
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert torch.equal(grad, *expected)
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad.square().sum().backward()
    batch = torch.randn(3, 5, D_MODEL)
    out = module(x)
    (batched,) = torch.autograd.grad(out, x, batch, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in batch]
    torch.testing.assert_close(batched, torch.stack(singly))


@options
def test_hooks_of_tensors_run_once_where_a_graph_of_the_gradients_is_made(options):
    results = []
    for recompute_q in (True, False):
        module, x = make(recompute_q, **options), torch.ones(5, D_MODEL, requires_grad=True)
        hidden = x * 2
        hidden.retain_grad()
        for tensor in (hidden, *module.parameters()):
            tensor.register_hook(lambda grad: grad / 2)
        module(hidden).square().sum().backward(create_graph=True)
        results.append([hidden.grad, x.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_compute_as_without_it(strict):
    module, x = make(), torch.randn(5, D_MODEL)
    program = torch.export.export(module, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"recompute_q": 1}, TypeError, "recompute_q must be a bool, got int"),
    ({"recompute_q": True, "skip_linear": True}, ValueError, "recompute_q is True; in_proj"),
])  # fmt: skip
def test_arguments(settings, error, message):
    with pytest.raises(error, match=message):
        flashmhf.FlashMHF(D_MODEL, 4, 3, 32, **settings)


def test_refuses_as_the_parts_do():
    with pytest.raises(TypeError, match="x has dtype float64; supported: float32, the module's dtype"):
        make()(torch.randn(2, D_MODEL, dtype=torch.float64))
