"""The C++ and CUDA sources have the form that .clang-format describes, the Python sources the one in pyproject.toml."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, run_python

OLDEST_CLANG_FORMAT = 23  # as in pyproject.toml; older ones break some lines elsewhere


def clang_format() -> str:
    tool = shutil.which("clang-format", path=str(Path(sys.executable).parent)) or shutil.which("clang-format")
    if tool is None:
        pytest.skip("clang-format is not installed (pip install 'flashmhf[test]')")
    printed = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    version = printed.split("version ")[1].split()[0]
    if int(version.split(".")[0]) < OLDEST_CLANG_FORMAT:
        pytest.skip(f"clang-format {version} is older than {OLDEST_CLANG_FORMAT}")
    return tool


@pytest.mark.parametrize("folder", ["csrc", "thunderkittens"])
def test_sources_are_formatted(folder):
    if not (ROOT / ".clang-format").exists():
        pytest.skip("the sources are not here")
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    assert files
    done = subprocess.run([clang_format(), "--dry-run", "-Werror", *files], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"run clang-format -i on:\n{done.stderr}"


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_python_is_linted_and_formatted(arguments):
    if importlib.util.find_spec("ruff") is None or not (ROOT / "pyproject.toml").exists():
        pytest.skip("ruff is not installed, or the sources are not here")
    run_python("-m", "ruff", *arguments, ".", cwd=ROOT)
