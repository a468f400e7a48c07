"""Operators and modules in streams, graphs and threads at once, first in a thread or process, and while another device
is current. Nothing survives a launch, so each call gets what it gets alone. A fresh thread has no CUDA context until
something makes one current, and memory that PyTorch has cached is handed out without any call of CUDA: the tests cache
the memory of their results before a thread begins."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from processes import run_python
from targets import RESULTS, assert_near, call

import flashmhf
from flashmhf.testing import assert_accurate, capturing, problem

THREADS, ROUNDS, BACKWARDS = 8, 20, ("backward", "gated_backward")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


def module_step(make: Callable[..., torch.nn.Module], backend: str, device: str, seed: int = 0) -> Callable[[], tuple]:
    torch.manual_seed(seed)
    module = make(backend=backend, device=device, dtype=torch.bfloat16, deterministic=True)
    x = torch.randn(300, 256, device=device, dtype=torch.bfloat16)

    def step() -> tuple:
        with torch.no_grad():  # few tokens, which on hopper go through the projection kernel
            few = module(x[:5])
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        return (out.detach(), few, *torch.autograd.grad(out, [leaf, *module.parameters()], torch.ones_like(out)))

    return step


def operator(name: str, backend: str, device: str, seed: int = 0) -> Callable[[], tuple]:
    p = problem(300, 2, 128, 3, 64, torch.bfloat16, device, seed=seed)
    return partial(call, name, p, backend=backend, deterministic=True)


STEPS = {
    **{name: partial(operator, name) for name in RESULTS},
    "FlashMHF": partial(module_step, partial(flashmhf.FlashMHF, 256, 2, 3, 64)),
    "MHFFN": partial(module_step, partial(flashmhf.MHFFN, 256, 2, 64)),
}


def expected_of(step: Callable[[], tuple]) -> tuple[torch.Tensor, ...]:
    """The step's results on the CPU, once they are there; their memory on the GPU is PyTorch's again, cached."""
    expected = tuple(x.cpu() for x in step())
    torch.cuda.synchronize()
    return expected


def check(name: str, results: tuple, expected: tuple) -> None:
    """Operators are exact; a module's products are cuBLAS's, which may choose another algorithm in another thread."""
    assert_near(tuple(x.cpu() for x in results), expected, 0 if name in RESULTS else 2e-2)


@pytest.mark.parametrize(
    ("device", "current"), [(0, 0), *(pytest.param(*devices, marks=two_gpus) for devices in ((0, 1), (1, 0)))]
)
@pytest.mark.parametrize("name", STEPS)
def test_first_thing_in_a_fresh_thread_and_while_another_device_is_current(name, gpu_backend, device, current):
    with torch.cuda.device(device):
        step = STEPS[name](gpu_backend, f"cuda:{device}")
        expected = expected_of(step)

    def elsewhere() -> tuple:
        torch.cuda.set_device(current)
        results = step()
        assert torch.cuda.current_device() == current
        assert all(x.device.index == device for x in results)
        return results

    for first in (step, step, elsewhere):
        with ThreadPoolExecutor(1) as pool:  # a fresh thread, whose device is cuda:0
            check(name, pool.submit(first).result(), expected)
    with torch.cuda.device(current):
        check(name, elsewhere(), expected)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=two_gpus)])
@pytest.mark.parametrize("name", ["forward", "backward", "gated_backward", "FlashMHF"])
def test_eight_threads_with_a_stream_each(name, devices, gpu_backend):
    """Ten times each, all beginning together."""
    steps = [STEPS[name](gpu_backend, f"cuda:{seed % devices}", seed) for seed in range(THREADS)]
    expected = [expected_of(step) for step in steps]
    streams, barrier = [torch.cuda.Stream(seed % devices) for seed in range(THREADS)], threading.Barrier(THREADS)

    def on_a_stream(step: Callable[[], tuple], stream: torch.cuda.Stream, right: tuple) -> None:
        barrier.wait()
        for _ in range(10):
            with torch.cuda.stream(stream):
                results = step()
            stream.synchronize()
            check(name, results, right)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(on_a_stream, steps, streams, expected))


# Two streams, or two CUDA graphs, at once
def calls(p, backend) -> dict[str, tuple[torch.Tensor, ...]]:
    """Both directions of both operators; those that promise it bitwise repeatable."""
    deterministic = {f"deterministic {name}": call(name, p, backend=backend, deterministic=True) for name in BACKWARDS}
    return {name: call(name, p, backend=backend) for name in RESULTS} | deterministic


def check_accurate(name, results, references) -> None:
    for actual, baseline, exact in zip(results, *references[name], strict=True):
        assert_accurate(name, actual, baseline, exact, fixed_limits=True)


@pytest.fixture(params=[(64, 4, 128, 5, 144), (1536, 4, 128, 5, 144), (2500, 40, 128, 2, 192)], ids=str)
def pair(request, gpu_backend):
    """Two problems, each with its references and the right results of its calls alone: of so few tokens that forward
    and backward split their work over the whole device; and where deterministic sums take turns."""
    found = []
    for seed in range(2):
        p = problem(*request.param, torch.bfloat16, "cuda", seed=seed)
        references, alone = {name: getattr(p, name)() for name in BACKWARDS}, calls(p, gpu_backend)
        for name in BACKWARDS:
            check_accurate(name, alone[f"deterministic {name}"], references)
        found.append((p, references, alone))
    torch.cuda.synchronize()
    return found


def check_rounds(pair, results) -> None:
    """Each problem's ``results``, of several rounds, against those of its calls alone."""
    for (_, references, alone), rounds in zip(pair, results, strict=True):
        for at_once, (name, expected) in itertools.product(rounds, alone.items()):
            if name in BACKWARDS:  # fp32 sums in any order
                check_accurate(name, at_once[name], references)
            else:
                assert all(map(torch.equal, at_once[name], expected)), name


def test_two_streams(pair, gpu_backend):
    streams, results = [torch.cuda.Stream() for _ in pair], [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # while the host queues launches
    for _ in range(ROUNDS):
        for (p, *_), stream, mine in zip(pair, streams, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(calls(p, gpu_backend))
    torch.cuda.synchronize()
    check_rounds(pair, results)


def test_two_graphs(pair, gpu_backend):
    """A capture fails on a launch to another stream than the current one, and where the host waits for the device."""
    graphs, results = [torch.cuda.CUDAGraph() for _ in pair], [[], []]
    for (p, *_), graph, mine in zip(pair, graphs, results, strict=True):
        with capturing(graph):
            mine.extend(calls(p, gpu_backend) for _ in range(3))
    streams = [torch.cuda.Stream() for _ in pair]
    for _ in range(ROUNDS):
        for at_once in itertools.chain(*results):
            for x in itertools.chain(*at_once.values()):
                x.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        check_rounds(pair, results)


# In processes of their own: what comes first there
EIGHT_AT_FIRST = """
import sys, threading, torch
from concurrent.futures import ThreadPoolExecutor
import flashmhf.testing
backend, device = sys.argv[1:]
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
sizes = (40, 2, 64, 2, 32) if device == "cuda" else (16, 1, 16, 1, 16)
problems = [flashmhf.testing.problem(*sizes, dtype, device, seed=seed) for seed in range(8)]
barrier = threading.Barrier(8)

def run(p):
    barrier.wait()
    q = p.q.clone().requires_grad_()
    out = flashmhf.flash_mhf(q, p.k, p.u, p.v, p.r, backend=backend, deterministic=True)
    return out.detach(), *torch.autograd.grad(out, q, p.grad_out)

with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(run, problems))
for p, actual in zip(problems, results):
    out = torch.ops.flashmhf.forward(*p.operands, p.r, backend=backend, deterministic=True)
    dq = torch.ops.flashmhf.backward(p.grad_out, *p.operands, p.r, True, backend=backend)[0]
    assert torch.equal(actual[0], out) and torch.equal(actual[1], dq), "a thread's results are not those of one thread"
"""


@pytest.mark.slow
def test_eight_threads_are_the_first_to_use_the_back_end(gpu_backend):
    run_python("-c", EIGHT_AT_FIRST, gpu_backend, "cuda")


def test_eight_threads_under_tritons_interpreter():
    pytest.importorskip("triton")
    run_python("-c", EIGHT_AT_FIRST, "triton", "cpu", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


FORK = """
import multiprocessing, sys, torch
torch.set_num_threads(1)  # a thread pool of OpenMP does not survive a fork
import flashmhf
from flashmhf.backends import hopper
backend = sys.argv[1]
module = flashmhf.FlashMHF(256, 2, 3, 64)
module(torch.randn(5, 256))
hopper.library()
assert not torch.cuda.is_initialized(), "importing flashmhf or using it on the CPU has initialised CUDA"

def use_cuda():
    ours = flashmhf.FlashMHF(256, 2, 3, 64, backend=backend, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ours(x).float().sum().backward()
    torch.cuda.synchronize()
    assert torch.isfinite(x.grad).all()

child = multiprocessing.get_context("fork").Process(target=use_cuda)
child.start()
child.join()
assert child.exitcode == 0, "the child's step failed"
use_cuda()
"""


@pytest.mark.slow
def test_a_process_that_was_forked_before_cuda_was_used(gpu_backend):
    run_python("-c", FORK, gpu_backend)


NO_CUDA_CALLS = """
import torch

def refuse(*args, **kwargs):
    raise AssertionError("CUDA was asked for")

for name in "_lazy_init is_available device_count current_device get_device_properties get_device_capability".split():
    setattr(torch.cuda, name, refuse)
import flashmhf
module = flashmhf.FlashMHF(64, 2, 3, 16)
x = torch.randn(5, 64, requires_grad=True)
module(x).sum().backward()
with torch.no_grad():
    module(x)
flashmhf.backends.hopper.library()
"""


def test_import_and_use_on_a_cpu_do_not_touch_cuda():
    """A process that forks workers must not have initialised CUDA before."""
    run_python("-c", NO_CUDA_CALLS)
