"""The operator flashmhf::layer by itself: what it refuses, and on which devices; opcheck."""

import pytest
import torch

from flashmhf import FlashMHF
from flashmhf.ops.layer import layer

D_MODEL, HEADS = 256, 4


def operands(tokens: int) -> dict:
    """The operator's arguments for a network with biases."""
    network = FlashMHF(D_MODEL, HEADS, 3, 32, bias=True).requires_grad_(False)
    return {
        "x": torch.randn(tokens, D_MODEL),
        "in_w": network.in_proj.weight,
        "in_bias": network.in_proj.bias,
        **{"k": network.k, "u": network.u, "v": network.v, "w": network.router, "eps": 1e-20},
        "out_w": network.out_proj.weight,
        "out_bias": network.out_proj.bias,
        **{"q_norm": torch.rand(HEADS, D_MODEL // HEADS), "q_norm_eps": 1e-5},
    }


REFUSED = {  # argument, what it becomes, and the error
    "x": (lambda x: x.long(), TypeError, "x has dtype int64; supported: bfloat16"),
    "in_w": (lambda w: w.double(), TypeError, r"in_w has dtype float64; supported: float32 \(x's dtype\)"),
    "in_bias": (lambda b: b[:1], ValueError, r"in_bias has shape \[1\]; expected \[256\]"),
    "k": (lambda k: k[:0], ValueError, "k has shape .*; H_kv must be at least 1"),
    "u": (lambda u: u[:, :, :-1], ValueError, "u has shape"),
    "w": (lambda w: "abc", TypeError, "w must be a torch.Tensor, got str"),
    "eps": (lambda eps: None, TypeError, "eps must be a float, got NoneType"),
    "out_w": (lambda w: w.bfloat16(), TypeError, "out_w has dtype bfloat16; supported: float32"),
    "out_bias": (lambda b: torch.tensor(1.0), ValueError, r"out_bias has shape \[\]; expected \[256\]"),
    "q_norm": (lambda w: w[:1], ValueError, r"q_norm has shape \[1, 64\]; expected \[4, 64\] \(\[H, d_h\]\)"),
    "q_norm_eps": (lambda eps: float("nan"), ValueError, "q_norm_eps is nan; supported: finite numbers from 0"),
}


def call(arguments: dict, device: str) -> torch.Tensor:
    placed = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    in_proj, out_proj = ((placed.pop(f"{end}_w"), placed.pop(f"{end}_bias")) for end in ("in", "out"))
    return layer(in_proj=in_proj, out_proj=out_proj, **placed)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_every_argument_of_the_operator_is_checked(name, tokens, device):
    given = operands(tokens)
    broken, error, message = REFUSED[name]
    assert call(given, device).shape == (tokens, D_MODEL)
    with pytest.raises(error, match=message):
        call(given | {name: broken(given[name])}, device)


def test_refuses_sizes_that_do_not_fit_and_gradients():
    given = operands(3)
    with pytest.raises(ValueError, match="in_w has shape"):
        call(given | {"in_w": given["in_w"][1:]}, "cpu")
    with pytest.raises(NotImplementedError, match="gradient"):
        call(given | {"x": given["x"].requires_grad_()}, "cpu")


def test_opcheck():
    given = operands(5)
    norm = {name: given.pop(name) for name in ("q_norm", "q_norm_eps")}
    torch.library.opcheck(torch.ops.flashmhf.layer, tuple(given.values()))
    torch.library.opcheck(torch.ops.flashmhf.layer, tuple(given.values()), norm)
