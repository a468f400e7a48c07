"""The operators ``torch.ops.flashmhf.fp8_linear`` and ``fp8_layer``: a projection with e4m3 weights, and the whole network.

They serve inference: an input that requires a gradient is refused. One node of a compiled or exported graph each, so that the choice by
the number of tokens (``linear.few_tokens``) makes no guard on that number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks, reference, torch_private
from ..backends.contract import Norm
from ..quantize.packing import E4M3
from . import fp8 as operators

Fp8Projection = tuple[Tensor, Tensor | None, Tensor | None]  # W [N, K]; the scale [N, 1] of its rows, None for a W in x's dtype; bias [N]
CHUNK_TOKENS = 16384  # more tokens than this take equal chunks of at most this many: Q and S of one chunk at a time
_ANY_SIZES = {"d_h": 64, "d_e": 16}  # a projection has neither: sizes that every back end takes

operators._library.define(
    'fp8_linear(Tensor x, Tensor weight8, Tensor scale, Tensor? bias=None, *, str backend="auto") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)
operators._library.define(
    "fp8_layer(Tensor x, Tensor in_w, Tensor? in_scale, Tensor? in_bias, Tensor k8, Tensor u8, Tensor v8, Tensor scales, Tensor w, "
    "float eps, Tensor out_w, Tensor? out_scale, Tensor? out_bias, *, Tensor? q_norm=None, float q_norm_eps=0.0, "
    'str backend="auto") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _check_linear(
    x: Tensor, weight8: Tensor, scale: Tensor, bias: Tensor | None, names: tuple[str, str, str] = ("weight8", "scale", "bias")
) -> None:
    weight_name, scale_name, bias_name = names
    given = {"x": x, weight_name: weight8, scale_name: scale} | ({} if bias is None else {bias_name: bias})
    checks.tensors(**given)
    checks.floating("x", x)
    dtypes = dict(zip(names, (E4M3, torch.float32, x.dtype), strict=True))
    for name, tensor in given.items():
        if name != "x" and tensor.dtype != dtypes[name]:
            raise TypeError(f"{name} has dtype {checks.name_of(tensor.dtype)}; supported: {checks.name_of(dtypes[name])}")
    for name, tensor in given.items():
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}; all tensors must be on one device")
    if x.dim() < 1 or weight8.dim() != 2 or x.shape[-1] != weight8.shape[1]:
        raise ValueError(f"x has shape {list(x.shape)} and {weight_name} {list(weight8.shape)}; expected [..., K] and [N, K]")
    features = weight8.shape[0]
    for name, shape in ((scale_name, (features, 1)), (bias_name, (features,))):
        if name in given and tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(given[name].shape)}; expected {list(shape)} from the rows of {weight_name}")
    for name in (weight_name, scale_name):
        if not given[name].is_contiguous():
            raise ValueError(f"{name} has strides {list(given[name].stride())} for shape {list(given[name].shape)}; it must be contiguous")


def _linear(x, weight8, scale, bias=None, *, backend="auto"):
    _check_linear(x, weight8, scale, bias)
    module = operators.select(backend, x.device, x.dtype, **_ANY_SIZES)
    shape = *x.shape[:-1], weight8.shape[0]
    rows = x.reshape(-1, x.shape[-1])
    return module.linear(rows, weight8, scale, bias).view(shape) if rows.numel() else x.new_empty(shape)


def _fake_linear(x, weight8, scale, bias=None, *, backend="auto"):
    _check_linear(x, weight8, scale, bias)
    return x.new_empty((*x.shape[:-1], weight8.shape[0]))


def _check_given(x: Tensor, in_w: Tensor, k8: Tensor, w: Tensor, out_w: Tensor, q_norm_eps: float) -> None:
    """What every back end's layer needs checked; the parts' operators check the rest."""
    checks.tensors(x=x, in_w=in_w, k8=k8, w=w, out_w=out_w)
    checks.epsilon("q_norm_eps", q_norm_eps)


def _project(name: str, x: Tensor, projection: Fp8Projection, backend: str) -> Tensor:
    w, scale, bias = projection
    if scale is None:
        checks.projection(name, w, bias, x)
        return torch.nn.functional.linear(x, w, bias)
    _check_linear(x, w, scale, bias, (f"{name}_w", f"{name}_scale", f"{name}_bias"))
    return torch.ops.flashmhf.fp8_linear(x, w, scale, bias, backend=backend)


def _parts(x, in_w, in_scale, in_bias, k8, u8, v8, scales, w, eps, out_w, out_scale, out_bias, *, q_norm, q_norm_eps, backend):
    """The network by its parts' operators, after the checks that name this operator's arguments."""
    _check_given(x, in_w, k8, w, out_w, q_norm_eps)
    checks.floating("x", x)
    if x.dim() < 1 or in_w.dim() != 2 or x.shape[-1] != in_w.shape[1]:
        raise ValueError(f"x has shape {list(x.shape)} and in_w {list(in_w.shape)}; expected [..., d_model] and [H d_h, d_model]")
    head_dim = k8.shape[3] if k8.dim() == 4 else 0
    if not head_dim or not in_w.shape[0] or in_w.shape[0] % head_dim:
        raise ValueError(f"in_w has shape {list(in_w.shape)} and k8 {list(k8.shape)}; expected [H d_h, d_model] and [H_kv, E, d_e, d_h]")
    if out_w.dim() != 2 or out_w.shape[1] != in_w.shape[0]:
        raise ValueError(f"out_w has shape {list(out_w.shape)}; expected [d_out, H d_h] with H d_h = {in_w.shape[0]} from in_w")
    q = _project("in", x, (in_w, in_scale, in_bias), backend).unflatten(-1, (-1, head_dim))
    checks.head_norm(q_norm, q, *q.shape[-2:])
    if q_norm is not None:
        q = reference.normalise_heads(q, q_norm, q_norm_eps)
    mixed = torch.ops.flashmhf.fp8_gated_forward(q, k8, u8, v8, scales, w, eps, backend=backend)
    return _project("out", mixed.flatten(-2), (out_w, out_scale, out_bias), backend)


def inference_layer(
    x: Tensor,
    in_proj: Fp8Projection,
    q_norm: Norm | None,
    packed: tuple[Tensor, Tensor, Tensor, Tensor],
    w: Tensor,
    eps: float,
    out_proj: Fp8Projection,
    backend: str = "auto",
) -> Tensor | None:
    """The network's values, [..., d_model] -> [..., d_model], by the back end's one operator for them, without autograd.

    None where the back end has no such operator or does not take these tensors as they are, and for more than CHUNK_TOKENS tokens. Raises
    NotImplementedError for an explicit back end that cannot run.
    """
    k8 = packed[0]
    if k8.dim() != 4 or x.shape[:-1].numel() > CHUNK_TOKENS:
        return None
    return operators.select(backend, x.device, x.dtype, k8.shape[3], k8.shape[2]).layer(x, in_proj, q_norm, packed, w, eps, out_proj)


def _layer(
    x, in_w, in_scale, in_bias, k8, u8, v8, scales, w, eps, out_w, out_scale, out_bias, *, q_norm=None, q_norm_eps=0.0, backend="auto"
):
    _check_given(x, in_w, k8, w, out_w, q_norm_eps)
    norm, packed, in_proj, out_proj = None, (k8, u8, v8, scales), (in_w, in_scale, in_bias), (out_w, out_scale, out_bias)
    if q_norm is not None:
        norm = q_norm, q_norm_eps

    def one(x: Tensor) -> Tensor:
        y = inference_layer(x, in_proj, norm, packed, w, eps, out_proj, backend)
        if y is not None:
            return y
        return _parts(x, *in_proj, *packed, w, eps, *out_proj, q_norm=q_norm, q_norm_eps=q_norm_eps, backend=backend)

    tokens = x.shape[:-1].numel()
    if tokens <= CHUNK_TOKENS:
        return one(x)
    chunks = x.flatten(0, -2).tensor_split(-(-tokens // CHUNK_TOKENS))
    first = one(chunks[0])  # its checks precede the allocation of the result
    out = first.new_empty((*x.shape[:-1], first.shape[-1]))
    parts = out.view(tokens, first.shape[-1]).tensor_split(len(chunks))
    parts[0].copy_(first)
    del first
    for x_chunk, part in zip(chunks[1:], parts[1:], strict=True):
        part.copy_(one(x_chunk))
    return out


def _fake_layer(x, *operands, q_norm=None, q_norm_eps=0.0, backend="auto"):
    return _parts(x, *operands, q_norm=q_norm, q_norm_eps=q_norm_eps, backend=backend).contiguous()


def _autocast_linear(device_type: str):
    def call(x, weight8, scale, bias=None, **kwargs):
        if isinstance(x, Tensor) and x.dtype in checks.FLOAT_DTYPES[:3]:
            dtype = torch.get_autocast_dtype(device_type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        with torch_private.below_autocast():
            return torch.ops.flashmhf.fp8_linear(x, weight8, scale, bias, **kwargs)

    return call


for _name, _kernel, _fake in (("fp8_linear", _linear, _fake_linear), ("fp8_layer", _layer, _fake_layer)):
    operators.register(_name, _kernel, _fake)
for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    operators._library.impl("fp8_linear", _autocast_linear(_device_type), _key)
