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
# Every name of nn and reference is public; the others have public and internal names.
PUBLIC = ("nn", "reference", "ops.mix.flash_mhf", "ops.gate.gate", "backends.info", "backends.Info", "swap.replace_ffn")


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


def test_public_names_have_complete_types(pyright, tmp_path):
    symbols = report(pyright, ["--verifytypes", "flashmhf", "--ignoreexternal"], tmp_path)["typeCompleteness"][
        "symbols"
    ]
    public = re.compile(rf"flashmhf\.({'|'.join(map(re.escape, PUBLIC))})(\.|$)")
    chosen = [symbol for symbol in symbols if symbol["isExported"] and public.match(symbol["name"])]
    assert {public.match(symbol["name"])[1] for symbol in chosen} == set(PUBLIC)
    # The type of a value that a constructor call gives is the same for every checker; torch's own gaps are not ours.
    allowed = ("could be inferred differently", "base class", "metaclass", "docstring", 'Return type is "FlashMHF"')
    gaps = {
        f"{symbol['name']}: {entry['message']}"
        for symbol in chosen
        for entry in symbol["diagnostics"]
        if not any(text in entry["message"] for text in allowed)
    }
    assert gaps == set()
