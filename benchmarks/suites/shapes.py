"""The shapes that are measured, their operation counts (arXiv 2512.06989). Legend: T tokens, H heads, d_h head
dimension, d_model = H d_h, E sub-networks a head of width d_e, d_ff = E d_e.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A FlashMHF model's feed-forward layers and the SwiGLU baseline's of the same parameter count."""

    name: str
    d_model: int
    heads: int
    subnets: int
    subnet_dim: int
    layers: int
    swiglu_dim: int
    swiglu_layers: int

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def d_ff(self) -> int:
        return self.subnets * self.subnet_dim

    def kernel_flops(self, tokens: int) -> int:
        """Operations of three T x d_h x d_ff products in each head, without the router's."""
        return 6 * tokens * self.d_model * self.d_ff

    def flashmhf_flops(self, tokens: int) -> int:
        return self.kernel_flops(tokens) + 4 * tokens * self.d_model**2

    def swiglu_flops(self, tokens: int) -> int:
        return 6 * tokens * self.d_model * self.swiglu_dim


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("paper", 2048, 16, 22, 384, layers=20, swiglu_dim=8192, swiglu_layers=24),
        Shape("128M", 768, 6, 8, 256, layers=10, swiglu_dim=2048, swiglu_layers=12),
        Shape("370M", 1024, 8, 7, 384, layers=21, swiglu_dim=2752, swiglu_layers=24),
        Shape("1.3B", 2048, 16, 15, 384, layers=20, swiglu_dim=5504, swiglu_layers=24),
        Shape("tiny", 32, 2, 3, 16, layers=2, swiglu_dim=48, swiglu_layers=2),
    )
}
BATCH = 8
LENGTHS = (192, 384, 768, 1536, 1920, 2880, 4032, 8064, 16128)
DECODE_TOKENS = (1, 16, 64, 96, 128, 192, 256, 384, 512, 1024)
