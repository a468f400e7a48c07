"""thunderkittens/:

every tile operation that the kernels use, against the host; and the kernels with upstream's headers instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

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
        + [f"-I{ROOT}/thunderkittens/include", f"-I{ROOT}/csrc", "-o", out, ROOT / "thunderkittens/tests/unit_tests.cu"]
        + [ROOT / "csrc/common" / name for name in ("tensor_map.cpp", "driver.cpp")],
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
    assert result.stdout.count("PASS") >= 60


def test_the_kernels_compile_with_upstream_headers(tmp_path):
    """One instance of each kernel family against the checkout that THUNDERKITTENS_ROOT names.

    Takes a few minutes, no GPU.
    """
    checkout = os.environ.get("THUNDERKITTENS_ROOT")
    if not checkout:
        pytest.skip("THUNDERKITTENS_ROOT names no checkout of HazyResearch/ThunderKittens")
    if missing := [tool for tool in ("cmake", "ninja", "nvcc") if shutil.which(tool) is None]:
        pytest.skip(f"no {', '.join(missing)}")
    assert (Path(checkout) / "include" / "kittens.cuh").exists(), f"{checkout} is no checkout of ThunderKittens"
    instances = ("backward_64", "forward_64", "forward_fp8_64", "project", "q_norm")
    options = {
        "TORCH_ROOT": Path(torch.__file__).parent,
        "THUNDERKITTENS_ROOT": checkout,
        "FLASHMHF_INSTANCES": ";".join(instances),
    }
    configure = [
        "cmake",
        "-G",
        "Ninja",
        "-S",
        ROOT,
        "-B",
        tmp_path,
        *(f"-D{name}={value}" for name, value in options.items()),
    ]
    for command in (configure, ["cmake", "--build", tmp_path, "--target", "flashmhf_kernels"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for instance in instances:
        folder = "CMakeFiles/flashmhf_kernels.dir/instances"
        assert (tmp_path / folder / f"{instance}.cu.o").exists(), instance
        dependencies = subprocess.run(
            ["ninja", "-C", tmp_path, "-t", "deps", f"{folder}/{instance}.cu.o"], capture_output=True, text=True
        )
        assert str(Path(checkout).resolve() / "include" / "kittens.cuh") in dependencies.stdout, instance
