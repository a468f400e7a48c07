"""What is installed: the op library's ABI and needs, and how the build finds its tools."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from processes import ROOT, run_python, script

import flashmhf
from flashmhf.backends import hopper


@pytest.fixture
def library() -> str:
    if not hopper.LIBRARY.exists():
        pytest.skip("no libflashmhf_hopper.so in this installation")
    return str(hopper.LIBRARY)


def readelf(*arguments: str) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf (binutils)")
    return subprocess.run(["readelf", "--wide", *arguments], capture_output=True, text=True, check=True).stdout


def test_library_uses_only_the_stable_abi(library):
    audit = shutil.which("torch-abi-audit", path=str(Path(sys.executable).parent))
    if audit is None:
        pytest.skip("torch-abi-audit is not installed")
    done = subprocess.run([audit, "--check", "torch", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Min torch:   2.10.0" in done.stdout


def test_library_needs_torch_and_the_system_only(library):
    dynamic = readelf("--dynamic", library)
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert {"libtorch_cpu.so", "libtorch_cuda.so"} <= needed
    system = ("libstdc++.so", "libgcc_s.so", "libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux")
    # no libcuda, libcudart, libpython, libc10
    assert [name for name in needed if not name.startswith(("libtorch_c", *system))] == []
    symbols = [line.split() for line in readelf("--dyn-syms", library).splitlines()[4:] if line.strip()]
    undefined = {row[7] for row in symbols if len(row) > 7 and row[6] == "UND"}
    assert not [name for name in undefined if name.startswith(("Py", "_Py", "cu", "_ZN2at", "_ZN3c10", "_ZN5torch"))]


@pytest.mark.skipif(torch.version.cuda is None, reason="libtorch_cuda is not there")
def test_library_loads_and_describes_itself(library):
    torch.ops.load_library(library)
    info = hopper.build_info()
    assert info["version"] == flashmhf.__version__
    assert info["thunderkittens"] == "bundled" or info["thunderkittens"].startswith("upstream ")
    assert tuple(map(int, info["cuda_version"].split("."))) >= (12, 4)


def test_no_stand_in_is_installed():
    assert not list(Path(flashmhf.__file__).parent.rglob("libtorch_cuda*"))


def test_a_missing_library_is_explained():
    if hopper.LIBRARY.exists() or not hopper.NO_LIBRARY.exists():
        pytest.skip("the library was built, or flashmhf runs from its sources")
    assert hopper.NO_LIBRARY.read_text().strip()


def test_metadata():
    try:
        distribution = importlib.metadata.distribution("flashmhf")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashmhf runs from its sources")
    assert distribution.version.partition("+")[0] == flashmhf.__version__  # without the label of a CUDA 12 wheel
    assert any(entry.name == "flashmhf" for entry in distribution.entry_points)


def test_sdist_holds_every_tracked_file(tmp_path):
    """Its own tests and the scripts of benchmarks/ read the records, so a pattern of MANIFEST.in that leaves some out
    breaks them.
    """
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    command = ("setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path, "--formats=tar")
    run_python(*command, cwd=ROOT, FLASHMHF_SKIP_CUDA_BUILD="1")
    with tarfile.open(next(tmp_path.glob("*.tar"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(name for name in tracked - held if not name.startswith((".ci", ".git"))) == []


# The build's search for its tools


@pytest.fixture
def toolchain(monkeypatch):
    if not (ROOT / "build_backend").exists() or not sys.platform.startswith("linux"):
        pytest.skip("the sources are not here, or this is not Linux, where the CUDA library is built")
    for name in (
        "CUDACXX",
        "CUDA_HOME",
        "CUDA_PATH",
        "MAX_JOBS",
        "TORCH_ROOT",
        "FLASHMHF_SKIP_CUDA_BUILD",
        "FLASHMHF_FORCE_CUDA_BUILD",
    ):
        monkeypatch.delenv(name, raising=False)
    return script("build_backend/toolchain.py")


@pytest.mark.parametrize(
    ("version", "usable", "label"),
    [("12.3", False, "+cu12"), ("12.4", True, "+cu12"), ("12.9", True, "+cu12"), ("13.0", True, "")],
)
def test_cuda_home_the_oldest_nvcc_and_the_version_of_a_wheel(toolchain, monkeypatch, tmp_path, version, usable, label):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.0'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.nvcc() == nvcc and toolchain.release_label() == label
    reason = toolchain.no_cuda_reason()
    assert reason is None if usable else "supported: 12.4 and later" in reason


@pytest.mark.parametrize(
    ("named", "message"), [("/no/such/nvcc", "CUDACXX is '/no/such/nvcc'"), ("true", "names no release of CUDA")]
)
def test_a_compiler_that_is_no_nvcc_is_named(toolchain, monkeypatch, named, message):
    monkeypatch.setenv("CUDACXX", named)
    assert message in toolchain.no_cuda_reason()


def test_without_nvcc_nothing_is_required(toolchain, monkeypatch):
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    assert "nvcc was not found" in toolchain.no_cuda_reason()
    assert toolchain.build_requirements() == []


@pytest.mark.parametrize(("value", "skipped"), [("1", True), ("0", False), ("", False), ("off", False)])
def test_skip_flag(toolchain, monkeypatch, value, skipped):
    monkeypatch.setenv("FLASHMHF_SKIP_CUDA_BUILD", value)
    assert (toolchain.no_cuda_reason() == "FLASHMHF_SKIP_CUDA_BUILD was set") is skipped


def torch_folder(root: Path, version: str, stable: bool = True) -> Path:
    folder = root / "torch"
    header = folder / "include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    if stable:
        header.touch()
    (folder / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder


@pytest.mark.parametrize(
    ("version", "stable", "used"),
    [("2.9.1", True, False), ("2.10.0", True, True), ("2.13.0+cpu", True, True), ("2.13.0", False, False)],
)
def test_torch_of_the_target_environment(toolchain, monkeypatch, tmp_path, version, stable, used):
    """Under build isolation torch is not importable, but the target's site-packages still has its headers."""
    folder = torch_folder(tmp_path, version, stable)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(toolchain, "no_cuda_reason", lambda: None)
    assert toolchain.torch_root() == (folder if used else None)
    assert ("torch>=2.10" in toolchain.build_requirements()) is not used


def test_a_named_torch_comes_first(toolchain, monkeypatch, tmp_path):
    """tools/build_wheel.py names the torch of its own environment, which an isolated build cannot see and would
    download again.
    """
    folder = torch_folder(tmp_path, "2.13.0+cpu")
    monkeypatch.setattr(toolchain, "no_cuda_reason", lambda: None)
    monkeypatch.setenv("TORCH_ROOT", str(folder))
    assert toolchain.torch_root() == folder
    assert "torch>=2.10" not in toolchain.build_requirements()
    monkeypatch.setenv("TORCH_ROOT", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"TORCH_ROOT={tmp_path} holds no torch>=2.10"):
        toolchain.torch_root()


def test_jobs(toolchain, monkeypatch):
    assert 1 <= toolchain.jobs(1) <= len(os.sched_getaffinity(0))
    assert toolchain.jobs(10**6) == 1
    monkeypatch.setenv("MAX_JOBS", "7")
    assert toolchain.jobs(1) == 7
    monkeypatch.setenv("MAX_JOBS", "all")
    with pytest.raises(ValueError, match="MAX_JOBS is 'all'; supported: a whole number"):
        toolchain.jobs(1)


def test_setup_parses_without_torch(tmp_path):
    if not (ROOT / "setup.py").exists():
        pytest.skip("the sources are not here")
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for it")
    (tmp_path / "torch.py").write_text("raise ImportError('setup.py must not import torch')\n")
    assert flashmhf.__version__ in run_python("setup.py", "--quiet", "--version", cwd=ROOT, PYTHONPATH=str(tmp_path))
