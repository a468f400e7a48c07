"""Registers and spills of the built kernels, as ptxas reported them, against the budgets of csrc/*/policy.h."""

import json
import re
from pathlib import Path

import pytest
from processes import script

import flashmhf

INSTALLED = Path(flashmhf.__file__).parent / "kernel_resources.json"
HEAD_DIMS = (64, 96, 128, 256)

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Zone' for 'sm_90a'
ptxas info    : Function properties for _Zone
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to...
ptxas info    : Compiling entry function '_Ztwo' for 'sm_90a'
ptxas info    : Function properties for _Ztwo
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 9216 bytes smem
"""


def test_the_log_of_ptxas_is_read(tmp_path):
    parser = script("build_backend/kernel_resources.py")
    kernels, remarks = parser.parse(LOG)
    assert kernels == {
        "_Zone": {"stack": 0, "spill_stores": 0, "spill_loads": 0, "registers": 168, "shared_memory": 0},
        "_Ztwo": {"stack": 16, "spill_stores": 8, "spill_loads": 12, "registers": 64, "shared_memory": 9216},
    }
    assert len(remarks) == 1 and "C7510" in remarks[0]
    with pytest.raises(RuntimeError, match="no ptxas log"):
        parser.collect(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.cu.o.log").write_text(LOG)
    assert parser.collect(tmp_path)["kernels"] == kernels
    (tmp_path / "deep" / "b.cu.o.log").write_text(LOG.replace("_Zone", "_Zthree"))
    (tmp_path / "build.ninja").write_text("build deep/b.cu.o: CUDA_COMPILER deep/b.cu\n")  # a is no longer built
    assert sorted(parser.collect(tmp_path)["kernels"]) == ["_Zthree", "_Ztwo"]


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
