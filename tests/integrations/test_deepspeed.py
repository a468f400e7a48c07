"""Losses, checkpoints and refusals under DeepSpeed's ZeRO, in two processes."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_python

REASON = "deepspeed is not installed, also in CI: it has no wheels"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason=REASON)
def test_models_train_as_in_one_process_or_are_refused(tmp_path):
    """AdamW; Muon needs whole matrices."""
    pytest.importorskip("transformers")
    run_python(Path(__file__).with_name("deepspeed_runs.py"), tmp_path, OMP_NUM_THREADS="1")
