"""Measures block shapes of the Triton kernels on this GPU and rewrites the table in configs.py.

    python -m benchmarks.tune_triton [--head-dims 64 128] [--bits 16] [--dry-run]

Candidates compile in parallel (Triton's cache on disk hands them to the timing process). Those that do not fit the GPU
drop out, as do those that the compiler gets wrong (Triton 3.6: 16-bit weight_grads of 64 x 16, 4 warps, unpipelined,
writes out of bounds).
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import pathlib
import re
from concurrent.futures import ProcessPoolExecutor

import torch

from flashmhf import reference, testing
from flashmhf.backends.contract import DEFAULTS
from flashmhf.backends.triton import HEAD_DIMS, configs, launch
from flashmhf.backends.triton.configs import Config

from .harness import timing

KERNELS = ("forward", "token_grads", "weight_grads")
# Where the time goes decides: the paper's efficiency shape for 16 bits, a shape of the same kind for fp32's slow
# products.
SHAPES = {16: {"T": 16128, "H": 16, "E": 22, "d_e": 384}, 32: {"T": 2048, "H": 16, "E": 4, "d_e": 128}}
# Large enough not to be split, so that it compiles what SHAPES runs.
WARM_SHAPE = {"T": 2048, "H": 16, "E": 2, "d_e": 384}
ERROR = 5e-3  # of a right result, generously: bf16 rounds by 2.4e-3


def candidates(kernel: str, bits: int) -> list[Config]:
    if bits == 32:
        return [Config(*x, 1) for x in ((16, 16, 4), (16, 16, 8), (32, 16, 4), (32, 16, 8), (32, 32, 8), (64, 16, 8))]
    blocks = {
        "forward": ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8)),
        "token_grads": ((64, 32, 4), (64, 64, 4), (64, 32, 8), (128, 32, 8), (128, 64, 8)),
        "weight_grads": ((64, 16, 4), (64, 32, 4), (64, 64, 4), (64, 32, 8), (128, 16, 8), (128, 32, 8), (128, 64, 8)),
    }[kernel]
    behind = (False, True) if kernel == "forward" else (False,)
    return [Config(*block, count, late) for block in blocks for count in (2, 3, 4) for late in behind]


def inputs(shape: dict[str, int], head_dim: int, bits: int) -> dict[str, torch.Tensor]:
    p = testing.problem(
        shape["T"],
        shape["H"],
        head_dim,
        shape["E"],
        shape["d_e"],
        torch.bfloat16 if bits == 16 else torch.float32,
        "cuda",
    )
    return {"grad_out": p.grad_out, "q": p.q, "k": p.k, "u": p.u, "v": p.v, "r": p.r}


def run(kernel: str, x: dict[str, torch.Tensor], config: Config) -> tuple[torch.Tensor, ...]:
    """One launch under ``config`` instead of the table's."""
    key = launch._architecture(x["q"].device)[0], 8 * x["q"].element_size(), x["q"].shape[-1]
    configs.TABLE[key] = {**configs.TABLE[key], kernel: config}
    if kernel == "forward":
        return (launch.forward(*(x[name] for name in ("q", "k", "u", "v", "r"))),)
    if kernel == "token_grads":
        return launch.token_grads(*x.values(), DEFAULTS, x["q"].dtype)
    return launch.weight_grads(*x.values(), None)


@functools.lru_cache(1)
def checked_inputs(bits: int, head_dim: int) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, ...]]]:
    """Inputs of WARM_SHAPE and what each kernel should make of them."""
    x = inputs(WARM_SHAPE, head_dim, bits)
    grad_out, *operands = (y.float() for y in x.values())
    dq, dk, du, dv, dr = reference.backward(grad_out, *operands)
    return x, {"forward": (reference.forward(*operands),), "token_grads": (dq, dr), "weight_grads": (dk, du, dv)}


def try_candidate(job: tuple[str, int, int, Config]) -> str | None:
    """Why the candidate is out: it does not compile or fit, or the compiler gets it wrong. Else it is in the cache on
    disk.
    """
    kernel, bits, head_dim, config = job
    x, expected = checked_inputs(bits, head_dim)
    try:
        results = run(kernel, x, config)
        errors = [testing.relative_l2(a, b.double()) for a, b in zip(results, expected[kernel], strict=True)]
    except Exception as error:
        return str(error).splitlines()[0]
    return None if max(errors) < ERROR else f"wrong by {max(errors):.1e}"


def milliseconds(kernel: str, x: dict[str, torch.Tensor], config: Config, repeats: int = 3) -> float:
    """Median of ``repeats`` launches, after one that is not counted."""
    seconds = timing.CudaTimer().window(lambda: run(kernel, x, config), repeats + 1)
    return 1e3 * timing.percentiles(seconds[1:])["p50"]


def rewrite(table: dict[tuple[str, int, int], dict[str, Config]]) -> str:
    """configs.py with ``table``."""
    path = pathlib.Path(configs.__file__)

    def literal(c: Config) -> str:
        return f"Config({c.tokens}, {c.inter}, {c.warps}, {c.stages}{', behind=True' if c.behind else ''})"

    rows = ((key, ", ".join(literal(row[kernel]) for kernel in KERNELS)) for key, row in table.items())
    text = "".join(f'    ("{arch}", {bits}, {head_dim}): _row({row}),\n' for (arch, bits, head_dim), row in rows)
    return re.sub(
        r"(?<=\] = \{\n).*?(?=^\})", lambda _: text, path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS, choices=HEAD_DIMS)
    parser.add_argument("--bits", type=int, nargs="+", default=(16, 32), choices=(16, 32))
    parser.add_argument("--dry-run", action="store_true", help="print the table, leave configs.py alone")
    args = parser.parse_args()
    arch = launch._architecture(torch.device("cuda", torch.cuda.current_device()))[0]
    best = dict(configs.TABLE)
    jobs = [
        (kernel, b, d, c)
        for b in args.bits
        for d in args.head_dims
        for kernel in KERNELS
        for c in candidates(kernel, b)
    ]
    with ProcessPoolExecutor(max(1, os.cpu_count() - 2), mp_context=multiprocessing.get_context("spawn")) as pool:
        reasons = list(pool.map(try_candidate, jobs, chunksize=2))
    for (kernel, bits, head_dim, config), reason in zip(jobs, reasons, strict=True):
        if reason:
            print(f"{bits} {head_dim} {kernel} {config}: {reason[:90]}")
    fits = [job for job, reason in zip(jobs, reasons, strict=True) if reason is None]
    for bits in args.bits:
        for head_dim in args.head_dims:
            x = inputs(SHAPES[bits], head_dim, bits)
            for kernel in KERNELS:
                timed = [
                    (milliseconds(kernel, x, c), c)
                    for name, b, d, c in fits
                    if (name, b, d) == (kernel, bits, head_dim)
                ]
                timed.sort(key=lambda pair: pair[0])
                best[arch, bits, head_dim] = {**best[arch, bits, head_dim], kernel: timed[0][1]}
                print(
                    f"{bits} {head_dim} {kernel}: " + "; ".join(f"{ms:.2f} ms {c}" for ms, c in timed[:3]), flush=True
                )
    text = rewrite(best)
    if args.dry_run:
        print(text[text.index("TABLE") :])
    else:
        pathlib.Path(configs.__file__).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
