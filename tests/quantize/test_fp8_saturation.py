"""The counts of saturated values, of single calls and of a model's calls."""

import pytest
import torch
from torch import Tensor, nn

import flashmhf
from flashmhf import quantize

ELEMENTS = 2 * 3 * 32  # of A, a token


def network(**options: bool) -> flashmhf.FlashMHF:
    torch.manual_seed(0)
    return flashmhf.FlashMHF(32, 2, 3, 32, **options)


def saturating(fp8: quantize.Fp8FlashMHF) -> Tensor:
    """An x whose q is one column, which K and U of ``fp8`` are made to have alone."""
    with torch.no_grad():
        for weights in (fp8.k8, fp8.u8):
            largest = torch.zeros(weights.shape)
            largest[..., 0] = 180
            weights.copy_(largest.to(weights.dtype))
    q = torch.zeros(2, 16)
    q[:, 0] = 1
    return torch.linalg.lstsq(fp8.in_proj.weight, q.flatten()[:, None]).solution.T


def test_a_model_reports_what_saturates_by_module():
    model = nn.Sequential(network(), nn.ReLU(), nn.Sequential(network()))
    quantize.quantize_(model)
    x = torch.randn(2, 3, 32)
    expected = model(x)
    with quantize.check_saturation(model) as report:
        assert report["0"]["a"] == (0, 0)
        assert torch.equal(model(x), expected)
        model(x[0])
    assert set(report) == {"0", "2.0"}
    for name, counts in report.items():
        weights = {key: (0, value.numel()) for key, value in zip("kuv", model.get_submodule(name).packed.tensors, strict=False)}
        assert counts == weights | {"a": (0, 9 * ELEMENTS)}
    model(x)
    assert report["0"]["a"] == (0, 9 * ELEMENTS)  # the check has ended


def test_saturated_values_are_counted():
    fp8 = quantize.to_fp8(network())
    x = saturating(fp8)
    with quantize.check_saturation(fp8) as report:
        assert torch.isfinite(fp8(x)).all()
    assert report[""]["a"] == quantize.count_saturated(fp8.query(x), fp8.packed)["a"] and report[""]["a"][0] == ELEMENTS


def test_the_norm_of_q_and_compiled_models():
    fp8 = quantize.to_fp8(network(q_norm=True))
    compiled = torch.compile(fp8, backend="eager")
    x = torch.randn(5, 32)
    compiled(x)
    with quantize.check_saturation(compiled) as report:
        compiled(x=x)
    assert [counts["a"] for counts in report.values()] == [(0, 5 * ELEMENTS)]


def test_the_check_ends_with_an_error():
    fp8 = quantize.to_fp8(network())
    with pytest.raises(ValueError, match="d_model"), quantize.check_saturation(fp8):
        fp8(torch.randn(5, 31))
    assert not fp8._forward_hooks


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [(torch.zeros(1), TypeError, "got Tensor"), (nn.Linear(4, 4), ValueError, "holds no Fp8FlashMHF"), (network(), ValueError, "no Fp8Fl")],
)
def test_refusals(model, error, match):
    with pytest.raises(error, match=match), quantize.check_saturation(model):
        pass
