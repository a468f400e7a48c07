"""Lays the core of the package out as a kernel for Hugging Face's ``kernels``: operators, modules and back ends, without app, lm and bench.

$ python tools/hub_kernel.py build/hub                                                # Triton and eager, for any GPU and the CPU
$ python tools/hub_kernel.py build/hub --library libflashmhf_hopper.so --cuda 13.0    # and the Hopper library, for x86_64

The folder can be loaded with ``kernels.get_local_kernel`` and uploaded as it is (docs/hub-kernel.md). The library must have been linked
for manylinux_2_28 (tools/build_wheel.py says how). Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flashmhf"
NAME, VERSION, STABLE_ABI = "flashmhf", 0, "210"
BUILD = f"""# The pure-Python build: Triton and eager. The variant with the CUDA library comes from tools/hub_kernel.py --library.
[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "MIT"
backends = ["cpu", "cuda"]

[torch-noarch]
"""


def imports(path: Path, inside_functions: bool = True) -> set[tuple[int, str]]:
    """(level, dotted name) of what a module imports; level 0 is absolute. A name imported from a package counts as its submodule, too."""
    found = set()
    for node in _nodes(ast.parse(path.read_text()), inside_functions):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found |= {(node.level, base), *((node.level, f"{base}.{alias.name}".lstrip(".")) for alias in node.names if node.level)}
    return found


def _nodes(node: ast.AST, inside_functions: bool):
    for child in ast.iter_child_nodes(node):
        yield child
        if inside_functions or not isinstance(child, ast.FunctionDef):
            yield from _nodes(child, inside_functions)


def core() -> list[Path]:
    """The modules that ``import flashmhf`` reaches, also from within functions: what a kernel consists of."""
    reached, waiting = set(), [PACKAGE / "__init__.py"]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        for level, name in imports(path):
            if level:
                base = path.parents[level - 1]
                waiting += _files(base.joinpath(*filter(None, name.split("."))))
                waiting += [
                    init for folder in (base, *base.parents) if folder.is_relative_to(PACKAGE) if (init := folder / "__init__.py").exists()
                ]
    return sorted(reached)


def _files(target: Path) -> list[Path]:
    """The file of a module or package; none for what is a name inside a module."""
    return [path for path in (target.with_suffix(".py"), target / "__init__.py") if path.is_file()]


def variant(out: Path, name: str, backend: dict, library: Path | None) -> Path:
    """Writes one build variant."""
    folder = out / "build" / name
    shutil.rmtree(folder, ignore_errors=True)
    digest = hashlib.sha256()
    sources = [(path.relative_to(PACKAGE), path) for path in core()] + ([(Path(library.name), library)] if library else [])
    for place, source in sources:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / place)
        digest.update(source.read_bytes())
    metadata = {
        "id": f"{NAME}_{name.replace('-', '_')}_{digest.hexdigest()[:12]}",
        "name": NAME,
        "version": VERSION,
        "license": "MIT",
        "python-depends": [],
        "backend": backend,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--library", type=Path, help="libflashmhf_hopper.so for manylinux_2_28")
    parser.add_argument("--cuda", default="13.0", metavar="VERSION", help="the CUDA that the library was built with (13.0)")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"), help="the library's (x86_64)")
    options = parser.parse_args(arguments)
    if options.library and options.library.name != "libflashmhf_hopper.so":
        parser.error(f"--library {options.library}: the file must be named libflashmhf_hopper.so")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "build.toml").write_text(BUILD)
    variant(options.out, "torch-cpu", {"type": "cpu"}, None)
    variant(options.out, "torch-cuda", {"type": "cuda"}, None)
    if options.library:
        cuda = f"cu{options.cuda.replace('.', '')}"
        name = f"torch-stable-abi{STABLE_ABI}-{cuda}-{options.machine}-linux"
        variant(options.out, name, {"type": "cuda", "archs": ["9.0a"]}, options.library)
    project = options.out / "torch-ext" / NAME
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(options.out / "build" / "torch-cpu", project, ignore=shutil.ignore_patterns("metadata.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
