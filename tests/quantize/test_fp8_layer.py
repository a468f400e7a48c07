"""The FP8 network as one operator: values, refusals, where modules take it."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import flashmhf
from flashmhf import backends, quantize, reference
from flashmhf.backends.contract import Router
from flashmhf.backends.eager import fp8 as eager
from flashmhf.testing import poisoned_memory, relative_l2

HALVES = [torch.bfloat16, torch.float16]
layer = torch.ops.flashmhf.fp8_layer


def network(device="cpu", dtype=torch.bfloat16, d_model=256, heads=2, **options) -> flashmhf.FlashMHF:
    torch.manual_seed(1)
    module = flashmhf.FlashMHF(d_model, heads, 3, 80, device=device, dtype=dtype, **options).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if name.startswith("q_norm") else 0.0, parameter.shape[-1] ** -0.5)
    return module


def defined(served: quantize.Fp8FlashMHF, x: Tensor) -> Tensor:
    """What the network is: its parts by the definitions in PyTorch."""
    ends = [each if each is None else (each.weight, each.bias) for each in (served.in_proj, served.out_proj)]
    q = (x if ends[0] is None else linear(x, *ends[0])).unflatten(-1, (served.num_heads, served.head_dim))
    if served.q_norm is not None:
        q = reference.normalise_heads(q, served.q_norm.weight, served.q_norm.eps)
    mixed = eager.forward(q, *served.packed.tensors, Router(served.router, served.router_eps))
    return mixed.flatten(-2) if ends[1] is None else linear(mixed.flatten(-2), *ends[1])


@pytest.mark.parametrize(
    "options", [{}, {"skip_linear": True}, {"q_norm": True}, {"num_kv_heads": 1, "q_norm": True, "bias": True}], ids=str
)
@pytest.mark.parametrize("dtype", HALVES)
def test_module_values(device, options, dtype):
    plain = network(device, dtype, **options)
    served = quantize.to_fp8(plain)
    with torch.no_grad():
        for tokens in (1, 7, 64, 100, 128, 129, 300, 1100):
            if device == "cpu" and tokens not in (7, 129):
                continue
            x = torch.randn(tokens, 256, device=device).to(dtype)
            with poisoned_memory():
                actual = served(x)
            expected = defined(served, x)
            assert actual.shape == x.shape and actual.dtype == dtype and relative_l2(actual, expected.double()) < 4e-2
            truth = copy.deepcopy(plain).double()
            truth.backend = "eager"
            truth = truth(x.double())
            assert relative_l2(actual, truth) <= 1.05 * relative_l2(expected, truth)


@pytest.mark.parametrize("tokens", [3, 100, 300])
def test_the_module_is_one_operator_of_the_library(needs_hopper, monkeypatch, tokens):
    """Called and compiled: the same kernels and bits. By its parts: other products, nearly the same values."""
    served = quantize.to_fp8(network("cuda", d_model=512, heads=4, q_norm=False))
    x = torch.randn(2, tokens, 512, device="cuda", dtype=torch.bfloat16)
    calls, module = [], backends.FP8_BACKENDS["hopper"]
    whole = module.layer
    monkeypatch.setattr(module, "layer", lambda *args: calls.append(whole(*args)) or calls[-1])
    with torch.no_grad():
        actual = served(x)
        assert len(calls) == 1 and calls[0] is actual
        assert relative_l2(served._forward_parts(x), actual.double()) < 4e-2
        compiled = torch.compile(served, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(x), actual) and torch.equal(compiled(x[:1]), served(x[:1]))
        assert len(calls) == 4


def test_layouts_and_odd_sizes(device):
    """Views, one token without leading dimensions, d_model that no kernel takes, none at all."""
    served, odd = (quantize.to_fp8(network(device, d_model=size)) for size in (256, 192))
    narrow = quantize.to_fp8(flashmhf.FlashMHF(48, 1, 2, 16, device=device, dtype=torch.bfloat16))
    wide = torch.randn(5, 3, 264, device=device).bfloat16()
    with torch.no_grad():
        cut = wide[..., :256]
        for x in (cut, cut.transpose(0, 1), wide[..., 3:259], cut[0, 0], wide[:, :1, 8:]):
            assert relative_l2(served(x), served(x.contiguous()).double()) < 1e-2
            assert served(x).shape == x.shape
        for module, size in ((odd, 192), (narrow, 48)):
            for tokens in (5, 150):
                x = torch.randn(tokens, size, device=device).bfloat16()
                assert relative_l2(module(x), defined(module, x).double()) < 3e-2
        assert served(cut[:0]).shape == (0, 3, 256)
    # The other checks add e4m3 tensors, which PyTorch cannot.
    ends = (odd.in_proj.weight, None), (odd.out_proj.weight, None)
    args = (cut[0, :, :192], *ends[0], *odd.packed.tensors, odd.router, 1e-20, *ends[1])
    torch.library.opcheck(layer, args, test_utils=("test_faketensor",))


def test_refusals():
    """The ends and q_norm are checked as in the 16-bit operator (test_layer.py), the packed weights as in fp8_forward
    (test_fp8.py)."""
    served = quantize.to_fp8(network())
    k8, u8, v8, scales = served.packed.tensors
    zeros, plain = torch.zeros(2, 256).bfloat16(), torch.zeros(256, 256).bfloat16()

    def whole(x=zeros, k8=k8, w=served.router, out_w=plain, in_w=plain):
        return layer(x, in_w, None, k8, u8, v8, scales, w, 1e-20, out_w, None)

    with pytest.raises(NotImplementedError, match="an input requires a gradient"):
        served(zeros.clone().requires_grad_())
    for error, message, changed in (
        (ValueError, r"x has shape \[2, 64\]", {"x": zeros[:, :64].contiguous()}),
        (ValueError, r"w has shape \[2, 128, 2\]", {"w": served.router[..., :2].contiguous()}),
        (ValueError, r"out_w has shape", {"out_w": plain[:, :128]}),
        (TypeError, "x must be a torch.Tensor, got NoneType", {"x": None}),
        (TypeError, "in_w must be a torch.Tensor, got NoneType", {"x": zeros.to("meta"), "in_w": None}),
        (ValueError, r"k8 has shape \[\]; expected four dimensions", {"k8": k8.flatten()[0]}),
        (ValueError, "out_w is on meta but x is on cpu", {"out_w": plain.to("meta")}),
    ):
        with pytest.raises(error, match=message):
            whole(**changed)
