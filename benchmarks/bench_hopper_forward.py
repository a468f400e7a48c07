"""The Hopper forward on its own: rate against a matrix product and eager SwiGLU, lengths, models, head dimensions, small T, errors.

    $ python benchmarks/bench_hopper_forward.py --out benchmarks/results/forward_h200_2026-11-22.json [--library PATH]

Writes a table beside it.

Every figure is the median over five rounds in which all subjects of a group take turns, another one first in every round, so that
ratios hold while clocks drift. Under the power limit the clocks of a turn's first 100 ms depend on the subject before: they do not
count. Nothing is recorded for a shape whose output is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time

import torch

from flashmhf.backends.gating import gate
from flashmhf.bench import timing

DEVICE = "cuda"
TIMER = timing.CudaTimer()
LIMIT = {torch.bfloat16: 2.6e-3, torch.float16: 3.5e-4}
FLAGSHIP = {"H": 16, "d_h": 128, "E": 22, "d_e": 384}


def problem(T, H, d_h, E, d_e, dtype=torch.bfloat16, seed=0):  # noqa: N803
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator)

    q = torch.empty(T, H, d_h, device=DEVICE, dtype=dtype).normal_(generator=generator)
    k, u, v = ((normal(H, E, d_e, d_h) / math.sqrt(s)).to(dtype) for s in (d_h, d_h, E * d_e))
    r = torch.rand(T, H, E, device=DEVICE, generator=generator)
    r /= r.sum(-1, keepdim=True)
    return q, k, u, v, r, normal(H, d_h, E) / math.sqrt(d_h)


def reference(q, k, u, v, r):
    heads = []
    for h in range(q.shape[1]):
        x, (K, U, V) = q[:, h].double(), (t[h].flatten(0, 1).double() for t in (k, u, v))  # noqa: N806
        a = torch.nn.functional.silu(x @ K.T) * (x @ U.T)
        heads.append((a * r[:, h].double().repeat_interleave(k.shape[2], 1)) @ V)
    return torch.stack(heads, 1)


def error(out, q, k, u, v, r, samples=512):
    rows = torch.randperm(q.shape[0], device=DEVICE)[:samples]
    expected = reference(q[rows], k, u, v, r[rows])
    return ((out[rows].double() - expected).norm() / expected.norm()).item()


def grouped(f):
    """So many calls of f that they take 2 ms or more, since the events around them take time too; and their number."""
    calls = max(1, int(2e-3 / max(TIMER.window(f, 2)[-1], 1e-6)))

    def run():
        for _ in range(calls):
            f()

    return run, calls


def burst(f, ms, skip=0.0):
    """Median milliseconds of f over about ms milliseconds of back-to-back calls, without the first ``skip`` of them."""
    run, calls = grouped(f)
    n = max(6 if skip else 3, timing.passes_for(run, TIMER, ms / 1e3))
    return 1e3 * timing.percentiles(TIMER.window(run, n)[int(skip * n) :])["p50"] / calls


def in_turns(subjects, rounds=5, ms=40):
    """Median milliseconds of each subject over ms milliseconds a turn, once the clocks have settled."""
    groups = {name: grouped(f) for name, f in subjects.items()}
    samples = timing.interleave({name: run for name, (run, _) in groups.items()}, TIMER, rounds, ms / 1e3, settle_seconds=0.1)
    return {name: 1e3 * timing.percentiles(samples[name])["p50"] / calls for name, (_, calls) in groups.items()}


def graph_of(f, n=16):
    """A CUDA graph of f(i), i = 0..n-1."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(n):
            f(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            f(i)
    return graph


def report(record: dict) -> str:
    """The record as Markdown."""

    def rows(header: tuple[str, ...], body: list[tuple]) -> list[str]:
        return ["", *("| " + " | ".join(map(str, row)) + " |" for row in (header, ("---",) * len(header), *body))]

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    shapes = [(f"T={x['T']}", x) for x in record["flagship"]] + list(record["models"].items())
    shapes += [(f"d_h={x['d_h']}", x) for x in record["head_dims"]]
    fastest = record["models"]["flagship"]["tflops"]
    lines = [
        f"# Hopper forward on an H200, {record['date']}",
        "",
        f"{record['device']}, torch {record['torch']}, bf16, r fp32, sustained clocks, medians of five rounds in turns, by",
        "`benchmarks/bench_hopper_forward.py`. FLOPs = 6·T·H·d_h·E·d_e. Matmul: 8192³ bf16 of the same rounds.",
        *(["", record["changed_since"]] if "changed_since" in record else []),
        *rows(
            ("shape", "ms", "TFLOP/s", "÷ matmul", "÷ eager SwiGLU (cuBLAS)", "gate fused, ms", "gate by PyTorch, ms"),
            [
                (
                    f"{name}: T={x['T']}, H={x['H']}, E={x['E']}, d_e={x['d_e']}, d_h={x['d_h']}",
                    ms(x["ms"]),
                    f"{x['tflops']:.0f}",
                    f"{x['x_matmul']:.3f}",
                    ms(x.get("x_swiglu")),
                    ms(x.get("gated_ms")),
                    ms(x.get("separate_ms")),
                )
                for name, x in shapes
            ],
        ),
        "",
        "Rate ÷ the flagship's at T=32768: "
        + ", ".join(f"{name} {x['tflops'] / fastest:.3f}" for name, x in record["models"].items() if name != "flagship")
        + ".",
        "",
        "Lengths at batch 8 (flagship), 100 ms a turn:",
        *rows(("T", "TFLOP/s", "÷ matmul"), [(x["T"], f"{x['tflops']:.0f}", f"{x['x_matmul']:.3f}") for x in record["lengths"]]),
        "",
        f"Lowest ÷ highest rate {record['lowest_rate_over_highest']:.3f}. Ragged T against the next multiple of 64: "
        + ", ".join(f"{x['T']}: {x['time_ratio']:.3f}" for x in record["ragged"])
        + ".",
        "",
        f"Few tokens, CUDA graph over four sets of weights, in turns; device copy {record['copy_gb_per_s']:.0f} GB/s:",
        *rows(
            ("T", "us", "bytes of K, U, V ÷ time ÷ copy", "gate fused, us"),
            [(x["T"], f"{x['us']:.1f}", f"{x['weights_x_copy']:.3f}", f"{x['gated_us']:.1f}") for x in record["small"]],
        ),
        "",
        "Relative L2 error against float64: "
        + ", ".join(f"{value:.2e} at T={int(T):,}" for T, value in record["errors"].items())
        + f". {record['different_of_1000_runs']} of 1000 runs differ.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--library", type=pathlib.Path, default=pathlib.Path(__file__).parents[1] / "flashmhf" / "libflashmhf_hopper.so")
    options = parser.parse_args()
    torch.ops.load_library(str(options.library.resolve()))
    ops = torch.ops.flashmhf_hopper
    record = {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    record |= {"dtype": "bfloat16", "r": "float32"}

    a, b = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    c = torch.empty_like(a)

    def matmul():
        torch.mm(a, b, out=c)

    burst(matmul, 1000)
    wg, wu, wd = ((torch.randn(*s, device=DEVICE) / math.sqrt(s[0])).bfloat16() for s in ((2048, 8192), (2048, 8192), (8192, 2048)))
    matmul_flop = 2 * 8192**3

    def compare(name, T, H, d_h, E, d_e, gated=False, swiglu=False, ms=40):  # noqa: N803
        q, k, u, v, r, w = problem(T, H, d_h, E, d_e)
        e = error(ops.forward(q, k, u, v, r, True), q, k, u, v, r)
        if not e <= LIMIT[q.dtype]:
            print(f"{name}: WRONG, relative error {e:.2e}", flush=True)
            return None
        x = q.view(T, -1)
        subjects = {"matmul": matmul, "forward": lambda: ops.forward(q, k, u, v, r, True)}
        if gated:
            subjects["gated"] = lambda: ops.gated_forward(q, k, u, v, w, 1e-20, True)
            subjects["separate"] = lambda: ops.forward(q, k, u, v, gate(q, w, 1e-20), True)
        if swiglu:
            subjects["swiglu"] = lambda: (torch.nn.functional.silu(x @ wg) * (x @ wu)) @ wd
        t = in_turns(subjects, ms=ms)
        flop = 6 * T * H * d_h * E * d_e
        row = {"T": T, "H": H, "d_h": d_h, "E": E, "d_e": d_e, "error": e, "ms": t["forward"], "tflops": flop / t["forward"] / 1e9}
        row["matmul_tflops"] = matmul_flop / t["matmul"] / 1e9
        row["x_matmul"] = row["tflops"] / row["matmul_tflops"]
        if gated:
            row["gated_ms"], row["gated_tflops"] = t["gated"], flop / t["gated"] / 1e9
            row["separate_ms"] = t["separate"]
        if swiglu:
            row["swiglu_tflops"] = 6 * T * 2048 * 8192 / t["swiglu"] / 1e9
            row["x_swiglu"] = row["tflops"] / row["swiglu_tflops"]
        figures = (f"{key}={value:.3f}" for key, value in row.items() if isinstance(value, float) and key != "error")
        print(name, *figures, f"error={e:.2e}", flush=True)
        return row

    record["flagship"] = [compare("flagship", T, **FLAGSHIP, gated=True, swiglu=True, ms=80) for T in (32256, 129024)]
    record["lengths"] = [compare(f"T={8 * L}", 8 * L, **FLAGSHIP, ms=100) for L in (192, 384, 768, 1536, 1920, 2880, 4032, 8064, 16128)]
    rates = [row["tflops"] for row in record["lengths"] if row]
    record["lowest_rate_over_highest"] = min(rates) / max(rates)
    models = {"flagship": (16, 22, 384), "1.3B": (16, 15, 384), "370M": (8, 7, 384), "128M": (6, 8, 256)}
    record["models"] = {name: compare(name, 32768, H, 128, E, d_e) for name, (H, E, d_e) in models.items()}
    head_dims = ((64, 32, 192), (96, 21, 256), (256, 8, 704))
    record["head_dims"] = [compare(f"d_h={d_h}", 32256, H, d_h, 22, d_e, gated=True) for d_h, H, d_e in head_dims]

    q, k, u, v, r, _ = problem(32384, **FLAGSHIP)
    record["ragged"] = []
    for short, full in ((1000, 1024), (1537, 1600), (32257, 32320)):
        calls = {name: (lambda n=n: ops.forward(q[:n], k, u, v, r[:n], True)) for name, n in (("short", short), ("full", full))}
        t = in_turns(calls, ms=15)
        record["ragged"].append({"T": short, "next_tile": full, "time_ratio": t["short"] / t["full"]})
        print(record["ragged"][-1], flush=True)

    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    copy = torch.empty_like(source)
    record["copy_gb_per_s"] = 2 * source.numel() / burst(lambda: copy.copy_(source), 25) / 1e6
    sets = [problem(256, **FLAGSHIP, seed=i) for i in range(4)]  # together larger than the L2
    weight_bytes = 3 * sets[0][1].numel() * 2

    def few(T, operator, last):  # noqa: N803
        return graph_of(lambda i: operator(sets[i % 4][0][:T], *sets[i % 4][1:4], *last(sets[i % 4], T)))

    token_counts = (1, 16, 64, 128, 256)
    graphs = {(T, "us"): few(T, ops.forward, lambda s, n: (s[4][:n], True)) for T in token_counts}
    graphs |= {(T, "gated_us"): few(T, ops.gated_forward, lambda s, n: (s[5], 1e-20, True)) for T in token_counts}
    times = in_turns({key: graph.replay for key, graph in graphs.items()}, ms=10)
    record["small"] = []
    for T in token_counts:  # noqa: N806
        us, gated = (times[T, key] * 1e3 / 16 for key in ("us", "gated_us"))
        row = {"T": T, "us": us, "weights_x_copy": weight_bytes / us / 1e3 / record["copy_gb_per_s"], "gated_us": gated}
        record["small"].append(row)
        print(row, flush=True)

    del q, r  # for room
    record["errors"] = {}
    for T in (129_024, 1_048_577):  # noqa: N806
        q, k, u, v, r, _ = problem(T, 16, 128, 2, 64)
        record["errors"][str(T)] = error(ops.forward(q, k, u, v, r, True), q, k, u, v, r, samples=4096)
    q, k, u, v, r, _ = problem(3000, 5, 128, 7, 80)
    first = ops.forward(q, k, u, v, r, True)
    different = 0
    for i in range(1000):  # other sizes in between move the workspace around
        torch.full((1 << (12 + i % 12),), float("nan"), device=DEVICE)
        different += not torch.equal(ops.forward(q, k, u, v, r, True), first)
    record["different_of_1000_runs"] = different
    print(record["errors"], f"{different} of 1000 runs differ", flush=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(report(record))
    return 0 if all(row for row in record["flagship"] + record["lengths"] + record["head_dims"]) and not different else 1


if __name__ == "__main__":
    raise SystemExit(main())
