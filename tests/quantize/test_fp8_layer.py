"""FP8 projections and the FP8 network as one operator: values, quantisation points, refusals, where modules take them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import flashmhf
from flashmhf import backends, quantize, reference
from flashmhf.backends.eager import fp8 as eager
from flashmhf.backends.fp8_linear import FEW_TOKENS, quantise_rows
from flashmhf.graphs import capturing
from flashmhf.testing import poisoned_memory, relative_l2

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
HALVES = [torch.bfloat16, torch.float16]
LENGTHS = (1, 2, 7, 16, 17, 33, 64, 65, 97, 128, 129, 192, 193, 256, 257, 384, 385, 512)
linear, layer = torch.ops.flashmhf.fp8_linear, torch.ops.flashmhf.fp8_layer


@pytest.fixture
def usable():
    reason = flashmhf.info().reasons["hopper"]
    if reason:
        pytest.skip(f"hopper is not usable here: {reason}")


def operands(tokens, inner, features, dtype=torch.bfloat16, device="cpu", *, bias=False) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(tokens + inner)
    x = torch.randn(tokens, inner, generator=generator).to(device, dtype)
    weight8, scale = quantise_rows(torch.randn(features, inner, generator=generator).to(device) * inner**-0.5)
    b = torch.randn(features, generator=generator).to(device, dtype) if bias else None
    return x, weight8, scale, b


def exact(x: Tensor, weight8: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Of the quantised weights, in float64."""
    out = x.double() @ (weight8.double() * scale.double()).t()
    return out if bias is None else out + bias.double()


def assert_rounds_once(actual: Tensor, x: Tensor, *rest: Tensor | None) -> None:
    truth = exact(x, *rest)
    assert actual.dtype == x.dtype and actual.is_contiguous()
    assert relative_l2(actual, truth) <= 1.05 * relative_l2(truth.to(x.dtype), truth) + 1e-7


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
def test_few_tokens_stay_in_their_dtype(device, dtype, bias):
    """Nothing is lost but what e4m3 weights lose, and one rounding."""
    for tokens in LENGTHS:
        args = operands(tokens, 512, 192, dtype, device, bias=bias)
        with poisoned_memory():
            assert_rounds_once(linear(*args), *args)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", HALVES)
def test_more_tokens_are_quantised_by_rows(device, dtype):
    for tokens, features in ((FEW_TOKENS + 1, 192), (FEW_TOKENS + 88, 2112)):
        x, weight8, scale, bias = operands(tokens, 512, features, dtype, device, bias=True)
        with poisoned_memory():
            actual = linear(x, weight8, scale, bias)
        x8, x_scale = quantise_rows(x)
        points = exact(x8.double() * x_scale.double(), weight8, scale, bias)
        assert actual.dtype == dtype and relative_l2(actual, points) < 4e-3  # the roundings of the sum and with the bias
        truth = exact(x, weight8, scale, bias)
        assert relative_l2(actual, truth) <= 1.05 * relative_l2(points, truth)
        assert relative_l2(points, truth) > 0.015  # the quantisation of x shows


def test_weights_alone_are_the_smaller_error():
    """W8A16 against W8A8 of the same weights, both against the weights before their quantisation."""
    x, w = torch.randn(FEW_TOKENS, 1024), torch.randn(512, 1024) / 32
    weight8, scale = quantise_rows(w)
    truth = x.double() @ w.double().t()
    kept = relative_l2(linear(x, weight8, scale), truth)
    quantised = relative_l2(linear(x.repeat(2, 1), weight8, scale)[: len(x)], truth)
    assert kept < 0.75 * quantised


@pytest.mark.gpu
def test_few_tokens_take_every_e4m3_value(usable):
    """All 254 finite codes, and NaN, which spoils its feature only."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes[codes % 128 == 127] = 0  # NaN
    weight8 = torch.stack([codes.roll(i) for i in range(64)]).view(torch.float8_e4m3fn)
    scale = torch.logspace(-8, 8, 64, device="cuda")[:, None].contiguous()
    for dtype in HALVES:
        x = torch.randn(5, 256, device="cuda", dtype=dtype)
        actual, truth = linear(x, weight8, scale), exact(x, weight8, scale, None)
        representable = truth.abs().amax(0) < torch.finfo(dtype).max
        assert (
            relative_l2(actual[:, representable] / scale.t()[:, representable], truth[:, representable] / scale.t()[:, representable])
            < 4e-3
        )
    bad = weight8.clone()
    bad.view(torch.uint8)[3, 17] = 0x7F
    out = linear(torch.randn(5, 256, device="cuda").bfloat16(), bad, scale)
    assert out[:, 3].isnan().all() and out[:, :3].isfinite().all() and out[:, 4:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [8, 64, 1000, 2048, 2056, 8448])
def test_rows_are_quantised_as_the_definition_does(usable, dtype, columns):
    wide = torch.randn(77, 3 * columns, device="cuda", dtype=dtype) * torch.logspace(-4, 3, 77, device="cuda").to(dtype)[:, None]
    x = wide[:, columns : 2 * columns]
    x[5] = 0
    x8, scale = torch.ops.flashmhf_hopper.quantise_rows(x)
    expected8, expected = quantise_rows(x)
    torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)
    # A product with 1 / scale and a quotient differ in the last place: values between two e4m3 numbers may go either way.
    assert (x8.float() != expected8.float()).float().mean() < 1e-3
    assert relative_l2(x8.float() * scale, x.double()) <= 1.001 * relative_l2(expected8.float() * expected, x.double())
    x[3, 1], x[4, 2] = torch.nan, torch.inf
    x8, scale = torch.ops.flashmhf_hopper.quantise_rows(x)
    rows = (x8.float() * scale).sum(1)
    assert not rows[3].isfinite() and not rows[4].isfinite() and rows[6:].isfinite().all()
    assert torch.ops.flashmhf_hopper.quantise_rows(x[:0])[0].shape == (0, columns)


def network(device="cpu", dtype=torch.bfloat16, d_model=256, heads=2, **options) -> flashmhf.FlashMHF:
    torch.manual_seed(1)
    module = flashmhf.FlashMHF(d_model, heads, 3, 80, device=device, dtype=dtype, **options).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if name.startswith("q_norm") else 0.0, parameter.shape[-1] ** -0.5)
    return module


def defined(served: quantize.Fp8FlashMHF, x: Tensor) -> Tensor:
    """What the network is: its parts by the definitions in PyTorch, with the quantisation points of this number of tokens."""

    def project(module, x):
        if isinstance(module, nn.Linear):
            return module(x)
        return eager.linear(x.reshape(-1, x.shape[-1]), module.weight8, module.scale, module.bias).view(*x.shape[:-1], -1)

    q = project(served.in_proj, x).unflatten(-1, (served.num_heads, served.head_dim))
    if served.q_norm is not None:
        q = reference.normalise_heads(q, served.q_norm.weight, served.q_norm.eps)
    mixed = eager.gated_forward(q, *served.packed.tensors, served.router, served.router_eps)
    return project(served.out_proj, mixed.flatten(-2))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("projections", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"q_norm": True}, {"num_kv_heads": 1, "q_norm": True, "bias": True}], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_module_values(device, projections, options, dtype):
    plain = network(device, dtype, **options)
    served = quantize.to_fp8(plain, projections=projections)
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


@pytest.mark.gpu
@pytest.mark.parametrize("projections", [True, False])
@pytest.mark.parametrize("tokens", [3, 100, 300])
def test_the_module_is_one_operator_of_the_library(usable, monkeypatch, projections, tokens):
    """Called, compiled, and in the parts' order: the same kernels and bits."""
    served = quantize.to_fp8(network("cuda", d_model=512, heads=4, q_norm=False), projections=projections)
    x = torch.randn(2, tokens, 512, device="cuda", dtype=torch.bfloat16)
    calls, module = [], backends.FP8_BACKENDS["hopper"]
    whole = module.layer
    monkeypatch.setattr(module, "layer", lambda *args: calls.append(whole(*args)) or calls[-1])
    with torch.no_grad():
        actual = served(x)
        assert len(calls) == 1 and calls[0] is actual
        if projections:
            torch.testing.assert_close(served._forward_parts(x), actual, rtol=2e-2, atol=2e-2)
        compiled = torch.compile(served, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(x), actual) and torch.equal(compiled(x[:1]), served(x[:1]))
        assert len(calls) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("projections", [True, False])
@pytest.mark.parametrize("tokens", [3, 64, 100, 300, 1200])
def test_module_in_a_cuda_graph(usable, projections, tokens):
    layers = nn.Sequential(
        *(quantize.to_fp8(network("cuda", d_model=512, heads=4, q_norm=True), projections=projections) for _ in range(4))
    )
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layers(x)
        static_x = torch.zeros_like(x)
        layers(static_x)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out = layers(static_x)
        static_x.copy_(x)
        for _ in range(50):
            graph.replay()
            assert torch.equal(out, expected)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_layouts_and_odd_sizes(device):
    """Views, one token without leading dimensions, d_model that no kernel takes, none at all."""
    served, odd = quantize.to_fp8(network(device)), quantize.to_fp8(network(device, d_model=192, heads=2, dtype=torch.bfloat16))
    narrow = quantize.to_fp8(flashmhf.FlashMHF(48, 1, 2, 16, device=device, dtype=torch.bfloat16))
    wide = torch.randn(5, 3, 264, device=device).bfloat16()
    with torch.no_grad():
        for x in (wide[..., :256], wide[..., :256].transpose(0, 1), wide[..., 3:259], wide[0, 0, :256], wide[:, :1, 8:]):
            assert relative_l2(served(x), served(x.contiguous()).double()) < 1e-2
            assert served(x).shape == x.shape
        for module, size in ((odd, 192), (narrow, 48)):
            for tokens in (5, 150):
                x = torch.randn(tokens, size, device=device).bfloat16()
                assert relative_l2(module(x), defined(module, x).double()) < 3e-2
        assert served(wide[:0, :, :256]).shape == (0, 3, 256)


def test_a_hooked_or_replaced_part_is_called():
    served, x = quantize.to_fp8(network(q_norm=True)), torch.randn(9, 256).bfloat16()
    with torch.no_grad():
        expected = served(x)
        assert torch.equal(served._forward_parts(x), expected)
        served.out_proj.register_forward_hook(lambda module, args, out: 2 * out)
        assert torch.equal(served(x), 2 * expected)
        served.q_norm = nn.Identity()
        assert not torch.equal(served(x), 2 * expected)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_compile_export_and_autocast(device):
    torch._dynamo.reset()
    served = quantize.to_fp8(network(device))
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(served, fullgraph=True, dynamic=True, backend=backend)
    x = torch.randn(40, 256, device=device).bfloat16()
    with torch.no_grad():
        for tokens in (5, FEW_TOKENS + 12):
            rows = torch.randn(tokens, 256, device=device).bfloat16()
            assert torch.equal(compiled(rows), served(rows))
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        exported = torch.export.export(served, (x,), dynamic_shapes=({0: tokens},), strict=False)
        rows = torch.randn(200, 256, device=device).bfloat16()
        assert torch.equal(exported.module()(rows), served(rows))
        targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert targets == ["flashmhf.fp8_layer.default"]
        wide = quantize.to_fp8(network(device, torch.float32), projections=False)
        with torch.autocast(device, torch.bfloat16):
            out = wide(x.float())
            assert (
                out.dtype == torch.bfloat16
                and quantize.to_fp8(network(device, torch.float32, bias=True))(x.float()).dtype == torch.bfloat16
            )
        assert relative_l2(out, wide(x.float()).double()) < 0.05


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_opcheck(device):
    served = quantize.to_fp8(network(device))
    x, both = torch.randn(6, 256, device=device).bfloat16(), (served.in_proj, served.out_proj)
    (in8, in_scale), (out8, out_scale) = ((each.weight8, each.scale) for each in both)
    # The other checks add e4m3 tensors, which PyTorch cannot.
    torch.library.opcheck(linear, (x, in8, in_scale), test_utils=("test_faketensor",))
    torch.library.opcheck(
        layer,
        (x, in8, in_scale, None, *served.packed.tensors, served.router, 1e-20, out8, out_scale, None),
        test_utils=("test_faketensor",),
    )


@pytest.mark.parametrize("projections", [True, False])
def test_on_the_meta_device(projections):
    served = quantize.to_fp8(flashmhf.FlashMHF(128, 2, 3, 32, device="meta"), projections=projections)
    assert served(torch.empty(3, 128, device="meta")).shape == (3, 128)


def test_refusals():
    x, weight8, scale, bias = operands(6, 128, 64, bias=True)
    served = quantize.to_fp8(network())
    k8, u8, v8, scales = served.packed.tensors
    ends = (served.in_proj.weight8, served.in_proj.scale, None), (served.out_proj.weight8, served.out_proj.scale, None)

    zeros, plain = torch.zeros(2, 256).bfloat16(), torch.zeros(256, 256).bfloat16()

    def whole(x=zeros, k8=k8, w=served.router, out=ends[1], inner=ends[0], **kwargs):
        return layer(x, *inner, k8, u8, v8, scales, w, 1e-20, *out, **kwargs)

    for error, message, call in (
        (TypeError, "x has dtype int32", lambda: linear(x.int(), weight8, scale)),
        (TypeError, "weight8 has dtype bfloat16; supported: float8_e4m3fn", lambda: linear(x, weight8.bfloat16(), scale)),
        (TypeError, "scale has dtype bfloat16; supported: float32", lambda: linear(x, weight8, scale.bfloat16())),
        (TypeError, "bias has dtype float32; supported: bfloat16", lambda: linear(x, weight8, scale, bias.float())),
        (ValueError, "scale is on meta but x is on cpu", lambda: linear(x, weight8, scale.to("meta"))),
        (ValueError, r"x has shape \[6, 127\] and weight8 \[64, 128\]", lambda: linear(x[:, :127], weight8, scale)),
        (ValueError, r"scale has shape \[64\]; expected \[64, 1\]", lambda: linear(x, weight8, scale[:, 0])),
        (ValueError, r"bias has shape \[32\]; expected \[64\]", lambda: linear(x, weight8, scale, bias[:32])),
        (ValueError, r"weight8 has strides \[256, 1\]", lambda: linear(x, weight8.repeat(1, 2)[:, :128], scale)),
        (ValueError, "backend is 'cuda'", lambda: linear(x, weight8, scale, backend="cuda")),
        (NotImplementedError, "backend='hopper' cannot run: device is cpu", lambda: linear(x, weight8, scale, backend="hopper")),
        (NotImplementedError, "an input requires a gradient", lambda: linear(x.clone().requires_grad_(), weight8, scale)),
        (NotImplementedError, "an input requires a gradient", lambda: served(torch.zeros(2, 256).bfloat16().requires_grad_())),
        (ValueError, r"x has shape \[2, 64\]", lambda: whole(torch.zeros(2, 64).bfloat16())),
        (TypeError, "k8 has dtype bfloat16", lambda: whole(k8=k8.bfloat16())),
        (ValueError, r"w has shape \[2, 128, 2\]", lambda: whole(w=served.router[..., :2].contiguous())),
        (ValueError, r"out_w has shape", lambda: whole(out=(ends[1][0][:, :128], *ends[1][1:]))),
        (NotImplementedError, "backend='hopper' cannot run: device is cpu", lambda: whole(backend="hopper")),
        (TypeError, "x has dtype int32", lambda: whole(zeros.int(), inner=(plain, None, None))),
        (TypeError, "x has dtype int64", lambda: quantize.to_fp8(network(), projections=False)(zeros.long())),
        (TypeError, "x must be a torch.Tensor, got NoneType", lambda: whole(x=None)),
        (TypeError, "in_w must be a torch.Tensor, got NoneType", lambda: whole(zeros.to("meta"), inner=(None, None, None))),
        (ValueError, r"k8 has shape \[\]; expected four dimensions", lambda: whole(k8=k8.flatten()[0])),
        (TypeError, "out_scale has dtype bfloat16; supported: float32", lambda: whole(out=(ends[1][0], scale.bfloat16(), None))),
        (TypeError, "in_w has dtype bfloat16; supported: float8_e4m3fn", lambda: whole(inner=(plain, ends[0][1], None))),
        (TypeError, r"in_w has dtype float32; supported: bfloat16", lambda: whole(inner=(plain.float(), None, None))),
        (ValueError, r"in_bias has shape \[1\]; expected \[256\]", lambda: whole(inner=(*ends[0][:2], bias[:1]))),
        (ValueError, r"out_bias has shape \[\]; expected \[256\]", lambda: whole(out=(plain, None, bias[0]))),
        (ValueError, r"q_norm has shape \[1, 128\]; expected \[2, 128\]", lambda: whole(q_norm=torch.ones(1, 128), q_norm_eps=1e-5)),
        (ValueError, "q_norm_eps is -1.0", lambda: whole(q_norm=torch.ones(2, 128), q_norm_eps=-1.0)),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.gpu
def test_the_library_checks_by_itself(usable):
    x, weight8, scale, bias = operands(8, 128, 64, device="cuda", bias=True)
    quantise = torch.ops.flashmhf_hopper.quantise_rows
    for call, message in (
        (lambda: quantise(x.float()), "x must be bfloat16 or float16"),
        (lambda: quantise(x[:, :12]), "K a multiple of 8"),
        (lambda: quantise(x[:, ::2]), "last dimension must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    with pytest.raises(ValueError, match="weight8 has storage offset 1"):
        linear(
            x,
            torch.cat([weight8.flatten().view(torch.uint8)[:1], weight8.flatten().view(torch.uint8)])[1:].view(weight8.dtype).view(64, 128),
            scale,
        )
