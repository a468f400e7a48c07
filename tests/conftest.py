import datetime
import gc
import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest

# Before OpenMP starts: threads that spin at barriers make every small CPU product wait for the scheduler on a busy
# machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before huggingface_hub is imported, which reads it once: without a network every name that is no file waits 48 s for
# the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A background job of a shell ignores SIGINT, and so would the runs that tests interrupt with it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The benchmarks are not installed. Last, so that an installed flashmhf comes before the sources.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

# Each process of pytest-xdist begins with another GPU, before CUDA starts: cuda:0 of all of them is every GPU in turn.
if worker := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"):
    gpus = [*filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))]
    if gpus := gpus or [str(index) for index in range(torch.cuda.device_count())]:
        first = int(worker) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])

from targets import TARGETS, Target  # noqa: E402

import flashmhf  # noqa: E402
from benchmarks.harness import environment  # noqa: E402
from flashmhf import backends  # noqa: E402


def pytest_addoption(parser):
    parser.addoption(
        "--record", metavar="FILE", help="write the suite's result with device, versions and date to FILE (JSON)"
    )


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    # a worker that outlives pytest-xdist knows only its own tests
    if not config.getoption("--record") or hasattr(config, "workerinput"):
        return
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    skipped = sorted({report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())})
    record = {
        "command": environment.command(), "commit": environment.commit(), "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"flashmhf": flashmhf.__version__, "torch": torch.__version__, "cuda": torch.version.cuda},
        "selection": config.getoption("-m") or "all", "exit_status": int(exitstatus), **counts, "skip_reasons": skipped,
        "failures": [report.nodeid for name in ("failed", "error") for report in terminalreporter.stats.get(name, ())],
    }  # fmt: skip
    pathlib.Path(config.getoption("--record")).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config):
    # pytest-xdist takes the files in the order below, not by their number of tests
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    # a long file that begins last keeps one process waiting for the other
    items.sort(key=lambda item: item.path not in slow)
    reason = None if torch.cuda.is_available() else "no CUDA device"
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """What the imports made stays: walking through it in each collection was a quarter of the training runs' time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # else nanobind, in Triton, reports all of its objects as leaked at exit


def skip_unless_usable(backend: str, reason: str | None) -> None:
    if reason:
        pytest.skip(f"{backend} is not usable here: {reason}")


@pytest.fixture(params=TARGETS)
def target(request) -> Target:
    chosen, sizes = request.param, {"d_h": 64, "d_e": 64}
    why_not = backends.BACKENDS[chosen.backend].why_not
    skip_unless_usable(chosen.backend, why_not(torch.device(chosen.device), torch.float16, **sizes))
    return chosen


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "hopper")])
def gpu_backend(request) -> str:
    """Each fused GPU back end that is usable here."""
    skip_unless_usable(request.param, flashmhf.info().reasons[request.param])
    return request.param


@pytest.fixture(params=[pytest.param("hopper", marks=pytest.mark.gpu)])
def needs_hopper(request) -> None:
    skip_unless_usable(request.param, flashmhf.info().reasons[request.param])


@pytest.fixture
def mesh(tmp_path) -> Iterator[object]:
    """A device mesh of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """A module's tests on one thread: with models so small, several mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo() -> None:
    """Nothing is compiled yet: neither graphs nor sizes of earlier tests count."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process():
    """TrainingArguments(torch_compile=True) sets TF32 for the process: the next test's float32 would have ten bits."""
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()  # other processes' tests want it
