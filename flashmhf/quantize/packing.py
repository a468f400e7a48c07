"""Packed weights: K, U and V in e4m3, in the order in which the FP8 kernels read them, with their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import checks
from ..backends.fp8_layout import BLOCK, E4M3, E4M3_MAX, TINIEST_SCALE, check_packed, permutation, to_e4m3

LAYOUT = 1  # of the packed tensors; a change of their order gets another number
ROW_NORM = 180.0  # of rows of k8 and u8: sums of Q K^T and Q U^T are about 720 at most, far inside fp16's range
V_MAX = 112.0  # of |v8|: a product with an a8 of 448 stays within fp16, in which the Hopper kernel sums a sub-network


@dataclass(frozen=True, eq=False)  # equality of tensors is no bool
class PackedWeights:
    """Hold K, U and V in e4m3 with their scales, as :func:`pack_fp8` returns them.

    k8, u8: [H_kv, E, d_e, d_h], v8: [H_kv, E, d_h, d_e], last dimension permuted in blocks of 16. scales: [3, H_kv, E]
    fp32; those of k8 are equal within a head. layout: the version of this order. Raises TypeError for non-tensors.
    """

    k8: Tensor
    u8: Tensor
    v8: Tensor
    scales: Tensor
    layout: int = LAYOUT

    def __post_init__(self) -> None:
        checks.tensors(k8=self.k8, u8=self.u8, v8=self.v8, scales=self.scales)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k8, self.u8, self.v8, self.scales


def check_layout(stored: Tensor) -> None:
    """Raise TypeError if ``stored`` is not a tensor, ValueError if it is another layout version than this one's."""
    checks.tensors(layout=stored)
    if stored.numel() != 1 or stored.item() != LAYOUT:
        raise ValueError(f"layout is {stored.tolist()}; supported: [{LAYOUT}]. Pack again with this version")


def operands(packed: PackedWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of ``packed``. Raises TypeError unless it is PackedWeights, ValueError for another layout."""
    checks.instance("packed", packed, PackedWeights, "a flashmhf.quantize.PackedWeights")
    if packed.layout != LAYOUT:
        raise ValueError(f"packed has layout {packed.layout}; supported: {LAYOUT}. Pack again with this version")
    return packed.tensors


@torch.no_grad()
def pack_fp8(k: Tensor, u: Tensor, v: Tensor) -> PackedWeights:
    """Pack K, U and V [H_kv, E, d_e, d_h] of any floating dtype into e4m3, on their device, without calibration data.

    A scale follows the root mean square of its sub-network's weights, and grows where the largest would saturate or,
    for K and U, a row's norm would exceed 180. Weights that are not finite become NaN. Raises TypeError for wrong
    dtypes and non-tensors, ValueError for shapes (d_e and d_h are multiples of 16), devices and strides.
    """
    checks.strided(k=k, u=u, v=v)
    checks.floating("k", k)
    checks.weight_shape(k)
    checks.networks(k, u, v, k, "k")
    for size, name in zip(k.shape[2:], ("d_e", "d_h"), strict=True):
        if size % BLOCK:
            raise ValueError(f"k has shape {list(k.shape)}; supported: multiples of {BLOCK}, {name} is {size}")

    k, u, v = (w.where(w.isfinite(), torch.nan) for w in (k.float(), u.float(), v.float()))

    def scale(weight: Tensor, largest: float, bounded_rows: bool) -> Tensor:
        w = weight.nan_to_num(0)
        found = torch.maximum(w.square().mean((2, 3)).sqrt(), w.abs().amax((2, 3)) / largest)
        if bounded_rows:
            found = torch.maximum(found, w.norm(dim=-1).amax(2) / ROW_NORM)
        return found.clamp_min(TINIEST_SCALE)

    of_k = scale(k, E4M3_MAX, True).amax(1, keepdim=True).expand(k.shape[:2])
    scales = torch.stack([of_k, scale(u, E4M3_MAX, True), scale(v, V_MAX, False)])
    rounded = (to_e4m3(w / s[..., None, None]) for w, s in zip((k, u, v), scales, strict=True))
    k8, u8, v8 = (w.view(torch.uint8) for w in rounded)  # PyTorch indexes e4m3 as bytes only
    over_heads, over_inter = permutation(k.shape[3], k.device), permutation(k.shape[2], k.device)
    ordered = k8[..., over_heads], u8[..., over_heads], v8[:, :, over_inter].transpose(2, 3)
    return PackedWeights(*(w.contiguous().view(E4M3) for w in ordered), scales.contiguous())


def unpack(packed: PackedWeights, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return (K, U, V) [H_kv, E, d_e, d_h] in ``dtype``: the e4m3 values times their scales. Raises TypeError for
    another type or dtype, ValueError for another layout version or wrong shapes.
    """
    k8, u8, v8, scales = operands(packed)
    check_packed(k8, u8, v8, scales)
    if dtype not in checks.FLOAT_DTYPES:
        raise TypeError(f"dtype is {dtype}; supported: {checks.FLOATS}")
    over_heads, over_inter = (permutation(size, k8.device).argsort() for size in (k8.shape[3], k8.shape[2]))
    plain = k8.float()[..., over_heads], u8.float()[..., over_heads], v8.float()[..., over_inter].transpose(2, 3)
    k, u, v = ((w * s[..., None, None]).to(dtype).contiguous() for w, s in zip(plain, scales, strict=True))
    return k, u, v
