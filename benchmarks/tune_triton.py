"""Times block shapes of the Triton kernels on this GPU and prints the rows for flashmhf/backends/triton/configs.py.

    $ python -m benchmarks.tune_triton                            # this GPU: bf16, d_h 128 and 64
    $ python -m benchmarks.tune_triton --head-dims 96 256 --kernels forward --seconds 120
    $ python -m benchmarks.tune_triton --as sm80                  # code for another GPU, assembled for this one

Candidates are compiled by several processes first, then timed one after the other beside the table's block shapes,
whose results theirs have to match. One that needs more shared memory than the GPU has, spills registers or is wrong is
not timed; with --as neither is one of which this GPU holds more at once than the other would. The table changes only by
an edit of configs.py: no process tunes by itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import concurrent.futures.process
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import torch

from flashmhf import testing
from flashmhf.testing import relative_l2

from .harness import timing
from .harness.proxy import pretend
from .suites import fp8
from .suites.operator import FLAGSHIP, Size

KERNELS = ("forward", "token_grads", "weight_grads")
OTHERS = (Size(32256, 32, 64, 22, 192), Size(32256, 16, 96, 22, 256), Size(32256, 16, 256, 11, 704))
SHAPES = {size.d_h: size for size in (FLAGSHIP, *OTHERS)}
FEW = (1, 16, 64)  # tokens
SHARED = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}  # KB; else 99
DEVICE = torch.device("cuda")
SPILLED = 512  # bytes of a thread's stack above which a candidate is not timed
TOLERANCE, FP8_TOLERANCE = 6e-3, 3e-2  # of two results, in bf16 and in FP8, that are both right


def candidates(kernel: str, d_h: int, native: bool, few: bool = False) -> list:
    """Block shapes worth timing: those whose sums and scores fill a good part of the registers and fit into them.
    native: on wgmma or tcgen05, else on mma.sync."""
    from flashmhf.backends.triton.configs import Config

    width = 1 << (d_h - 1).bit_length()
    if kernel == "fp8":
        return [Config(*size) for size in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))]
    if few:
        sizes = itertools.product((16, 64), (32, 64, 128), (4,), (2, 3, 4))
        return [Config(*size, waves=waves) for size in sizes for waves in (1, 2, 3)]
    found = []
    for tokens, inter, warps, stages in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        held = {  # fp32 numbers
            "forward": tokens * (width + 2 * inter), "token_grads": tokens * (width + 3 * inter),
            "weight_grads": inter * (3 * width + 3 * tokens),
        }[kernel] / (32 * warps)  # fmt: skip
        least = 32 if kernel == "weight_grads" or native or width > 128 else 64
        if kernel != "weight_grads" and tokens < least or native and inter < (16 if width > 128 else 32):
            continue
        if not (48 if native or width > 128 else 64) <= held <= (200 if width <= 128 else 225):
            continue
        if stages in (1, 4) and (native or width <= 128) and (kernel != "weight_grads" or stages == 1):
            continue
        if kernel == "forward" and inter > 64 and width > 64 or stages == 4 and width > 128:
            continue
        size = tokens, inter, warps, stages
        if native:
            found += [Config(*size, True, behind) for behind in ((False, True) if kernel == "forward" else (False,))]
            continue
        found.append(Config(*size))
        if kernel == "forward" and (stages == 2 or width <= 64):
            found.append(Config(*size, behind=True))
        if kernel == "forward" and d_h <= 64 and inter <= 64:
            found.append(Config(*size, True, True))
    return found


def call(kernel: str, config, p: testing.Problem) -> Sequence[torch.Tensor]:
    """Run a kernel with a block shape."""
    from flashmhf.backends.triton import launch

    if kernel == "fp8":
        from flashmhf.backends.triton import fp8_kernels

        return [fp8_kernels.forward(p.q, *packed(p.k, p.u, p.v), p.r, config)]
    of = launch.Call(*p.operands, p.r, p.activation, p.grad_out, config)
    if kernel == "forward":
        return [of.forward()]
    return of.token_grads(p.q.dtype) if kernel == "token_grads" else of.weight_grads()


@functools.lru_cache(1)
def packed(k: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from flashmhf import quantize

    return quantize.pack_fp8(k, u, v).tensors


def why_wrong(
    kernel: str, results: Sequence[torch.Tensor], p: testing.Problem, expected: Sequence[torch.Tensor] | None = None
) -> str | None:
    """None for right results. expected: another block shape's; None: float64's, of some tokens or of the first head."""
    is_fp8 = kernel == "fp8"
    if expected is not None:
        limit, expected = FP8_TOLERANCE if is_fp8 else TOLERANCE, [x.double() for x in expected]
    else:
        limit = fp8.ERROR_LIMIT if is_fp8 else TOLERANCE
        if kernel in ("forward", "fp8"):
            rows = torch.arange(min(64, p.q.shape[0]), device=p.q.device)
            results, expected = [results[0][rows]], [p.exact_forward(rows)]
        else:
            dq, *weights, dr = p.exact_backward(0)
            of_tokens = kernel == "token_grads"
            results = [x[:, 0] if of_tokens else x[0] for x in results]
            expected = [dq, dr] if of_tokens else weights
    error = max(map(relative_l2, results, expected))
    return None if error <= limit else f"wrong: {error:.1e}"


def compile_one(kernel: str, size: Size, config, dtype: torch.dtype, few: bool) -> None:
    """In a process of its own: put the kernel into Triton's cache on the disk."""
    from flashmhf.backends.triton import launch

    gpu = launch.gpu(DEVICE)._replace(multiprocessors=1 << 20 if few else 0)
    launch.gpu = lambda device: gpu  # of so many or so few multiprocessors that sums go in shares, in fp32, or in one
    call(kernel, config, problem(size, config.tokens, dtype))
    torch.cuda.synchronize()


def problem(size: Size, tokens: int, dtype: torch.dtype) -> testing.Problem:
    return testing.problem(tokens, size.H, size.d_h, size.E, size.d_e, dtype, DEVICE)


def compile_all(jobs: list[tuple], processes: int, architecture: str | None, until: float) -> list[str | None]:
    """Returns why a kernel could not be compiled, or None, for each of the jobs."""
    start = (pretend, (architecture,)) if architecture else (None, ())
    context, reasons = multiprocessing.get_context("spawn"), {}
    for _ in range(3):  # a crash of the compiler takes all jobs of its pool with it
        pool = concurrent.futures.ProcessPoolExecutor(processes, context, *start)
        futures = {pool.submit(compile_one, *job): job for job in jobs if job not in reasons}
        concurrent.futures.wait(futures, max(0.0, until - time.monotonic()))
        crashed = False
        for future, job in futures.items():
            error = future.exception() if future.done() else TimeoutError("not compiled in time")
            if isinstance(error, concurrent.futures.process.BrokenProcessPool):
                crashed = True
            else:
                reasons[job] = None if error is None else f"{type(error).__name__}: {str(error)[:200]}"
        pool.shutdown(wait=False, cancel_futures=True)
        if not crashed:
            break
    return [reasons.get(job, "the compiler crashed") for job in jobs]


def milliseconds(run: Callable[[], object], few: bool) -> float:
    """The median of some 25 ms; ``few``: of a graph's calls, which the host does not slow down."""
    timer, calls = timing.timer_for(DEVICE), 10 if few else 1

    def several() -> None:
        for _ in range(calls):
            run()

    several, repeats = timing.repeated(timing.graphed(several) if few else several, timer, 1e-3)
    samples = timer.window(several, timing.passes_for(several, timer, 25e-3))
    return 1e3 * timing.percentiles(samples)["p50"] / (calls * repeats)


def resources(run: Callable[[], object]) -> tuple[Sequence[torch.Tensor], dict[str, int]]:
    """The result of ``run`` and registers, spilled bytes and shared memory of the first kernel that it launches."""
    from flashmhf.backends.triton import launch

    plans, start = [], launch.Plan.start
    launch.Plan.start = lambda plan, *tensors: (plans.append(plan), start(plan, *tensors))
    try:
        result = run()
    finally:
        launch.Plan.start = start
    compiled = plans[0].compiled
    used = {"registers": compiled.n_regs, "spilled": 4 * compiled.n_spills, "shared": compiled.metadata.shared}
    return result, used


def resident(entry: dict, shared: int) -> int:
    """Programs that a multiprocessor with so many KB of shared memory holds at once (and 64 K registers)."""
    threads = 32 * entry["config"].warps
    return min(65536 // (entry["registers"] * threads), (shared + 1 << 10) // (entry["shared"] + 1024))


class UntimedError(Exception):
    """Why a candidate is not timed."""


def measure(
    entry: dict, p: testing.Problem, few: bool, limits: tuple[int, int], expected: Sequence[torch.Tensor] | None
) -> Sequence[torch.Tensor]:
    """Puts what a candidate takes into ``entry``; returns its results. limits: KB of shared memory that the row's GPU
    has, and this one. expected: another block shape's results; None: float64 says what is right.
    """
    name, run = entry["kernel"], functools.partial(call, entry["kernel"], entry["config"], p)
    results, used = resources(run)
    entry |= used
    there, here = (resident(entry, limit) for limit in limits)
    if entry["shared"] > limits[0] << 10:
        raise UntimedError(f"{entry['shared'] >> 10} KB of shared memory")
    if there != here:
        raise UntimedError(f"{here} programs at once here, {there} there")
    if (wrong := why_wrong(name, results, p, expected)) is not None:
        raise UntimedError(wrong)
    if entry["spilled"] > SPILLED and expected is not None:
        raise UntimedError(f"{entry['spilled']} bytes spilled")
    torch.cuda.empty_cache()
    entry["ms"] = milliseconds(run, few)
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64], choices=SHAPES)
    parser.add_argument("--kernels", nargs="+", choices=(*KERNELS, "few", "fp8"), default=(*KERNELS, "few"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32256)
    parser.add_argument("--as", dest="architecture", metavar="sm80", help="another GPU's code, assembled for this one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time no candidate after so many")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write all candidates as JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this PyTorch sees no CUDA GPU")
    begin = time.monotonic()
    if options.architecture:
        pretend(options.architecture)
    from flashmhf.backends.triton import launch
    from flashmhf.backends.triton.configs import TABLE, row_of
    from flashmhf.backends.triton.fp8_kernels import block_shape

    dtype, capability = getattr(torch, options.dtype), launch.gpu(DEVICE).capability
    row, here = row_of(capability), torch.cuda.get_device_capability()
    limits = SHARED.get(capability, 99), SHARED.get(here, 99)
    jobs = []
    for d_h, kernel in itertools.product(options.head_dims, options.kernels):
        few = kernel == "few"
        table = TABLE[row, 8 * dtype.itemsize, d_h] | {"fp8": block_shape(d_h, SHAPES[d_h].d_e)}
        name = "forward" if few else kernel
        found = [table["forward_few" if few else kernel], *candidates(name, d_h, row in ("wgmma", "tcgen05"), few)]
        jobs += [(name, SHAPES[d_h], config, dtype, few) for config in dict.fromkeys(found)]
    print(f"{torch.cuda.get_device_name()}, code for {capability}, row {row!r}: {len(jobs)} candidates", flush=True)
    reasons = compile_all(jobs, options.processes, options.architecture, begin + 0.65 * options.seconds)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)

    rows = []
    groups = itertools.groupby(zip(jobs, reasons, strict=True), lambda x: (x[0][0], x[0][1], x[0][4]))
    for (name, size, few), group in groups:
        group = [(config, reason) for (_, _, config, *_), reason in group]
        for tokens in FEW if few else (options.tokens,):
            p, expected, timed = problem(size, tokens, dtype), None, []
            for config, reason in group:
                if few and config.tokens != max(16, tokens) and expected is not None:
                    continue
                entry = {"kernel": name, "d_h": size.d_h, "tokens": tokens, "config": config}
                rows.append(entry)
                if reason is not None or time.monotonic() - begin > options.seconds:
                    entry["reason"] = reason or "no time left"
                    continue
                try:
                    results = measure(entry, p, few, limits, expected)
                    expected = results if expected is None else expected
                    timed.append(entry)
                except Exception as error:
                    entry["reason"] = f"{type(error).__name__}: {str(error)[:200]}"
                    if expected is None:
                        print(name, size.d_h, tokens, written(config), entry["reason"], flush=True)
            if timed:
                report(timed, dataclasses.replace(size, T=tokens), few)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1, default=dataclasses.asdict))
    print_rows(row, 8 * dtype.itemsize, rows)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    return 0


def report(timed: list[dict], size: Size, few: bool) -> None:
    first, *_ = timed
    print(f"\n{first['kernel']} {size}: the table's {first['ms']:.4f} ms: {words(first)}", flush=True)
    for entry in sorted(timed, key=lambda entry: entry["ms"])[:7]:
        work = {"forward": 6, "fp8": 6, "token_grads": 10, "weight_grads": 12}[first["kernel"]] * size.products
        rate = "" if few else f", {work / entry['ms'] / 1e9:.0f} TFLOP/s"
        print(f"  {entry['ms']:.4f} ms{rate}: {words(entry)}", flush=True)


def words(entry: dict) -> str:
    used = f"{entry['registers']} registers, {entry['spilled']} bytes spilled, {entry['shared'] >> 10} KB"
    return f"{written(entry['config'])}, {used}"


def written(config) -> str:
    """A block shape as configs.py has it."""
    size = f"{config.tokens}, {config.inter}, {config.warps}, {config.stages}"
    if config.paired:
        return f"_pair({size}{', True' if config.behind else ''})"
    waves = f", waves={config.waves}" if config.waves != 2 else ""
    return f"Config({size}{', behind=True' if config.behind else ''}{waves})"


def print_rows(gpu: str, bits: int, rows: list[dict]) -> None:
    """The rows of configs.py with the fastest block shapes, and what each gains on the table's, timed first."""
    for d_h in dict.fromkeys(entry["d_h"] for entry in rows):
        shapes, gains = [], []
        for kernel in KERNELS:
            timed = [x for x in rows if (x["kernel"], x["d_h"]) == (kernel, d_h) and "ms" in x and x["tokens"] > 64]
            if timed:
                best = min(timed, key=lambda entry: entry["ms"])
                shapes.append(written(best["config"]))
                gains.append(f"{kernel} {timed[0]['ms'] / best['ms']:.2f} times as fast")
        if shapes:
            print(f"\n    ({gpu!r}, {bits}, ({d_h},), {', '.join(shapes)}),\n    # {', '.join(gains)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
