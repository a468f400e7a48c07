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

PACKAGES = str(Path(flashmhf.__file__).resolve().parents[1])
CONSUMER = Path(__file__).with_name("typed_consumer.py")


def test_the_consumer_uses_every_public_name_and_runs():
    text = CONSUMER.read_text()
    assert [
        name for name in flashmhf.__all__ if not re.search(rf"\b{name}\b", text.partition("\n\nx: Tensor")[2])
    ] == []
    runpy.run_path(str(CONSUMER))


@pytest.mark.parametrize(("source", "errors"), [
    (CONSUMER.read_text(), 0),
    ("from flashmhf import FlashMHF\nffn = FlashMHF(128, 2, '3', device=1.5)\nname: str = ffn.k\n", 3),
], ids=["right", "wrong"])  # fmt: skip
def test_strict_mode_accepts_a_consumer_and_refuses_wrong_use(tmp_path, source, errors):
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    pyright = shutil.which("basedpyright", path=paths) or shutil.which("pyright", path=paths)
    if pyright is None:
        pytest.skip("pyright is not installed: pip install basedpyright")
    (tmp_path / "consumer.py").write_text(source)
    settings = {"typeCheckingMode": "strict", "include": ["consumer.py"], "extraPaths": [PACKAGES]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    environment = os.environ | {"PATH": paths, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": PACKAGES}
    command = [pyright, "--project", str(tmp_path), "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment)
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert len(found) == errors, [entry["message"] for entry in found]
