"""Bad input: the stated exception, naming the argument, in every mode; and the next valid call still works."""

import contextlib
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from targets import VIEWS, shifted

import flashmhf
from flashmhf.backends import hopper
from flashmhf.backends.contract import Settings
from flashmhf.testing import problem

ops = torch.ops.flashmhf
H, E, D_E, D_H, T = 2, 3, 32, 64, 10
NO_EPS, FROM_0 = (-1.0, math.nan, math.inf), "supported: finite numbers from 0"


def good(device="cpu", dtype=torch.float32):
    p = problem(T, H, D_H, E, D_E, dtype, device)
    return {"q": p.q, "k": p.k, "u": p.u, "v": p.v, "r": p.r, "w": p.w, "eps": 1e-20, "grad_out": p.grad_out}


def edited(names, edit):
    return lambda x: x | {name: edit(x[name]) for name in names.split()}


def missing(*names):
    """None for a tensor, which the dispatcher passes on to the operator."""
    return {
        f"no {n}": (edited(n, lambda _: None), TypeError, rf"\b{n} must be a torch.Tensor, got NoneType") for n in names
    }


def elsewhere(*names):
    def moved(x):
        return x.to("meta" if x.device.type == "cpu" else "cpu")

    return {f"{n} on another device": (edited(n, moved), ValueError, rf"\b{n} is on .* but . is on") for n in names}


def not_contiguous(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


# argument, how it is spoiled, exception, part of the message beside the argument's name
BAD = {
    "q of integers": (edited("q k u v grad_out", torch.Tensor.int), TypeError, "q has dtype int32"),
    "q of rank 1": (edited("q", lambda q: q[0, 0]), ValueError, r"q has shape \[64\]"),
    "k of rank 3": (edited("k", lambda k: k[:, 0]), ValueError, "k has shape"),
    **{
        f"{n} of another dtype": (edited(n, torch.Tensor.half), TypeError, f"{n} has dtype float16; supported: float32")
        for n in "kuv"
    },
    "H mismatch": (edited("q", lambda q: q[:, :1]), ValueError, "k has shape .* H = 1"),
    "H no multiple": (edited("q", lambda q: q.repeat(1, 2, 1)[:, :3]), ValueError, "k has shape .* divides H = 3"),
    "d_h mismatch": (edited("q", lambda q: q[..., :32]), ValueError, "k has shape .* d_h = 32"),
    "u of another shape": (edited("u", lambda u: u[:, :2]), ValueError, "u has shape"),
    "v of another shape": (edited("v", lambda v: v[:, :, :16]), ValueError, "v has shape"),
    "no sub-networks": (edited("k u v", lambda x: x[:, :0]), ValueError, "E must be at least 1"),
    "k not contiguous": (edited("k", not_contiguous), ValueError, "k has strides"),
    "v not contiguous": (edited("v", lambda v: v.repeat(1, 1, 1, 2)[..., ::2]), ValueError, "v has strides"),
    **elsewhere(*"kuv"),
    **missing(*"qkuv"),
}
BAD_GATE = {
    "r of another dtype": (edited("r", torch.Tensor.double), TypeError, "r has dtype float64; supported: float32"),
    "r of integers": (edited("r", torch.Tensor.int), TypeError, "r has dtype int32"),
    "r of another E": (edited("r", lambda r: r[..., :2]), ValueError, "r has shape"),
    "r of another T": (edited("r", lambda r: r[:5]), ValueError, "r has shape"),
    "r of another rank": (edited("r", lambda r: r[None]), ValueError, "r has shape"), **elsewhere("r"),
}  # fmt: skip
BAD_ROUTER = {
    "w of another dtype": (edited("w", torch.Tensor.double), TypeError, "w has dtype float64"),
    "w of rank 2": (edited("w", lambda w: w[0]), ValueError, "w has shape"),
    "w transposed": (edited("w", lambda w: w.mT), ValueError, "w has shape"),
    "w not contiguous": (edited("w", not_contiguous), ValueError, "w has strides"),
    **{f"eps {x}": (edited("eps", lambda _, x=x: x), ValueError, f"eps is {x}; {FROM_0}") for x in NO_EPS},
    **elsewhere("w"), **missing("w"),
}  # fmt: skip
BAD_GRAD = {
    "grad_out of another dtype": (edited("grad_out", torch.Tensor.half), TypeError, "grad_out has dtype float16"),
    "grad_out of another shape": (edited("grad_out", lambda g: g[:5]), ValueError, "grad_out has shape"),
    **elsewhere("grad_out"), **missing("grad_out"),
}  # fmt: skip


def call_of(name):
    def call(x, **kwargs):
        gate = ("w", "eps") if "gated" in name else ("r",)
        names = [*(["grad_out"] if "backward" in name else []), *"qkuv", *gate]
        return getattr(ops, name)(*map(x.get, names), **kwargs)

    return call


CALLS = {
    "forward": BAD | BAD_GATE, "gated_forward": BAD | BAD_ROUTER, "backward": BAD | BAD_GATE | BAD_GRAD,
    "gated_backward": BAD | BAD_ROUTER | BAD_GRAD,
}  # fmt: skip
CASES = [
    pytest.param(call_of(call), *case, id=f"{call}: {name}")
    for call, cases in CALLS.items()
    for name, case in cases.items()
]


@pytest.mark.parametrize(("call", "spoil", "exception", "message"), CASES)
def test_bad_input(call, spoil, exception, message):
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            inputs = spoil(good())
            with pytest.raises(exception, match=message):
                call(inputs)
            call(good())


@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_serves_after_each_refusal(name, gpu_backend):
    call = call_of(name)
    for spoil, exception, message in CALLS[name].values():  # messages about dtypes are of q in float32
        dtype, backend = (torch.float32, "eager") if exception is TypeError else (torch.bfloat16, gpu_backend)
        with pytest.raises(exception, match=message):
            call(spoil(good("cuda", dtype)), backend=backend)
        call(good("cuda", torch.bfloat16), backend=gpu_backend)
        torch.cuda.synchronize()


@pytest.mark.parametrize(("call", "spoil", "exception", "message"), CASES[:: len(CASES) // 12])
def test_bad_input_under_compile(call, spoil, exception, message, fresh_dynamo):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=message):
        compiled(spoil(good()))
    compiled(good())


NAMES = "'auto', 'hopper', 'triton', 'eager'"
TANH = "activation is 'tanh'; supported: 'silu', 'gelu', 'relu', 'relu2'"


@pytest.mark.parametrize(("call", "exception", "message"), [
    (lambda x: flashmhf.flash_mhf(x.q, [1, 2], x.u, x.v), TypeError, "k must be a torch.Tensor, got list"),
    (lambda x: flashmhf.flash_mhf(x.q, x.k, x.u, x.v, x.r.long()), TypeError,
     r"r has dtype int64; supported: float32 \(q's dtype\)$"),
    (lambda x: flashmhf.flash_mhf(*(y.double() for y in (x.q, x.k, x.u, x.v)), x.r.long()), TypeError,
     r"r has dtype int64; supported: float32 or float64 \(q's dtype\)$"),
    (lambda x: flashmhf.flash_mhf(x.q, x.k, x.u, x.v, backend="cublas"), ValueError,
     f"backend is 'cublas'; supported: {NAMES}"),
    (lambda x: flashmhf.flash_mhf(x.q, x.k, x.u, x.v, backend=None), TypeError, "backend must be a str, got NoneType"),
    (lambda x: flashmhf.flash_mhf(x.q, x.k, x.u, x.v, deterministic="yes"), TypeError,
     "deterministic must be a bool or None, got str"),
    (lambda x: flashmhf.flash_mhf(x.q, x.k, x.u, x.v, backend="auto", activation="tanh"), ValueError, TANH),
    (lambda x: flashmhf.gate(x.q.long(), x.w), TypeError, "q has dtype int64"),
    *((lambda x, eps=eps: flashmhf.gate(x.q, x.w, eps), ValueError, f"eps is {eps}; {FROM_0}") for eps in NO_EPS),
    *((lambda x, eps=eps: flashmhf.gate(x.q, x.w, eps), TypeError, f"eps must be a float, got {type(eps).__name__}")
      for eps in (None, "1e-6", [0.0], 1j)),
    (lambda x: flashmhf.info([1.0], x.k), TypeError, "q must be a torch.Tensor, got list"),
    (lambda x: flashmhf.info(x.q, x.k[0]), ValueError, r"k has shape \[3, 32, 64\]; expected four dimensions"),
    (lambda x: flashmhf.info(x.q, x.k.to("meta")), ValueError, "k is on meta but q is on cpu"),
    (lambda x: flashmhf.info(None, x.k), ValueError, "q is None; info takes both q and k, or neither"),
    (lambda x: flashmhf.info(x.q), ValueError, "k is None; info takes both q and k"),
])  # fmt: skip
def test_arguments_of_the_functions(call, exception, message):
    with pytest.raises(exception, match=message):
        call(SimpleNamespace(**good()))


PACKED = flashmhf.quantize.pack_fp8(*(good()[name] for name in "kuv"))


@pytest.mark.parametrize(("call", "names"), [
    *((partial(flashmhf.flash_mhf, backend=name), "qkuvr") for name in ("auto", "eager", "reference")),
    (flashmhf.gate, "qw"),
    (flashmhf.quantize.pack_fp8, "kuv"),
    (lambda q, r: flashmhf.quantize.forward(q, PACKED, r), "qr"),
])  # fmt: skip
def test_sparse_and_nested_tensors_are_refused_by_name(call, names):
    given = {name: good()[name] for name in names}
    for name, x in given.items():
        with pytest.raises(TypeError, match=f"^{name} has layout torch.sparse_coo; supported: torch.strided"):
            call(*(given | {name: x.to_sparse()}).values())
        jagged = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        with pytest.raises(TypeError, match=f"^{name} is a nested tensor; supported: dense tensors"):
            call(*(given | {name: jagged}).values())


@pytest.mark.parametrize(("name", "edit", "message"), [
    ("q", shifted, "q cannot be read in place by the hopper back end: the strides .* or the storage offset 1"),
    ("q", VIEWS["padded columns"], "q cannot be read in place by the hopper back end: the strides"),
    ("q", VIEWS["stride 2 in the last dimension"],
     "q cannot be read in place by the hopper back end: the last dimension has stride 2"),
    ("q", lambda x: x.new_zeros(4, 3, 2, *x.shape[1:]).permute(2, 1, 0, 3, 4), "do not collapse"),
    ("k", shifted, "k has storage offset 1; the hopper back end supports multiples of 16 bytes"),
    ("r", VIEWS["stride 2 in the last dimension"],
     "r has stride 2 in its last dimension; the hopper back end supports 1"),
])  # fmt: skip
def test_hopper_is_asked_first_and_its_refusals_are_explained(monkeypatch, name, edit, message):
    asked = []

    def refusing(*arguments):
        asked.append(len(arguments))
        raise RuntimeError("refused")

    def call(x, **operators):
        monkeypatch.setattr(torch.ops, "flashmhf_hopper", SimpleNamespace(**operators))
        for function, first in ((hopper.forward, ()), (hopper.backward, ("grad_out",))):
            yield lambda function=function, first=first: function(*(x[n] for n in (*first, *"qkuvr")), Settings())

    given = good(dtype=torch.bfloat16)
    for refused in call(given | {name: edit(given[name])}, forward=refusing, backward=refusing):
        with pytest.raises(ValueError, match=message):
            refused()
    assert asked == [6, 9]
    for refused in call(given, forward=refusing, backward=refusing):
        with pytest.raises(RuntimeError, match="^refused$"):  # for a reason that is not the layout's
            refused()
    assert [run() for run in call(given, forward=lambda *_: 1, backward=lambda *_: 2)] == [1, 2]
