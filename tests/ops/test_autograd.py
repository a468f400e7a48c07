"""Derivatives: the definition's, what is saved, what is refused, autocast, checkpointing."""

import dataclasses
import functools

import pytest
import torch
from targets import Calls, call, leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flashmhf
from flashmhf import reference
from flashmhf.backends import eager
from flashmhf.ops import gated_flash_mhf
from flashmhf.testing import problem

ops = torch.ops.flashmhf
both = pytest.mark.parametrize("name", ["forward", "gated_forward"])
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def float64_problem(gate="same", **kwargs):
    return problem((2, 3), 2, 4, 3, 5, torch.float64, gate=gate, **kwargs)


@pytest.mark.parametrize("activation", list(reference.ACTIVATIONS))
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_definition_and_its_written_out_gradients(kv_heads, activation):
    """By einsum with a weight head for each of q's heads, and autograd."""
    p = float64_problem(num_kv_heads=kv_heads)
    inputs = leaves("forward", p)
    q, *weights, r = inputs
    k, u, v = (torch.stack([x[h // (2 // kv_heads)] for h in range(2)]) for x in weights)
    m, n = (torch.einsum("...hd,hejd->...hej", q, x) for x in (k, u))
    out = torch.einsum("...he,...hej,hejd->...hd", r, reference.ACTIVATIONS[activation][0](m) * n, v)
    close(reference.forward(*inputs, activation=activation), out)
    expected = torch.autograd.grad(out, inputs, p.grad_out)
    close(reference.backward(p.grad_out, *inputs, activation=activation), expected)
    grad_r, (q, w) = torch.randn_like(p.r), (p.q.requires_grad_(), p.w.requires_grad_())
    scores = torch.einsum("...hd,hde->...he", q, w).sigmoid()
    gate = scores / (scores.sum(-1, keepdim=True) + 0.1)
    actual = flashmhf.gate(q, w, 0.1)
    close(actual, gate)
    expected = torch.autograd.grad(gate, (q, w), grad_r)
    close(reference.gate_backward(grad_r, q, w, 0.1), expected)
    close(torch.autograd.grad(actual, (q, w), grad_r), expected)


@pytest.mark.parametrize("needed", [(0,), (1,), (4,), (0, 3), (2, 4), ()])
def test_only_what_needs_a_gradient_gets_one(needed):
    p = float64_problem()
    inputs = [x.detach().requires_grad_(i in needed) for i, x in enumerate((*p.operands, p.r))]
    out = flashmhf.flash_mhf(*inputs)
    assert out.requires_grad == bool(needed)
    if needed:
        out.backward(p.grad_out)
    assert tuple(i for i, x in enumerate(inputs) if x.grad is not None) == needed
    expected = reference.backward(p.grad_out, *p.operands, p.r)
    close([inputs[i].grad for i in needed], [expected[i] for i in needed])


def test_saves_the_inputs_only(target):
    p = problem(256, 2, 64, 3, 64, target.dtype, target.device)
    inputs, saved = leaves("forward", p), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        flashmhf.flash_mhf(*inputs, backend=target.backend)
    assert sorted(saved) == sorted(x.data_ptr() for x in inputs)


@both
def test_second_derivatives_raise(target, name):
    inputs = leaves(name, problem(64, 2, 64, 2, 64, target.dtype, target.device))
    out = getattr(ops, name)(*inputs, backend=target.backend)
    (grad,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match='second derivative.*backend="reference"'):
        grad.square().sum().backward()


@both
def test_function_transforms_and_forward_mode_raise(name):
    p = float64_problem()

    def function(q):
        return call(name, dataclasses.replace(p, q=q))[0]

    for transform in (
        lambda q: torch.func.grad(lambda x: function(x).sum())(q),
        lambda q: torch.func.vjp(function, q),
        lambda q: torch.func.jvp(function, (q,), (q,)),
        lambda q: torch.func.hessian(lambda x: function(x).sum())(q),
    ):
        with pytest.raises(NotImplementedError, match='torch.func transform.*backend="reference"'):
            transform(p.q)
    with pytest.raises(NotImplementedError, match="forward mode"), torch.autograd.forward_ad.dual_level():
        function(torch.autograd.forward_ad.make_dual(p.q, p.q))


@pytest.mark.parametrize(("in_forward", "argument"), [(True, None), (False, None), (False, True)])
def test_backward_does_what_forward_was_told(in_forward, argument):
    torch.use_deterministic_algorithms(in_forward)
    try:
        out = flashmhf.flash_mhf(
            *leaves("forward", float64_problem()), deterministic=argument, backend="eager", activation="gelu"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    with Calls() as calls:
        out.sum().backward()
    ((args, kwargs),) = calls.of(ops.backward)
    assert args[6:] == ((True,) if in_forward or argument else ())  # the dispatcher leaves out what is a default
    assert (kwargs["backend"], kwargs["activation"]) == ("eager", "gelu")


@both
def test_autocast_casts_operands_and_keeps_the_gate(name):
    p = problem((2, 50), 4, 64, 3, 64, torch.float32, num_kv_heads=2)
    operator, inputs = functools.partial(getattr(ops, name), activation="gelu"), leaves(name, p)
    with torch.autocast("cpu", dtype=torch.bfloat16), Calls() as calls:
        out = operator(*inputs)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    ((args, _),) = calls.of(getattr(ops, name))
    assert [x.dtype for x in args[:5]] == [torch.bfloat16] * 4 + [torch.float32]
    assert all(x.grad.dtype == torch.float32 for x in inputs[:5])
    # What ran inside the autocast region was exactly the 16-bit operator: nothing in it was cast again.
    with torch.no_grad():
        assert torch.equal(out, operator(*(x.bfloat16() for x in inputs[:4]), *inputs[4:]))


def test_batched_gradients():
    p = float64_problem()
    inputs = leaves("forward", p)
    out, grads = flashmhf.flash_mhf(*inputs), torch.stack([p.grad_out, -p.grad_out])
    expected = reference.backward(p.grad_out, *inputs)
    batched = torch.autograd.grad(out, inputs, grads, is_grads_batched=True)
    close(batched, [torch.stack([one, -one]) for one in expected])


@pytest.mark.parametrize("policy", ["full", "save operator", "recompute operator"])
def test_checkpointing(policy):
    module = flashmhf.FlashMHF(64, 4, 3, 32, dtype=torch.float64)
    x = torch.randn(2, 9, 64, dtype=torch.float64, requires_grad=True)
    module(x).sum().backward()
    expected, x.grad = x.grad, None

    def choose(ctx, op, *args, **kwargs):
        save = policy == "save operator" and op is ops.gated_forward.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    with Calls() as calls:
        how = {} if policy == "full" else {"context_fn": contexts}
        checkpoint(module, x, use_reentrant=False, **how).sum().backward()
    close(x.grad, expected)
    assert len(calls.of(ops.gated_forward)) == (1 if policy == "save operator" else 2)


@pytest.mark.parametrize("name", ["forward", "gated_forward"])
def test_back_ends_get_no_negative_bits(monkeypatch, name):
    """imag of a conjugate has one, and so has a gradient on its way through both: Triton reads memory as it is."""
    got = []
    for direction in ("forward", "backward"):
        run = getattr(eager, direction)
        watched = functools.partial(lambda run, *given: got.extend(given) or run(*given), run)
        monkeypatch.setattr(eager, direction, watched)
    p = float64_problem()
    q = torch.complex(p.q, -p.q).conj().imag
    assert q.is_neg()
    _, *others = leaves(name, p)
    results = {}
    for backend in ("eager", "reference"):
        x = q.detach().requires_grad_()
        function = gated_flash_mhf if name == "gated_forward" else flashmhf.flash_mhf
        out = function(x, *others, backend=backend)
        torch.complex(out, out).conj().imag.square().sum().backward()
        results[backend] = out, x.grad
    tensors = [x for x in got if isinstance(x, torch.Tensor)]
    assert len(tensors) > 8 and not any(x.is_neg() for x in tensors)
    close(*results.values())
