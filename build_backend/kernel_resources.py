"""What ptxas says about each kernel of a build: registers, stack, spills and static shared memory, from the logs beside
the object files.

python build_backend/kernel_resources.py BUILD_FOLDER      prints the JSON that setup.py puts beside the library
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

FILE = "kernel_resources.json"
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\w+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_REMARK = re.compile(r"\(C7\d\d\d\)")  # wgmma serialised, setmaxnreg ignored


def parse(log: str) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Resources of every kernel of a ptxas log (-v), and the remarks in it that cost speed."""
    kernels: dict[str, dict[str, int]] = {}
    kernel = function = None
    remarks = []
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            kernel = match[1]
        elif match := _PROPERTIES.search(line):
            function = match[1]
        elif (match := _FRAME.search(line)) and kernel is not None and function == kernel:
            kernels[kernel] = dict(zip(("stack", "spill_stores", "spill_loads"), map(int, match.groups()), strict=True))
        elif (match := _USED.search(line)) and kernel in kernels:
            kernels[kernel]["registers"] = int(match[1])
            shared = _SHARED.search(line)
            kernels[kernel]["shared_memory"] = int(shared[1]) if shared else 0
        elif _REMARK.search(line):
            remarks.append(line.strip())
    return kernels, remarks


def collect(build_folder: Path) -> dict:
    """The same of the logs of a build folder, but for those of instances that it no longer builds. Raises RuntimeError
    when there is none."""
    kernels: dict[str, dict[str, int]] = {}
    remarks: list[str] = []
    rules = build_folder / "build.ninja"
    built = rules.read_text(encoding="utf-8") if rules.exists() else None
    for log in sorted(build_folder.rglob("*.cu.o.log")):
        if built is not None and f" {log.relative_to(build_folder).with_suffix('').as_posix()}:" not in built:
            continue
        found, said = parse(log.read_text(encoding="utf-8", errors="replace"))
        kernels |= found
        remarks += said
    if not kernels:
        raise RuntimeError(f"{build_folder} holds no ptxas log of a kernel")
    return {"kernels": dict(sorted(kernels.items())), "remarks": sorted(set(remarks))}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(json.dumps(collect(Path(sys.argv[1])), indent=1))
