"""Python processes that tests start."""

import os
import pathlib
import subprocess
import sys

import flashmhf


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
