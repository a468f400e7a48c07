"""The text and the uninterrupted run that the tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    from lm_runs import write_text

    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def uninterrupted(text, tmp_path_factory):
    """(result, batches) of a run from start to end, on one thread as the runs that are compared with it."""
    from lm_runs import HELD_OUT, Batches, options

    from flashmhf_recipes import training

    batches, threads = Batches(), torch.get_num_threads()
    torch.set_num_threads(1)
    result = training.start(options(tmp_path_factory.mktemp("run") / "run", text, **HELD_OUT), bar=False, callbacks=[batches])
    torch.set_num_threads(threads)
    return result, batches.seen
