"""Lays the core of the package out as a kernel for Hugging Face's ``kernels``: all of flashmhf without integrations.

$ python tools/hub_kernel.py build/hub      # Triton and eager, for any GPU and the CPU
$ python tools/hub_kernel.py build/hub --library libflashmhf_hopper.so --cuda 13.0    # and Hopper's, for x86_64

The folder can be loaded with ``kernels.get_local_kernel`` and uploaded as it is (docs/hub-kernel.md). The library must
have been linked for manylinux_2_28 (tools/build_wheel.py says how). Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flashmhf"
NAME, VERSION, STABLE_ABI = "flashmhf", 0, "210"
# the last for replace_ffn, which imports it where transformers is
FOLDERS = ("backends", "ops", "nn", "quantize", "distributed", "models")
BUILD = f"""# The pure-Python build: Triton and eager. tools/hub_kernel.py --library makes the one with CUDA's library.
[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "MIT"
backends = ["cpu", "cuda"]

[torch-noarch]
"""


def core() -> list[Path]:
    """What a kernel consists of: the package's single modules and these folders, whose imports are relative."""
    return sorted([*PACKAGE.glob("*.py"), *(path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py"))])


def variant(out: Path, name: str, backend: dict, library: Path | None) -> Path:
    """Writes one build variant."""
    folder = out / "build" / name
    shutil.rmtree(folder, ignore_errors=True)
    digest = hashlib.sha256()
    sources = [(path.relative_to(PACKAGE), path) for path in core()] + (
        [(Path(library.name), library)] if library else []
    )
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
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--library", type=Path, help="libflashmhf_hopper.so for manylinux_2_28")
    parser.add_argument(
        "--cuda", default="13.0", metavar="VERSION", help="the CUDA that the library was built with (13.0)"
    )
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"), help="the library's (x86_64)")
    options = parser.parse_args(arguments)
    if options.library and options.library.name != "libflashmhf_hopper.so":
        parser.error(f"--library {options.library}: the file must be named libflashmhf_hopper.so")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "build.toml").write_text(BUILD, encoding="utf-8")
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
