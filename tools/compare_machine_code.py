"""Whether two builds of the op library hold the same machine code, kernel by kernel.

    python tools/compare_machine_code.py OLD.so NEW.so

A kernel is equal when its instructions, its launch attributes and its resources (registers, stack, static shared
memory, constant bank) are equal. Names do not count: a kernel that only NEW names so is paired with the kernel of OLD
that has the same code. Line numbers are not compared. cuobjdump comes from the CUDA toolkit ($CUDA_HOME/bin, PATH) or
from the Triton package.

Exit status: 0 all equal, 1 some differ, 2 bad arguments or no cuobjdump.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def cuobjdump() -> str:
    folders = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    search = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    tool = shutil.which("cuobjdump", path=search)
    if tool is None:
        raise FileNotFoundError("no cuobjdump: install the CUDA toolkit or Triton, or set CUDA_HOME")
    return tool


def demangle(names: list[str]) -> list[str]:
    if shutil.which("c++filt") is None:
        return names
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [re.sub(r"^void |\(.*\)$", "", name) for name in done.stdout.splitlines()]


def kernels(library: str) -> dict[str, str]:
    """Code and resources of every kernel in `library`, by its mangled name."""
    tool = cuobjdump()

    def dump(option: str) -> list[str]:
        return subprocess.run([tool, option, library], capture_output=True, text=True, check=True).stdout.splitlines()

    found: dict[str, list[str]] = {}
    code: list[str] | None = None
    for line in dump("-sass"):
        text = line.strip()
        if text.startswith("Function : "):
            code = found.setdefault(text.removeprefix("Function : "), [])
        elif text.startswith(("Fatbin elf code", "code for ")):
            code = None
        elif code is not None and text and not set(text) <= {"."}:
            code.append(re.sub(r"\s+", " ", text))
    name = None
    for line in dump("-res-usage"):
        text = line.strip()
        if text.startswith("Function "):
            name = text.removeprefix("Function ").rstrip(":")
        elif name in found and text.startswith("REG:"):
            found[name].append(text)
    return {name: "\n".join(code) for name, code in found.items()}


Pairs = list[tuple[str, str]]


def compare(old: dict[str, str], new: dict[str, str]) -> tuple[Pairs, Pairs, list[str], list[str]]:
    """Pairs of equal kernels, pairs of one name that differ, names that only `old` has, names that only `new` has."""
    equal = [(name, name) for name in new if old.get(name) == new[name]]
    old_left = [name for name in old if old.get(name) != new.get(name)]
    new_left = [name for name in new if old.get(name) != new.get(name)]
    for name in list(new_left):
        # The same name first: an unchanged copy may exist under another one.
        candidates = [other for other in old_left if old[other] == new[name]]
        if candidates:
            old_left.remove(candidates[0])
            new_left.remove(name)
            equal.append((candidates[0], name))
    different = [(name, name) for name in new_left if name in old_left]
    alone = ([name for name in left if name not in other] for left, other in ((old_left, new), (new_left, old)))
    return equal, different, *alone


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="library or object file of the build to compare with")
    parser.add_argument("new", help="library or object file of the changed build")
    options = parser.parse_args(arguments)
    try:
        old, new = kernels(options.old), kernels(options.new)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        print(f"compare_machine_code: {detail}", file=sys.stderr)
        return 2
    equal, different, only_old, only_new = compare(old, new)
    rows = [("equal", old_name, new_name) for old_name, new_name in equal]
    rows += [("different", old_name, new_name) for old_name, new_name in different]
    rows += [("only OLD", name, name) for name in only_old] + [("only NEW", name, name) for name in only_new]
    readable = dict(zip(names := sorted({name for row in rows for name in row[1:]}), demangle(names), strict=True))
    for state, old_name, new_name in rows:
        renamed = f"  (was {readable[old_name]})" if old_name != new_name else ""
        print(f"{state:9}  {readable[new_name]}{renamed}")
    print(f"{len(equal)} equal, {len(different)} different, {len(only_old)} only in OLD, {len(only_new)} only in NEW")
    return 0 if len(equal) == len(rows) and rows else 1


if __name__ == "__main__":
    sys.exit(main())
