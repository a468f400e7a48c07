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


@pytest.mark.gpu
def test_an_older_graph_in_a_cycle_does_not_end_a_capture():
    x = torch.zeros(8, device="cuda")
    x.add_(1)
    cycle = {"graph": torch.cuda.CUDAGraph()}
    with capturing(cycle["graph"]):
        x.add_(1)
    cycle["self"] = cycle
    thresholds = gc.get_threshold()
    with capturing(newer := torch.cuda.CUDAGraph()):
        del cycle
        gc.set_threshold(1)
        objects = [[] for _ in range(1000)]
        x.add_(1)
    gc.set_threshold(*thresholds)
    assert len(objects) == 1000
    x.zero_()
    newer.replay()
    assert torch.equal(x, torch.ones_like(x))
