"""The text and the uninterrupted run that the tests of training share."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Sentences with a pattern to learn."""
    words = "the head mixes what each sub network finds and the gate weighs it for every token".split()
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{' '.join(words[i % 5 : i % 5 + 9])} {i % 10}.\n" for i in range(3000)))
    return path


@pytest.fixture(scope="session")
def uninterrupted(text, tmp_path_factory):
    """(result, batches) of a run from start to end, on one thread as the runs that are compared with it."""
    from lm_runs import HELD_OUT, noting, start

    batches, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    result = start(tmp_path_factory.mktemp("run") / "run", text, callbacks=[noting(batches)], **HELD_OUT)
    torch.set_num_threads(threads)
    return result, batches
