"""The build of the CUDA library: how it finds its tools, and that it yields a library or fails. The tools are stubs.
That of CMake does what matters here: it remembers the ninja of the first call, as CMake does."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from processes import ROOT, script

LINUX = pytest.mark.skipif(
    not (ROOT / "build_backend").exists() or not sys.platform.startswith("linux"),
    reason="the sources are not here, or this is not Linux, where the CUDA library is built",
)
pytestmark = LINUX
VARIABLES = "CUDACXX CUDA_HOME CUDA_PATH CXX MAX_JOBS TORCH_ROOT".split()
VARIABLES += ["TORCH_CUDA_ARCH_LIST", "CMAKE_CUDA_COMPILER_LAUNCHER", "CMAKE_CXX_COMPILER_LAUNCHER"]
VARIABLES += ["FLASHMHF_SKIP_CUDA_BUILD", "FLASHMHF_FORCE_CUDA_BUILD", "FLASHMHF_LIBRARY", "FLASHMHF_WHEEL"]
NVCC = "echo 'Cuda compilation tools, release {0}, V{0}.1'"
CMAKE = r"""
case "$1" in
--version) echo "cmake version 3.30.1"; exit;;
--build) cd "$2"; test -f broken && { cat broken; exit 1; }
    mkdir -p objects; cp ptxas.log objects/kernel.cu.o.log; echo $(cat builds) library > libflashmhf_hopper.so
    sed s/_Zone/_Zgone/ ptxas.log > objects/gone.cu.o.log  # which the rules no longer build
    echo "build objects/kernel.cu.o: CUDA" > build.ninja; exit;;
esac
for argument; do case "$argument" in -DCMAKE_MAKE_PROGRAM=*) ninja="${argument#*=}";; esac; done
while [ "$1" != -B ]; do shift; done
mkdir -p "$2"; cd "$2"
cached=$(cat CMakeCache.txt 2>/dev/null || command -v ninja); ninja="${ninja:-$cached}"
"$ninja" --version || { echo "CMake Error: Running '$ninja' '--version' failed"; exit 1; }
echo "$ninja" > CMakeCache.txt; echo build >> builds; cp "$PTXAS_LOG" ptxas.log; cp "$BROKEN" broken 2>/dev/null; true
"""
PTXAS_LOG = """\
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
RESOURCES = {
    "_Zone": {"stack": 0, "spill_stores": 0, "spill_loads": 0, "registers": 168, "shared_memory": 0},
    "_Ztwo": {"stack": 16, "spill_stores": 8, "spill_loads": 12, "registers": 64, "shared_memory": 9216},
}


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def build(tmp_path):
    """A function that builds a copy of the sources as pip does, with tools in a folder that is gone afterwards. It
    returns the exit status and what was printed; the package is in build/lib."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for it")
    tree = tmp_path / "flashmhf"
    for name in ("build_backend", "flashmhf", "flashmhf_recipes"):
        left_out = shutil.ignore_patterns("*.so", "__pycache__", "_no_library.txt", "kernel_resources.json")
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tmp_path / "ptxas.log").write_text(PTXAS_LOG, encoding="utf-8")
    nvcc = program(tmp_path / "cuda" / "bin" / "nvcc", NVCC.format("13.0"))
    folders = iter(range(100))

    def run(*command: str, cmake: str = CMAKE, **variables: str) -> tuple[int, str]:
        tools = tmp_path / f"pip-build-env-{next(folders)}"
        program(tools / "cmake", cmake), program(tools / "ninja", "echo 1.11")
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "CUDA_HOME": str(nvcc.parents[1]), "BROKEN": "none"}
        environment |= {"PTXAS_LOG": str(tmp_path / "ptxas.log"), "CXX": "false"} | variables  # no planner: seconds
        command = [sys.executable, "setup.py", "-q", *(command or ("build", "--build-lib", "build/lib"))]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, encoding="utf-8")
        shutil.rmtree(tools)
        return done.returncode, done.stdout + done.stderr

    run.tree, run.nvcc, run.library = tree, nvcc, tree / "build/lib/flashmhf/libflashmhf_hopper.so"
    return run


def ends_well(result: tuple[int, str]) -> None:
    assert result[0] == 0, result[1]


def test_a_second_installation_has_the_library_too(build):
    """pip deletes the ninja and the cmake that it brought, and CMake remembers where they were."""
    for _ in range(2):
        ends_well(build())
        assert build.library.read_text(encoding="utf-8")
        build.library.unlink()
    said = json.loads(build.library.with_name("kernel_resources.json").read_text(encoding="utf-8"))
    assert said["kernels"] == RESOURCES and ["C7510" in remark for remark in said["remarks"]] == [True]
    (build.tree / "build/lib/flashmhf/gone.py").touch()  # of an older version
    ends_well(build(FLASHMHF_SKIP_CUDA_BUILD="1"))
    assert not build.library.exists() and not (build.tree / "build/lib/flashmhf/gone.py").exists()
    reason = build.library.with_name("_no_library.txt").read_text(encoding="utf-8")
    assert reason == "FLASHMHF_SKIP_CUDA_BUILD was set\n"


def test_an_editable_installation_is_incremental(build):
    for folder in ("first", "second"):
        ends_well(build("build_ext", "--inplace", "--build-temp", str(build.tree / folder)))
    assert (build.tree / "flashmhf/libflashmhf_hopper.so").read_text(encoding="utf-8") == "build build library\n"


def test_an_editable_installation_works_in_the_folder_above_the_checkout(build, tmp_path):
    """Which has the package's name, as a clone's folder has."""
    ends_well(build("editable_wheel", "--dist-dir", "dist", FLASHMHF_SKIP_CUDA_BUILD="1"))
    with zipfile.ZipFile(next((build.tree / "dist").glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    code = "import site; site.addsitedir('site'); import importlib.util as u; print(u.find_spec('flashmhf').origin)"
    command = [sys.executable, "-S", "-c", code]  # -S: another installation of this Python does not count
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.stdout.strip() == str(build.tree / "flashmhf/__init__.py"), done.stderr


def test_another_toolkit_behind_the_same_path_builds_anew(build):
    for version in ("13.0", "13.1"):
        program(build.nvcc, NVCC.format(version))
        ends_well(build())
        assert build.library.read_text(encoding="utf-8") == "build library\n", version
    link = build.nvcc.parents[2] / "linked" / "bin" / "nvcc"  # the same toolkit by another path
    link.parent.mkdir(parents=True)
    link.symlink_to(build.nvcc)
    ends_well(build(CUDA_HOME=str(link.parents[1])))
    assert build.library.read_text(encoding="utf-8") == "build library\n"


@pytest.mark.parametrize("step", ["compiling", "configuring", "no ptxas log", "an old cmake", "FLASHMHF_LIBRARY"])
def test_a_build_that_fails_is_an_error_and_keeps_the_library_that_was(build, step, tmp_path):
    ends_well(build())
    before = build.library.read_text(encoding="utf-8")
    broken, cmake, message, variables = tmp_path / "broken", CMAKE, "kernel.cuh(7): error: expected a ';'", {}
    if step == "compiling":
        broken.write_text(message, encoding="utf-8")
    elif step == "configuring":
        cmake = CMAKE.replace('mkdir -p "$2"', f'echo "{message}"; exit 1')
    elif step == "no ptxas log":
        cmake, message = CMAKE.replace("cp ptxas.log", "rm"), "holds no ptxas log of a kernel"
    elif step == "an old cmake":
        cmake, message = CMAKE.replace("3.30.1", "3.22.1"), "there is no cmake>=3.24; pip install 'cmake>=3.24'"
    else:
        variables, message = {"FLASHMHF_LIBRARY": "/no/such.so"}, "FLASHMHF_LIBRARY is '/no/such.so'; supported"
    status, printed = build(cmake=cmake, BROKEN=str(broken), **variables)
    assert status != 0 and message in printed
    assert step == "FLASHMHF_LIBRARY" or "FLASHMHF_SKIP_CUDA_BUILD=1 installs without it" in printed
    assert build.library.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(("group", "file", "limit"), [
    ("0::/docker/abc", "memory.max", "4294967296\n"),  # version 2; the container sees its own group at the top
    ("0::/slice/job", "slice/memory.max", "4294967296\n"),  # the limit of the group above
    ("4:memory:/docker/abc", "memory/memory.limit_in_bytes", "4294967296\n"),  # version 1
    ("0::/", "memory.max", "max\n"), ("3:cpu:/", "memory.max", "1\n"),
])  # fmt: skip
def test_the_memory_of_a_control_group_bounds_the_compilers(toolchain, tmp_path, group, file, limit):
    for path, text in (("proc/self/cgroup", f"1:name=systemd:/\n{group}\n"), (f"sys/fs/cgroup/{file}", limit)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert toolchain.memory(tmp_path) == (min(machine, 1 << 32) if limit[0] == "4" else machine)


@pytest.fixture
def toolchain(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return script("build_backend/toolchain.py")


@pytest.mark.parametrize(("version", "label"), [("12.4", "+cu12"), ("12.9", "+cu12"), ("13.0", "")])
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_the_place_of_nvcc_and_the_version_of_a_wheel(toolchain, monkeypatch, tmp_path, version, label, variable):
    nvcc = program(tmp_path / "bin" / "nvcc", NVCC.format(version))
    monkeypatch.setenv(variable, str(nvcc.parent if variable == "PATH" else tmp_path))
    assert toolchain.nvcc() == nvcc and toolchain.release_label() == label and toolchain.no_cuda_reason() is None


@pytest.mark.parametrize(("installed", "named", "taken"), [
    ("", None, ""), ("ccache", None, "ccache"), ("ccache sccache", None, "sccache"),
    ("ccache sccache", "distcc", "distcc"), ("ccache sccache", "", ""),
])  # fmt: skip
def test_the_launcher_of_the_compilers(toolchain, monkeypatch, tmp_path, installed, named, taken):
    for name in installed.split():
        program(tmp_path / name, "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    if named is not None:
        monkeypatch.setenv("CMAKE_CUDA_COMPILER_LAUNCHER", named)
    assert toolchain.launcher("CUDA") == (str(tmp_path / taken) if taken in installed.split() else taken)


@pytest.mark.parametrize(
    ("listed", "builds"),
    [
        ("", True), (" ", True), ("9.0", True), ("8.0;9.0a", True), ("8.0 9.0+PTX", True), ("Hopper", True),
        ("All", True), ("8.0", False), ("8.6;8.9+PTX", False), ("10.0 12.0", False),
        ("Ampere", False), ("19.0;9.01", False),
    ],
)  # fmt: skip
def test_kernels_that_torch_cuda_arch_list_rules_out_are_not_compiled(toolchain, monkeypatch, tmp_path, listed, builds):
    program(tmp_path / "bin" / "nvcc", NVCC.format("13.0"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    reason = toolchain.no_cuda_reason()
    assert reason is None if builds else f"TORCH_CUDA_ARCH_LIST is {listed!r}, without 9.0" in reason
    assert builds or toolchain.build_requirements() == []


def test_an_old_nvcc_that_nobody_named_is_no_error(toolchain, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(program(tmp_path / "nvcc", NVCC.format("12.3")).parent))
    assert "has version 12.3; supported: nvcc 12.4 and later" in toolchain.no_cuda_reason()
    assert toolchain.build_requirements() == []


@pytest.mark.parametrize(("variable", "named", "message"), [
    ("CUDACXX", "/no/such/nvcc", "CUDACXX is '/no/such/nvcc'; supported: the path of nvcc"),
    ("CUDACXX", "true", "names no release of CUDA"),
    ("CUDACXX", "{}/bin", "CUDACXX is '.*/bin'"),
    ("CUDA_HOME", "/no/such", "CUDA_HOME is '/no/such'; supported: the folder of a CUDA toolkit that has bin/nvcc"),
    ("CUDA_PATH", "/no/such", "CUDA_PATH is '/no/such'"),
    ("CUDA_HOME", "{}/bin", "CUDA_HOME is '.*/bin'"),
    ("CUDA_HOME", "{}", "has version 12.3; supported: nvcc 12.4 and later"),
])  # fmt: skip
def test_a_named_compiler_that_cannot_build_is_an_error(toolchain, monkeypatch, tmp_path, variable, named, message):
    """And no other one is taken in its place."""
    program(tmp_path / "bin" / "nvcc", NVCC.format("12.3"))
    monkeypatch.setenv("PATH", f"{program(tmp_path / 'other' / 'nvcc', NVCC.format('13.0')).parent}:/bin:/usr/bin")
    monkeypatch.setenv(variable, named.format(tmp_path))
    with pytest.raises(RuntimeError, match=f"{message}.*unset {variable}"):
        toolchain.build_requirements()


@pytest.mark.parametrize(
    ("version", "header", "used"),
    [("2.9.1", "library", 0), ("2.10.0", "library", 1), ("2.13.0+cpu", "library", 1), ("2.13.0", "other", 0)],
)
def test_torch_of_the_target_environment(toolchain, monkeypatch, tmp_path, version, header, used):
    """Under build isolation torch is not importable, but the target's site-packages still has its headers."""
    folder = tmp_path / "torch"
    headers = folder / "include/torch/csrc/stable"
    headers.mkdir(parents=True)
    (headers / f"{header}.h").touch()
    (folder / "version.py").write_text(f"__version__ = '{version}'\n", encoding="utf-8")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(toolchain, "no_cuda_reason", lambda: None)
    assert toolchain.torch_root() == (folder if used else None)
    assert ("torch>=2.10" in toolchain.build_requirements()) is not bool(used)
