"""Timing at sustained clocks: windows of back-to-back passes, subjects interleaved, percentiles; and peak memory.

A pass calls one layer for each of several weight sets and inputs. Together they are several times the L2 cache, so each
call reads its weights from DRAM, as in a model. Windows follow one another without a pause, so the GPU stays busy.
Under a power limit, the subject before determines the clocks of a window's first 0.1 s, so the passes of that time do
not count. Every round visits all subjects and begins with another one, so ratios hold while the clocks drift.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from flashmhf.testing import capturing
from flashmhf_recipes.timing import Pass, Timer, peak_memory, peak_tensor_bytes  # noqa: F401 - what suites use

COLD = 4  # bytes that one pass reads, in units of the L2 cache
AGREEMENT = 0.01  # relative difference of two warm-up windows below which the clocks count as sustained


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
    """Number of copies of ``bytes_each`` that together are COLD times the L2 cache, from 2 to ``at_most``."""
    return max(2, min(at_most, -(-COLD * l2_bytes // max(bytes_each, 1))))


def passes_for(run: Pass, timer, window_seconds: float) -> int:
    """Number of passes that fill a window, from the time of the second of two passes."""
    return max(1, round(window_seconds / max(timer.window(run, 2)[-1], 1e-7)))


def repeated(run: Pass, timer, at_least_seconds: float) -> tuple[Pass, int]:
    """A pass of so many calls that it takes ``at_least_seconds``: recording an event takes microseconds."""
    calls = math.ceil(at_least_seconds / max(timer.window(run, 2)[-1], 1e-7))

    def several() -> None:
        for _ in range(calls):
            run()

    return (several, calls) if calls > 1 else (run, 1)


def warm_up(run: Pass, timer, seconds: float) -> float:
    """Runs at least ``seconds``, then until two windows agree, at most ``3 * seconds``. Returns the seconds."""
    passes = passes_for(run, timer, seconds / 8)
    start, before = time.perf_counter(), None
    while (elapsed := time.perf_counter() - start) < 3 * seconds:
        now = percentiles(timer.window(run, passes))["p50"]
        if elapsed >= seconds and before is not None and abs(now - before) <= AGREEMENT * before:
            break
        before = now
    return time.perf_counter() - start


def interleave(
    runs: Mapping[str, Pass], timer, rounds: int, window_seconds: float, settle_seconds: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of every pass of every subject. In every round a subject runs ``settle_seconds`` that do not count, then
    ``window_seconds`` that do.
    """
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
    with capturing(graph):
        run()

    def replay(captured: Pass = run) -> None:  # ``captured`` keeps the tensors alive that the graph reads
        graph.replay()

    return replay


class KernelTimes(NamedTuple):
    """Nanoseconds in which kernels run, collectives do, and others do: at once counts once."""

    all: int
    collectives: int
    others: int


def kernels(run: Pass) -> KernelTimes:
    """The GPU's time for one ``run``, however long the host takes for it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events, cuda = profile.profiler.kineto_results.events(), torch.autograd.DeviceType.CUDA
    spans = {True: [], False: []}
    for event in (event for event in events if event.device_type() == cuda):
        spans["nccl" in event.name().lower()].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return KernelTimes(*map(covered, (spans[True] + spans[False], spans[True], spans[False])))


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    total, end = 0, -(1 << 62)
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
