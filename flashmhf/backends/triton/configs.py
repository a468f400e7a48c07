"""Block shapes of the Triton kernels: a fixed table, so that no process tunes and every process computes the same.

``python -m benchmarks.tune_triton`` times others on the GPU that it runs on and prints rows.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNELS = ("forward", "forward_few", "token_grads", "weight_grads")


@dataclass(frozen=True)
class Config:
    """tokens x inter: the block a program holds. ``paired``: one product for K and U (see kernels.py), else one each;
    ``behind``: forward's product with V runs one tile behind; ``waves``: programs that a multiprocessor should get
    before a launch is worth splitting no further.
    """

    tokens: int
    inter: int
    warps: int
    stages: int
    paired: bool = False
    behind: bool = False
    waves: int = 2


def row_of(capability: tuple[int, int]) -> str:
    """Return a GPU's row: that of its matrix instructions, or where those are mma.sync, of its shared memory."""
    if capability[0] in (10, 11):
        return "tcgen05"
    if capability[0] == 9:
        return "wgmma"
    return "163 KB" if capability in ((8, 0), (8, 7)) else "99 KB"


_AS_A100 = "timed with the instructions of an A100 on an H200, all others compiled only"
HOW_CHOSEN = {  # rows that were not timed on a GPU of theirs
    "163 KB": f"16-bit shapes of d_h 64, 96 and 128, and of d_h 256 above 64 tokens, {_AS_A100}",
    "99 KB": "within 99 KB of shared memory; 16-bit shapes of d_h 128, of d_h 256 above 64 tokens and of the gradients "
    f"of d_h 64 {_AS_A100}",
    "tcgen05": "compiled only",
}


def _pair(tokens: int, inter: int, warps: int, stages: int, behind: bool = False) -> Config:
    return Config(tokens, inter, warps, stages, paired=True, behind=behind)


# GPU, bits of the element, sizes d_h: forward, token_grads, weight_grads. Compiled only: 16, 32 and 192 everywhere, all
# of tcgen05's, 32 bits on other GPUs than wgmma's, and within 99 KB 96 and the forward at 64.
_ROWS = (
    ("wgmma", 16, (16, 32), _pair(64, 32, 4, 4, True), _pair(64, 64, 4, 3), _pair(64, 64, 4, 3)),
    ("wgmma", 16, (64,), _pair(64, 64, 4, 2, True), _pair(64, 32, 4, 3), _pair(64, 64, 4, 3)),
    ("wgmma", 16, (96, 128), _pair(128, 32, 4, 3), _pair(128, 64, 8, 3), _pair(64, 32, 4, 2)),
    ("wgmma", 16, (192, 256), _pair(128, 32, 8, 3, True), _pair(128, 32, 8, 2), _pair(64, 16, 4, 3)),
    ("wgmma", 32, (16, 32, 64), _pair(64, 16, 8, 1), _pair(32, 32, 8, 1), _pair(32, 32, 8, 1)),
    ("wgmma", 32, (96,), _pair(64, 16, 8, 1), _pair(64, 16, 8, 1), _pair(32, 32, 8, 1)),
    ("wgmma", 32, (128,), _pair(64, 16, 8, 1), _pair(32, 16, 4, 1), _pair(32, 32, 8, 1)),
    ("wgmma", 32, (192, 256), _pair(32, 32, 8, 1), _pair(32, 32, 8, 1), _pair(64, 16, 8, 1)),
    ("tcgen05", 16, (16, 32), _pair(128, 64, 4, 2), _pair(128, 32, 4, 3), _pair(128, 64, 8, 2)),
    ("tcgen05", 16, (64,), _pair(128, 64, 4, 2), _pair(128, 32, 4, 3), _pair(128, 64, 4, 2)),
    ("tcgen05", 16, (96, 128), _pair(128, 64, 8, 2), _pair(128, 64, 8, 2), _pair(64, 32, 4, 2)),
    ("tcgen05", 16, (192, 256), _pair(128, 32, 8, 2), _pair(128, 16, 8, 2), _pair(64, 16, 4, 2)),
    # Only shapes of which as many programs fit a multiprocessor of that GPU as fitted the one that timed them.
    ("163 KB", 16, (16, 32), Config(64, 32, 4, 3), Config(64, 32, 4, 2), Config(64, 32, 4, 2)),
    ("163 KB", 16, (64,), Config(128, 32, 4, 3), Config(128, 32, 4, 3), Config(32, 64, 4, 3)),
    ("163 KB", 16, (96,), Config(128, 32, 4, 3), Config(128, 64, 8, 3), Config(32, 64, 4, 2)),
    ("163 KB", 16, (128,), Config(128, 32, 4, 3), Config(128, 64, 8, 3), Config(64, 32, 4, 2)),
    ("163 KB", 16, (192, 256), Config(64, 64, 8, 2), Config(64, 32, 4, 2), Config(64, 32, 8, 2)),
    ("163 KB", 32, (16, 32), Config(32, 16, 4, 1), Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
    ("163 KB", 32, (64, 96, 128), _pair(32, 16, 8, 1), Config(32, 16, 8, 1), Config(32, 16, 8, 1)),
    ("163 KB", 32, (192, 256), _pair(32, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    ("99 KB", 16, (64,), Config(128, 32, 4, 3), Config(128, 16, 4, 3), Config(32, 64, 4, 3)),
    ("99 KB", 16, (96,), Config(128, 16, 4, 2), Config(128, 32, 8, 2), Config(32, 64, 4, 2)),
    ("99 KB", 16, (128,), Config(128, 16, 4, 2), Config(128, 32, 8, 2), Config(64, 32, 4, 2)),
    ("99 KB", 16, (192, 256), Config(64, 32, 4, 2), Config(64, 16, 4, 2), Config(32, 16, 4, 3)),
)
_SHAPES = {(gpu, bits, d_h): shapes for gpu, bits, sizes, *shapes in _ROWS for d_h in sizes}


def _row(gpu: str, bits: int, d_h: int) -> dict[str, Config]:
    """Return what a GPU takes: the row of "163 KB" where it has none of its own."""
    forward, *grads = _SHAPES.get((gpu, bits, d_h), _SHAPES["163 KB", bits, d_h])
    few = forward
    if bits == 16:  # few tokens: reads the weights as fast as it can
        few = Config(64, 64 // (2 if gpu == "99 KB" else 1) // (2 if d_h > 128 else 1), 4, 3, waves=1)
    return dict(zip(KERNELS, (forward, few, *grads), strict=True))


TABLE = {  # (GPU, bits, d_h) -> kernel -> Config
    (gpu, bits, d_h): _row(gpu, bits, d_h)
    for gpu in ("wgmma", "tcgen05", "163 KB", "99 KB")
    for other, bits, d_h in _SHAPES
    if other == "163 KB"
}
