"""The layer's one operator: chunks, autocast, vmap, refusals, and when a module runs its parts instead."""

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from processes import run_python
from targets import Calls, doubled, randomised
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode

import flashmhf
from benchmarks.harness import timing
from flashmhf import quantize
from flashmhf.nn import multihead
from flashmhf.ops import layer

TOKENS, D_MODEL, HEADS = 20, 32, 2


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(layer, "CHUNK_TOKENS", 8)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Tokens of each call of the layer's own code, chunks included."""
    seen: list[int] = []
    values, parts = layer.values, layer._by_parts
    monkeypatch.setattr(layer, "values", lambda call: seen.append(0) or values(call))
    monkeypatch.setattr(layer, "_by_parts", lambda x, *rest: seen.append(x.shape[:-1].numel()) or parts(x, *rest))
    return seen


def make(dtype: torch.dtype = torch.float64, kind: type = flashmhf.FlashMHF, **options) -> flashmhf.FlashMHF:
    return randomised(kind(D_MODEL, HEADS, 3, 16, dtype=dtype, **options), 0.3)


def make_fp8(dtype: torch.dtype = torch.float32, **options) -> quantize.Fp8FlashMHF:
    return quantize.to_fp8(make(dtype, **options))


either = pytest.mark.parametrize("make", [make, make_fp8])


def by_parts(module: nn.Module, x: Tensor) -> Tensor:
    return module.join_heads(module._run_networks(module.query(x)))


def tokens_of(module: nn.Module, *leading: int) -> Tensor:
    return torch.randn(*leading, D_MODEL, dtype=module.router.dtype)


@either
@pytest.mark.parametrize("options", [{}, {"bias": True, "q_norm": True}], ids=["plain", "bias and q_norm"])
@pytest.mark.parametrize("leading", [(), (8,), (TOKENS,), (4, 5), (2, 5, 2), (9,), (0,), "transposed"])
def test_chunks_have_the_values_of_the_whole(calls, options, leading, make):
    module = make(**options)
    x = tokens_of(module, 5, 4).transpose(0, 1) if leading == "transposed" else tokens_of(module, *leading)
    with torch.inference_mode():
        out = module(x)
        count = x[..., 0].numel()
        assert calls[0] == 0 and len(calls) == 1 + max(1, -(-count // 8)) and max(calls[1:]) - min(calls[1:]) <= 1
        tolerance = 1e-12 if x.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(out, by_parts(module, x), rtol=tolerance, atol=tolerance)
    assert out.is_contiguous()


def test_frozen_weights_need_no_gradient_and_gradients_take_the_parts(calls):
    """Also of a subclass that changes no part."""
    module = make(kind=type("Named", (flashmhf.FlashMHF,), {"name": "x"}))
    x = tokens_of(module, TOKENS)
    for trained in ("k", "u", "router", "in_proj.weight"):
        module.requires_grad_(False).get_parameter(trained).requires_grad_()
        module(x).sum().backward()
    module.requires_grad_(False)
    module(x.clone().requires_grad_()).sum().backward()
    assert calls == []
    module(x)
    assert calls == [0, 7, 7, 6]


# What somebody else does to a module or around it. Each case changes the result or watches the parts' calls.
def double_output(module: nn.Module, args: object, out: Tensor) -> Tensor:
    return 2 * out


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        return 2 * out if function is nn.functional.linear else out


@contextlib.contextmanager
def patched(owner: object, name: str):
    """``owner.name`` gives twice its result, for every module there is."""
    with pytest.MonkeyPatch.context() as patch:
        usual = getattr(owner, name)
        patch.setattr(owner, name, lambda *args: 2 * usual(*args))
        yield


class OtherMix(flashmhf.FlashMHF):
    def _run_networks(self, q: Tensor) -> Tensor:
        return 2 * super()._run_networks(q)


def by_function(module: nn.Module, part: str) -> None:
    delattr(module, part)
    setattr(module, part, lambda x: 2 * x)


CHANGED: dict[str, Callable[[nn.Module], object]] = {
    "forward hook": lambda m: m.in_proj.register_forward_hook(double_output),
    "forward pre-hook": lambda m: m.out_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "hook on q_norm": lambda m: m.q_norm.register_forward_hook(double_output),
    "replaced projection": lambda m: setattr(m, "out_proj", nn.Sequential(m.out_proj)),
    "subclassed projection": lambda m: setattr(m.in_proj, "__class__", doubled(type(m.in_proj))),
    "projection of computed weights": lambda m: setattr(
        m.in_proj,
        "__class__",
        type("Doubled", (nn.Linear,), {"weight": property(lambda linear: 2 * linear._parameters["weight"])}),
    ),
    "replaced q_norm": lambda m: setattr(m, "q_norm", nn.Identity()),
    "q_norm by a function": lambda m: by_function(m, "q_norm"),
    "out_proj by a function": lambda m: by_function(m, "out_proj"),
    "patched projection": lambda m: setattr(m.in_proj, "forward", lambda x: 2 * x),
    "patched part": lambda m: setattr(m, "_run_networks", lambda q: 2 * q),
    "part of a subclass": lambda m: setattr(m, "__class__", OtherMix),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m.eval().in_proj),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m.eval().out_proj),
    "pruned weight": lambda m: prune.l1_unstructured(m.in_proj, "weight", amount=0.5),
    "pruned bias": lambda m: prune.l1_unstructured(m.in_proj, "bias", amount=0.5),
    "pruned k": lambda m: prune.l1_unstructured(m, "k", amount=0.5),
    "weight of another type": lambda m: setattr(
        m.in_proj, "weight", nn.Parameter(m.in_proj.weight.detach().as_subclass(type("Tagged", (Tensor,), {})))
    ),
}
FP8_CHANGED = ("forward hook", "hook on q_norm", "replaced projection", "patched projection", "q_norm by a function")
AROUND: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "global hook": lambda: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if isinstance(module, nn.Linear) else None
    ),
    "function mode": Doubling,
    "dispatch mode": Calls,
    "autocast": partial(torch.autocast, "cpu"),
    "patched nn.Linear": partial(patched, nn.Linear, "forward"),
    "patched linear": partial(patched, nn.functional, "linear"),
}


@pytest.mark.parametrize(
    ("change", "make"), [*((name, make) for name in CHANGED), *((name, make_fp8) for name in FP8_CHANGED)]
)
def test_a_changed_module_runs_its_parts(calls, change, make):
    module = make(bias=True, q_norm=True)
    x = tokens_of(module, TOKENS)
    with torch.no_grad():
        before = module(x)
        calls.clear()
        CHANGED[change](module)
        torch.testing.assert_close(module(x), by_parts(module, x))
        assert "type" in change or not torch.equal(module(x), before)
    assert calls == []


@either
@pytest.mark.parametrize("around", AROUND)
def test_what_watches_calls_sees_the_parts(calls, around, make):
    module = make(torch.float32, q_norm=True)
    x = tokens_of(module, TOKENS)
    with torch.no_grad(), AROUND[around]():
        torch.testing.assert_close(module(x), by_parts(module, x))
    assert calls == []


@pytest.mark.parametrize("change", ["forward hook", "replaced projection", "subclassed projection", *AROUND])
def test_a_compiled_changed_module_runs_its_parts(change, fresh_dynamo):
    module = make(q_norm=True)
    CHANGED.get(change, lambda module: None)(module)
    x, compiled = tokens_of(module, TOKENS), torch.compile(module, fullgraph=change in CHANGED, backend="aot_eager")
    with torch.no_grad(), AROUND.get(change, contextlib.nullcontext)():
        torch.testing.assert_close(compiled(x), by_parts(module, x))


@pytest.mark.parametrize(
    ("change", "make"),
    [(name, make) for name in ("replaced projection", "patched projection", "patched part", "pruned k", "autocast")]
    + [(name, make_fp8) for name in ("replaced projection", "patched projection")]
    + [("q_norm by a function", each) for each in (make, make_fp8)]
    + [("patched linear", each) for each in (make, make_fp8)],
)
def test_a_compiled_module_notices_what_pytorchs_own_do(change, make, fresh_dynamo):
    """They ask in every call for all but hooks and classes."""
    module = make(torch.float32, q_norm=True)
    x, compiled = tokens_of(module, TOKENS), torch.compile(module, backend="eager")
    with torch.no_grad():
        before = compiled(x)
        CHANGED.get(change, lambda module: None)(module)
        with AROUND.get(change, contextlib.nullcontext)():
            torch.testing.assert_close(compiled(x), module(x))
            assert change == "replaced projection" or not torch.equal(compiled(x), before)


# Patches of classes: each changes what the training step's parts compute
def of_class(owner: type, name: str) -> tuple[type, str, Callable]:
    usual = getattr(owner, name)
    return owner, name, lambda self, x: 2 * usual(self, x)


def called_twice(owner: type, name: str) -> tuple[type, str, Callable]:
    usual = getattr(owner, name)
    return owner, name, lambda self, *args, **kwargs: usual(self, *args, **kwargs) * (1 + isinstance(self, nn.Linear))


CLASSES = [
    of_class(multihead.HeadRMSNorm, "forward"), of_class(nn.Linear, "forward"),
    *(of_class(flashmhf.FlashMHF, name) for name in ("split_heads", "normalise", "query", "_heads", "join_heads")),
    of_class(multihead.GroupedHeads, "normalise"), of_class(multihead.MultiHead, "join_heads"),
    of_class(multihead.Heads, "split_heads"), called_twice(nn.Module, "__call__"),
    called_twice(nn.Module, "_call_impl"), (flashmhf.FlashMHF, "router_eps", property(lambda self: 0.5)),
]  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "other"), CLASSES, ids=[f"{owner.__name__}.{name}" for owner, name, _ in CLASSES]
)
def test_a_patched_class_counts_in_training_and_at_inference(monkeypatch, owner, name, other, compiled, fresh_dynamo):
    module, served = make(torch.float32, q_norm=True), make_fp8(q_norm=True)
    x = tokens_of(module, 8)
    with torch.no_grad():
        before = module(x), served(x)
        monkeypatch.setattr(owner, name, other, raising=False)
        call = torch.compile(module, backend="eager") if compiled else module
        after = call(x), served(x)
    with torch.enable_grad():
        trained = module(x)
    torch.testing.assert_close(after[0], trained.detach())
    assert not torch.allclose(after[0], before[0])
    changes_fp8 = issubclass(quantize.Fp8FlashMHF, owner) or owner in (nn.Linear, multihead.HeadRMSNorm)
    assert torch.equal(after[1], before[1]) != changes_fp8


PATCHED_BEFORE = """
import sys, torch
if sys.argv[1] == "functional":
    usual, torch.nn.functional.linear = torch.nn.functional.linear, lambda *args: 2 * usual(*args)
else:
    owner = torch.nn.Linear if sys.argv[1] == "forward" else torch.nn.Module
    usual = getattr(owner, sys.argv[1])
    def other(self, *args):
        return usual(self, *args) * (1 + isinstance(self, torch.nn.Linear))
    setattr(owner, sys.argv[1], other)
import flashmhf
torch.manual_seed(0)
module = flashmhf.FlashMHF(32, 2, 2, 16)
served = flashmhf.quantize.to_fp8(module)
x = torch.randn(4, 32)
trained = module(x)
with torch.no_grad():
    assert torch.equal(module(x), trained)
    assert (served(x) - trained).norm() < 0.1 * trained.norm()
"""


@pytest.mark.parametrize("what", ["forward", "__call__", "functional"])
def test_a_patch_from_before_the_import_counts(what):
    """Those from after it are in the tables above."""
    run_python("-c", PATCHED_BEFORE, what)


@pytest.mark.parametrize("how", ["property", "__getattribute__"])
@pytest.mark.parametrize("name", ["k", "router", "in_proj", "out_proj", "q_norm"])
def test_what_a_subclass_computes_counts(name, how):
    def halved(self: nn.Module) -> object:
        part = nn.Module.__getattr__(self, name)
        return part / 2 if isinstance(part, Tensor) else lambda x: part(x) / 2

    def found(self: nn.Module, key: str) -> object:
        return halved(self) if key == name else object.__getattribute__(self, key)

    module = make(q_norm=name == "q_norm")
    x = tokens_of(module, 8)
    with torch.no_grad():
        before = module(x)
    body = {name: property(halved)} if how == "property" else {"__getattribute__": found}
    module.__class__ = type("Halved", (flashmhf.FlashMHF,), body)
    trained = module(x)
    assert not torch.allclose(trained, before)
    with torch.no_grad():
        assert torch.equal(module(x), trained)


MISSING: dict[str, Callable[[nn.Module], None]] = {
    "no q_norm": lambda m: delattr(m, "q_norm"),
    "no in_proj": lambda m: delattr(m, "in_proj"),
    "no router": lambda m: delattr(m, "router"),
    "router None": lambda m: setattr(m, "router", None),
}


@either
@pytest.mark.parametrize("lose", MISSING.values(), ids=MISSING)
def test_what_is_missing_is_missed_at_inference_too(lose, make):
    module = make(q_norm=True)
    x = tokens_of(module, 8)
    lose(module)
    with torch.no_grad(), pytest.raises(AttributeError):
        module(x)


def test_vmap_of_the_operator():
    module = make(q_norm=True)
    k = torch.stack([module.k.detach()] * 3)
    x = torch.randn(4, 3, D_MODEL, dtype=torch.float64)

    def call(x: Tensor, k: Tensor) -> Tensor:
        weights = module._plain_weights()
        return layer.call(x, weights._replace(networks=(k, *weights.networks[1:])))

    with torch.no_grad():
        for dims, given in (((1, None), k[0]), ((1, 0), k)):
            out = torch.vmap(call, dims, 1)(x, given)
            torch.testing.assert_close(out, by_parts(module, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("strict", "name"),
    [(False, "layer"), (True, "layer"), (False, "fp8_layer"), (False, "gated_forward"), (True, "gated_forward")],
)
def test_exports(strict, name):
    """With gradients the parts of the layer, with the operator of its networks alone."""
    module = (make_fp8 if name == "fp8_layer" else make)()
    with torch.set_grad_enabled(name == "gated_forward"):
        shapes = ({0: torch.export.Dim("tokens", min=2)},)
        program = torch.export.export(module, (tokens_of(module, TOKENS),), dynamic_shapes=shapes, strict=strict)
        longer = tokens_of(module, 3 * TOKENS)
        assert torch.equal(program.module()(longer), module(longer))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ours = [target for target in called if "aten" not in target or name != "gated_forward"]
    assert ours == [f"flashmhf.{name}.default"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton", "eager"])
def test_peak_memory_beyond_the_input(backend, monkeypatch):
    """The result and one chunk: 1 + 1/4 buffers of [T, d_model]."""
    reason = flashmhf.info().reasons[backend]
    if reason:
        pytest.skip(f"{backend} is not usable here: {reason}")
    monkeypatch.setattr(layer, "CHUNK_TOKENS", 16384)
    tokens, d_model = 4 * 16384, 1024
    module = flashmhf.FlashMHF(d_model, 8, 2, backend=backend, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, d_model, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        buffers = timing.peak_memory(lambda: module(x), x.device) / (tokens * d_model * 2)
    assert buffers <= (1.5 if backend != "eager" else 4), f"{buffers:.2f} buffers"


@either
def test_autocast_of_the_operator(make):
    """As the parts: projections and networks in its dtype, gate and q_norm in float32; compilers know the dtype."""
    module = make(torch.float32, bias=True, q_norm=True)
    x = tokens_of(module, 5)

    def call(x: Tensor) -> Tensor:
        return layer.call(x, module._plain_weights())

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, expected = call(x), by_parts(module, x)
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        compiled = torch.compile(lambda x: call(x) * 2, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), 2 * out)
    with torch.no_grad():
        assert (out - module(x)).norm() < 0.05 * module(x).norm()


@pytest.mark.parametrize("key", ["CPU", "CUDA", "MPS", "XPU", "HPU", "PrivateUse1"])
def test_every_operator_is_for_every_device(key):
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd")
    ours = [name for name in names if name.startswith("flashmhf::")]
    assert len(ours) == 8
    for name in ours:
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key)
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, f"Autograd{key}")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{key}")


# The operator by itself: what it refuses, and on which devices; opcheck
def operands(tokens: int) -> dict:
    """The operator's arguments for a network with every option."""
    network = flashmhf.FlashMHF(256, 4, 3, 32, bias=True, q_norm=True).requires_grad_(False)
    in_w, in_bias, networks, *rest = network._plain_weights()
    values = (torch.randn(tokens, 256), in_w, in_bias, *networks, *rest)
    names = [argument.name for argument in torch.ops.flashmhf.layer.default._schema.arguments]
    return dict(zip(names, values, strict=False))


REFUSED = [  # argument, what it becomes, and the error
    ("x", lambda x: x.long(), TypeError, "x has dtype int64; supported: bfloat16"),
    ("x", lambda x: x.clone().requires_grad_(), NotImplementedError, "gradient"),
    ("in_w", lambda w: w.double(), TypeError, r"in_w has dtype float64; supported: float32 \(x's dtype\)"),
    ("in_w", lambda w: w[1:], ValueError, "in_w has shape"),
    ("in_bias", lambda b: b[:1], ValueError, r"in_bias has shape \[1\]; expected \[256\]"),
    ("k", lambda k: k[:0], ValueError, "k has shape .*; H_kv must be at least 1"),
    ("u", lambda u: u[:, :, :-1], ValueError, "u has shape"),
    ("w", lambda w: w.double(), TypeError, "w has dtype float64; supported: float32"),
    ("eps", lambda eps: -1.0, ValueError, "eps is -1.0; supported: finite numbers from 0"),
    ("out_w", lambda w: w.bfloat16(), TypeError, "out_w has dtype bfloat16; supported: float32"),
    ("out_bias", lambda b: torch.tensor(1.0), ValueError, r"out_bias has shape \[\]; expected \[256\]"),
    ("q_norm", lambda w: w[:1], ValueError, r"q_norm has shape \[1, 64\]; expected \[4, 64\] \(\[H, d_h\]\)"),
    ("q_norm_eps", lambda eps: float("nan"), ValueError, "q_norm_eps is nan; supported: finite numbers from 0"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize(("name", "spoil", "error", "message"), REFUSED)
def test_every_argument_of_the_operator_is_checked(name, spoil, error, message, tokens, device):
    def call(arguments: dict) -> Tensor:
        placed = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in arguments.items()}
        return torch.ops.flashmhf.layer(**placed, backend="auto" if device == "cpu" else "hopper")  # shapes need no GPU

    given = operands(tokens)
    assert call(given).shape == (tokens, 256)
    with pytest.raises(error, match=message):
        call(given | {name: spoil(given[name])})


def test_opcheck():
    given = operands(5)
    norm = {name: given.pop(name) for name in ("q_norm", "q_norm_eps")}
    torch.library.opcheck(torch.ops.flashmhf.layer, tuple(given.values()))
    torch.library.opcheck(torch.ops.flashmhf.layer, tuple(given.values()), norm)


# Tensors that begin inside a storage: slices of the tokens, weights in one flat buffer
@pytest.mark.parametrize("tokens", [2, 100, 300])
@pytest.mark.parametrize("what", ["tokens", "tokens of fp8", "weights"])
def test_what_lies_behind_other_values(monkeypatch, device, tokens, what):
    monkeypatch.setattr(layer, "CHUNK_TOKENS", 16384)
    module = flashmhf.FlashMHF(256, 4, 3, 32, bias=True, q_norm=True, device=device, dtype=torch.bfloat16)
    module = quantize.to_fp8(module) if what == "tokens of fp8" else module
    x = torch.full((3 * tokens, 256), torch.nan, device=device, dtype=torch.bfloat16)[tokens : 2 * tokens]
    x.normal_()
    with torch.no_grad():
        expected = module(x.clone())
        if what == "weights":  # every parameter in one flat buffer, behind NaN
            sizes = [512, *(-(-parameter.numel() // 512) * 512 for parameter in module.parameters())]
            pieces = x.new_full((sum(sizes),), torch.nan).split(sizes)
            for parameter, piece in zip(module.parameters(), pieces[1:], strict=True):
                piece[: parameter.numel()] = parameter.detach().flatten()
                parameter.data = piece[: parameter.numel()].view(parameter.shape)
            x = x.clone()
        actual = module(x)
    assert actual.isfinite().all() and torch.equal(actual, expected)


@either
def test_what_a_projection_cannot_take_is_named(make):
    module = make(torch.bfloat16)
    for calls in (contextlib.nullcontext(), torch.no_grad()):
        with calls, pytest.raises(TypeError, match="^x has dtype float32; supported: bfloat16, the module's dtype"):
            module(torch.randn(3, D_MODEL))
    module.out_proj.float()
    found = "the input of out_proj has dtype bfloat16; supported: float32|out_w has dtype float32; supported: bfloat16"
    with pytest.raises(TypeError, match=f"^({found})"):
        module(torch.randn(3, D_MODEL, dtype=torch.bfloat16))
