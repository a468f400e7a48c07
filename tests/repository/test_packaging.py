"""What is installed and released: a core that needs torch alone, the library's ABI, files, a wheel for all."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
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
    # in a process of its own: here tests may have defined the operators, which a library can do only once
    code = "import json, sys, torch; torch.ops.load_library(sys.argv[1])"
    code += "; print(torch.ops.flashmhf_hopper.build_info())"
    info = json.loads(run_python("-c", code, library))
    assert info["version"] == flashmhf.__version__
    assert info["thunderkittens"] == "bundled" or info["thunderkittens"].startswith("upstream ")
    assert tuple(map(int, info["cuda_version"].split("."))) >= (12, 4)


def test_sdist_holds_every_tracked_file(tmp_path):
    """Its own tests and benchmarks/ read the records: a pattern of MANIFEST.in may leave none out."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    command = ("setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path, "--formats=tar")
    run_python(*command, cwd=ROOT, FLASHMHF_SKIP_CUDA_BUILD="1")
    with tarfile.open(next(tmp_path.glob("*.tar"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(name for name in tracked - held if not name.startswith((".ci", ".git"))) == []


LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # of manylinux_2_28
SOURCES = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the sources are not here")


def too_new(library: Path) -> dict[str, tuple[int, ...]]:
    """The newest version of each system interface that the library refers to, where manylinux_2_28 has none so new."""
    found: dict[str, tuple[int, ...]] = {}
    listed = readelf("--version-info", str(library))
    for interface, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)", listed):
        found[interface] = max(found.get(interface, ()), tuple(map(int, version.split("."))))
    return {name: version for name, version in found.items() if version > LIMITS[name]}


@SOURCES
def test_the_release_wheel_serves_every_python(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for it")
    library = tmp_path / "compiled_before.so"
    library.write_bytes(b"a library")
    command = ["setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path / "build"]
    command += ["bdist_wheel", "--dist-dir", tmp_path / "dist"]
    run_python(*command, cwd=ROOT, FLASHMHF_WHEEL="1", FLASHMHF_LIBRARY=str(library))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert re.fullmatch(r"flashmhf-.*-py3-none-\w+\.whl", wheel.name) and not wheel.name.endswith("none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read("flashmhf/libflashmhf_hopper.so") == b"a library"
        (about,) = (name for name in names if name.endswith("/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(about).decode()
    assert "flashmhf/py.typed" in names
    assert not [name for name in names if "_plan" in name or not name.startswith("flashmhf")]


SOURCE = """
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
static void* run(void*) { return nullptr; }
static const bool loaded = [] {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, run, nullptr) || pthread_join(thread, nullptr)) __builtin_abort();
  shm_unlink("/flashmhf-no-such-object");
  std::ostringstream text;
  std::stringstream both;
  text << "number " << 2 << ' ' << both.str();
  if (dlsym(RTLD_DEFAULT, "malloc") == nullptr) throw std::runtime_error(text.str());
  auto kept = std::make_shared<std::string>(std::move(text).str());
  std::cout << *kept << std::flush;
  return true;
}();
"""


@SOURCES
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="manylinux is Linux")
def test_a_library_linked_for_manylinux_runs_on_older_systems(tmp_path):
    """One source links against new interfaces, and with cmake/manylinux.cmake against manylinux_2_28's."""
    if missing := [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]:
        pytest.skip(f"no {' and no '.join(missing)}")
    (tmp_path / "code.cpp").write_text(SOURCE, encoding="utf-8")
    project = f"""
cmake_minimum_required(VERSION 3.24)
project(example LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_FLAGS_RELEASE "-O0 -D_GLIBCXX_NO_ASSERTIONS") # as a release's -O3: GCC 15 checks preconditions at -O0
include({ROOT}/cmake/manylinux.cmake)
foreach(name new old)
  add_library(${{name}} MODULE code.cpp)
  target_link_options(${{name}} PRIVATE -Wl,--no-undefined)
endforeach()
link_for_manylinux(old)
"""
    (tmp_path / "CMakeLists.txt").write_text(project, encoding="utf-8")
    for command in (["-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release"], ["--build", "build"]):
        done = subprocess.run(["cmake", *command], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    new, old = (tmp_path / "build" / f"lib{name}.so" for name in ("new", "old"))
    assert too_new(old) == {}
    if not too_new(new):
        pytest.skip("this system is old itself: it cannot show what cmake/manylinux.cmake changes")
    assert run_python("-c", f"import ctypes; ctypes.CDLL({str(old)!r})") == "number 2 "


@SOURCES
def test_version_is_the_same_everywhere():
    assert f"\nversion: {flashmhf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == flashmhf.__version__


@SOURCES
def test_setup_parses_without_torch(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for it")
    (tmp_path / "torch.py").write_text("raise ImportError('setup.py must not import torch')\n", encoding="utf-8")
    assert flashmhf.__version__ in run_python("setup.py", "--quiet", "--version", cwd=ROOT, PYTHONPATH=str(tmp_path))


OPTIONAL = (
    "numpy", "tqdm", "matplotlib", "triton", "transformers", "accelerate", "datasets", "tokenizers", "safetensors",
)  # fmt: skip
SECONDS = 0.5  # CPU time of `import flashmhf` after torch; 0.03 s where it was measured


def python(code: str, cwd: object = None) -> str:
    # torch's own remark where numpy is absent
    return run_python("-Wignore:Failed to initialize NumPy", "-c", code, cwd=cwd)


def test_import_brings_in_torch_and_the_standard_library_only():
    code = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import flashmhf
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""
    seconds, brought = json.loads(python(code))
    assert set(brought) - set(sys.stdlib_module_names) <= {"flashmhf", "torch"}
    assert seconds < SECONDS


COMMANDS = {
    # the command, and the extra that it needs
    "info": None, "train --output run --data text.txt": "lm", "eval --model run --data text.txt": "lm",
    "generate --model run": "lm",
}  # fmt: skip


def test_a_missing_extra_is_one_line(tmp_path):
    """One process runs all commands. The core needs no optional package: it computes, with gradients."""
    code = f"""
import contextlib, io, json, sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # importing it fails, as where it is not installed
from flashmhf_recipes.cli import main
results = {{}}
for line in {list(COMMANDS)!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(line.split())
    results[line] = (status, out.getvalue(), err.getvalue())
import torch
from flashmhf_recipes import first_run
assert all(each.passed for each in first_run.check(torch.device("cpu")))
try:
    import flashmhf.models
except ModuleNotFoundError as error:
    assert str(error) == "flashmhf.models needs transformers: pip install 'flashmhf[lm]'", error
else:
    raise AssertionError("flashmhf.models was imported")
print(json.dumps(results))
"""
    for line, (status, out, err) in json.loads(python(code, tmp_path)).items():
        if COMMANDS[line] is None:
            # torch 2.10 and 2.11 say so where nvcc is, but no GPU.
            complaints = [text for text in err.splitlines() if "No CUDA runtime is found" not in text]
            assert status == 0 and out.startswith("flashmhf ") and not complaints
        else:
            assert status == 2 and not out and len(err.splitlines()) == 1, (line, err)
            assert f"pip install 'flashmhf[{COMMANDS[line]}]'" in err


@SOURCES
def test_an_old_transformers_is_named(tmp_path):
    (tmp_path / "transformers.py").write_text("__version__ = '4.57.1'\n", encoding="utf-8")
    least = re.search(r'"transformers>=(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    code = "try: import flashmhf.models\nexcept ImportError as error: print(error)"
    message = f"flashmhf.models needs transformers {least} or later, not 4.57.1: pip install 'flashmhf[lm]'\n"
    assert run_python("-c", code, PYTHONPATH=f"{tmp_path}:{ROOT}") == message


@pytest.mark.parametrize("command", ["", "info"])
def test_a_missing_torch_is_one_line(command, tmp_path):
    code = f"""
import sys
sys.modules["torch"] = None
from flashmhf_recipes.cli import main
sys.stderr = sys.stdout
assert main({command.split()!r}) == 2
"""
    assert python(code, tmp_path) == "flashmhf: error: torch is not installed: pip install torch\n"
