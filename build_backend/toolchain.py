"""Finds what the CUDA library is built with. Standard library only; imports neither torch nor setuptools."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MINIMUM_NVCC = (12, 4)
MINIMUM_CMAKE = (3, 24)  # as in CMakeLists.txt
RELEASE_CUDA = 13  # major version of the wheel without a label
TORCH_REQUIREMENT = "torch>=2.10"
STABLE_HEADER = "include/torch/csrc/stable/library.h"
BYTES_PER_JOB = 4 << 30  # one nvcc process with all its passes


def flag(name: str) -> bool:
    """Whether the environment variable is set to something other than empty, 0, no, off or false."""
    return os.environ.get(name, "").lower() not in ("", "0", "no", "off", "false")


def count(name: str) -> int | None:
    """The environment variable as a whole number from 1 on, smaller ones as 1; None when it is not set."""
    value = os.environ.get(name)
    try:
        return max(1, int(value)) if value else None
    except ValueError:
        raise ValueError(f"{name} is {value!r}; supported: a whole number") from None


def named_nvcc() -> tuple[str, str, str] | None:
    """The variable of the environment that says where nvcc is, its value and the place that it means."""
    for name, below in (("CUDACXX", ""), ("CUDA_HOME", "/bin/nvcc"), ("CUDA_PATH", "/bin/nvcc")):
        if value := os.environ.get(name):
            return name, value, f"{value}{below}"
    return None


@functools.cache
def nvcc() -> Path | None:
    """The CUDA compiler: that of $CUDACXX, $CUDA_HOME or $CUDA_PATH, the first that is set. Without them that of the
    PATH, then of the usual place.
    """
    named = named_nvcc()
    places = [named[2]] if named else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((Path(found) for place in places if (found := shutil.which(place))), None)


def _says(program: Path | str) -> str:
    """What ``program --version`` prints."""
    done = subprocess.run([program, "--version"], capture_output=True, encoding="utf-8", errors="replace")
    return done.stdout


@functools.cache
def nvcc_version() -> tuple[int, int]:
    """(0, 0) of a program that is no nvcc."""
    release = re.search(r"release (\d+)\.(\d+)", _says(nvcc()))
    return tuple(map(int, release.groups())) if release else (0, 0)


def launcher(language: str) -> str:
    """What CMake starts the compiler of a language by: its own variable of the environment, else sccache or ccache if
    installed; empty: nothing."""
    named = os.environ.get(f"CMAKE_{language}_COMPILER_LAUNCHER")
    return shutil.which("sccache") or shutil.which("ccache") or "" if named is None else named


def fingerprint(*more: str) -> str:
    """Names ``more`` and the compilers, which CMake looks at only once in a build folder.

    Another toolkit behind the same path, and other flags of the environment, need another folder.
    """
    real, host = nvcc().resolve(), shutil.which(os.environ.get("CXX") or "c++")
    # also by which path: CMake forgets its other variables where CMAKE_CUDA_COMPILER changes
    found = [*more, str(nvcc()), str(real), str(real.stat().st_mtime_ns), _says(nvcc()), _says(host) if host else ""]
    found += [os.environ.get(name, "") for name in ("CXX", "CUDAHOSTCXX", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS")]
    return hashlib.sha256("\0".join(found).encode()).hexdigest()[:12]


def release_label() -> str:
    """What a wheel's version ends with:

    nothing for CUDA 13, +cu12 for CUDA 12, so that both wheels can lie in one folder.
    """
    return "" if nvcc() is None or nvcc_version()[0] == RELEASE_CUDA else f"+cu{nvcc_version()[0]}"


def no_cuda_reason() -> str | None:
    """None when the CUDA library should be built, else why it is left out.

    Raises RuntimeError where the environment names a compiler that is not there or cannot build it: another one, or no
    library, would be a silent replacement.
    """
    if flag("FLASHMHF_SKIP_CUDA_BUILD"):
        return "FLASHMHF_SKIP_CUDA_BUILD was set"
    if not sys.platform.startswith("linux"):
        return f"the platform is {sys.platform}; supported: linux"
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if listed.strip() and not re.search(r"(^|[\s;,])(9\.0a?(\+PTX)?|Hopper|All|Common|Auto)($|[\s;,])", listed):
        return f"TORCH_CUDA_ARCH_LIST is {listed!r}, without 9.0, the architecture of the kernels"
    named, reason = named_nvcc(), None
    supported = f"nvcc {'.'.join(map(str, MINIMUM_NVCC))} and later"
    if nvcc() is None and named:
        name, value, place = named
        wanted = "the path of nvcc" if place == value else "the folder of a CUDA toolkit that has bin/nvcc"
        reason = f"{name} is {value!r}; supported: {wanted}"
    elif nvcc() is None:
        reason = "nvcc was not found (looked at CUDACXX, CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)"
    elif nvcc_version() == (0, 0):
        reason = f"{nvcc()} --version names no release of CUDA; supported: {supported}"
    elif nvcc_version() < MINIMUM_NVCC:
        reason = f"{nvcc()} has version {'.'.join(map(str, nvcc_version()))}; supported: {supported}"
    if named and reason is not None:
        raise RuntimeError(f"{reason} (unset {named[0]}, or set FLASHMHF_SKIP_CUDA_BUILD=1)")
    return reason


def torch_root() -> Path | None:
    """The folder of a torch that has the stable ABI's headers: $TORCH_ROOT (RuntimeError when it is none), else an
    installed one.

    Under build isolation the target environment is not importable, but its site-packages still is where sysconfig says:
    the library needs only headers and libtorch_cpu from there, so nothing has to be downloaded.
    """
    if named := os.environ.get("TORCH_ROOT"):
        if not _has_stable_abi(Path(named)):
            raise RuntimeError(f"TORCH_ROOT={named} holds no {TORCH_REQUIREMENT}")
        return Path(named)
    spec = importlib.util.find_spec("torch")
    places = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    places += [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    return next((place for place in places if _has_stable_abi(place)), None)


def _has_stable_abi(root: Path) -> bool:
    return torch_version(root) >= (2, 10) and (root / STABLE_HEADER).exists()


def torch_version(root: Path) -> tuple[int, int]:
    path = root / "version.py"
    match = re.search(r"__version__ = ['\"](\d+)\.(\d+)", path.read_text(encoding="utf-8")) if path.exists() else None
    return tuple(map(int, match.groups())) if match else (0, 0)


def build_requirements() -> list[str]:
    if os.environ.get("FLASHMHF_LIBRARY") or no_cuda_reason() is not None:
        return []
    needed = [("cmake>=3.24", cmake() is None), ("ninja", shutil.which("ninja") is None)]
    return [name for name, is_missing in (*needed, (TORCH_REQUIREMENT, torch_root() is None)) if is_missing]


def cmake() -> str | None:
    """The first cmake of the PATH, unless it is too old for CMakeLists.txt."""
    found = shutil.which("cmake")
    version = re.search(r"version (\d+)\.(\d+)", _says(found)) if found else None
    return found if version and tuple(map(int, version.groups())) >= MINIMUM_CMAKE else None


def memory(root: Path = Path("/")) -> int:
    """Bytes that this process may use: the machine's, or fewer if its control group (v1 or v2) has a limit."""
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        # A container sees its own group at the top, whatever its path on the host is.
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            limit = root / "sys/fs/cgroup" / top / folder / name
            text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
            least = least if text == "max" else min(least, int(text))
    return least


def jobs(nvcc_threads: int) -> int:
    """$MAX_JOBS, else as many compilers as there are cores and memory for."""
    if named := count("MAX_JOBS"):
        return named
    return max(1, min(len(os.sched_getaffinity(0)), memory() // (BYTES_PER_JOB * nvcc_threads)))
