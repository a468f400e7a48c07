"""Token axes: leading dimensions that collapse to one stride, and block access without copying the tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def token_count(x: Tensor) -> int:
    return math.prod(x.shape[:-2])


def collapse(x: Tensor) -> list[tuple[int, int]]:
    """Return (size, stride) of x's leading dimensions [..., H, d], outermost first, merged where one stride covers
    both. Dimensions of size 1 vanish. A result of length 0 or 1 means that the tokens lie at one stride.
    """
    axes: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes


class TokenRows:
    """Blocks of tokens of x [..., H, d] as [tokens, H, d]: views where they lie at one stride, else copies."""

    def __init__(self, x: Tensor):
        self.x = x
        self.flat = x.view(token_count(x), *x.shape[-2:]) if len(collapse(x)) <= 1 else None

    def __getitem__(self, block: slice) -> Tensor:
        if self.flat is not None:
            return self.flat[block]
        index = torch.arange(block.start, block.stop, device=self.x.device)
        return self.x[torch.unravel_index(index, self.x.shape[:-2])]
