"""Timing at sustained clocks: windows of back-to-back passes, subjects interleaved, percentiles; and peak memory.

A pass calls one layer for each of several weight sets and inputs, together several times the L2 cache, so that what a call reads
is as cold as in a model. Windows follow one another without a pause, so the GPU stays busy. Under a power limit the clocks of a
window's first tenth of a second are those that the subject before has left: they are not counted. Every round visits all subjects and
begins with another one, so that ratios hold while the clocks drift.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

Pass = Callable[[], None]
COLD = 4  # what one pass touches, in units of the L2 cache
AGREEMENT = 0.01  # two warm-up windows that differ by less are at sustained clocks


def percentiles(samples: list[float]) -> dict[str, float]:
    """20/50/80 percentiles, linear between the sorted samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)

    def at(fraction: float) -> float:
        position = fraction * (len(ordered) - 1)
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (position - below) * (ordered[above] - ordered[below])

    return {"p20": at(0.2), "p50": at(0.5), "p80": at(0.8)}


def cold_copies(bytes_each: int, l2_bytes: int, at_most: int = 24) -> int:
    """How many copies of something are together COLD times the L2 cache; at least 2."""
    return max(2, min(at_most, -(-COLD * l2_bytes // max(bytes_each, 1))))


class HostTimer:
    """Wall-clock seconds of each pass, for devices whose calls are synchronous."""

    def window(self, run: Pass, passes: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(passes):
            run()
            marks.append(time.perf_counter())
        return [after - before for before, after in zip(marks, marks[1:], strict=False)]


class CudaTimer:
    """Seconds of each pass between CUDA events; the host waits once, at the end of the window."""

    def window(self, run: Pass, passes: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(passes + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in zip(events, events[1:], strict=False)]


def timer_for(device: torch.device) -> HostTimer | CudaTimer:
    return CudaTimer() if device.type == "cuda" else HostTimer()


def passes_for(run: Pass, timer, window_seconds: float) -> int:
    """How many passes fill a window; two passes are run, the second one is timed."""
    return max(1, round(window_seconds / max(timer.window(run, 2)[-1], 1e-7)))


def warm_up(run: Pass, timer, seconds: float) -> float:
    """Runs for at least ``seconds`` and until two windows agree (at most three times as long); the seconds it took."""
    passes = passes_for(run, timer, seconds / 8)
    start, before = time.perf_counter(), None
    while (elapsed := time.perf_counter() - start) < 3 * seconds:
        now = percentiles(timer.window(run, passes))["p50"]
        if elapsed >= seconds and before is not None and abs(now - before) <= AGREEMENT * before:
            break
        before = now
    return time.perf_counter() - start


def interleave(runs: Mapping[str, Pass], timer, rounds: int, window_seconds: float, settle_seconds: float = 0.0) -> dict[str, list[float]]:
    """Seconds of every pass of every subject: of ``window_seconds`` in every round, behind ``settle_seconds`` that are not counted."""
    passes = {name: passes_for(run, timer, window_seconds) for name, run in runs.items()}
    uncounted = {name: passes_for(run, timer, settle_seconds) if settle_seconds else 0 for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(rounds):
        for name in order:
            samples[name] += timer.window(runs[name], uncounted[name] + passes[name])[uncounted[name] :]
        order.append(order.pop(0))
    return samples


def graphed(run: Pass) -> Pass:
    """``run`` captured into a CUDA graph; calling the result replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(captured: Pass = run) -> None:  # what the graph reads lives as long as ``captured``
        graph.replay()

    return replay


def peak_memory(run: Pass, device: torch.device) -> int | None:
    """Bytes that one warm ``run`` needs at its peak beyond what is allocated before it; None where PyTorch does not count."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
