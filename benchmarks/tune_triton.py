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
import statistics
import sys
import time
from collections.abc import Callable

import torch

from flashmhf.testing import relative_l2

KERNELS = ("forward", "token_grads", "weight_grads")
SHAPES = {64: (32, 22, 192), 96: (16, 22, 256), 128: (16, 22, 384), 256: (16, 11, 704)}  # d_h -> H, E, d_e
SHARED = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}  # KB; else 99
SPILLED = 512  # bytes of a thread's stack above which a candidate is not timed
TOLERANCE = 6e-3  # of two bf16 results that are both right


def candidates(kernel: str, d_h: int, tensor_cores: str, few: bool = False) -> list:
    """Block shapes worth timing: those whose sums and scores fill a good part of the registers and fit into them."""
    from flashmhf.backends.triton.configs import Config

    width = 1 << (d_h - 1).bit_length()
    if kernel == "fp8":
        return [Config(*size) for size in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))]
    if few:
        sizes = itertools.product((16, 64), (32, 64, 128), (4,), (2, 3, 4))
        return [Config(*size, waves=waves) for size in sizes for waves in (1, 2, 3)]
    native = tensor_cores != "mma.sync"
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


@dataclasses.dataclass(frozen=True)
class Problem:
    d_h: int
    heads: int
    subnets: int
    subnet_dim: int

    @property
    def products(self) -> int:
        return self.heads * self.d_h * self.subnets * self.subnet_dim

    def tensors(self, tokens: int, dtype: torch.dtype):
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape, std=1.0):
            return (torch.randn(shape, device="cuda", generator=generator) * std).to(dtype)

        size = self.heads, self.subnets, self.subnet_dim, self.d_h
        k, u = (normal(*size, std=self.d_h**-0.5) for _ in range(2))
        r = torch.rand(tokens, self.heads, self.subnets, device="cuda", generator=generator)
        q, grad_out = (normal(tokens, self.heads, self.d_h) for _ in range(2))
        v = normal(*size, std=(self.subnets * self.subnet_dim) ** -0.5)
        return grad_out, q, k, u, v, r / r.sum(-1, keepdim=True)


def call(kernel: str, config, grad_out, q, k, u, v, r) -> tuple[torch.Tensor, ...]:
    """Run a kernel with a block shape."""
    from flashmhf.backends.triton import launch

    if kernel == "fp8":
        from flashmhf import quantize
        from flashmhf.backends.triton import fp8_kernels

        packed = quantize.pack_fp8(k, u, v) if not hasattr(k, "packed") else k.packed
        k.packed = packed
        return (fp8_kernels.forward(q, *packed.tensors, r, config),)
    of = launch.Call(q, k, u, v, r, grad_out=grad_out, config=config)
    if kernel == "forward":
        return (of.forward(),)
    return of.token_grads(q.dtype) if kernel == "token_grads" else tuple(of.weight_grads())


def exact(kernel: str, grad_out, q, k, u, v, r) -> list[tuple]:
    """Float64 results of the first head, of some tokens where tokens are independent, with what cuts them out."""
    from flashmhf import reference

    some = slice(None) if kernel == "weight_grads" else slice(0, 64)
    grad_out, q, r = (x[some, :1].double() for x in (grad_out, q, r))
    k, u, v = (x[:1].double() for x in (k, u, v))
    if kernel in ("forward", "fp8"):
        return [(reference.forward(q, k, u, v, r), (some, slice(0, 1)))]
    dq, *weights, dr = reference.backward(grad_out, q, k, u, v, r)
    if kernel == "weight_grads":
        return [(x, slice(0, 1)) for x in weights]
    return [(dq, (some, slice(0, 1))), (dr, (some, slice(0, 1)))]


def compile_one(kernel: str, problem: Problem, config, dtype: torch.dtype, few: bool) -> None:
    """In a process of its own: put the kernel into Triton's cache on the disk."""
    from flashmhf.backends.triton import launch

    gpu = launch.gpu(torch.device("cuda", 0))._replace(multiprocessors=1 << 20 if few else 0)
    launch.gpu = lambda device: gpu  # of so many or so few multiprocessors that sums go in shares, in fp32, or in one
    call(kernel, config, *problem.tensors(config.tokens, dtype))
    torch.cuda.synchronize()


def compile_all(jobs: list[tuple], processes: int, architecture: str | None, until: float) -> list[str | None]:
    """Returns why a kernel could not be compiled, or None, for each of the jobs."""
    from .harness.proxy import pretend

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
                continue
            reasons[job] = None if error is None else f"{type(error).__name__}: {str(error)[:200]}"
        pool.shutdown(wait=False, cancel_futures=True)
        if not crashed:
            break
    return [reasons.get(job, "the compiler crashed") for job in jobs]


def milliseconds(run: Callable[[], object], at_least: float = 25.0) -> float:
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    passes, samples = max(1, int(at_least / 3 / max(start.elapsed_time(end), 1e-3))), []
    for _ in range(3):
        start.record()
        for _ in range(passes):
            run()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / passes)
    return statistics.median(samples)


def graphed_ms(run: Callable[[], object], calls: int = 10) -> float:
    from .harness.timing import graphed

    def several():
        for _ in range(calls):
            run()

    return milliseconds(graphed(several), 6.0) / calls


def resources(run: Callable[[], object]) -> tuple[object, dict[str, int]]:
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
    """Programs that a multiprocessor with so much shared memory holds at once (and 64 K registers; a block's KB)."""
    threads = 32 * entry["config"]["warps"]
    return min(65536 // (entry["registers"] * threads), (shared + 1024) // (entry["shared"] + 1024))


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
    begin = time.monotonic()
    if options.architecture:
        from .harness.proxy import pretend

        pretend(options.architecture)
    from flashmhf.backends.triton import launch
    from flashmhf.backends.triton.configs import TABLE, row_of

    device, dtype = torch.device("cuda", 0), getattr(torch, options.dtype)
    capability = launch.gpu(device).capability
    row = row_of(capability)
    tensor_cores = row if row in ("wgmma", "tcgen05") else "mma.sync"
    limit = SHARED.get(capability, 99)
    jobs = []
    for d_h, kernel in itertools.product(options.head_dims, options.kernels):
        problem, few = Problem(d_h, *SHAPES[d_h]), kernel == "few"
        name = "forward" if few else kernel
        if kernel == "fp8":
            from flashmhf.backends.triton.fp8_kernels import block_shape

            first = block_shape(d_h, SHAPES[d_h][2])
        else:
            first = TABLE[row, 8 * dtype.itemsize, d_h]["forward_few" if few else kernel]
        found = [first, *candidates(name, d_h, tensor_cores, few)]
        jobs += [(name, problem, config, dtype, few) for config in dict.fromkeys(found)]
    print(f"{torch.cuda.get_device_name()}, code for {capability}, row {row!r}: {len(jobs)} candidates", flush=True)
    reasons = compile_all(jobs, options.processes, options.architecture, begin + 0.65 * options.seconds)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)

    rows = []
    for (name, problem, few), group in itertools.groupby(
        zip(jobs, reasons, strict=True), lambda x: (x[0][0], x[0][1], x[0][4])
    ):
        timed = []
        for tokens in (1, 16, 64) if few else (options.tokens,):
            tensors, expected = problem.tensors(tokens, dtype), None
            group = list(group)
            for (_, _, config, *_), reason in group:
                if few and config.tokens != max(16, tokens) and expected is not None:
                    continue
                entry = {"kernel": name, "d_h": problem.d_h, "tokens": tokens, "config": dataclasses.asdict(config)}
                rows.append(entry)
                if reason is not None or time.monotonic() - begin > options.seconds:
                    entry["reason"] = reason or "no time left"
                    continue
                try:
                    run = functools.partial(call, name, config, *tensors)
                    results, used = resources(run)
                    entry |= used
                    if expected is None:
                        truths = exact(name, *tensors)
                        away = max(relative_l2(x[at], truth) for x, (truth, at) in zip(results, truths, strict=True))
                        torch.cuda.empty_cache()
                        if not away <= (3e-2 if name == "fp8" else TOLERANCE):
                            entry["reason"] = f"wrong: {away:.1e}"
                            print(name, problem.d_h, tokens, words(entry), entry["reason"], flush=True)
                            continue
                        expected = results
                    errors = [relative_l2(a, b.double()) for a, b in zip(results, expected, strict=True)]
                    there, here = (
                        resident(entry, kb << 10) for kb in (limit, SHARED.get(torch.cuda.get_device_capability(), 99))
                    )
                    if entry["shared"] > limit << 10:
                        entry["reason"] = f"{entry['shared'] >> 10} KB of shared memory"
                    elif options.architecture and there != here:
                        entry["reason"] = f"{here} programs at once here, {there} there"
                    elif not max(errors) <= (3e-2 if name == "fp8" else TOLERANCE):
                        entry["reason"] = f"wrong: {max(errors):.1e}"
                    elif entry["spilled"] > SPILLED and results is not expected:
                        entry["reason"] = f"{entry['spilled']} bytes spilled"
                    del results
                    if "reason" in entry:
                        continue
                    entry["ms"] = graphed_ms(run) if few else milliseconds(run)
                    timed.append(entry)
                except Exception as error:
                    entry["reason"] = f"{type(error).__name__}: {str(error)[:200]}"
            del tensors, expected
            torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))
        report(name, problem, timed, few)
    print_rows(row, 8 * dtype.itemsize, rows)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    return 0


def report(name: str, problem: Problem, timed: list[dict], few: bool) -> None:
    for tokens in sorted({entry["tokens"] for entry in timed}):
        first, *_ = entries = [entry for entry in timed if entry["tokens"] == tokens]
        print(
            f"\n{name} d_h {problem.d_h}, {tokens} tokens: the table's {first['ms']:.4f} ms: {words(first)}", flush=True
        )
        for entry in sorted(entries, key=lambda entry: entry["ms"])[:7]:
            work = {"forward": 6, "fp8": 6, "token_grads": 10, "weight_grads": 12}[name] * tokens * problem.products
            rate = "" if few else f", {work / entry['ms'] / 1e9:.0f} TFLOP/s"
            print(f"  {entry['ms']:.4f} ms{rate}: {words(entry)}", flush=True)


def words(entry: dict) -> str:
    used = f"{entry['registers']} registers, {entry['spilled']} bytes spilled, {entry['shared'] >> 10} KB"
    return f"{written(entry['config'])}, {used}"


def written(config: dict) -> str:
    """A block shape as configs.py has it."""
    size = ", ".join(str(config[name]) for name in ("tokens", "inter", "warps", "stages"))
    behind = ", True" if config["behind"] else ""
    waves = f", waves={config['waves']}" if config["waves"] != 2 else ""
    return f"_pair({size}{behind})" if config["paired"] else f"Config({size}{', behind=True' if behind else ''}{waves})"


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
