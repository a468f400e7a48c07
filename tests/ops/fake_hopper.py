"""The Hopper operators on the CPU: the schemas of the C++ library with the eager back end's arithmetic behind them."""

import functools
import pathlib
import re
from collections.abc import Callable

import torch
from torch import Tensor

from flashmhf import reference
from flashmhf.backends import eager, hopper
from flashmhf.backends.contract import Router, Settings
from flashmhf.backends.eager import fp8
from flashmhf.backends.hopper import fakes

BINDINGS = pathlib.Path(__file__).resolve().parents[2] / "csrc/torch/bindings.cpp"
LIBRARY = torch.library.Library("flashmhf_hopper", "FRAGMENT")


def schemas() -> dict[str, str]:
    """The operators' schemas by their names, as the C++ source has them."""
    source = BINDINGS.read_text().replace("\\\n", "")
    for macro, parameter, text in re.findall(r"#define (\w+)\((\w+)\) (.*)", source):
        whole = functools.partial(re.sub, rf"\b{parameter}\b", string=text)
        source = re.sub(rf'{macro}\(("[^"]*")\)', lambda call, whole=whole: whole(call[1]), source)
    found = re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)', source)
    texts = ("".join(re.findall(r'"([^"]*)"', text)) for text in found)
    return {text.partition("(")[0]: text for text in texts}


def _gate(r_or_w, *eps):
    return Router(r_or_w, *eps) if eps else r_or_w


def _forward(q, k, u, v, *gate_and_deterministic):
    *gate, deterministic = gate_and_deterministic
    return eager.forward(q, k, u, v, _gate(*gate), Settings(deterministic))


def _backward(grad_out, q, k, u, v, *gate_and_settings):
    *gate, deterministic, tokens, weights = gate_and_settings
    return eager.backward(grad_out, q, k, u, v, _gate(*gate), Settings(deterministic, (tokens, weights)))


def _fp8_forward(q, k8, u8, v8, scales, r, w, eps):
    return fp8.forward(q, k8, u8, v8, scales, r if w is None else Router(w, eps))


def _layer(x, in_w, in_bias, q_norm, q_norm_eps, *operands) -> Tensor:
    *networks, w, eps, out_w, out_bias = operands
    q = torch.nn.functional.linear(x, in_w, in_bias).unflatten(-1, w.shape[:2])
    q = q if q_norm is None else reference.normalise_heads(q, q_norm, q_norm_eps)
    is_fp8 = len(networks) == 4
    mixed = _fp8_forward(q, *networks, None, w, eps) if is_fp8 else _forward(q, *networks, w, eps, True)
    return torch.nn.functional.linear(mixed.flatten(-2), out_w, out_bias)


KERNELS: dict[str, Callable] = {
    **dict.fromkeys(("forward", "gated_forward"), _forward), **dict.fromkeys(("backward", "gated_backward"), _backward),
    "fp8_forward": _fp8_forward, **dict.fromkeys(("layer", "fp8_layer", "graph_layer", "graph_fp8_layer"), _layer),
}  # fmt: skip


@functools.cache
def install() -> None:
    """Give the process the operators' CPU kernels, and those operators that no C++ library has defined."""
    hopper.library()
    for name, kernel in KERNELS.items():
        if not hasattr(torch.ops.flashmhf_hopper, name):  # a library that was refused may have been loaded
            LIBRARY.define(schemas()[name])
        LIBRARY.impl(name, kernel, "CPU")
    fakes.register()
