"""The Hopper backward on its own: rate against a matrix product, deterministic mode, the router's part, eager SwiGLU, small T, errors.

    $ python benchmarks/bench_hopper_backward.py --out benchmarks/results/backward_h200_2026-11-22.json [--library PATH]

Blocks of matmul, default, matmul, deterministic, matmul, each back to back; a block's figure is the median of its second half, so that the
clocks are those that the subject itself sustains. Times include zeroing and post-processing. Nothing is recorded for wrong gradients.
A table goes to the same path with the suffix .md.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import time

import torch
import torch.utils.checkpoint
from bench_hopper_forward import DEVICE, FLAGSHIP, LIMIT, burst, in_turns, problem

MATMUL_FLOP = 2 * 8192**3
SHAPES = {
    "L384": (3072, 16, 128, 22, 384),
    "L1536": (12288, 16, 128, 22, 384),
    "L4032 (flagship)": (32256, 16, 128, 22, 384),
    "L16128": (129024, 16, 128, 22, 384),
    "1.3B": (32768, 16, 128, 15, 384),
    "370M": (32768, 8, 128, 7, 384),
    "128M": (32768, 6, 128, 8, 256),
    "d_h 64": (32768, 16, 64, 22, 192),
    "d_h 96": (32768, 16, 96, 22, 256),
    "d_h 256": (16384, 8, 256, 22, 704),
}
LENGTHS = ("L384", "L1536", "L4032 (flagship)", "L16128")
NAMES = ("dq", "dk", "du", "dv", "dr")
LIMITS = {name: LIMIT[torch.bfloat16] for name in NAMES} | {"dr": 1e-5}


def sustained(f, seconds):
    """Median milliseconds of f over the second half of a block of back-to-back calls."""
    return burst(f, seconds * 1e3, skip=0.5)


def exact_head(grad_out, q, k, u, v, r):
    """dq, dk, du, dv, dr of one head in float64: q, grad_out [T, d_h]; k, u, v [E, d_e, d_h]; r [T, E]."""
    q, grad_out, r = q.double(), grad_out.double(), r.double()
    dq, weights, dr = torch.zeros_like(q), [], []
    for e in range(k.shape[0]):
        K, U, V = (x[e].double() for x in (k, u, v))  # noqa: N806
        m, n, d = q @ K.T, q @ U.T, grad_out @ V.T
        s = torch.sigmoid(m)
        a = m * s
        dr.append((d * a * n).sum(1))
        d *= r[:, e, None]
        dn = d * a
        dm = d * n * (s + a * (1 - s))
        dq += dm @ K + dn @ U
        weights.append((dm.T @ q, dn.T @ q, (a * n * r[:, e, None]).T @ grad_out))
    return dq, *(torch.stack(x) for x in zip(*weights, strict=True)), torch.stack(dr, 1)


def errors(grads, grad_out, q, k, u, v, r, head):
    """Relative L2 errors of one head's gradients."""
    dq, dk, du, dv, dr = grads
    ours = (dq[:, head], dk[head], du[head], dv[head], dr[:, head])
    exact = exact_head(grad_out[:, head], q[:, head], k[head], u[head], v[head], r[:, head])
    return {name: ((a.double() - b).norm() / b.norm()).item() for name, a, b in zip(NAMES, ours, exact, strict=True)}


def table(record: dict) -> str:
    lines = [
        f"# Backward on an {record['device'].removeprefix('NVIDIA ')}, {record['date']}",
        "",
        "bf16, sustained clocks; method and all figures in the JSON beside this. Useful FLOPs = 16·T·H·d_h·E·d_e; times include",
        "zeroing and post-processing. Matmul: 8192³ bf16 of the same run, just before and after.",
        "",
        "| shape | default ms | useful TFLOP/s | ÷ matmul | deterministic ÷ default |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        sizes = ", ".join(f"{name}={row[name]}" for name in ("T", "H", "E", "d_e", "d_h"))
        lines.append(
            f"| {row['shape']} ({sizes}) | {row['default_ms']:.3f} | {row['useful_tflops']:.0f} | {row['ratio']:.3f} "
            f"| {row['deterministic_over_default']:.3f} |"
        )
    t, small = record["swiglu_ms"], record["small_T_ms"]
    lines += [
        "",
        f"Flagship shape, in turns: forward and backward of the operator {t['op']:.2f} ms; of eager SwiGLU (d_model 2048, d_ff 8448) "
        f"{t['eager']:.2f} ms, under activation checkpointing {t['checkpointed']:.2f} ms. `backward` {t['backward']:.2f} ms, "
        f"`gated_backward` {t['gated_backward']:.2f} ms.",
        "",
        "Few tokens, ms: "
        + ", ".join(f"{name} {x['default']:.3f} ({x['deterministic']:.3f} deterministic)" for name, x in small.items())
        + ".",
        "",
        "Relative L2 errors against float64 (two heads): "
        + "; ".join(f"T = {case['T']:,}: " + ", ".join(f"{k} {v:.2e}" for k, v in case["errors"].items()) for case in record["errors"])
        + f". {record['different_of_deterministic_runs']} of 1000 deterministic runs differ.",
        "",
        "| bar | measured |",
        "|---|---|",
    ]
    lines += [f"| {name} | {value if isinstance(value, str) else format(value, '.3f')} |" for name, value in record["bars"].items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--library", type=pathlib.Path, default=pathlib.Path(__file__).parents[1] / "flashmhf" / "libflashmhf_hopper.so")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block")
    options = parser.parse_args()
    torch.ops.load_library(str(options.library.resolve()))
    ops = torch.ops.flashmhf_hopper
    record = {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    record |= {"dtype": "bfloat16", "r": "float32", "method": " ".join(__doc__.split("\n\n")[2].split())}

    a, b = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    c = torch.empty_like(a)

    def matmul():
        torch.mm(a, b, out=c)

    def operands(*sizes):
        q, k, u, v, r, w = problem(*sizes)
        return torch.randn_like(q), q, k, u, v, r, w

    # Errors first: no figure from wrong gradients.
    record["errors"] = []
    wrong = False
    for T in (3072, 129_024):  # noqa: N806
        *args, _ = operands(T, 2, 128, 22, 384)
        grads = ops.backward(*args, False, True, True)
        heads = [errors(grads, *args, head) for head in range(2)]
        found = {name: max(head[name] for head in heads) for name in NAMES}
        record["errors"].append({"T": T, "errors": found})
        wrong |= any(not found[name] <= LIMITS[name] for name in NAMES)
        print(T, {name: f"{value:.2e}" for name, value in found.items()}, flush=True)
    different = 0
    for sizes in ((3000, 5, 128, 7, 80), (2500, 40, 128, 2, 192)):  # two kernels; one, in turns
        *args, _ = operands(*sizes)
        first = ops.backward(*args, True, True, True)
        for i in range(500):  # other sizes in between move the workspace around
            torch.full((1 << (12 + i % 12),), float("nan"), device=DEVICE)
            different += not all(torch.equal(x, y) for x, y in zip(ops.backward(*args, True, True, True), first, strict=True))
    record["different_of_deterministic_runs"] = different
    if wrong or different:
        print(f"WRONG gradients, or {different} of 1000 deterministic runs differ")
        return 1
    del args, grads, first

    sustained(matmul, 1.0)
    record["rows"] = []
    for name, (T, H, d_h, E, d_e) in SHAPES.items():  # noqa: N806
        *args, _ = operands(T, H, d_h, E, d_e)
        default = lambda x=args: ops.backward(*x, False, True, True)  # noqa: E731
        deterministic = lambda x=args: ops.backward(*x, True, True, True)  # noqa: E731
        blocks = [sustained(f, options.seconds) for f in (matmul, default, matmul, deterministic, matmul)]
        products = [MATMUL_FLOP / blocks[i] / 1e9 for i in (0, 2, 4)]
        useful = 16 * T * H * d_h * E * d_e / blocks[1] / 1e9
        row = {"shape": name, "T": T, "H": H, "E": E, "d_e": d_e, "d_h": d_h, "default_ms": blocks[1], "deterministic_ms": blocks[3]}
        row |= {"useful_tflops": useful, "matmul_tflops": statistics.mean(products[:2]), "matmul_before_between_after": products}
        row |= {"ratio": useful / row["matmul_tflops"], "deterministic_over_default": blocks[3] / blocks[1]}
        record["rows"].append(row)
        print(
            name,
            f"{blocks[1]:.3f} ms, {row['ratio']:.3f} of the matmul, deterministic x {row['deterministic_over_default']:.3f}",
            flush=True,
        )
        del args, default, deterministic

    *args, w = operands(32256, *FLAGSHIP.values())
    grad_out, q, k, u, v, r = args
    wg, wu, wd = ((torch.randn(*s, device=DEVICE) / math.sqrt(s[0])).bfloat16() for s in ((2048, 8448), (2048, 8448), (8448, 2048)))
    x = q.reshape(32256, 2048).detach().requires_grad_()
    leaves = [x, *(y.requires_grad_() for y in (wg, wu, wd))]
    dx = grad_out.view(32256, 2048)

    def swiglu(x):
        return (torch.nn.functional.silu(x @ wg) * (x @ wu)) @ wd

    def operator():
        ops.forward(q, k, u, v, r, False)
        ops.backward(*args, False, True, True)

    subjects = {
        "op": operator,
        "eager": lambda: torch.autograd.grad(swiglu(x), leaves, dx),
        "checkpointed": lambda: torch.autograd.grad(torch.utils.checkpoint.checkpoint(swiglu, x, use_reentrant=False), leaves, dx),
        "backward": lambda: ops.backward(*args, False, True, True),
        "gated_backward": lambda: ops.gated_backward(grad_out, q, k, u, v, w, 1e-20, False, True, True),
    }
    record["swiglu_ms"] = t = in_turns(subjects, rounds=7, ms=80)
    print({name: f"{value:.2f}" for name, value in t.items()}, flush=True)

    record["small_T_ms"] = {}
    for T in (1, 16, 64, 256):  # noqa: N806
        some = (grad_out[:T], q[:T], k, u, v, r[:T])
        calls = {
            "default": lambda s=some: ops.backward(*s, False, True, True),
            "deterministic": lambda s=some: ops.backward(*s, True, True, True),
        }
        record["small_T_ms"][f"T{T}"] = in_turns(calls, rounds=3, ms=10)

    rows = {row["shape"]: row for row in record["rows"]}
    flagship, rates = rows["L4032 (flagship)"], [rows[name]["useful_tflops"] for name in LENGTHS]
    record["bars"] = {
        "flagship / matmul >= 0.84": flagship["ratio"],
        "L 384, 1536, 4032, 16128: lowest / highest rate >= 0.92": min(rates) / max(rates),
        "deterministic / default time <= 1.25": flagship["deterministic_over_default"],
        "operator forward + backward / checkpointed SwiGLU <= 0.92": t["op"] / t["checkpointed"],
        "operator forward + backward / eager SwiGLU <= 1.22": t["op"] / t["eager"],
        "1.3B, 370M, 128M rate / flagship rate >= 0.90": ", ".join(
            f"{rows[name]['useful_tflops'] / flagship['useful_tflops']:.3f}" for name in ("1.3B", "370M", "128M")
        ),
        "d_h 64, 96, 256 / matmul >= 0.55, 0.55, 0.45": ", ".join(f"{rows[name]['ratio']:.3f}" for name in ("d_h 64", "d_h 96", "d_h 256")),
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(record))
    print("\n" + table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
