"""The layout of packed FP8 weights: dtype, order of columns, checks.

In each block of 16 columns, place 4t + i holds column 2t + i for i < 2 and column 8 + 2t + i - 2 for i >= 2: what a
thread of the Hopper kernel holds of Q or a product is then its operand of the next product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 16  # columns that are permuted among themselves
TINIEST_SCALE = 1e-30


def permutation(columns: int, device: torch.device | None = None) -> Tensor:
    """Return [columns]: the column that stands at each place."""
    place = torch.tensor([2 * t + i if i < 2 else 8 + 2 * t + i - 2 for t in range(4) for i in range(4)], device=device)
    return (torch.arange(0, columns, BLOCK, device=device)[:, None] + place).flatten()


def to_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3; values beyond +-448 saturate, NaN stays."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def check_packed(k8: Tensor, u8: Tensor, v8: Tensor, scales: Tensor, q: Tensor | None = None) -> None:
    """Refuse packed weights of wrong dtypes, shapes, strides or devices, and a q that does not fit them."""
    checks.tensors(k8=k8, u8=u8, v8=v8, scales=scales)
    for name, tensor in (("k8", k8), ("u8", u8), ("v8", v8)):
        if tensor.dtype != E4M3:
            raise TypeError(f"{name} has dtype {checks.name_of(tensor.dtype)}; supported: float8_e4m3fn")
    if scales.dtype != torch.float32:
        raise TypeError(f"scales has dtype {checks.name_of(scales.dtype)}; supported: float32")
    checks.weight_shape(k8, "k8")
    heads, subnets, subnet_dim, head_dim = k8.shape
    if subnet_dim % BLOCK or head_dim % BLOCK:
        raise ValueError(f"k8 has shape {list(k8.shape)}; supported: d_e and d_h that are multiples of {BLOCK}")
    checks.expect_shape("u8", u8, k8.shape, "k8's shape [H_kv, E, d_e, d_h]")
    checks.expect_shape("v8", v8, (heads, subnets, head_dim, subnet_dim), "[H_kv, E, d_h, d_e]")
    checks.expect_shape("scales", scales, (3, heads, subnets), "[3, H_kv, E]")
    for name, tensor in (("k8", k8), ("u8", u8), ("v8", v8), ("scales", scales)):
        checks.expect_device(name, tensor, k8, of="k8")
        checks.expect_contiguous(name, tensor)
    if q is None:
        return
    checks.floating("q", q)
    checks.expect_device("q", q, k8, of="k8")
    if q.dim() < 2 or q.shape[-2] < 1 or q.shape[-2] % heads or q.shape[-1] != head_dim:
        expected = f"H a multiple of H_kv = {heads} and d_h = {head_dim} from k8"
        raise ValueError(f"q has shape {list(q.shape)}; expected [..., H, d_h] with {expected}")
