"""What a release consists of: the wheel for every Python, the library's needs, the files that a public project has."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from processes import ROOT, run_python
from test_packaging import readelf

import flashmhf

LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # of manylinux_2_28

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the sources are not here")


def too_new(library: Path) -> dict[str, tuple[int, ...]]:
    """The newest version of each system interface that the library refers to, where manylinux_2_28 has none so new."""
    found: dict[str, tuple[int, ...]] = {}
    listed = readelf("--version-info", str(library))
    for interface, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)", listed):
        found[interface] = max(found.get(interface, ()), tuple(map(int, version.split("."))))
    return {name: version for name, version in found.items() if version > LIMITS[name]}


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
static std::shared_ptr<std::string> describe(int number) {
  std::ostringstream text;
  std::stringstream both;
  text << "number " << number << ' ' << both.str();
  if (number > 2) throw std::runtime_error(text.str());
  return std::make_shared<std::string>(std::move(text).str());
}
static bool load() {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, run, nullptr) || pthread_join(thread, nullptr)) __builtin_abort();
  if (dlsym(RTLD_DEFAULT, "malloc") == nullptr) __builtin_abort();
  shm_unlink("/flashmhf-no-such-object");
  auto copy = describe(2);
  if (*copy != "number 2 ") __builtin_abort();
  std::cout << *copy << std::flush;
  return true;
}
static const bool loaded = load();
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="manylinux is Linux")
def test_a_library_linked_for_manylinux_runs_on_older_systems(tmp_path):
    """The same source links against new interfaces without cmake/manylinux.cmake, and against those of manylinux_2_28
    with it."""
    if missing := [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]:
        pytest.skip(f"no {' and no '.join(missing)}")
    (tmp_path / "code.cpp").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "CMakeLists.txt").write_text(
        f"""
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
""",
        encoding="utf-8",
    )
    for command in (["-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release"], ["--build", "build"]):
        done = subprocess.run(["cmake", *command], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    new, old = (tmp_path / "build" / f"lib{name}.so" for name in ("new", "old"))
    assert too_new(old) == {}
    if not too_new(new):
        pytest.skip("this system is old itself: it cannot show what cmake/manylinux.cmake changes")
    assert run_python("-c", f"import ctypes; ctypes.CDLL({str(old)!r})") == "number 2 "


def test_version_is_the_same_everywhere():
    assert f"\nversion: {flashmhf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == flashmhf.__version__
