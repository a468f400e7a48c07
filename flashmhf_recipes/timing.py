"""Time and peak memory of a call, as the first command and the benchmarks measure them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

Pass = Callable[[], object]


class Timer:
    """Seconds of each pass: between CUDA events, for which the host waits once, or by the clock where calls wait."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"

    def window(self, run: Pass, passes: int) -> list[float]:
        if not self.on_gpu:
            marks = [time.perf_counter()]
            for _ in range(passes):
                run()
                marks.append(time.perf_counter())
            return [after - before for before, after in pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(passes + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def peak_memory(run: Pass, device: torch.device) -> int | None:
    """Bytes that a second ``run`` needs at its peak beyond those before it; None where none is kept."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_tensor_bytes(run: Pass) -> int:
    """Bytes of CPU tensors that a second ``run`` holds at its peak, added up from the profiler's allocations and frees.
    Exact, but the profiler starts slowly and prints to stderr.
    """
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    allocated = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak
