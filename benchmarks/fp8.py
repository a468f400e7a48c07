"""FP8 inference: the operator, decode, whole networks and a trained model against bf16 and against an FP8 SwiGLU.

    $ python benchmarks/fp8.py --out benchmarks/results/fp8_h200.json [--parts operator decode networks model] [--tokens DIR]

The FP8 SwiGLU is two products of torch._scaled_mm with scales for rows, its quantisation included, compiled. Subjects take turns in
windows of CUDA events, as CUDA graphs; decode and whole networks run layers whose weights do not fit in the L2 cache together, networks as
CUDA graphs and called by the host.
The part "model" trains the 26M model of experiments/queue_muon.json (one minute) on the tokens of experiments/corpus.py and compares
held-out losses. Results are checked against float64 before they are timed. The record is written after every part. Legend: T tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn

import flashmhf
from flashmhf import quantize, reference
from flashmhf.testing import relative_l2

from .harness import environment, timing
from .harness.fp8 import Fp8SwiGLU
from .harness.shapes import LENGTHS, SHAPES

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = ("operator", "decode", "networks", "model")
SETTINGS = {"device": "cuda", "dtype": torch.bfloat16}
PRODUCT = 8192
ERROR_LIMIT = 0.07
DECODE_TOKENS = (1, 16, 64)
NETWORK_TOKENS = (*DECODE_TOKENS, 128, 256)  # beside the paper's lengths
HEADS = {64: (32, 22, 192), 96: (21, 22, 256), 128: (16, 22, 384), 256: (8, 22, 704)}  # d_h -> (H, E, d_e)


def weights(heads: int, subnets: int, subnet_dim: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = heads, subnets, subnet_dim, head_dim
    k, u, v = (torch.randn(shape, **SETTINGS) for _ in range(3))
    return k / math.sqrt(head_dim), u / math.sqrt(head_dim), v / math.sqrt(subnets * subnet_dim)


def inputs(tokens: int, heads: int, subnets: int, head_dim: int) -> tuple[Tensor, Tensor]:
    q = torch.randn(tokens, heads, head_dim, **SETTINGS)
    r = torch.rand(tokens, heads, subnets, device="cuda")
    return q, r / r.sum(-1, keepdim=True)


def median_ms(runs: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, float]:
    samples = timing.interleave(runs, timing.CudaTimer(), rounds, seconds, settle_seconds=seconds / 2)
    return {name: 1e3 * statistics.median(values) for name, values in samples.items()}


def product() -> Callable[[], None]:
    a, b = (torch.randn(PRODUCT, PRODUCT, **SETTINGS) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    """So many calls as a CUDA graph."""

    def calls() -> None:
        for _ in range(times):
            run()

    return timing.graphed(calls)


def operator() -> list[dict]:
    """The FP8 operator beside the bf16 one and a bf16 product; at d_h = 128 also beside an FP8 SwiGLU of equal size."""
    rows, swiglu = [], torch.compile(Fp8SwiGLU(flashmhf.SwiGLU(2048, 8448, **SETTINGS)), fullgraph=True, dynamic=True)
    multiply = product()
    for head_dim, (heads, subnets, subnet_dim) in HEADS.items():
        kuv = weights(heads, subnets, subnet_dim, head_dim)
        packed = quantize.pack_fp8(*kuv)
        for tokens in (1536, 32256):
            q, r = inputs(tokens, heads, subnets, head_dim)
            chosen = torch.linspace(0, tokens - 1, 64, device="cuda").long()
            exact = reference.forward(*(x.double() for x in (q[chosen], *kuv, r[chosen])))
            error = relative_l2(quantize.forward(q, packed, r)[chosen], exact)
            if not error <= ERROR_LIMIT:
                raise RuntimeError(f"d_h = {head_dim}, T = {tokens}: relative L2 error {error}, at most {ERROR_LIMIT} expected")
            runs: dict[str, Callable[[], object]] = {
                "fp8": lambda q=q, r=r, p=packed: quantize.forward(q, p, r),
                "bf16": lambda q=q, r=r, w=kuv: flashmhf.flash_mhf(q, *w, r),
                "product": multiply,
            }
            if head_dim == 128:
                x = q.view(tokens, -1)
                runs["swiglu fp8"] = lambda x=x: swiglu(x)
            calls, seconds = (1, 0.1) if tokens > 4096 else (8, 0.03)
            graphs = {name: repeated(run, calls) for name, run in runs.items()}  # the GPU's time, however long the host takes for a call
            ms = {name: t / calls for name, t in median_ms(graphs, 6, seconds).items()}
            flops = 6 * tokens * heads * head_dim * subnets * subnet_dim
            rate = {name: (2 * PRODUCT**3 if name == "product" else flops) / t / 1e9 for name, t in ms.items()}
            rows.append(
                {"d_h": head_dim, "tokens": tokens, "error": error, "ms": ms, "tflops": rate}
                | {f"fp8 over {name}": rate["fp8"] / rate[name] for name in rate if name != "fp8"}
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * median_ms({"copy": lambda: target.copy_(source)}, 3, 0.05)["copy"])


def decode() -> list[dict]:
    """The operator at few tokens: time and its share of the copy's bandwidth for the bytes of the weights."""
    heads, subnets, subnet_dim = HEADS[128]
    layers = [weights(heads, subnets, subnet_dim, 128) for _ in range(4)]
    packed = [quantize.pack_fp8(*layer) for layer in layers]
    size, bandwidth, rows = layers[0][0].numel() * 3, copy_bandwidth(), []
    for tokens in DECODE_TOKENS:
        q, r = inputs(tokens, heads, subnets, 128)

        def fp8(q=q, r=r):
            for each in packed * 5:
                quantize.forward(q, each, r)

        def bf16(q=q, r=r):
            for each in layers * 5:
                flashmhf.flash_mhf(q, *each, r)

        ms = median_ms({"fp8": timing.graphed(fp8), "bf16": timing.graphed(bf16)}, 8, 0.02)
        us = {name: 1e3 * value / 20 for name, value in ms.items()}
        shares = {"fp8": size / (1e-6 * us["fp8"]) / bandwidth, "bf16": 2 * size / (1e-6 * us["bf16"]) / bandwidth}
        rows.append({"tokens": tokens, "us": us, "share of copy": shares, "copy GB/s": bandwidth / 1e9})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def networks() -> list[dict]:
    """Layers with projections, four each: 24 SwiGLU ÷ 20 FlashMHF, all in FP8 (and FlashMHF with bf16 projections).

    "graph": from CUDA graphs, the GPU's time. "called": queued by the host, SwiGLU compiled and FlashMHF called as it is.
    """
    shape, rows = SHAPES["paper"], []
    plain = [flashmhf.FlashMHF(shape.d_model, shape.heads, shape.subnets, shape.subnet_dim, **SETTINGS) for _ in range(4)]
    subjects: dict[str, list[nn.Module]] = {
        name: [quantize.to_fp8(each, projections=projections) for each in plain]
        for name, projections in (("flashmhf", True), ("flashmhf, bf16 projections", False))
    }
    swiglu = [Fp8SwiGLU(flashmhf.SwiGLU(shape.d_model, shape.swiglu_dim, **SETTINGS)) for _ in range(4)]
    subjects["swiglu"] = [torch.compile(layer, fullgraph=True, dynamic=True) for layer in swiglu]
    ratio = shape.swiglu_layers / shape.layers
    with torch.no_grad():
        for tokens in (*NETWORK_TOKENS, *(8 * length for length in LENGTHS)):
            x = torch.randn(tokens, shape.d_model, **SETTINGS)
            error = relative_l2(subjects["flashmhf"][0](x), plain[0](x).double())
            if not error <= 2 * ERROR_LIMIT:
                raise RuntimeError(f"T = {tokens}: relative L2 distance {error} between FP8 and bf16")

            def layers(name, x=x):
                for layer in subjects[name]:
                    layer(x)

            called = {name: (lambda name=name: layers(name)) for name in subjects}
            for run in called.values():
                run()  # compiles
            row: dict[str, object] = {"tokens": tokens, "error": error}
            for way, runs in (("graph", {name: timing.graphed(run) for name, run in called.items()}), ("called", called)):
                ms = {name: value / 4 for name, value in median_ms(runs, 5, 0.03).items()}
                ratios = {name: ratio * ms["swiglu"] / ms[name] for name in ms if name != "swiglu"}
                row[way] = {"ms a layer": ms, "24 swiglu over 20": ratios}
            rows.append(row)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def model(tokens: pathlib.Path) -> list[dict]:
    """Held-out loss of a trained model in bf16 and with its networks in FP8."""
    sys.path.insert(0, str(ROOT / "experiments"))
    import compare

    run = compare.Run(
        "fp8", "flashmhf", 1040, heads=8, subnets=5, optimizer="muon", learning_rate=8e-3, rates={"projection": 0.3}, steps=700
    )
    data, trained = compare.Tokens(tokens, "cuda"), []
    validate = compare.validate
    compare.validate = lambda run, model, *rest: trained.append(model) or {"all": 0.0}
    try:
        with tempfile.TemporaryDirectory() as directory:
            compare.train(run, data, "cuda", True, pathlib.Path(directory) / "fp8.state")
    finally:
        compare.validate = validate
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = compare.Model(run, data.stored["vocabulary"])
    plain.load_state_dict(trained[0].state_dict())
    windows = torch.cat([text.unfold(0, run.context + 1, run.context)[:256] for text in data.validation.values()])

    def loss() -> float:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            return statistics.mean(plain(batch.long()).item() for batch in windows.split(32))

    row: dict[str, object] = {
        "network": "FlashMHF d_h 64, 26M",
        "steps": run.steps,
        "held-out tokens": windows[:, 1:].numel(),
        "bf16": loss(),
    }
    networks = [block.ffn for block in plain.blocks]
    for name, projections in (("fp8, bf16 projections", False), ("fp8", True)):
        for block, network in zip(plain.blocks, networks, strict=True):
            block.ffn = quantize.to_fp8(network, projections=projections)
        row[name] = loss()
        row[f"{name}: over bf16"] = row[name] / row["bf16"]
    print(json.dumps(row), flush=True)
    return [row]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens", type=pathlib.Path, help="the folder of tokens of experiments/corpus.py, for the part model")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this PyTorch sees no CUDA GPU")
    if "model" in options.parts and options.tokens is None:
        parser.error("--parts model needs --tokens")
    record, failed = environment.describe(torch.device("cuda", 0)), 0
    measure = {"operator": operator, "decode": decode, "networks": networks, "model": lambda: model(options.tokens)}
    for part in options.parts:
        try:
            record[part] = measure[part]()
        except Exception as error:  # the other parts are still measured
            failed, record[part] = 1, {"failed": environment.brief(error)}
            print(f"{part}: {error!r}", file=sys.stderr, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
