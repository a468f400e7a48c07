"""Registers and spills of the built kernels against csrc/*/policy.h. test_build.py has how ptxas' log is read."""

import json
import re
from pathlib import Path

import pytest

import flashmhf

INSTALLED = Path(flashmhf.__file__).parent / "kernel_resources.json"
HEAD_DIMS = (64, 96, 128, 256)


@pytest.fixture(scope="module")
def built() -> dict:
    if not INSTALLED.exists():
        pytest.skip("no kernel_resources.json in this installation: the CUDA library was not built")
    resources = json.loads(INSTALLED.read_text())
    if resources.get("thunderkittens", "bundled") != "bundled":
        pytest.skip("built with upstream's ThunderKittens headers, with which some kernels spill")
    return resources


def test_the_library_is_compressed_and_without_line_numbers(built):
    library = INSTALLED.with_name("libflashmhf_hopper.so")
    assert library.stat().st_size <= 7_000_000


def test_no_kernel_spills(built):
    if built.get("nvcc", "13.").startswith("12."):
        pytest.skip(f"built with nvcc {built['nvcc']}, with whose ptxas some kernels spill")
    spills = ("stack", "spill_stores", "spill_loads")
    assert [name for name, used in built["kernels"].items() if any(used[x] for x in spills)] == built["remarks"] == []


def test_every_instance_is_there_and_named_after_the_package(built):
    def head_dims(kernel: str) -> list[int]:
        return sorted(int(d) for name in built["kernels"] for d in re.findall(rf"{kernel}ILi(\d+)E", name))

    assert all("flashmhf_" in name for name in built["kernels"])
    divided = tuple(d for d in HEAD_DIMS if d != 256)  # into parts that the clusters gather, and into slices
    assert head_dims("16flashmhf_forwardINS_3F16") == sorted(2 * HEAD_DIMS + 4 * divided)
    assert head_dims("16flashmhf_forwardINS_4E4m3") == sorted(4 * HEAD_DIMS)  # and of few rows
    for kernel in ("24flashmhf_forward_combine", "23flashmhf_backward_token", "25flashmhf_backward_collect"):
        assert head_dims(kernel) == sorted(2 * HEAD_DIMS)  # bf16 and fp16


def test_registers_at_launch_are_those_of_the_policy(built):
    """Of each kernel whose warpgroups trade registers, for both element types."""
    plan = pytest.importorskip("flashmhf._plan")
    patterns = {  # of the mangled names
        "forward": r"16flashmhf_forwardINS_3F16ILi{head_dim}E",
        "forward_fp8": r"16flashmhf_forwardINS_4E4m3ILi{head_dim}E\w+?Lb{few_rows:d}E",
        "backward_token": r"23flashmhf_backward_tokenILi{head_dim}E",
        "backward_inter": r"23flashmhf_backward_interILi{head_dim}ELi{outputs}E",
    }
    for policy in plan.policies():
        name = patterns[policy["kernel"]].format(**policy)
        found = [used["registers"] for kernel, used in built["kernels"].items() if re.search(name, kernel)]
        divides = "3F16" in name and policy["head_dim"] != 256
        assert found == [policy["launch_registers"]] * (6 if divides else 2), name
