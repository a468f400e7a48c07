"""thunderkittens/: every tile operation that the kernels use, against the host."""

import os
import shutil
import subprocess

import pytest
import torch
from processes import ROOT


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    """FLASHMHF_KITTENS_TESTS, the CMake target build/kittens_tests, or a fresh build with nvcc."""
    for candidate in (os.environ.get("FLASHMHF_KITTENS_TESTS"), ROOT / "build" / "kittens_tests"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no kittens_tests binary and no nvcc")
    out = tmp_path_factory.mktemp("kittens") / "kittens_tests"
    subprocess.run(
        [nvcc, "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-cudart", "static"]
        + [
            f"-I{ROOT}/thunderkittens/include",
            f"-I{ROOT}/csrc",
            "-o",
            out,
            ROOT / "thunderkittens/tests/unit_tests.cu",
        ],
        check=True,
    )
    return out


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_every_tile_operation(binary):
    result = subprocess.run([binary], capture_output=True, text=True, timeout=120)
    failed = [line for line in result.stdout.splitlines() if not line.startswith("PASS")]
    assert result.returncode == 0, "\n".join(failed) + result.stderr
    assert result.stdout.count("PASS") >= 51
