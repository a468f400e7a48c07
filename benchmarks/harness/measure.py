"""Measures cells one after the other until the time budget is used up.

A cell is one problem; its subjects are prepared one by one (check, memory) and then timed together, interleaved. A
subject that is wrong, is missing, fails or finds no time left is a row with a status and a reason, and without a
number.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from . import environment, proxy, timing

YARDSTICK = 8192  # the square matrix product that rates are compared with
COPY_BYTES = 1 << 30
PRODUCT = "8192³ product"
# relative L2 error of a whole layer's output against float64; gradients twice that (they pass through more roundings)
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}


class RedCheckError(Exception):
    """The subject's result is wrong, so its time is not recorded."""


class MissingError(Exception):
    """The subject cannot run here; the message says why."""


@dataclass
class Context:
    """Device and duration of a run's measurements. ``deadline``: in seconds of time.monotonic."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 5
    window_seconds: float = 0.04
    settle_seconds: float = 0.1  # before each window; does not count
    warm_up_seconds: float = 1.0  # before the yardstick
    cell_warm_up_seconds: float = 0.3  # before each cell's first round; the GPU is idle while subjects are prepared
    deadline: float = float("inf")
    log: Callable[[str], None] = print
    timer: object = field(init=False)

    def __post_init__(self):
        self.timer = timing.Timer(self.device)

    @property
    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).L2_cache_size if self.device.type == "cuda" else 1 << 20


@dataclass
class Prepared:
    """A subject that passed its check. run: one pass, of ``calls`` calls. row: the subject's figures so far. ``flops``
    and ``bytes`` of the row, of one call, become rates.
    """

    run: timing.Pass
    calls: int = 1
    row: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """Subjects that are timed together.

    row: the fields that say which problem this is, the same in all rows.
    subjects: by name, a function of the context and the inputs that checks and prepares one; it may raise RedCheckError
    or MissingError.
    inputs: what the subjects share, made when the cell is measured and freed after it; it may raise MissingError.
    product: also time a bf16 matrix product in the same rounds; rows get ``x_product``, their rate over its rate.
    faster_than: name -> (subject, factor); rows get ``x_name``, factor times that subject's time over their own:
    the median of the rounds' ratios.
    window_scale: how much longer the windows are than the context's.
    """

    row: Mapping[str, object]
    subjects: Mapping[str, Callable[[Context, object], Prepared]]
    inputs: Callable[[Context], object] = lambda context: None
    product: bool = False
    faster_than: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    window_scale: float = 1

    def measure(self, context: Context) -> list[dict]:
        rows = {name: {**self.row, "subject": name} for name in self.subjects}
        clear(context.device)
        if time.monotonic() > context.deadline:
            shared = {"status": "skipped", "reason": "the time budget was used up"}
        else:
            shared = attempt(lambda: {"inputs": self.inputs(context)})
        ready = {}
        for name, prepare in self.subjects.items():
            result = shared
            if "inputs" in shared:
                clear(context.device)
                result = attempt(lambda prepare=prepare: {"prepared": prepare(context, shared["inputs"])})
            if "prepared" in result:
                ready[name] = result["prepared"]
            else:
                rows[name] |= result
        clear(context.device)
        if self.product and ready and context.device.type == "cuda":
            rows[PRODUCT] = {**self.row, "subject": PRODUCT}
            ready[PRODUCT] = Prepared(product(context.device), 1, {"flops": 2 * YARDSTICK**3})
        typical = {}  # of each round: ratios within a round do not see how the host's speed drifts
        for name, samples in self._interleaved(ready, rows, context).items():
            rows[name] |= ready[name].row | {"status": "ok"} | figures(samples, ready[name])
            typical[name] = torch.tensor(samples).view(context.rounds, -1).quantile(0.5, 1) / ready[name].calls
        done = {name: row for name, row in rows.items() if row.get("status") == "ok"}
        for row in done.values():
            if PRODUCT in done:
                row["x_product"] = row["tflops"] / done[PRODUCT]["tflops"]
            for name, (subject, factor) in self.faster_than.items():
                if subject in done and subject != row["subject"]:
                    ratios = typical[subject] / typical[row["subject"]]
                    row[f"x_{name}"] = factor * ratios.quantile(0.5).item()
        return list(rows.values())

    def _interleaved(
        self, ready: dict[str, Prepared], rows: dict[str, dict], context: Context
    ) -> dict[str, list[float]]:
        """Seconds of all subjects' passes. One whose call fails gets a reason, and the others are timed anew."""
        runs = {name: prepared.run for name, prepared in ready.items()}
        while runs:
            current = next(iter(runs))

            def marked(name: str, run: timing.Pass) -> timing.Pass:
                def call() -> None:
                    nonlocal current
                    current = name
                    run()

                return call

            passes = {name: marked(name, run) for name, run in runs.items()}
            try:
                timing.warm_up(passes[current], context.timer, context.cell_warm_up_seconds)
                window = self.window_scale * context.window_seconds
                return timing.interleave(passes, context.timer, context.rounds, window, context.settle_seconds)
            except Exception as error:
                rows[current] |= {"status": "failed", "reason": reason(error)}
                del runs[current]
                clear(context.device)
        return {}


def figures(samples: list[float], prepared: Prepared) -> dict:
    """Milliseconds of a call, and the rates where the row has the call's operations or bytes."""
    ms = {name: 1e3 * value / prepared.calls for name, value in timing.percentiles(samples).items()}
    found = {"ms": ms, "samples": len(samples)}
    if "flops" in prepared.row:
        found["tflops"] = prepared.row["flops"] / ms["p50"] / 1e9
    if "bytes" in prepared.row:
        found["gb_per_s"] = prepared.row["bytes"] / ms["p50"] / 1e6
    return found


def reason(error: Exception) -> str:
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else environment.brief(error)


def attempt(make: Callable[[], dict]) -> dict:
    """The result of ``make``. If it raises, a status and a reason, so that the other subjects are still measured."""
    try:
        return make()
    except RedCheckError as error:
        return {"status": "wrong", "reason": str(error)}
    except MissingError as error:
        return {"status": "missing", "reason": str(error)}
    except Exception as error:
        return {"status": "failed", "reason": reason(error)}


def require(errors: Mapping[str, float], limit: float) -> float:
    """The largest error. Raises RedCheckError if it is above the limit or not a number."""
    for name, error in errors.items():
        if not error <= limit:
            raise RedCheckError(f"{name}: relative L2 error {error:.2e}, the limit is {limit:.1e}")
    return max(errors.values())


def clear(device: torch.device) -> None:
    """Frees what earlier subjects left, so that the next one's memory and time do not depend on them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def product(device: torch.device) -> timing.Pass:
    """A bf16 square product of random matrices; Triton's own where the process pretends to have another GPU."""
    a, b = (torch.randn(YARDSTICK, YARDSTICK, device=device).bfloat16() for _ in range(2))
    call = proxy.of_triton(torch.mm)
    if call is not torch.mm:
        return lambda: call(a, b)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def yardstick(context: Context) -> dict[str, object]:
    """TFLOP/s of the product, GB/s of a copy (read and written), and the sensors after them; empty on a CPU."""
    if context.device.type != "cuda":
        return {}
    run = product(context.device)
    timing.warm_up(run, context.timer, context.warm_up_seconds)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=context.device).random_(0, 256)
    target = torch.empty_like(source)
    copy = timing.interleave({"": lambda: target.copy_(source)}, context.timer, context.rounds, 0.02)[""]
    seconds = timing.percentiles(timing.interleave({"": run}, context.timer, context.rounds, 0.1)[""])["p50"]
    return {
        "matmul_tflops": 2 * YARDSTICK**3 / seconds / 1e12,
        "copy_gb_per_s": 2 * COPY_BYTES / timing.percentiles(copy)["p50"] / 1e9,
        "sensors": environment.sensors(context.device),
    }
