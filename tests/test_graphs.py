"""Captures into CUDA graphs."""

import gc
from contextlib import contextmanager

import pytest
import torch

from flashmhf.graphs import capturing


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(monkeypatch, enabled):
    seen = []

    @contextmanager
    def graph(_):
        seen.append(gc.isenabled())
        yield
        seen.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "graph", graph)
    if not enabled:
        gc.disable()
    try:
        with capturing(None):
            pass
        assert gc.isenabled() is enabled
        with pytest.raises(ValueError, match="in the capture"), capturing(None):
            raise ValueError("in the capture")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False, False, False]
