"""Builds the op library libflashmhf_hopper.so, by CMake where nvcc is, and the optional launch-planner module
flashmhf._plan. A library that fails to compile is an error: it is left out only where there is no CUDA toolkit.

FLASHMHF_WHEEL=1 builds what a release ships (tools/build_wheel.py): one wheel for every Python, hence without
flashmhf._plan, whose library runs on manylinux_2_28. A wheel of another CUDA than 13 has it in its version
(0.2.0+cu12).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import kernel_resources  # noqa: E402
import toolchain  # noqa: E402

LIBRARY = "libflashmhf_hopper.so"
RELEASE = toolchain.flag("FLASHMHF_WHEEL")
NO_LIBRARY = "_no_library.txt"  # says in the installed package why the library is not there


def cmake_build(version: str) -> Path:
    """Builds the op library and returns where it lies, with what ptxas says about its kernels beside it.

    Its folder is not setuptools' build_temp, which an editable installation deletes. Raises RuntimeError if it fails.
    """
    build_dir = ROOT / "build" / f"cmake-{toolchain.fingerprint(str(ROOT))}"
    torch_root = toolchain.torch_root()
    if torch_root is None:
        raise RuntimeError(
            f"there is no {toolchain.TORCH_REQUIREMENT} to take headers from; install it first, or build with isolation"
        )
    tools = {"cmake>=3.24": toolchain.cmake(), "ninja": shutil.which("ninja")}
    for requirement, found in tools.items():
        if found is None:
            raise RuntimeError(f"there is no {requirement}; pip install '{requirement}', or build with isolation")
    nvcc_threads = toolchain.count("NVCC_THREADS") or 1
    configure = [
        "cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build_dir),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}",  # CMake remembers the ninja of pip's last build, which is gone
        f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc()}",
        f"-DTORCH_ROOT={torch_root}",
        f"-DFLASHMHF_VERSION={version}",
        f"-DNVCC_THREADS={nvcc_threads}",
        f"-DFLASHMHF_MANYLINUX={'ON' if RELEASE else 'OFF'}",
        f"-DTHUNDERKITTENS_ROOT={os.environ.get('THUNDERKITTENS_ROOT', '')}",
    ]  # fmt: skip
    for language in ("CXX", "CUDA"):  # empty, too: CMake remembers one that is gone
        configure.append(f"-DCMAKE_{language}_COMPILER_LAUNCHER={toolchain.launcher(language)}")
    build = ["cmake", "--build", str(build_dir), "--target", "flashmhf_hopper", "-j", str(toolchain.jobs(nvcc_threads))]
    for step, command in (("configuring", configure), ("compiling", build)):
        if subprocess.run(command).returncode:
            raise RuntimeError(
                f"{step} it failed, as said above (if a compiler was killed: MAX_JOBS=1 takes less memory)"
            )
    headers = "upstream" if os.environ.get("THUNDERKITTENS_ROOT") else "bundled"
    nvcc = ".".join(map(str, toolchain.nvcc_version()))
    resources = {"thunderkittens": headers, "nvcc": nvcc} | kernel_resources.collect(build_dir)
    (build_dir / kernel_resources.FILE).write_text(json.dumps(resources, indent=1) + "\n", encoding="utf-8")
    return build_dir / LIBRARY


class BuildExtensions(build_ext):
    """flashmhf._plan through setuptools (optional), the op library through CMake; both land in the package's folder."""

    def run(self):
        super().run()
        package = ROOT / "flashmhf" if self.inplace else Path(self.build_lib) / "flashmhf"
        package.mkdir(parents=True, exist_ok=True)
        library, reason = self.library()
        if library is None and (RELEASE or toolchain.flag("FLASHMHF_FORCE_CUDA_BUILD")):
            raise RuntimeError(f"flashmhf: the CUDA library was not built: {reason}")
        for name in (LIBRARY, kernel_resources.FILE, NO_LIBRARY):
            (package / name).unlink(missing_ok=True)
        if library is None:
            (package / NO_LIBRARY).write_text(f"{reason}\n", encoding="utf-8")
            print(f"flashmhf: installed without its CUDA library: {reason}", file=sys.stderr)
            return
        for source in (library, library.parent / kernel_resources.FILE):
            if source.exists():
                shutil.copy2(source, package / (LIBRARY if source is library else kernel_resources.FILE))

    def library(self) -> tuple[Path | None, str | None]:
        """The op library: $FLASHMHF_LIBRARY (compiled before), else built here; or None and why this machine has none.

        What fails on a machine that has a CUDA toolkit raises RuntimeError: it is no reason to install without.
        """
        if named := os.environ.get("FLASHMHF_LIBRARY"):
            if not Path(named).is_file():
                raise RuntimeError(f"FLASHMHF_LIBRARY is {named!r}; supported: the path of a {LIBRARY}")
            return Path(named), None
        reason = toolchain.no_cuda_reason()
        if reason is not None:
            return None, reason
        try:
            return cmake_build(self.distribution.get_version().partition("+")[0]), None
        except RuntimeError as error:
            hint = "FLASHMHF_SKIP_CUDA_BUILD=1 installs without it"
            raise RuntimeError(f"flashmhf: the CUDA library was not built: {error}; {hint}") from None

    def get_outputs(self):
        if self.inplace:
            return super().get_outputs()
        package = Path(self.build_lib) / "flashmhf"
        return super().get_outputs() + [
            str(path) for name in (LIBRARY, kernel_resources.FILE, NO_LIBRARY) if (path := package / name).exists()
        ]


class BuildPython(build_py):
    """Modules that an earlier build left in build/lib, and that the sources no longer have, are not installed."""

    def run(self):
        for package in ("flashmhf", "flashmhf_recipes"):
            for path in (Path(self.build_lib) / package).rglob("*.py"):
                path.unlink()
        super().run()


def plan_extension() -> Extension:
    try:
        import pybind11

        include = [pybind11.get_include()]
    except ImportError:  # without build isolation; the optional extension then fails to compile and is left out
        include = []
    return Extension(
        "flashmhf._plan",
        ["csrc/plan_bindings.cpp", *(f"csrc/{folder}/plan.cpp" for folder in ("forward", "backward", "project"))],
        include_dirs=[*include, "csrc"],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
        language="c++",
        optional=True,
    )


class ReleaseDistribution(Distribution):
    """Runs build_ext although setuptools knows of no extension."""

    def has_ext_modules(self):
        return True


def release_commands() -> dict[str, type]:
    from setuptools.command.bdist_wheel import bdist_wheel  # setuptools 70.1 and later

    class ReleaseWheel(bdist_wheel):
        """The library has no Python symbol, so one wheel serves every CPython; it does depend on the platform."""

        def get_tag(self):
            return ("py3", "none", super().get_tag()[2])

    return COMMANDS | {"bdist_wheel": ReleaseWheel}


COMMANDS = {"build_ext": BuildExtensions, "build_py": BuildPython}
if RELEASE:
    label = {"egg_info": {"tag_build": toolchain.release_label()}}
    setup(cmdclass=release_commands(), distclass=ReleaseDistribution, options=label)
else:
    setup(ext_modules=[plan_extension()], cmdclass=COMMANDS)
