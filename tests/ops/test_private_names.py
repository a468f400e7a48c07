"""A private name that PyTorch has renamed costs a feature at most, and a warning names it."""

import os
import pathlib
import subprocess
import sys

import pytest

import flashmhf
from flashmhf import torch_private


def test_each_name_may_be_gone():
    script = pathlib.Path(__file__).with_name("private_names.py")
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(flashmhf.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 15


def test_a_registration_that_fails_warns_once_and_names_the_feature():
    torch_private.warn_lost.cache_clear()
    with pytest.warns(UserWarning, match="flashmhf does without counting sheep on torch .*: .*no_such_name") as seen:
        for _ in range(2):
            torch_private.register("counting sheep", lambda: torch_private.no_such_name)
    assert len(seen) == 1
