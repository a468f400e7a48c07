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
PUBLIC_MODULES = ("nn", "reference", "router")  # every name of these is public; ops and backends have public and internal names
PUBLIC_NAMES = ("ops.flash_mhf", "backends.info", "backends.Info")


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
    done = subprocess.run([pyright, *arguments, "--outputjson"], capture_output=True, text=True, timeout=240, cwd=cwd, env=environment)
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_consumer_uses_every_public_name_and_runs():
    text = CONSUMER.read_text()
    assert [name for name in flashmhf.__all__ if not re.search(rf"\b{name}\b", text.partition("\n\nx: Tensor")[2])] == []
    runpy.run_path(str(CONSUMER))


def strict_errors(pyright: str, source: str, folder: Path) -> list[str]:
    (folder / "consumer.py").write_text(source)
    settings = {"typeCheckingMode": "strict", "include": ["consumer.py"], "extraPaths": [str(PACKAGE.parent)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    return [entry["message"] for entry in report(pyright, ["--project", str(folder)], folder)["generalDiagnostics"]]


def test_strict_mode_accepts_a_consumer(pyright, tmp_path):
    assert strict_errors(pyright, CONSUMER.read_text(), tmp_path) == []


def test_strict_mode_refuses_wrong_use(pyright, tmp_path):
    wrong = "from flashmhf import FlashMHF\nffn = FlashMHF(128, 2, '3', device=1.5)\nname: str = ffn.k\n"
    assert len(strict_errors(pyright, wrong, tmp_path)) == 3


def test_public_names_have_complete_types(pyright, tmp_path):
    symbols = report(pyright, ["--verifytypes", "flashmhf", "--ignoreexternal"], tmp_path)["typeCompleteness"]["symbols"]
    public = re.compile(rf"flashmhf\.(({'|'.join(PUBLIC_MODULES)})\.|({'|'.join(PUBLIC_NAMES)})(\.|$))")
    chosen = [symbol for symbol in symbols if symbol["isExported"] and public.match(symbol["name"])]
    assert any(symbol["name"] == "flashmhf.nn.flashmhf.FlashMHF.__init__" for symbol in chosen)
    # The type of a value that a constructor call gives is the same for every checker; torch's own gaps are not ours.
    allowed = ("could be inferred differently", "base class", "metaclass", "docstring", 'Return type is "FlashMHF"')
    gaps = {
        f"{symbol['name']}: {entry['message']}"
        for symbol in chosen
        for entry in symbol["diagnostics"]
        if not any(text in entry["message"] for text in allowed)
    }
    assert gaps == set()
