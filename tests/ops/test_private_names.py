"""A private name that PyTorch has renamed costs a feature at most, and a warning names it."""

import pathlib

import pytest
from processes import run_python

from flashmhf import torch_private


def test_each_name_may_be_gone():
    script = pathlib.Path(__file__).with_name("private_names.py")
    assert int(run_python(script, OMP_NUM_THREADS="1").split()[0]) > 15


def test_a_registration_that_fails_warns_once_and_names_the_feature():
    torch_private.warn_lost.cache_clear()
    with pytest.warns(UserWarning, match="flashmhf does without counting sheep on torch .*: .*no_such_name") as seen:
        for _ in range(2):
            torch_private.register("counting sheep", lambda: torch_private.no_such_name)
    assert len(seen) == 1
