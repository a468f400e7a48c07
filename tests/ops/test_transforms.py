"""torch.vmap over the operators; backend="reference": all derivatives, per-sample gradients, export, ONNX."""

import dataclasses
import functools
import importlib.util
import itertools

import pytest
import torch
from targets import RESULTS, arguments, assert_near, leaves, randomised

import flashmhf
from flashmhf import reference
from flashmhf.testing import gated_forward, problem

ops = torch.ops.flashmhf
BATCH = 3


def small(**kwargs):
    """Heads that share weights, and an eps that shows."""
    return dataclasses.replace(problem((2, 5), 6, 4, 2, 7, torch.float64, num_kv_heads=3, **kwargs), eps=0.25)


def stacked(tensors, dims):
    """Each tensor with ``BATCH`` different multiples of it along its dimension of ``dims``."""
    return [x if dim is None else torch.stack([x, 2 * x, -x], dim) for x, dim in zip(tensors, dims, strict=True)]


def entry(tensors, dims, i):
    return [x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)]


# Every subset of batched inputs, at the first and at the last dimension
SUBSETS = [s for s in itertools.product((None, 0), repeat=5) if any(d is not None for d in s)]
ELSEWHERE = [
    (1, None, None, None, None), (2, None, None, None, 1), (None, 1, 2, 3, None), (4, 4, 4, 4, 4),
    (-1, None, None, None, -1),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("dims", [*SUBSETS, *ELSEWHERE], ids=str)
def test_vmap_of_every_choice_of_inputs(dims, backend):
    """With a gate, with a router, and without either."""
    for name, operator, definition, gate in (
        ("forward", flashmhf.flash_mhf, reference.forward, "same"),
        ("forward", flashmhf.flash_mhf, reference.forward, None),
        ("gated_forward", ops.gated_forward, gated_forward, "same"),
    ):
        tensors = [x for x in arguments(name, small(gate=gate)) if isinstance(x, torch.Tensor)]
        how = {"activation": "gelu"} | ({"eps": 0.25} if name == "gated_forward" else {})
        chosen = tuple(dim if dim is None else min(dim, x.dim()) for x, dim in zip(tensors, dims, strict=False))
        if any(dim is not None for dim in chosen):
            batch = stacked(tensors, chosen)
            actual = torch.vmap(functools.partial(operator, backend=backend, **how), in_dims=chosen)(*batch)
            expected = torch.stack([definition(*entry(batch, chosen, i), **how) for i in range(BATCH)])
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["backward", "gated_backward"])
@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("dims", [(0, 0, None, None, None, None), (1, 2, None, 3, None, 0)], ids=str)
def test_vmap_of_the_gradients(name, backend, dims):
    given = arguments(name, small())
    batch = stacked(given[:6], dims)

    def call(*x, backend=backend):
        return getattr(ops, name)(*x, *given[6:], backend=backend)

    actual = torch.vmap(call, in_dims=dims)(*batch)
    for i in range(BATCH):
        expected = call(*(x.contiguous() for x in entry(batch, dims, i)), backend="eager")
        torch.testing.assert_close([x[i] for x in actual], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (1, 1)], ids=str)
@pytest.mark.filterwarnings("error")  # PyTorch's own loop over a batch warns
def test_vmap_in_fp8(dims):
    p = problem(3, 2, 16, 2, 16, torch.float32)
    packed = flashmhf.quantize.pack_fp8(p.k, p.u, p.v).tensors
    for operator, gate in ((ops.fp8_forward, (p.r,)), (ops.fp8_gated_forward, (p.w, 0.25))):
        q, of_gate = stacked([p.q, gate[0]], dims)

        def call(q, of_gate, operator=operator, eps=gate[1:]):
            return operator(q, *packed, of_gate, *eps)

        expected = [call(*(x.contiguous() for x in entry([q, of_gate], dims, i))) for i in range(BATCH)]
        assert_near(torch.vmap(call, dims)(q, of_gate), torch.stack(expected), tolerance=1e-3)


MODULES = {
    "FlashMHF": functools.partial(flashmhf.FlashMHF, 24, 3, 2, 6, q_norm=True),
    "MHFFN": functools.partial(flashmhf.MHFFN, 24, 3, 6, num_kv_heads=1, activation="gelu"),
}


def make(name: str, **kwargs) -> torch.nn.Module:
    return randomised(MODULES[name](dtype=torch.float64, **kwargs), 0.4)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", MODULES)
def test_ensembles_and_per_sample_gradients(name, backend):
    models = [make(name, backend=backend) for _ in range(BATCH)]
    weights, x = torch.func.stack_module_state(models)[0], torch.randn(BATCH, 5, 24, dtype=torch.float64)

    def run(weights, x):
        return torch.func.functional_call(models[0], weights, (x,))

    torch.testing.assert_close(torch.vmap(run, (0, None))(weights, x), torch.stack([model(x) for model in models]))
    if backend == "reference":
        one = dict(models[0].named_parameters())
        gradients = torch.vmap(torch.func.grad(lambda w, x: run(w, x).square().sum()), (None, 0))(one, x)
        samples = [torch.autograd.grad(models[0](sample).square().sum(), list(one.values())) for sample in x]
        torch.testing.assert_close(list(gradients.values()), list(map(torch.stack, zip(*samples, strict=True))))


# backend="reference": the definition in plain differentiable operations
@pytest.mark.parametrize(("name", "gate"), [("forward", None), *((name, "same") for name in RESULTS)])
def test_every_derivative(name, gate):
    operator = flashmhf.flash_mhf if name == "forward" else getattr(ops, name)
    given, function = leaves(name, small(gate=gate)), functools.partial(operator, backend="reference")
    assert torch.autograd.gradcheck(function, given, check_forward_ad=name == "forward", fast_mode=True)
    if "forward" in name:
        assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("name", MODULES)
def test_compile_of_the_reference(name, fresh_dynamo):
    module = make(name, backend="reference").float()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (6, 3):
        x = torch.randn(2, length, 24)
        torch.testing.assert_close(compiled(x), module(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is not installed")
@pytest.mark.parametrize("name", MODULES)
def test_onnx(name):
    module, x = make(name, backend="reference").float().eval(), torch.randn(2, 6, 24)
    program = torch.onnx.export(
        module, (x,), dynamo=True, dynamic_shapes=({1: torch.export.Dim("length", min=2, max=4096)},)
    )
    evaluator = pytest.importorskip("onnx.reference")
    model = evaluator.ReferenceEvaluator(program.model_proto)
    for n in (6, 3):
        (actual,) = model.run(None, {model.input_names[0]: x[:, :n].numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), module(x[:, :n]).detach(), rtol=1e-4, atol=1e-5)
