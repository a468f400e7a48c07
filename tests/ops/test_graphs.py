"""What graphs of torch.compile, torch.export and AOTInductor hold of the operators."""

import functools
import re
import sys
import zipfile
from pathlib import Path

import fake_hopper
import pytest
import torch
from targets import RESULTS, arguments, assert_near, leaves
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import flashmhf
from flashmhf import backends, quantize
from flashmhf.backends import hopper
from flashmhf.distributed.shards import Rank, shard
from flashmhf.testing import problem

BF16 = torch.bfloat16
assert_close = functools.partial(assert_near, tolerance=2e-2)
X = torch.randn(2, 20, 128, generator=torch.Generator().manual_seed(0)).to(BF16)


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch, fresh_dynamo):
    """The hopper back end takes the CPU for its GPU. Nothing is compiled or chosen yet."""
    fake_hopper.install()
    why_not = hopper.why_not

    def for_cpu(device, dtype, **case):
        return why_not(torch.device("cuda", 0) if device.type == "cpu" else device, dtype, **case)

    monkeypatch.setattr(hopper, "library", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: hopper.CAPABILITY)
    monkeypatch.setattr(hopper, "why_not", for_cpu)
    backends.select.cache_clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    backends.select.cache_clear()


def compiled(function, step=lambda function, *inputs: function(*inputs), inputs=(X,), **options):
    """The result of ``step`` with a function that torch.compile has compiled, and the operators that its code calls."""
    result, codes = run_and_get_code(step, torch.compile(function, fullgraph=True, **options), *inputs)
    return result, sorted({name for code in codes for name in re.findall(r"torch\.ops\.(flashmhf\w*\.\w+)", code)})


def network(num_heads=2, dtype=BF16, **settings):
    return flashmhf.FlashMHF(128, num_heads, 3, 32, dtype=dtype, deterministic=True, **settings)


dynamic_or_not = pytest.mark.parametrize("dynamic", [False, True])
OPTIONS = {"q_norm": True, "bias": True, "num_kv_heads": 1}


@dynamic_or_not
@pytest.mark.parametrize("settings", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize(("served", "name"), [(nn.Identity(), "graph_layer"), (quantize.to_fp8, "graph_fp8_layer")])
@pytest.mark.parametrize("engine", [False, True])
@torch.no_grad()
def test_layer(settings, served, name, engine, dynamic):
    module = served(network(**settings))
    module = shard(module, Rank()) if engine else module  # as engines hold it
    result, found = compiled(module, dynamic=dynamic)
    assert found == [f"flashmhf_hopper.{name}"]
    assert_close(result, module(X))


@dynamic_or_not
@pytest.mark.parametrize("how", ["plain", "options", "autocast and checkpointing"])
def test_training(how, dynamic):
    mixed = how == "autocast and checkpointing"
    module = network(dtype=torch.float32 if mixed else BF16, **(OPTIONS if how == "options" else {}))

    def function(x):
        return checkpoint(module, x, use_reentrant=False) if mixed else module(x)

    def step(function, x):
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", BF16, enabled=mixed):
            out = function(x)
        return out, *torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])

    x = X.to(module.k.dtype)
    result, found = compiled(function, step, (x,), dynamic=dynamic)
    assert found == ["flashmhf_hopper.gated_backward", "flashmhf_hopper.gated_forward"]
    assert_close(result, step(module, x))


@dynamic_or_not
@pytest.mark.parametrize(
    ("name", "gate"), [("forward", None), ("forward", "same"), ("forward", "float32"), ("gated_forward", "float32")]
)
def test_functions(name, gate, dynamic):
    given = leaves(name, problem((2, 20), 2, 64, 3, 32, BF16, gate=gate))

    def function(*operands):
        return getattr(torch.ops.flashmhf, name)(*operands, deterministic=True)

    def step(function, *operands):
        out = function(*operands)
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))

    result, found = compiled(function, step, given, dynamic=dynamic)
    assert found == [f"flashmhf_hopper.{name.replace('forward', 'backward')}", f"flashmhf_hopper.{name}"]
    assert_close(result, step(function, *given))


@torch.no_grad()
def test_fp8_function():
    p = problem((2, 20), 2, 64, 3, 32, BF16)
    packed = quantize.pack_fp8(p.k, p.u, p.v).tensors
    for gate, name in (((p.r,), "fp8_forward"), ((p.w, p.eps), "fp8_gated_forward")):
        function = getattr(torch.ops.flashmhf, name)
        result, found = compiled(lambda *x, op=function: op(*x), inputs=(p.q, *packed, *gate))
        assert found == ["flashmhf_hopper.fp8_forward"]
        assert_close(result, function(p.q, *packed, *gate))


@pytest.mark.parametrize(
    "settings",
    [{"dtype": torch.float32}, {"num_heads": 4}, {"activation": "gelu"}, {"backend": "eager"}, "fp8"],
    ids=str,
)
@torch.no_grad()
def test_what_the_kernels_do_not_take_keeps_the_portable_operator(settings):
    """Which the layer is one of, whatever its options."""
    fp8 = settings == "fp8"
    module = quantize.to_fp8(network(4, q_norm=True)) if fp8 else network(q_norm=True, **settings)
    x = X.to(module.router.dtype)
    result, found = compiled(module, inputs=(x,))
    assert found == ["flashmhf.fp8_layer" if fp8 else "flashmhf.layer"]
    assert_close(result, module(x))


@torch.no_grad()
def test_another_dtype_or_number_of_tokens():
    module = network()
    made = torch.compile(module, fullgraph=True)
    counters.clear()
    for tokens in (20, 33, 47, 64):
        x = torch.randn(2, tokens, 128, dtype=BF16)
        assert_close(made(x), module(x))
    assert counters["stats"]["unique_graphs"] == 2  # the length of the first call, and any
    module.float()
    assert_close(made(X.float()), module(X.float()))
    assert counters["stats"]["unique_graphs"] == 3


@torch.no_grad()
def test_settings_are_constants_of_the_graph():
    module, inputs = network(q_norm=True), []

    def backend(graph, examples):
        inputs.append(examples)
        return graph.forward

    made = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    made(X)
    assert sum(isinstance(x, torch.Tensor) for x in inputs[0]) == 1 + len(list(module.parameters()))
    assert not any(isinstance(x, (float, torch.SymFloat)) for x in inputs[0])
    module.router_eps = 0.5
    assert_close(made(X), module(X))
    assert len(inputs) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@torch.no_grad()
def test_aot_inductor(tmp_path):
    module = network()
    program = torch.export.export(module, (X,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    with zipfile.ZipFile(package) as files:
        sources = [files.read(name).decode() for name in files.namelist() if name.endswith((".cpp", ".json"))]
    assert set(re.findall(r"flashmhf\w*::\w+", "\n".join(sources))) == {"flashmhf_hopper::graph_layer"}
    assert_close(torch._inductor.aoti_load_package(package)(X), module(X))


@pytest.mark.parametrize("gate", [None, "float32"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_fakes(gate, needs):
    for name in RESULTS if gate else ("forward", "backward"):
        given = arguments(name, problem((2, 20), 2, 64, 3, 32, BF16, gate=gate))
        settings = (True, *needs) if "backward" in name else (True,)
        op = getattr(torch.ops.flashmhf_hopper, name)
        torch.library.opcheck(op, (*given, *settings), test_utils=("test_schema", "test_faketensor"))


def test_python_calls_until_the_kernels_have_the_tensors():
    """A user waits for each: an eager step at small batches is bound by the host."""
    module, names = network(), []
    x = X.clone().requires_grad_()
    package = str(Path(flashmhf.__file__).parent)

    def count(function):
        def note(frame, event, _):
            if frame.f_code.co_filename == fake_hopper.__file__:
                sys.setprofile(None)
            elif event == "call" and frame.f_code.co_filename.startswith(package):
                names.append(frame.f_code.co_name)

        names.clear()
        sys.setprofile(note)
        try:
            return function(), len(names)
        finally:
            sys.setprofile(None)

    module(x).sum().backward()
    out, forward = count(lambda: module(x))
    with torch.autograd.set_multithreading_enabled(False):
        _, backward = count(out.sum().backward)
    with torch.no_grad():
        _, inference = count(lambda: module(x))
    assert (forward <= 28, backward <= 28, inference <= 12) == (True,) * 3, (forward, backward, inference, names)
    assert min(forward, backward, inference) > 3
