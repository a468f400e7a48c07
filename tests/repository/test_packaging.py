"""What is installed: the op library's ABI and needs, and the files of the package."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from processes import ROOT, run_python

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


def test_metadata():
    try:
        distribution = importlib.metadata.distribution("flashmhf")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashmhf runs from its sources")
    assert distribution.version.partition("+")[0] == flashmhf.__version__  # without the label of a CUDA 12 wheel
    assert any(entry.name == "flashmhf" for entry in distribution.entry_points)


def test_sdist_holds_every_tracked_file(tmp_path):
    """Its own tests and the scripts of benchmarks/ read the records, so a pattern of MANIFEST.in that leaves some out
    breaks them."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    command = ("setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path, "--formats=tar")
    run_python(*command, cwd=ROOT, FLASHMHF_SKIP_CUDA_BUILD="1")
    with tarfile.open(next(tmp_path.glob("*.tar"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(name for name in tracked - held if not name.startswith((".ci", ".git"))) == []


def test_setup_parses_without_torch(tmp_path):
    if not (ROOT / "setup.py").exists():
        pytest.skip("the sources are not here")
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for it")
    (tmp_path / "torch.py").write_text("raise ImportError('setup.py must not import torch')\n", encoding="utf-8")
    assert flashmhf.__version__ in run_python("setup.py", "--quiet", "--version", cwd=ROOT, PYTHONPATH=str(tmp_path))
