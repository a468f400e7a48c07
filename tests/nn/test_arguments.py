"""Arguments of constructors, conversion and info: what is refused, where and how, and what is taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flashmhf

FLASH = (48, 3, 2, 16)
MAKERS = {
    "FlashMHF": lambda **kwargs: flashmhf.FlashMHF(*FLASH, **kwargs),
    "MHFFN": lambda **kwargs: flashmhf.MHFFN(48, 3, 16, **kwargs),
    "DenseMoE": lambda **kwargs: flashmhf.DenseMoE(48, 3, 16, **kwargs),
    "SwiGLU": lambda **kwargs: flashmhf.SwiGLU(48, 16, **kwargs),
    "ParametricKV": lambda **kwargs: flashmhf.ParametricKV(48, 3, 16, **kwargs),
}


@pytest.mark.parametrize(
    ("makers", "arguments", "exception", "message"),
    [
        (
            "FlashMHF MHFFN",
            {"backend": "tritn"},
            ValueError,
            "backend is 'tritn'; supported: 'auto', 'hopper', 'triton', 'eager', 'reference'",
        ),
        ("FlashMHF MHFFN", {"backend": None}, TypeError, "backend must be a str, got NoneType"),
        ("FlashMHF", {"backend": "naive"}, ValueError, "backend is 'naive'"),
        ("FlashMHF MHFFN", {"deterministic": 1}, TypeError, "deterministic must be a bool or None, got int"),
        ("FlashMHF MHFFN SwiGLU ParametricKV", {"bias": "no"}, TypeError, "bias must be a bool, got str"),
        ("FlashMHF", {"q_norm": 1}, TypeError, "q_norm must be a bool, got int"),
        *(
            (makers, {name: value}, exception, f"{name} {message}")
            for makers, name in (("FlashMHF DenseMoE", "router_eps"), ("FlashMHF", "q_norm_eps"))
            for value, exception, message in (
                (-1e-20, ValueError, "is -1e-20; supported: finite numbers from 0"),
                (math.nan, ValueError, "is nan; supported"),
                (math.inf, ValueError, "is inf; supported"),
                ("1e-20", TypeError, "must be a float, got str"),
                (True, TypeError, "must be a float, got bool"),
                (None, TypeError, "must be a float, got NoneType"),
            )
        ),
    ],
)
def test_constructors_refuse(makers, arguments, exception, message):
    for name in makers.split():
        with pytest.raises(exception, match=message):
            MAKERS[name](**arguments)


@pytest.mark.parametrize("name", MAKERS)
def test_the_initialisation_is_checked(name):
    module = MAKERS[name]()
    with pytest.raises(TypeError, match="init must be a str, got int"):
        module.reset_parameters(1)
    for num_layers, exception in ((0, ValueError), (-1, ValueError), ("a", TypeError)):
        with pytest.raises(exception, match="num_layers"):
            module.reset_parameters(num_layers=num_layers)
    for initializer_range, exception in ((-1.0, ValueError), (math.nan, ValueError)):
        with pytest.raises(exception, match="initializer_range"):
            module.reset_parameters(initializer_range=initializer_range)


def test_integers_of_other_libraries_are_sizes():
    module = flashmhf.FlashMHF(np.int64(48), np.int32(3), torch.tensor(2), np.uint8(16), router_eps=np.float32(0.25), device="meta")
    assert module.k.shape == (3, 2, 16, 16) and module.router_eps == 0.25
    assert all(type(getattr(module, name)) is int for name in ("d_model", "num_heads", "num_subnets", "subnet_dim", "head_dim"))
    assert flashmhf.MHFFN(np.int64(48), np.int64(3), np.int64(16)).k.shape == (3, 16, 16)
    assert flashmhf.SwiGLU(np.int64(48), np.int64(16)).up_proj.weight.shape == (16, 48)
    assert flashmhf.ParametricKV(np.int64(48), np.int64(3), np.int64(16)).k.shape == (3, 16, 16)
    assert flashmhf.DenseMoE(np.int64(48), np.int64(3), np.int64(16), router_eps=0).router.shape == (48, 3)
    for size in (48.0, np.float64(48), True, np.bool_(True), "48"):
        with pytest.raises(TypeError, match=f"d_model must be an int, got {type(size).__name__}"):
            flashmhf.FlashMHF(size, 3, 2, 16)


@pytest.mark.parametrize("name", MAKERS)
def test_the_input_is_a_tensor(name):
    with pytest.raises(TypeError, match="x must be a torch.Tensor, got list"):
        MAKERS[name]()([[0.0] * 48])
    with pytest.raises(TypeError, match="x has dtype int64; supported: bfloat16, float16, float32, float64"):
        MAKERS[name]()(torch.ones(1, 48, dtype=torch.int64))


@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf])
def test_eps_of_the_router_and_of_the_gated_operators(eps):
    q, k, w = torch.randn(5, 3, 8), torch.randn(3, 2, 4, 8), torch.randn(3, 8, 2)
    with pytest.raises(ValueError, match=f"eps is {eps}; supported: finite numbers from 0"):
        flashmhf.gate(q, w, eps)
    with pytest.raises(ValueError, match=f"eps is {eps}"):
        torch.ops.flashmhf.gated_forward(q, k, k, k, w, eps)
    with pytest.raises(ValueError, match=f"eps is {eps}"):
        torch.ops.flashmhf.gated_backward(q, q, k, k, k, w, eps)


@pytest.mark.parametrize("eps", [None, "1e-6", [0.0], 1j])
def test_eps_of_the_gate_is_a_number(eps):
    with pytest.raises(TypeError, match=f"eps must be a float, got {type(eps).__name__}"):
        flashmhf.gate(torch.randn(5, 3, 8), torch.randn(3, 8, 2), eps)


def test_a_supported_dtype_is_named_once():
    q, k, r = torch.randn(5, 3, 8), torch.randn(3, 2, 4, 8), torch.rand(5, 3, 2)
    for dtype, supported in ((torch.float32, "float32"), (torch.float64, "float32 or float64")):
        with pytest.raises(TypeError, match=rf"r has dtype int64; supported: {supported} \(q's dtype\)$"):
            flashmhf.flash_mhf(*(x.to(dtype) for x in (q, k, k, k)), r.long())


def test_state_dicts_hold_tensors():
    network = flashmhf.FlashMHF(64, 2, 2, 32)
    with pytest.raises(RuntimeError, match="parameter named \"k\", expected torch.Tensor .* received <class 'list'>"):
        network.load_state_dict(network.state_dict() | {"k": [1.0]})
    served = flashmhf.quantize.to_fp8(network)
    with pytest.raises(TypeError, match="layout must be a torch.Tensor, got int"):
        served.load_state_dict(served.state_dict() | {"layout": 1})


def test_sparse_and_nested_tensors_are_refused_by_name():
    q, k, r, w = torch.randn(5, 4, 16), torch.randn(2, 3, 16, 16), torch.rand(5, 4, 3), torch.randn(4, 16, 3)
    packed = flashmhf.quantize.pack_fp8(k, k, k)
    jagged = torch.nested.nested_tensor([q[:2], q[2:]], layout=torch.jagged)
    for backend in ("auto", "eager", "reference"):
        for place, name in enumerate("qkuvr"):
            operands = [x.to_sparse() if i == place else x for i, x in enumerate((q, k, k, k, r))]
            with pytest.raises(TypeError, match=f"^{name} has layout torch.sparse_coo; supported: torch.strided"):
                flashmhf.flash_mhf(*operands, backend=backend)
        with pytest.raises(TypeError, match="q is a nested tensor; supported: dense tensors"):
            flashmhf.flash_mhf(jagged, k, k, k, backend=backend)
    for call, name in (
        (lambda: flashmhf.gate(q.to_sparse(), w), "q"),
        (lambda: flashmhf.gate(q, w.to_sparse()), "w"),
        (lambda: flashmhf.quantize.pack_fp8(k, k.to_sparse(), k), "u"),
        (lambda: flashmhf.quantize.forward(q.to_sparse(), packed), "q"),
        (lambda: flashmhf.quantize.forward(q, packed, r.to_sparse()), "r"),
    ):
        with pytest.raises(TypeError, match=f"^{name} has layout torch.sparse_coo"):
            call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_modules_refuse_what_is_no_dense_tensor_of_floats():
    x = torch.randn(6, 64)
    network = flashmhf.FlashMHF(64, 4, 2, 16)
    for module in (network, flashmhf.MHFFN(64, 4, 48), flashmhf.SwiGLU(64, 96), flashmhf.quantize.to_fp8(network)):
        for layout in (torch.jagged, torch.strided):
            with pytest.raises(TypeError, match="x is a nested tensor; supported: dense tensors"):
                module(torch.nested.nested_tensor([x[:2], x[2:]], layout=layout))
        with pytest.raises(TypeError, match="x has layout torch.sparse_coo; supported: torch.strided"):
            module(x.to_sparse())
        for dtype in (torch.int64, torch.complex64):
            with pytest.raises(TypeError, match=f"x has dtype {str(dtype)[6:]}; supported: bfloat16, float16, float32, float64"):
                module(x.to(dtype))
        assert module(x).shape == x.shape


# Conversion












@pytest.mark.parametrize(
    ("change", "exception", "message"),
    [
        (lambda s: s | {"gate_weight": s["gate_weight"][0]}, ValueError, r"gate_weight has shape \[48\]; expected \[d_ff, H_kv d_h\]"),
        (
            lambda s: s | {"up_weight": s["up_weight"][:16]},
            ValueError,
            r"up_weight has shape \[16, 48\]; expected \[32, 48\] \(gate_weight",
        ),
        (lambda s: {n: x for n, x in s.items() if n != "router"}, KeyError, r"missing from the official state dict: \['router'\]"),
    ],
)
def test_what_does_not_convert_from_the_official_layout(change, exception, message):
    official = flashmhf.convert.to_official(flashmhf.FlashMHF(*FLASH).state_dict())
    with pytest.raises(exception, match=message):
        flashmhf.convert.from_official(change(official), 3, 2)


@pytest.mark.parametrize(("heads", "subnets", "exception"), [(0, 2, ValueError), (3, 0, ValueError), (3.0, 2, TypeError)])
def test_conversion_checks_its_sizes(heads, subnets, exception):
    official = flashmhf.convert.to_official(flashmhf.FlashMHF(*FLASH).state_dict())
    with pytest.raises(exception, match="num_heads|num_subnets"):
        flashmhf.convert.from_official(official, heads, subnets)
    assert flashmhf.convert.from_official(official, np.int64(3), np.int64(2))["k"].shape == (3, 2, 16, 16)


@pytest.mark.parametrize(
    ("change", "exception", "message"),
    [
        (lambda s: s | {"extra": s["k"]}, ValueError, r"unknown names in the state dict: \['extra'\]"),
        (lambda s: {n: x for n, x in s.items() if n != "u"}, KeyError, r"missing from the state dict: \['u'\]"),
        (lambda s: s | {"v": s["v"][:, :, :8]}, ValueError, r"v has shape \[3, 2, 8, 16\]; expected \[3, 2, 16, 16\] \(k's shape\)"),
        (lambda s: s | {"v": s["v"][0]}, ValueError, r"v has shape \[2, 16, 16\]; expected \[3, 2, 16, 16\] \(k's shape\)"),
    ],
)
def test_what_does_not_convert_to_the_official_layout(change, exception, message):
    with pytest.raises(exception, match=message):
        flashmhf.convert.to_official(change(flashmhf.FlashMHF(*FLASH).state_dict()))


# info


@pytest.mark.parametrize(
    ("q", "k", "exception", "message"),
    [
        ([1.0], torch.zeros(2, 3, 4, 8), TypeError, "q must be a torch.Tensor, got list"),
        (torch.zeros(5, 2, 8), "k", TypeError, "k must be a torch.Tensor, got str"),
        (torch.zeros(5, 2, 8).int(), torch.zeros(2, 3, 4, 8).int(), TypeError, "q has dtype int32"),
        (torch.zeros(5, 2, 8), torch.zeros(2, 3, 4, 8).double(), TypeError, "k has dtype float64"),
        (torch.zeros(5, 2, 8), torch.zeros(3, 4, 8), ValueError, r"k has shape \[3, 4, 8\]; expected four dimensions"),
        (torch.zeros(5, 2, 8), torch.zeros(2, 3, 4, 16), ValueError, "k has shape .* d_h = 8"),
        (torch.zeros(8), torch.zeros(2, 3, 4, 8), ValueError, r"q has shape \[8\]"),
        (torch.zeros(5, 2, 8), torch.zeros(2, 3, 4, 8, device="meta"), ValueError, "k is on meta but q is on cpu"),
        (None, torch.zeros(2, 3, 4, 8), ValueError, "q is None; info takes both q and k, or neither"),
    ],
)
def test_info_checks_its_arguments(q, k, exception, message):
    with pytest.raises(exception, match=message):
        flashmhf.info(q, k)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": None}, "backend must be a str, got NoneType"),
        ({"activation": None}, "activation must be a str, got NoneType"),
        ({"deterministic": "yes"}, "deterministic must be a bool, got str"),
    ],
)
def test_the_operator_checks_its_options(options, message):
    with pytest.raises(TypeError, match=message):
        flashmhf.flash_mhf(torch.zeros(5, 2, 8), *torch.zeros(3, 2, 3, 4, 8), **options)
