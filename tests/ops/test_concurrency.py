"""Two streams, or two CUDA graphs, at once: nothing survives a launch, so each gets what it gets alone."""

import itertools

import pytest
import torch
from targets import RESULTS, call

from flashmhf.graphs import capturing
from flashmhf.testing import assert_accurate, problem

pytestmark = pytest.mark.gpu

ROUNDS, BACKWARDS = 20, ("backward", "gated_backward")


def calls(p, backend) -> dict[str, tuple[torch.Tensor, ...]]:
    """Both directions of both operators; those that promise it bitwise repeatable."""
    deterministic = {f"deterministic {name}": call(name, p, backend=backend, deterministic=True) for name in BACKWARDS}
    return {name: call(name, p, backend=backend) for name in RESULTS} | deterministic


def check_accurate(name, results, p) -> None:
    for actual, baseline, exact in zip(results, *p.references[name], strict=True):
        assert_accurate(name, actual, baseline, exact, fixed_limits=True)


def check(problems, alone, results) -> None:
    """Each problem's ``results``, of several rounds, against those of its calls alone."""
    for p, right, mine in zip(problems, alone, results, strict=True):
        for at_once, (name, expected) in itertools.product(mine, right.items()):
            if name in BACKWARDS:  # fp32 sums in any order
                check_accurate(name, at_once[name], p)
            else:
                for a, b in zip(at_once[name], expected, strict=True):
                    assert torch.equal(a, b), name


@pytest.fixture(params=[(64, 4, 128, 5, 144), (1536, 4, 128, 5, 144), (2500, 40, 128, 2, 192)], ids=str)
def problems(request):
    """Two: of so few tokens that forward and backward split their work over the whole device; and where deterministic sums take turns."""
    both = [problem(*request.param, torch.bfloat16, "cuda", seed=seed) for seed in range(2)]
    for p in both:
        p.references = {name: getattr(p, name)() for name in BACKWARDS}
    return both


@pytest.fixture
def alone(problems, gpu_backend):
    """The right results of each problem's calls."""
    results = [calls(p, gpu_backend) for p in problems]
    for p, mine in zip(problems, results, strict=True):
        for name in BACKWARDS:
            check_accurate(name, mine[f"deterministic {name}"], p)
    return results


def test_two_streams(problems, alone, gpu_backend):
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # while the host queues launches
    for _ in range(ROUNDS):
        for p, stream, mine in zip(problems, streams, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(calls(p, gpu_backend))
    torch.cuda.synchronize()
    check(problems, alone, results)


def test_two_graphs(problems, alone, gpu_backend):
    graphs, results = [torch.cuda.CUDAGraph() for _ in problems], [[], []]
    for p, graph, mine in zip(problems, graphs, results, strict=True):
        with capturing(graph):
            mine.extend(calls(p, gpu_backend) for _ in range(3))
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(ROUNDS):
        for x in itertools.chain.from_iterable(tensors for mine in results for at_once in mine for tensors in at_once.values()):
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        check(problems, alone, results)
