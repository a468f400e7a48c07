"""The hopper library's projection of few tokens, and the layer's operator that takes it."""

import functools

import pytest
import torch
from targets import randomised
from torch import nn

import flashmhf
from flashmhf.backends import hopper
from flashmhf.testing import capturing, poisoned_memory, relative_l2

DTYPES = [torch.bfloat16, torch.float16]
MOST_TOKENS = 384


def project(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.flashmhf_hopper.project(x, w, bias)


def operands(tokens, inner, features, dtype, *, bias=False):
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.float64)
    x, w, b = draw(tokens, inner), draw(features, inner) * inner**-0.5, draw(features)
    return x.to(dtype), w.to(dtype), b.to(dtype) if bias else None


def check(x, w, bias, what=""):
    """All but nothing of the error is the one rounding."""
    with poisoned_memory():
        actual = project(x, w, bias)
    exact = nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    assert actual.is_contiguous() and actual.dtype == x.dtype
    error, rounding = relative_l2(actual, exact), relative_l2(exact.to(x.dtype), exact)
    assert error <= 1.05 * rounding, f"relative L2 error {error:.3e} where rounding costs {rounding:.3e} {what}"
    return actual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_every_number_of_tokens(needs_hopper, dtype, bias):
    for tokens in range(1, MOST_TOKENS + 1):
        check(*operands(tokens, 512, 192, dtype, bias=bias), f"T = {tokens}")
    assert project(*operands(0, 512, 192, dtype, bias=bias)).shape == (0, 192)


# Less k than CTAs of a cluster, not divided by them evenly, more than what is in flight; one and many clusters
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inner", "features"),
    [(64, 64), (320, 128), (768, 768), (1024, 2048), (2048, 2048), (2112, 64), (8192, 320), (131072, 64)],
)
def test_sizes(needs_hopper, dtype, inner, features):
    for tokens in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 384):
        check(*operands(tokens, inner, features, dtype, bias=True), f"T = {tokens}")


@pytest.mark.parametrize("tokens", [1, 5, 16, 29, 60, 90, 120, 150, 250, 330])
def test_rows_at_any_stride_and_nothing_beside_them(needs_hopper, tokens):
    x, w, bias = operands(tokens, 512, 128, torch.bfloat16, bias=True)
    memory = torch.full((tokens + 8, 3 * 512 + 8), float("nan"), device="cuda", dtype=x.dtype)
    memory[:tokens, 512:1024] = x
    assert torch.equal(check(memory[:tokens, 512:1024], w, bias), project(x, w, bias))


@pytest.mark.parametrize("tokens", [1, 13, 32, 64, 96, 128, 192, 256, 384])
@pytest.mark.parametrize("graphed", [False, True])
def test_a_chain_that_starts_early_reads_what_the_kernel_before_wrote(needs_hopper, tokens, graphed):
    """Every result lies in memory that an earlier one has left; at the end the kernel before a projection writes its
    weight. Equal inputs give equal bits."""
    x, w, bias = operands(tokens, 2048, 2048, torch.bfloat16, bias=True)
    weights = [w[torch.randperm(2048, device="cuda")].contiguous() for _ in range(6)]
    written = torch.empty_like(w)

    def chain(synchronise=lambda: None):
        y = x
        for i in range(30):
            y = project(y, weights[i % 6], bias)
            synchronise()
        written.copy_(weights[0])
        synchronise()
        return project(y, written)

    expected = chain(torch.cuda.synchronize)
    written.zero_()
    run = chain
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out = chain()
        written.zero_()

        def run():
            graph.replay()
            return out.clone()

    for _ in range(50):
        assert torch.equal(run(), expected)
        written.zero_()


@pytest.mark.parametrize(("change", "message"), [
    (lambda x, w, bias: (x.float(), w, None), "x must be bfloat16 or float16"),
    (lambda x, w, bias: (x, w.half(), None), "w must have the dtype of x"),
    (lambda x, w, bias: (x, w.cpu(), None), "w must be on the same CUDA device"),
    (lambda x, w, bias: (x.repeat(MOST_TOKENS // 8 + 1, 1), w, None), f"T at most {MOST_TOKENS}"),
    (lambda x, w, bias: (x, w[:, :64], None), "w must be"),
    (lambda x, w, bias: (x, w[:48], None), "multiples of 64"),
    (lambda x, w, bias: (x, w, bias[:32]), "bias must be"),
    (lambda x, w, bias: (x[:, ::2], w[:, :64].contiguous(), None), "last dimension must be contiguous"),
    (lambda x, w, bias: (nn.functional.pad(x, (0, 4))[:, :128], w, None), "multiples of 16 bytes"),
])  # fmt: skip
def test_the_operator_checks_by_itself(needs_hopper, change, message):
    with pytest.raises(RuntimeError, match=message):
        project(*change(*operands(8, 128, 64, torch.bfloat16, bias=True)))


# The module on a GPU
def plain(module, x):
    return module.out_proj(module._run_networks(module.query(x)).flatten(-2))


@pytest.fixture
def by_parts(monkeypatch):
    """Runs the module without the operator for the whole module."""

    def run(module, x):
        with monkeypatch.context() as context:
            context.setattr(hopper, "layer", lambda *_: None)
            return module(x)

    return run


def on_gpu(dtype, d_model=512, heads=4, **options):
    return randomised(flashmhf.FlashMHF(d_model, heads, 3, 64, device="cuda", dtype=dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 17, 64, 65, 129, 300, 400, 1025])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"q_norm": True}, {"q_norm": True, "bias": True}], ids=str)
def test_module_values(needs_hopper, by_parts, monkeypatch, dtype, tokens, options):
    """One call of the library, which projects few tokens by its own kernel, against the parts."""
    layers = []
    layer = hopper.layer
    monkeypatch.setattr(hopper, "layer", lambda *args: layers.append(layer(*args)) or layers[-1])
    module = on_gpu(dtype, **options)
    with torch.no_grad():
        if "q_norm" in options:
            module.q_norm.weight.normal_(1, 0.3)
        x = torch.randn(tokens, 512, device="cuda", dtype=dtype)
        with poisoned_memory():
            actual = module(x)
        assert len(layers) == 1 and layers[0] is actual
        linear = by_parts(module, x)  # the same with cuBLAS's projections
        assert torch.equal(linear, plain(module, x))
        module.backend = "eager"
        exact = module.double()(x.double())
    assert relative_l2(actual, exact) <= 1.1 * relative_l2(linear, exact)


@pytest.mark.parametrize("tokens", [5, 100])
def test_module_takes_inputs_of_any_layout(needs_hopper, by_parts, tokens):
    """Rows at a stride or off 16 bytes, transposed batches, one token without leading dimensions."""
    module, odd = on_gpu(torch.bfloat16), on_gpu(torch.bfloat16, 288, 3)  # d_model 288: no multiple of 64
    wide = torch.randn(tokens, 3, 520, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        rows = wide[..., :512]
        for x in (rows, rows.transpose(0, 1), wide[..., 3:515], rows[0, 0], wide[:, :1, 8:]):
            assert relative_l2(module(x), by_parts(module, x)) < 5e-3
        x = wide[..., :288]
        torch.testing.assert_close(odd(x), plain(odd, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d_model", "heads"), [(256, 4), (288, 3), (512, 4), (512, 2)])
def test_q_norm_rounds_once(needs_hopper, dtype, d_model, heads):
    """d_h = 64, 96, 128 and 256, weights in Q's type and in fp32, rows of many magnitudes and of zeros."""
    module = flashmhf.FlashMHF(d_model, heads, 3, 64, q_norm=True, q_norm_eps=1e-3, device="cuda", dtype=dtype)
    with torch.no_grad():
        module.q_norm.weight.normal_(1, 0.5)
        for tokens in (1, 3, 70, 1030):
            magnitudes = torch.logspace(-3, 1, tokens, device="cuda").to(dtype)[:, None]
            x = torch.randn(tokens, d_model, device="cuda", dtype=dtype) * magnitudes
            x[0] = 0
            for weight in (module.q_norm.weight, nn.Parameter(module.q_norm.weight.float() * 1.001)):
                module.q_norm.weight = weight
                actual, expected = module(x), plain(module, x)
                assert relative_l2(actual, expected) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
                assert not actual[0].any()


@pytest.mark.parametrize("tokens", [3, 64, 100, 300, 1200])
@pytest.mark.parametrize("options", [{}, {"q_norm": True}], ids=str)
@pytest.mark.parametrize("served", [nn.Identity(), flashmhf.quantize.to_fp8], ids=["bf16", "fp8"])
def test_module_in_a_cuda_graph(needs_hopper, tokens, options, served):
    networks = (flashmhf.FlashMHF(512, 4, 3, 64, device="cuda", dtype=torch.bfloat16, **options) for _ in range(4))
    layers = nn.Sequential(*map(served, networks))
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layers(x)
        graph = torch.cuda.CUDAGraph()
        static_x = torch.zeros_like(x)
        layers(static_x)
        with capturing(graph):
            out = layers(static_x)
        static_x.copy_(x)
        for _ in range(100):
            graph.replay()
            assert torch.equal(out, expected)


def test_what_the_operator_for_the_module_does_not_read_goes_to_its_parts(needs_hopper):
    x = torch.randn(5, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        module = on_gpu(torch.bfloat16)
        expected = module(x)
        for name in ("in_proj", "out_proj"):  # transposed memory, which cuBLAS reads
            linear = getattr(module, name)
            linear.weight = nn.Parameter(linear.weight.t().contiguous().t())
        assert relative_l2(module(x), expected) < 1e-2
        module.u = nn.Parameter(module.u.transpose(1, 2).contiguous().transpose(1, 2))  # read from a copy
        assert relative_l2(module(x), expected) < 1e-2
