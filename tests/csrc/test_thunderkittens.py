"""thunderkittens/: every tile operation that the kernels use, against the host."""

import os
import subprocess

import pytest
import torch
from processes import ROOT


@pytest.fixture(scope="module")
def binary():
    """FLASHMHF_KITTENS_TESTS, or the CMake target build/kittens_tests."""
    for candidate in (os.environ.get("FLASHMHF_KITTENS_TESTS"), ROOT / "build" / "kittens_tests"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    pytest.skip("no kittens_tests (cmake --build build --target kittens_tests)")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_every_tile_operation(binary):
    result = subprocess.run([binary], capture_output=True, text=True, timeout=120)
    failed = [line for line in result.stdout.splitlines() if not line.startswith("PASS")]
    assert result.returncode == 0, "\n".join(failed) + result.stderr
    assert result.stdout.count("PASS") >= 51
