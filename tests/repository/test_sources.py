"""The sources: nothing imports from a floor above its own, no files import each other in a circle, and the form is that
of .clang-format and pyproject.toml."""

import ast
import graphlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT, run_python

# From the ground up. "flashmhf/*" are the single modules of the package, "flashmhf" its __init__, which users import
# and which swaps networks of models by what models know of them.
CORE = ("flashmhf/*", "flashmhf.backends", "flashmhf.ops", "flashmhf.nn", "flashmhf.quantize", "flashmhf.distributed")
TOP = ("flashmhf.models", "flashmhf.swap", "flashmhf", "flashmhf.integrations")
FLOORS = (*CORE, *TOP, "flashmhf_recipes", "benchmarks")
# what these alone import beside torch
OPTIONAL = {"flashmhf.backends.triton": {"triton"}}
pytestmark = pytest.mark.skipif(not (ROOT / "flashmhf").is_dir(), reason="the sources are not here")
PATHS = [path for package in ("flashmhf", "flashmhf_recipes", "benchmarks") for path in (ROOT / package).rglob("*.py")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}


def imports(name: str) -> Iterator[str]:
    """The absolute names of what a module imports, also inside functions, submodules by their own name."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (full if (full := f"{base}.{alias.name}") in MODULES else base for alias in node.names)


def floor(name: str) -> str:
    package, *rest = name.split(".")
    if package != "flashmhf" or not rest or name in FLOORS:
        return name if name in FLOORS else package
    return f"flashmhf.{rest[0]}" if (ROOT / "flashmhf" / rest[0]).is_dir() else "flashmhf/*"


ARROWS = {name: {target for target in imports(name) if target in MODULES and target != name} for name in MODULES}


def test_nothing_imports_from_a_floor_above():
    up = [(a, b) for a, targets in ARROWS.items() for b in targets if FLOORS.index(floor(a)) < FLOORS.index(floor(b))]
    assert not up


def test_no_files_import_each_other_in_a_circle():
    """A submodule that takes a name from its own package's __init__ would close a circle."""
    try:
        tuple(graphlib.TopologicalSorter(ARROWS).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_core_imports_torch_and_the_standard_library_only():
    for name in (name for name in MODULES if floor(name) in (*CORE, "flashmhf.swap", "flashmhf")):
        allowed = {"torch", "flashmhf", *sys.stdlib_module_names}
        for prefix, more in OPTIONAL.items():
            allowed |= more if name.startswith(prefix) else set()
        assert {target.partition(".")[0] for target in imports(name)} <= allowed, name


OLDEST_CLANG_FORMAT = 23  # as in pyproject.toml; older ones break some lines elsewhere


@pytest.mark.parametrize("folder", ["csrc", "thunderkittens"])
def test_sources_are_formatted(folder):
    tool = shutil.which("clang-format", path=str(Path(sys.executable).parent)) or shutil.which("clang-format")
    if tool is None:
        pytest.skip("clang-format is not installed (pip install 'flashmhf[test]')")
    printed = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    version = printed.split("version ")[1].split()[0]
    if int(version.split(".")[0]) < OLDEST_CLANG_FORMAT:
        pytest.skip(f"clang-format {version} is older than {OLDEST_CLANG_FORMAT}")
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    assert files
    done = subprocess.run([tool, "--dry-run", "-Werror", *files], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"run clang-format -i on:\n{done.stderr}"


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_python_is_linted_and_formatted(arguments):
    pytest.importorskip("ruff")
    run_python("-m", "ruff", *arguments, ".", cwd=ROOT)
