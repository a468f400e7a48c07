"""Python processes that tests start, and files that they load which are not installed."""

import importlib.util
import os
import pathlib
import subprocess
import sys
from types import ModuleType

import pytest

import flashmhf

ROOT = pathlib.Path(__file__).resolve().parents[1]


def script(path: str) -> ModuleType:
    """Return the module of a file of the source tree; the test is skipped where the sources are not."""
    if not (ROOT / path).exists():
        pytest.skip("the sources are not here")
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(*arguments: object, cwd: object = None, timeout: float = 250, **environment: str) -> str:
    """Return what this Python prints with ``arguments`` and with flashmhf in its path. Its failure is the test's."""
    sources = pathlib.Path(flashmhf.__file__).resolve().parents[1]
    path = os.pathsep.join([str(sources), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path} | environment,
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout
