"""Capture into CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture as torch.cuda.graph(graph) does, without the cyclic garbage collector.

    The collector may run at any allocation of a Python object. An older graph that it frees during a capture is reset,
    which CUDA forbids
    then: the capture fails with "operation failed due to a previous error during capture".
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        if enabled:
            gc.enable()
