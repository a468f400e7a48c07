"""Tests of Triton kernels: as they are on a GPU; without one on the CPU, in a process whose Triton interprets."""

import os
import pathlib

import pytest
import torch
from processes import run_python
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")  # skips every file of tests that imports this one
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# the interpreter's bf16 product is wrong, so the back end refuses it
HALF = torch.float16 if INTERPRETED else torch.bfloat16
runs_kernels = (lambda test: test) if INTERPRETED else pytest.mark.gpu
starts_interpreter = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests run here directly")


def run_interpreted(file: str) -> None:
    """Run a file's tests on the CPU, in a process whose Triton interprets."""
    command = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", file)
    run_python(*command, cwd=pathlib.Path(__file__).parents[1], timeout=900, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def far_apart(r: Tensor, folder: pathlib.Path) -> Tensor:
    """Gates [T, H, E] in columns 2^30 elements apart; almost nothing of the memory between them is touched."""
    size = 2**31 + 64
    if INTERPRETED:
        memory = torch.from_file(str(folder / "sparse"), shared=True, size=size, dtype=r.dtype)
    else:
        memory = torch.empty(size, dtype=r.dtype, device=DEVICE)
    return memory.as_strided(r.shape, (1, 8, 2**30)).copy_(r)
