"""Runs the CPU tests with several versions of torch, transformers and Python, each set in an environment of its own.

$ python tools/matrix.py                                             # every set, all tests
$ python tools/matrix.py --sets 2.10/5.17/3.10 -- tests/nn/test_nn.py   # one set, some tests
$ python tools/matrix.py --wheel dist/flashmhf-*.whl                 # with the wheel of a release, CUDA library included
$ python tools/matrix.py --check                                     # whether the documents say what the record says

A set names torch, transformers and Python; python3.X must be in the PATH or be given by --interpreters. The result of a
set and selection replaces the earlier one, and a result of all tests those of every selection of its set, in
benchmarks/results/compatibility.json, which docs/compatibility.md and README.md quote. Environments are deleted
afterwards: a CUDA build of torch takes up to 7 GB. Needs a network and the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness.markdown import with_block  # noqa: E402

RECORD = ROOT / "benchmarks" / "results" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
README = ROOT / "README.md"
# Oldest and newest of all three (Python 3.10 has no torch 2.15 and no transformers 5.21), and torch 2.14, which serving
# engines pin.
SETS = ("2.10/5.17/3.10", "2.10/5.24/3.11", "2.13/5.24/3.12", "2.14/5.17/3.13", "2.15/5.24/3.14")
IMPORT_TIMES = """
import json, time
start = time.process_time()
import torch
middle = time.process_time()
import flashmhf
print(json.dumps([torch.__version__, middle - start, time.process_time() - middle]))
"""
LOAD = """
from flashmhf.backends import hopper
import torch
if not hopper.LIBRARY.exists():
    print("not installed")
elif torch.version.cuda is None:
    print("not loaded: torch is a CPU build")
else:
    torch.ops.load_library(str(hopper.LIBRARY))
    print("loads")
"""


def run(*command: object, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def own_wheel(python: Path, folder: Path) -> Path:
    """A wheel of this source tree for this interpreter, without the CUDA library."""
    environment = os.environ | {"FLASHMHF_SKIP_CUDA_BUILD": "1"}
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(list(map(str, command)), env=environment, check=True)
    return next(folder.glob("flashmhf-*.whl"))


def interpreter(version: str, given: list[str]) -> str:
    """The program of this Python: one of those given, else that of the PATH. Raises ValueError where there is none."""
    name = f"python{version}"
    found = next((path for path in given if Path(path).name == name), None) or shutil.which(name)
    if found is None:
        raise ValueError(f"there is no {name} in the PATH or in --interpreters")
    return found


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def install(interpreter: str, folder: Path, torch: str, transformers: str, wheel: Path | None) -> tuple[Path, int]:
    """A fresh environment with exactly these versions, and ``wheel`` or one made for it: its interpreter, and the bytes
    that torch and what it needs take."""
    run(interpreter, "-m", "venv", folder)
    python = folder / "bin" / "python"
    constraints = folder / "constraints.txt"
    versioned = ("torch>", "transformers<", "triton<")  # torch says which Triton it takes
    kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith(versioned)]
    constraints.write_text("\n".join([*kept, f"torch=={torch}.*", f"transformers=={transformers}.*", ""]))
    pip = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", constraints)
    empty = size(folder)
    run(*pip, "torch")
    torch_bytes = size(folder) - empty
    run(*pip, f"{wheel or own_wheel(python, folder / 'wheel')}[test]")
    return python, torch_bytes


def passed_tests(python: Path, tests: list[str]) -> dict:
    """Runs pytest on a copy of the tests, so that the installed package is what they import."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        left_out = (
            ".git",
            ".venv",
            "build",
            "dist",
            "*.egg-info",
            "__pycache__",
            "*.so",
            ".pytest_cache",
            ".ruff_cache",
            ".hypothesis",
        )
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left_out))
        junit = Path(scratch) / "junit.xml"
        # The program, not `python -m pytest`, which would put the sources before the installed package.
        command = [str(python.parent / "pytest"), "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", *tests]
        start = time.monotonic()
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        seconds = time.monotonic() - start
        if not junit.exists():
            raise RuntimeError(f"pytest wrote no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        suite = ElementTree.parse(junit).getroot().find("testsuite")
        count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        failed = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    return {
        "passed": count["tests"] - count["failures"] - count["errors"] - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "seconds": round(seconds),
    }


def result(program: str, versions: str, wheel: Path | None, tests: list[str], keep: Path | None) -> dict:
    torch, transformers, _ = versions.split("/")
    with tempfile.TemporaryDirectory(prefix="flashmhf-matrix-", dir=keep) as scratch:
        python, torch_bytes = install(program, Path(scratch) / "env", torch, transformers, wheel)
        version, torch_seconds, own_seconds = json.loads(run(python, "-c", IMPORT_TIMES, cwd=scratch))
        return {
            "set": versions,
            "python": run(python, "-c", "import platform; print(platform.python_version())").strip(),
            "torch": version,
            "transformers": run(
                python, "-c", "from importlib.metadata import version as v; print(v('transformers'))"
            ).strip(),
            "torch_gb": round(torch_bytes / 1e9, 1),
            "library": run(python, "-c", LOAD, cwd=scratch).strip(),
            "import_torch_s": round(torch_seconds, 2),
            "import_flashmhf_s": round(own_seconds, 3),
            "selection": " ".join(tests) or "all",
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, CPU",
            **passed_tests(python, tests),
        }


def outcome(row: dict) -> str:
    """Return "passed", or how many of the tests failed; a part of the tests is named."""
    part = "" if row["selection"] == "all" else f" (`pytest {row['selection']}`)"
    return f"{len(row['failed'])} failed: {', '.join(row['failed'])}{part}" if row["failed"] else f"passed{part}"


def table(rows: list[dict]) -> str:
    """What docs/compatibility.md says; the record has the numbers of tests, sizes, times and dates."""
    lines = ["| torch | Python | transformers | CPU tests | CUDA library |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = (row["torch"], row["python"], row["transformers"], outcome(row), row["library"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sentence(rows: list[dict]) -> str:
    """What README.md quotes: the versions between which every set has passed."""
    passed = [row for row in rows if outcome(row) == "passed"]
    if any(row["failed"] for row in rows):
        return "Not every version passes: see [Versions](docs/compatibility.md)."
    ends = [
        " to ".join(
            dict.fromkeys(
                f(versions, key=lambda version: [int(part) for part in version.split(".")]) for f in (min, max)
            )
        )
        for versions in (
            [".".join(row[name].partition("+")[0].split(".")[:2]) for row in passed] for name in ("torch", "python")
        )
    ]
    return f"The CPU tests have passed with torch {ends[0]} on Python {ends[1]} ([versions](docs/compatibility.md))."


BLOCKS = {PAGE: table, README: sentence}


def documents(rows: list[dict]) -> dict[Path, str]:
    """The texts of the pages with what the rows say between the markers."""
    return {
        path: with_block(path.read_text(), "compatibility", block(rows), "tools/matrix.py")
        for path, block in BLOCKS.items()
    }


def write(rows: list[dict]) -> None:
    RECORD.write_text(json.dumps({"command": "python tools/matrix.py", "rows": rows}, indent=1) + "\n")
    for path, text in documents(rows).items():
        path.write_text(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sets", nargs="+", default=SETS, metavar="TORCH/TRANSFORMERS/PYTHON", help=f"default: {' '.join(SETS)}"
    )
    parser.add_argument(
        "--interpreters", nargs="+", default=[], metavar="PYTHON3.X", help="programs that are not in the PATH"
    )
    parser.add_argument(
        "--wheel", type=Path, help="install this wheel (default: one of this source tree without the CUDA library)"
    )
    parser.add_argument(
        "--scratch", type=Path, help="where environments are made (default: the system's temporary folder)"
    )
    parser.add_argument(
        "--check", action="store_true", help="run nothing; exit status 1 where documents and record disagree"
    )
    parser.add_argument("tests", nargs="*", help="arguments of pytest (default: all tests)")
    options = parser.parse_args(arguments)
    rows = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
    if options.check:
        return int(any(path.read_text() != text for path, text in documents(rows).items()))
    try:
        programs = {}
        for versions in options.sets:
            _torch, _transformers, python = versions.split("/")
            programs[versions] = interpreter(python, options.interpreters)
    except ValueError as error:
        parser.error(f"--sets {' '.join(options.sets)}: {error}")
    failed = False
    for versions, program in programs.items():
        row = result(program, versions, options.wheel and options.wheel.resolve(), options.tests, options.scratch)
        whole = row["selection"] == "all"
        rows = [old for old in rows if old["set"] != versions or not (whole or old["selection"] == row["selection"])]
        rows = sorted([*rows, row], key=lambda row: (row["selection"], row["set"]))
        write(rows)
        print(f"{versions}: torch {row['torch']}, {row['passed']} passed, {len(row['failed'])} failed", flush=True)
        failed |= bool(row["failed"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
