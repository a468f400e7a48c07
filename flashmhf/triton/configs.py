"""Block shapes of the Triton kernels: a fixed table, so that no process tunes and every process computes the same.

``python -m flashmhf.triton.tune`` measures the candidates on a GPU and rewrites TABLE.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """tokens x inter: the block a program holds; ``behind``: forward's product with V runs one tile behind."""

    tokens: int
    inter: int
    warps: int
    stages: int
    behind: bool = False


# (architecture, bits of the element, d_h) -> kernel -> Config. "sm90" was measured on an H200; "other" is conservative: it fits
# 99 KB of shared memory (the smallest of the GPUs with bf16 tensor cores) and was compiled for sm_80, not timed.
TABLE: dict[tuple[str, int, int], dict[str, Config]] = {
    ("sm90", 16, 16): {"forward": Config(64, 64, 4, 2, behind=True), "token_grads": Config(128, 64, 8, 3), "weight_grads": Config(64, 32, 4, 2)},
    ("sm90", 16, 32): {"forward": Config(64, 64, 4, 2, behind=True), "token_grads": Config(128, 64, 8, 3), "weight_grads": Config(64, 32, 4, 2)},
    ("sm90", 16, 64): {"forward": Config(64, 64, 4, 2, behind=True), "token_grads": Config(128, 64, 8, 3), "weight_grads": Config(64, 32, 4, 2)},
    ("sm90", 16, 96): {"forward": Config(64, 64, 4, 2, behind=True), "token_grads": Config(128, 64, 8, 3), "weight_grads": Config(64, 32, 4, 2)},
    ("sm90", 16, 128): {"forward": Config(64, 64, 4, 2, behind=True), "token_grads": Config(128, 64, 8, 3), "weight_grads": Config(64, 32, 4, 2)},
    ("sm90", 16, 256): {"forward": Config(64, 32, 4, 2), "token_grads": Config(64, 32, 8, 2), "weight_grads": Config(64, 16, 4, 1)},
    ("sm90", 32, 16): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("sm90", 32, 32): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("sm90", 32, 64): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("sm90", 32, 96): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("sm90", 32, 128): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("sm90", 32, 256): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("other", 16, 16): {"forward": Config(64, 32, 4, 2), "token_grads": Config(64, 32, 4, 2), "weight_grads": Config(64, 32, 4, 2)},
    ("other", 16, 32): {"forward": Config(64, 32, 4, 2), "token_grads": Config(64, 32, 4, 2), "weight_grads": Config(64, 32, 4, 2)},
    ("other", 16, 64): {"forward": Config(64, 32, 4, 2), "token_grads": Config(64, 32, 4, 2), "weight_grads": Config(64, 32, 4, 2)},
    ("other", 16, 96): {"forward": Config(64, 32, 4, 2), "token_grads": Config(64, 32, 4, 2), "weight_grads": Config(64, 32, 4, 1)},
    ("other", 16, 128): {"forward": Config(64, 32, 4, 2), "token_grads": Config(64, 32, 4, 2), "weight_grads": Config(64, 32, 4, 1)},
    ("other", 16, 256): {"forward": Config(64, 16, 4, 1), "token_grads": Config(64, 16, 8, 1), "weight_grads": Config(32, 16, 8, 1)},
    ("other", 32, 16): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("other", 32, 32): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("other", 32, 64): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("other", 32, 96): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("other", 32, 128): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
    ("other", 32, 256): {"forward": Config(32, 16, 4, 1), "token_grads": Config(32, 16, 4, 1), "weight_grads": Config(32, 16, 4, 1)},
}


def lookup(arch: str, bits: int, head_dim: int) -> dict[str, Config]:
    return TABLE[arch, bits, head_dim]
