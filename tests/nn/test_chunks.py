"""FlashMHF's inference forward over chunks of tokens: the same values, and only where nothing else needs the plain path."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import flashmhf
from flashmhf.nn import flashmhf as modules

TOKENS, D_MODEL = 20, 32


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(modules, "CHUNK_TOKENS", 8)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Tokens of each call of the operator."""
    seen: list[int] = []
    mix = modules.FlashMHF._mix

    def record(self, q):
        seen.append(q.shape[:-2].numel())
        return mix(self, q)

    monkeypatch.setattr(modules.FlashMHF, "_mix", record)
    return seen


def make(**options) -> flashmhf.FlashMHF:
    module = flashmhf.FlashMHF(D_MODEL, 2, 3, 16, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def unchunked(module: flashmhf.FlashMHF, x: torch.Tensor) -> torch.Tensor:
    return module.out_proj(module._mix(module.split_heads(x)).flatten(-2))


@pytest.mark.parametrize("options", [{}, {"bias": True, "q_norm": True}], ids=["plain", "bias and q_norm"])
@pytest.mark.parametrize("leading", [(TOKENS,), (4, 5), (2, 5, 2), (9,)])
def test_same_values(calls, options, leading):
    module, x = make(**options), torch.randn(*leading, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        out = module(x)
        assert len(calls) == -(-x[..., 0].numel() // 8) and max(calls) - min(calls) <= 1
        torch.testing.assert_close(out, unchunked(module, x), rtol=1e-12, atol=1e-12)
    assert out.is_contiguous()


def test_views_that_do_not_flatten(calls):
    module, x = make(), torch.randn(5, 4, D_MODEL, dtype=torch.float64).transpose(0, 1)
    with torch.inference_mode():
        torch.testing.assert_close(module(x), unchunked(module, x), rtol=1e-12, atol=1e-12)
    assert calls[:-1] == [7, 7, 6]


def test_frozen_weights_need_no_gradient(calls):
    module = make().requires_grad_(False)
    module(torch.randn(TOKENS, D_MODEL, dtype=torch.float64))
    assert len(calls) == 3


@pytest.mark.parametrize("what", ["weights", "input"])
def test_one_piece_where_a_gradient_is_needed(calls, what):
    module, x = make(), torch.randn(TOKENS, D_MODEL, dtype=torch.float64)
    if what == "input":
        module.requires_grad_(False)
        x.requires_grad_()
    module(x).sum().backward()
    assert calls == [TOKENS]


def test_one_piece_for_few_tokens(calls):
    with torch.no_grad():
        make()(torch.randn(8, D_MODEL, dtype=torch.float64))
        make()(torch.randn(D_MODEL, dtype=torch.float64))
    assert calls == [8, 1]


def test_one_piece_under_autocast(calls):
    with torch.no_grad(), torch.autocast("cpu"):
        assert make().float()(torch.randn(TOKENS, D_MODEL)).dtype == torch.bfloat16
    assert calls == [TOKENS]


def test_hooked_replaced_and_patched_projections_are_called(calls):
    x = torch.randn(TOKENS, D_MODEL, dtype=torch.float64)
    hooked, replaced, patched = make(), make(), make()
    hooked.in_proj.register_forward_hook(lambda module, args, out: out + 1)
    replaced.out_proj = torch.nn.Sequential(replaced.out_proj)
    patched.in_proj.forward = lambda x: 2 * x
    with torch.no_grad():
        for module in (hooked, replaced, patched):
            assert torch.equal(module(x), unchunked(module, x))
    assert calls == [TOKENS] * 6


@pytest.mark.parametrize("change", [nn.utils.spectral_norm, partial(prune.l1_unstructured, name="weight", amount=0.5)])
def test_projections_whose_weight_is_computed_before_each_call(calls, change):
    """Pruning and the older spectral_norm leave a linear layer of the same type without a parameter "weight"."""
    module, x = make().eval(), torch.randn(TOKENS, D_MODEL, dtype=torch.float64)
    for projection in (module.in_proj, module.out_proj):
        change(projection)
    expected = module(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)
    assert calls == [TOKENS] * 2


def test_wrong_width():
    with torch.no_grad(), pytest.raises(ValueError, match=r"x has shape \[20, 48\]"):
        make()(torch.randn(TOKENS, 48, dtype=torch.float64))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    torch._dynamo.reset()
    module = make()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with torch.no_grad():
        for tokens in (TOKENS, TOKENS + 3):
            x = torch.randn(tokens, D_MODEL, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), unchunked(module, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strict", [False, True])
def test_exports(strict):
    module, x = make(), torch.randn(TOKENS, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},), strict=strict)
        longer = torch.randn(3 * TOKENS, D_MODEL, dtype=torch.float64)
        torch.testing.assert_close(program.module()(longer), unchunked(module, longer), rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton", "eager"])
def test_peak_memory_beyond_the_input(backend, monkeypatch):
    """The result and one chunk: 1 + 1/4 buffers of [T, d_model]."""
    reason = flashmhf.info().reasons[backend]
    if reason:
        pytest.skip(f"{backend} is not usable here: {reason}")
    monkeypatch.setattr(modules, "CHUNK_TOKENS", 16384)
    tokens, d_model = 4 * 16384, 1024
    module = flashmhf.FlashMHF(d_model, 8, 2, backend=backend, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, d_model, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        module(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(x)
    buffers = (torch.cuda.max_memory_allocated() - before) / (tokens * d_model * 2)
    assert buffers <= (1.5 if backend != "eager" else 4), f"{buffers:.2f} buffers"
