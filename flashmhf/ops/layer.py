"""``torch.ops.flashmhf.layer`` and ``fp8_layer``: in_proj, the heads' networks and out_proj at inference in one.

A compiled layer is one node, which picks its kernels by the number of tokens when it runs: the compiler adds no guard
on that number, and CUDA graphs can capture it. Whether a module's call may run so :func:`run` alone decides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import functional

from .. import backends, checks, reference
from ..backends.contract import LayerWeights
from ..torch_private import any_autocast, autocasts, function_modes, has_function_mode
from .library import ORDINARY, define, is_direct, register_vmap

CHUNK_TOKENS = 16384  # more tokens run in equal chunks of at most this many: one chunk of Q and S at a time


class Call(NamedTuple):
    """One call of an operator."""

    x: Tensor
    weights: LayerWeights
    backend: str = "auto"
    activation: str = "silu"


def _describe(
    x: Tensor, *, in_w: Tensor, in_bias: Tensor | None, w: Tensor | None, eps: float, out_w: Tensor,
    out_bias: Tensor | None, q_norm: Tensor | None = None, q_norm_eps: float = 0.0, backend: str = "auto",
    activation: str = "silu", **networks: Tensor,
) -> Call:  # fmt: skip
    weights = LayerWeights(in_w, in_bias, tuple(networks.values()), w, eps, out_w, out_bias, q_norm, q_norm_eps)
    return Call(x, weights, backend, activation)


def _check(call: Call) -> None:
    """Raise for weights that do not belong together or to x; the operators of the heads' networks check the rest."""
    x, weights, _, activation = call
    in_w, in_bias, networks, _, _, out_w, out_bias, q_norm, q_norm_eps = weights
    name = "k8" if len(networks) == 4 else "k"
    checks.tensors(x=x, in_w=in_w, out_w=out_w, **{name: networks[0]})
    checks.activation(activation)
    checks.floating("x", x)
    checks.weight_shape(networks[0], name)
    kv_heads, _, _, head_dim = networks[0].shape
    inner = in_w.shape[0] if in_w.dim() == 2 else 0
    if not inner or inner % (kv_heads * head_dim):
        expected = f"[H d_h, d_model] with a multiple of H_kv d_h = {kv_heads * head_dim} from {name}"
        raise ValueError(f"in_w has shape {list(in_w.shape)}; expected {expected}")
    if out_w.dim() != 2 or out_w.shape[1] != inner:
        expected = f"[d_model, H d_h] with H d_h = {inner} from in_w"
        raise ValueError(f"out_w has shape {list(out_w.shape)}; expected {expected}")
    if x.dim() < 1 or x.shape[-1] != in_w.shape[1]:
        expected = f"[..., d_model] with d_model = {in_w.shape[1]} from in_w"
        raise ValueError(f"x has shape {list(x.shape)}; expected {expected}")
    checks.not_negative("q_norm_eps", q_norm_eps)
    checks.projection("in", in_w, in_bias, x)
    checks.projection("out", out_w, out_bias, x)
    if q_norm is not None:  # in any floating dtype
        checks.floating("q_norm", q_norm)
        checks.expect_device("q_norm", q_norm, x, of="x")
        checks.expect_shape("q_norm", q_norm, (inner // head_dim, head_dim), "[H, d_h]")


def contiguous(weights: LayerWeights) -> LayerWeights:
    """Return weights of any strides as the operators of the heads' networks take them, in a copy where they must be."""
    router = None if weights.router is None else weights.router.contiguous()
    return weights._replace(networks=tuple(w.contiguous() for w in weights.networks), router=router)


def _project(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return x W^T + b, written into ``out`` [T, N] if there is one."""
    if out is None:
        return functional.linear(x, w, bias)
    return torch.mm(x, w.t(), out=out) if bias is None else torch.addmm(bias, x, w.t(), out=out)


def _run_networks(q: Tensor, weights: LayerWeights, backend: str, activation: str) -> Tensor:
    """Return S for Q, both [..., H d_h]."""
    heads = q.unflatten(-1, (-1, weights.networks[0].shape[3]))
    if weights.q_norm is not None:
        heads = reference.normalise_heads(heads, weights.q_norm, weights.q_norm_eps)
    ops, operands, gate = torch.ops.flashmhf, (heads, *weights.networks), (weights.router, weights.eps)
    if len(weights.networks) == 4:
        return ops.fp8_gated_forward(*operands, *gate, backend=backend).flatten(-2)
    if weights.router is None:
        return ops.forward(*operands, backend=backend, activation=activation).flatten(-2)
    return ops.gated_forward(*operands, *gate, backend=backend, activation=activation).flatten(-2)


def _by_parts(x: Tensor, weights: LayerWeights, backend: str, activation: str, out: Tensor | None = None) -> Tensor:
    """Run the layer by its parts. ``out`` [T, d_model] takes the result and, where it is as wide, Q before it."""
    q_out = out if out is not None and out.shape[1] == weights.in_w.shape[0] else None
    summed = _run_networks(_project(x, weights.in_w, weights.in_bias, q_out), weights, backend, activation)
    return _project(summed, weights.out_w, weights.out_bias, out)


def values(call: Call) -> Tensor:
    """Return the layer's result: what both operators run on every device. The back end is asked first."""
    x, weights, backend, activation = call
    networks = weights.networks
    try:
        if networks[0].dim() == 4 and 0 <= weights.eps < math.inf and 0 <= weights.q_norm_eps < math.inf:
            _, _, d_e, d_h = networks[0].shape
            chosen = backends.select(backend, x.device, x.dtype, d_h, d_e, activation, len(networks) == 4)
            y = chosen.layer(x, weights)
            if y is not None:
                return y
    except Exception:
        _check(call)
        raise
    _check(call)
    weights = contiguous(weights)
    if x.shape[:-1].numel() > CHUNK_TOKENS:
        return _by_chunks(x, weights, backend, activation)
    return _by_parts(x, weights, backend, activation)


def _by_chunks(x: Tensor, weights: LayerWeights, backend: str, activation: str) -> Tensor:
    """Run the layer in chunks of tokens. The peak memory beyond x is the result and S of one chunk."""
    out = x.new_empty((*x.shape[:-1], weights.out_w.shape[0]))
    rows, results = x.flatten(0, -2), out.flatten(0, -2)
    chunks = -(-len(rows) // CHUNK_TOKENS)
    for x_chunk, out_chunk in zip(rows.tensor_split(chunks), results.tensor_split(chunks), strict=True):
        _by_parts(x_chunk, weights, backend, activation, out_chunk)
    return out


def _fake(call: Call) -> Tensor:
    x, weights, backend, activation = call
    _check(call)
    _run_networks(x.new_empty((*x.shape[:-1], weights.in_w.shape[0])), contiguous(weights), backend, activation)
    return x.new_empty((*x.shape[:-1], weights.out_w.shape[0]))


def _in_graph(call: Call) -> Tensor | None:
    x, weights, backend, activation = call
    _, _, d_e, d_h = weights.networks[0].shape
    if not backends.chooses_hopper(backend, x.device, x.dtype, d_h, d_e, activation):
        return None
    return backends.hopper.graph_layer(x, weights)


_BEFORE, _AFTER = "Tensor x, Tensor in_w, Tensor? in_bias", "float eps, Tensor out_w, Tensor? out_bias"
_TAIL = 'Tensor? q_norm=None, float q_norm_eps=0.0, *, str backend="auto"'
_ENDS = ("x", "in_w", "in_bias", "out_w", "out_bias")
_PLAIN = f'({_BEFORE}, Tensor k, Tensor u, Tensor v, Tensor? w, {_AFTER}, {_TAIL}, str activation="silu") -> Tensor'
_FP8 = f"({_BEFORE}, Tensor k8, Tensor u8, Tensor v8, Tensor scales, Tensor w, {_AFTER}, {_TAIL}) -> Tensor"
define("layer", _PLAIN, _describe, values, _fake, _in_graph, casts=(*_ENDS, *"kuv"))
define("fp8_layer", _FP8, _describe, values, _fake, _in_graph, casts=_ENDS)
register_vmap("layer", 0)
register_vmap("fp8_layer", 0)
_LAYER, _FP8_LAYER = torch.ops.flashmhf.layer, torch.ops.flashmhf.fp8_layer


def call(x: Tensor, weights: LayerWeights, backend: str = "auto", activation: str = "silu") -> Tensor:
    """Return the layer's result [..., d_model] in x's dtype, by the operator that these weights need. in_proj and
    out_proj may hold the heads of one rank: the result is then its part of the sum over the ranks.
    """
    in_w, in_bias, networks, *rest = weights
    operands = (x, in_w, in_bias, *networks, *rest)
    if len(networks) == 4:  # packed
        return _FP8_LAYER(*operands, backend=backend)
    return _LAYER(*operands, backend=backend, activation=activation)


def run(x: Tensor, weights: LayerWeights, backend: str = "auto", activation: str = "silu") -> Tensor | None:
    """Return the layer's result in one operation, eagerly without the dispatcher, or None if more than its values
    matter: a gradient is wanted, somebody watches the calls of its parts, or a tensor is not PyTorch's own or x not as
    the weights are.
    """
    in_w, in_bias, networks, router, _, out_w, out_bias, q_norm, _ = weights
    if x.dtype != in_w.dtype or x.device != in_w.device:
        return None
    tensors = (x, in_w, in_bias, *networks, router, out_w, out_bias, q_norm)
    if is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return None
    if is_dynamo_compiling():  # whose graphs ask again, in every call, for all that is read here
        watched = function_modes() > 0 and has_function_mode()
        if watched or (not x.is_meta and is_autocast_enabled(x.device.type)):
            return None
    elif (any_autocast() or not (x.is_cuda or x.is_cpu)) and autocasts(x.device.type):
        return None
    elif is_direct(*tensors):
        return values(Call(x, weights, backend, activation))
    elif not is_compiling():
        return None
    for tensor in tensors:  # in torch.export without Dynamo others stand for them; a DTensor and its kin flatten
        if type(tensor) not in ORDINARY and tensor is not None:
            if is_dynamo_compiling() or hasattr(type(tensor), "__tensor_flatten__"):
                return None
    return call(x, weights, backend, activation)
