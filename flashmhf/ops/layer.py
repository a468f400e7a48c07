"""``torch.ops.flashmhf.layer``: in_proj, the operator and out_proj as one node of a compiled graph, for inference.

Engines compile their models, and a compiled ``FlashMHF`` keeps its linear layers as separate products (flashmhf.nn.FlashMHF). Here the
choice of kernels by the number of tokens is made inside the node: no guard on that number, no synchronisation, and the calls of a fixed
number of tokens are the same kernels every time, so a CUDA graph captures them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import backends, checks, flops, reference, torch_private
from ..backends.contract import Backend, Projection

CHUNK_TOKENS = 16384  # more tokens than this take equal chunks of at most this many: S of one chunk at a time

_library = torch.library.Library("flashmhf", "FRAGMENT")
_library.define(
    "layer(Tensor x, Tensor in_w, Tensor? in_bias, Tensor k, Tensor u, Tensor v, Tensor? w, float eps, Tensor out_w, Tensor? out_bias, *, "
    'Tensor? q_norm=None, float q_norm_eps=0.0, str backend="auto", str activation="silu") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _check_call(x: Tensor, in_w: Tensor, k: Tensor, out_w: Tensor, q_norm_eps: float) -> None:
    checks.weight_shape(k)
    shared = k.shape[0] * k.shape[3]
    if in_w.dim() != 2 or not in_w.shape[0] or in_w.shape[0] % shared:
        raise ValueError(f"in_w has shape {list(in_w.shape)}; expected [H d_h, d_model] with a multiple of H_kv d_h = {shared} from k")
    if out_w.dim() != 2 or out_w.shape[1] != in_w.shape[0]:
        raise ValueError(f"out_w has shape {list(out_w.shape)}; expected [d_model, H d_h] with H d_h = {in_w.shape[0]} from in_w")
    if x.dim() < 1 or x.shape[-1] != in_w.shape[1]:
        raise ValueError(f"x has shape {list(x.shape)}; expected [..., d_model] with d_model = {in_w.shape[1]} from in_w")
    checks.epsilon("q_norm_eps", q_norm_eps)


def _check(x: Tensor, in_proj: Projection, mix: _Mix, out_proj: Projection) -> None:
    """What _check_call leaves open, of every tensor but those that the operator of ``mix`` checks."""
    checks.floating("x", x)
    checks.projection("in", *in_proj, x)
    checks.projection("out", *out_proj, x)
    head_dim = mix.k.shape[3]
    checks.head_norm(mix.q_norm, x, in_proj[0].shape[0] // head_dim, head_dim)


@dataclass(frozen=True)
class _Mix:
    """Q [T, H d_h] -> S [T, H d_h]."""

    k: Tensor
    u: Tensor
    v: Tensor
    w: Tensor | None
    eps: float
    q_norm: Tensor | None
    q_norm_eps: float
    settings: dict[str, str]  # backend and activation

    def __call__(self, q: Tensor) -> Tensor:
        heads = q.unflatten(-1, (-1, self.k.shape[3]))
        if self.q_norm is not None:
            heads = reference.normalise_heads(heads, self.q_norm, self.q_norm_eps)
        if self.w is None:
            mixed = torch.ops.flashmhf.forward(heads, self.k, self.u, self.v, **self.settings)
        else:
            mixed = torch.ops.flashmhf.gated_forward(heads, self.k, self.u, self.v, self.w, self.eps, **self.settings)
        return mixed.flatten(-2)


def _projects(module: Backend, rows: Tensor, in_proj: Projection, mixed_features: int, out_proj: Projection) -> bool:
    """Whether the back end's kernel for few tokens takes both projections."""
    if len(rows) > module.PROJECT_TOKENS or module.refuse_projection(rows, *in_proj) is not None:
        return False
    return module.refuse_projection(rows.new_empty((len(rows), mixed_features)), *out_proj) is None


def _layer(x, in_w, in_bias, k, u, v, w, eps, out_w, out_bias, *, q_norm=None, q_norm_eps=0.0, backend="auto", activation="silu"):
    _check_call(x, in_w, k, out_w, q_norm_eps)
    module = backends.select(backend, x.device, x.dtype, k.shape[3], k.shape[2], activation)
    if w is not None:
        norm = None if q_norm is None else (q_norm, q_norm_eps)
        y = module.layer(x, (in_w, in_bias), norm, k, u, v, w, eps, (out_w, out_bias))
        if y is not None:
            return y
    mix = _Mix(k, u, v, w, eps, q_norm, q_norm_eps, {"backend": backend, "activation": activation})
    _check(x, (in_w, in_bias), mix, (out_w, out_bias))
    shape = (*x.shape[:-1], len(out_w))
    if not x.numel():
        mix(x.new_empty((0, len(in_w))))  # for its checks
        return x.new_empty(shape)
    rows = x.reshape(-1, x.shape[-1])
    if _projects(module, rows, (in_w, in_bias), in_w.shape[0], (out_w, out_bias)):
        mixed = mix(module.project(rows, in_w, in_bias))
        # The kernel before this projection is the forward operator's, which starts after all older kernels: the weights are ready.
        return module.project(mixed, out_w, out_bias, weights_ready=True).view(shape)
    if len(rows) <= CHUNK_TOKENS:
        return torch.nn.functional.linear(mix(torch.nn.functional.linear(rows, in_w, in_bias)), out_w, out_bias).view(shape)
    out = x.new_empty(shape)
    chunks = -(-len(rows) // CHUNK_TOKENS)
    for x_chunk, out_chunk in zip(rows.tensor_split(chunks), out.view(-1, len(out_w)).tensor_split(chunks), strict=True):
        mixed = mix(torch.nn.functional.linear(x_chunk, in_w, in_bias))
        if out_bias is None:
            torch.mm(mixed, out_w.t(), out=out_chunk)
        else:
            torch.addmm(out_bias, mixed, out_w.t(), out=out_chunk)
    return out


def _fake_layer(x, in_w, in_bias, k, u, v, w, eps, out_w, out_bias, *, q_norm=None, q_norm_eps=0.0, backend="auto", activation="silu"):
    _check_call(x, in_w, k, out_w, q_norm_eps)
    mix = _Mix(k, u, v, w, eps, q_norm, q_norm_eps, {"backend": backend, "activation": activation})
    _check(x, (in_w, in_bias), mix, (out_w, out_bias))
    mix(x.new_empty((*x.shape[:-1], in_w.shape[0])))
    return x.new_empty((*x.shape[:-1], out_w.shape[0]))


def _layer_autograd(*args, **kwargs):
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError("flashmhf::layer has no gradient; supported: inference (torch.no_grad). flashmhf.FlashMHF trains")
    with torch_private.below_autograd():
        return torch.ops.flashmhf.layer(*args, **kwargs)


for _key in ("CPU", "CUDA"):
    _library.impl("layer", _layer, _key)
_library.impl("layer", _layer_autograd, "Autograd")
torch.library.register_fake("flashmhf::layer", _fake_layer, lib=_library)
flops.register_layer()


def layer(
    x: Tensor,
    in_proj: Projection,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    w: Tensor | None,
    eps: float,
    out_proj: Projection,
    *,
    q_norm: Tensor | None = None,
    q_norm_eps: float = 0.0,
    backend: str = "auto",
    activation: str = "silu",
) -> Tensor:
    """out_proj(S(in_proj(x))) at inference (paper, section 3.2), by one operator.

    Args:
        x: [..., d_model].
        in_proj, out_proj: weights [H d_h, d_model] and [d_model, H d_h] with a bias or None. H may be the heads of one rank: the result
            is then that rank's part of the sum over the ranks.
        k, u, v: [H_kv, E, d_e, d_h], contiguous, x's dtype; H_kv divides H.
        w: the router [H, d_h, E], or None for a network without gate (MH-FFN). eps: of the gate's normalisation.
        q_norm, q_norm_eps: weight [H, d_h] of the per-head RMS normalisation of Q, or None.
        backend, activation: as in :func:`flashmhf.flash_mhf`.

    Returns [..., d_model] in x's dtype. Raises TypeError, ValueError and NotImplementedError as :func:`flashmhf.flash_mhf`, and
    NotImplementedError where a gradient is needed.
    """
    (in_w, in_bias), (out_w, out_bias) = in_proj, out_proj
    given = {"w": w, "in_bias": in_bias, "out_bias": out_bias, "q_norm": q_norm}
    checks.strided(x=x, in_w=in_w, k=k, u=u, v=v, out_w=out_w, **{name: value for name, value in given.items() if value is not None})
    checks.real(eps=eps, q_norm_eps=q_norm_eps)
    checks.options(backend=(backend, str), activation=(activation, str))
    settings = {"q_norm": q_norm, "q_norm_eps": q_norm_eps, "backend": backend, "activation": activation}
    return torch.ops.flashmhf.layer(x, in_w, in_bias, k, u, v, w, eps, out_w, out_bias, **settings)
