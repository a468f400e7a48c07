"""Builds the op library libflashmhf_hopper.so (CMake, where nvcc is) and the optional launch-planner module
flashmhf._plan.

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

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import kernel_resources  # noqa: E402
import toolchain  # noqa: E402

LIBRARY = "libflashmhf_hopper.so"
RELEASE = toolchain.flag("FLASHMHF_WHEEL")
NO_LIBRARY = "_no_library.txt"  # says in the installed package why the library is not there


def cmake_build(build_dir: Path, version: str) -> Path:
    """Builds the op library and returns where it lies, with what ptxas says about its kernels beside it."""
    torch_root = toolchain.torch_root()
    if torch_root is None:
        raise RuntimeError(
            f"no {toolchain.TORCH_REQUIREMENT} to take headers from; install it first, or build with isolation"
        )
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"{tool} was not found; pip install {tool}, or build with isolation")
    nvcc_threads = toolchain.count("NVCC_THREADS") or 1
    configure = [
        "cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build_dir),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc()}",
        f"-DTORCH_ROOT={torch_root}",
        f"-DFLASHMHF_VERSION={version}",
        f"-DNVCC_THREADS={nvcc_threads}",
        f"-DFLASHMHF_MANYLINUX={'ON' if RELEASE else 'OFF'}",
        f"-DTHUNDERKITTENS_ROOT={os.environ.get('THUNDERKITTENS_ROOT', '')}",
    ]  # fmt: skip
    ccache = shutil.which("ccache")
    if ccache:
        configure += [f"-DCMAKE_{language}_COMPILER_LAUNCHER={ccache}" for language in ("CXX", "CUDA")]
    build = ["cmake", "--build", str(build_dir), "--target", "flashmhf_hopper", "-j", str(toolchain.jobs(nvcc_threads))]
    for step, command in (("configuring", configure), ("compiling", build)):
        if subprocess.run(command).returncode:
            raise RuntimeError(f"{step} it with CMake failed; pip install -v shows the messages")
    headers = "upstream" if os.environ.get("THUNDERKITTENS_ROOT") else "bundled"
    nvcc = ".".join(map(str, toolchain.nvcc_version()))
    resources = {"thunderkittens": headers, "nvcc": nvcc} | kernel_resources.collect(build_dir)
    (build_dir / kernel_resources.FILE).write_text(json.dumps(resources, indent=1) + "\n")
    return build_dir / LIBRARY


class BuildExtensions(build_ext):
    """flashmhf._plan through setuptools (optional), the op library through CMake; both land in the package's folder."""

    def run(self):
        super().run()
        package = ROOT / "flashmhf" if self.inplace else Path(self.build_lib) / "flashmhf"
        package.mkdir(parents=True, exist_ok=True)
        try:
            library = self.library()
            shutil.copy2(library, package / LIBRARY)
            (package / kernel_resources.FILE).unlink(missing_ok=True)
            if (resources := library.parent / kernel_resources.FILE).exists():
                shutil.copy2(resources, package / kernel_resources.FILE)
            (package / NO_LIBRARY).unlink(missing_ok=True)
            return
        except RuntimeError as error:
            reason = str(error)
        if RELEASE or toolchain.flag("FLASHMHF_FORCE_CUDA_BUILD"):
            raise RuntimeError(f"flashmhf: the CUDA library was not built: {reason}")
        for name in (LIBRARY, kernel_resources.FILE):
            (package / name).unlink(missing_ok=True)
        (package / NO_LIBRARY).write_text(reason + "\n")
        print(f"flashmhf: installed without its CUDA library: {reason}", file=sys.stderr)

    def library(self) -> Path:
        """The op library:

        $FLASHMHF_LIBRARY (compiled before), else built here. Raises RuntimeError with the reason why there is none.
        """
        if os.environ.get("FLASHMHF_LIBRARY"):
            return Path(os.environ["FLASHMHF_LIBRARY"])
        reason = toolchain.no_cuda_reason()
        if reason is not None:
            raise RuntimeError(reason)
        return cmake_build(Path(self.build_temp).resolve() / "cmake", self.distribution.get_version().partition("+")[0])

    def get_outputs(self):
        if self.inplace:
            return super().get_outputs()
        package = Path(self.build_lib) / "flashmhf"
        return super().get_outputs() + [
            str(path) for name in (LIBRARY, kernel_resources.FILE, NO_LIBRARY) if (path := package / name).exists()
        ]


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

    return {"build_ext": BuildExtensions, "bdist_wheel": ReleaseWheel}


if RELEASE:
    label = {"egg_info": {"tag_build": toolchain.release_label()}}
    setup(cmdclass=release_commands(), distclass=ReleaseDistribution, options=label)
else:
    setup(ext_modules=[plan_extension()], cmdclass={"build_ext": BuildExtensions})
