"""Types of the public names: complete, and good enough for pyright's strict mode."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashmhf

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(flashmhf.__file__).resolve().parent
CONSUMER = TESTS / "typed_consumer.py"


@pytest.fixture(scope="module")
def pyright() -> str:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("basedpyright", path=places) or shutil.which("pyright", path=places)
    if found is None:
        pytest.skip("pyright is not installed: pip install basedpyright")
    return found


def report(pyright: str, arguments: list[str], cwd: Path) -> dict:
    """What pyright prints as JSON, with this interpreter's packages in view."""
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environment = os.environ | {"PATH": paths, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [pyright, *arguments, "--outputjson"], capture_output=True, text=True, timeout=240, cwd=cwd, env=environment
    )
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_consumer_uses_every_public_name_and_runs():
    text = CONSUMER.read_text()
    assert [
        name for name in flashmhf.__all__ if not re.search(rf"\b{name}\b", text.partition("\n\nx: Tensor")[2])
    ] == []
    runpy.run_path(str(CONSUMER))


@pytest.mark.parametrize(
    ("source", "errors"),
    [
        (CONSUMER.read_text(), 0),
        ("from flashmhf import FlashMHF\nffn = FlashMHF(128, 2, '3', device=1.5)\nname: str = ffn.k\n", 3),
    ],
    ids=["right", "wrong"],
)
def test_strict_mode_accepts_a_consumer_and_refuses_wrong_use(pyright, tmp_path, source, errors):
    (tmp_path / "consumer.py").write_text(source)
    settings = {"typeCheckingMode": "strict", "include": ["consumer.py"], "extraPaths": [str(PACKAGE.parent)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    found = report(pyright, ["--project", str(tmp_path)], tmp_path)["generalDiagnostics"]
    assert len(found) == errors, [entry["message"] for entry in found]
