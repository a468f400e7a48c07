"""Block shapes of the Triton kernels: a fixed table, so that no process tunes and every process computes the same."""

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


# Architecture, bits of the element, sizes d_h; forward, token_grads, weight_grads. "sm90" was measured on an H200;
# "other" is conservative: it fits 99 KB of shared memory (the smallest of the GPUs with bf16 tensor cores) and was
# compiled for sm_80, not timed. 192 has the blocks of 256, to which its rows are padded; no candidates were timed.
_ROWS = (
    ("sm90", 16, (16, 32), Config(64, 32, 4, 4, behind=True), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    ("sm90", 16, (64,), Config(64, 64, 4, 2, behind=True), Config(64, 32, 4, 4), Config(64, 64, 4, 3)),
    ("sm90", 16, (96, 128), Config(64, 64, 4, 2, behind=True), Config(128, 64, 8, 3), Config(64, 32, 4, 2)),
    ("sm90", 16, (192, 256), Config(128, 32, 8, 3, behind=True), Config(128, 32, 8, 2), Config(64, 16, 4, 3)),
    ("sm90", 32, (16, 32, 64), Config(64, 16, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    ("sm90", 32, (96,), Config(64, 16, 8, 1), Config(64, 16, 8, 1), Config(32, 32, 8, 1)),
    ("sm90", 32, (128,), Config(64, 16, 8, 1), Config(32, 16, 4, 1), Config(32, 32, 8, 1)),
    ("sm90", 32, (192, 256), Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(64, 16, 8, 1)),
    ("other", 16, (16, 32, 64), Config(64, 32, 4, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 2)),
    ("other", 16, (96, 128), Config(64, 32, 4, 2), Config(64, 32, 8, 2), Config(64, 32, 8, 2)),
    ("other", 16, (192, 256), Config(64, 16, 4, 2), Config(64, 16, 8, 2), Config(32, 16, 8, 2)),
    ("other", 32, (16, 32), Config(32, 16, 4, 1), Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
    ("other", 32, (64, 96, 128), Config(32, 16, 8, 1), Config(32, 16, 8, 1), Config(32, 16, 8, 1)),
    ("other", 32, (192, 256), Config(32, 16, 8, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
)
# (architecture, bits, d_h) -> kernel -> Config
TABLE: dict[tuple[str, int, int], dict[str, Config]] = {
    (architecture, bits, d_h): dict(zip(("forward", "token_grads", "weight_grads"), configs, strict=True))
    for architecture, bits, sizes, *configs in _ROWS
    for d_h in sizes
}
