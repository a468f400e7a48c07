"""Tokens a second of ``model.generate`` with a static cache and CUDA graphs: FlashMHF-1.3B against SwiGLU-1.3B, random weights.

    $ python benchmarks/generate.py --out benchmarks/results/generate_h200.json
    $ python benchmarks/generate.py --fp8 --batches 1 8 --contexts 512 --out benchmarks/results/generate_fp8_h200.json

All is bf16; with --fp8 the bf16 models run beside models whose feed-forward networks are in e4m3: FlashMHF with and without its
projections, SwiGLU by torch._scaled_mm with scales for rows. Networks with e4m3 projections, SwiGLU's and FlashMHF's, are compiled for few
tokens, so that a quantisation is one kernel. Before their time is taken, the logits of the FP8 models are compared with those of the same
weights in bf16.

A cell is a batch and a context, the tokens of each prompt. The rate is that of the tokens after the capture; the models take turns for
ROUNDS rounds, and a round's rates are compared with each other. Host: the time a token in which the host does not wait for the device.
``transformers`` is its own loop with the dynamic cache. Before a bf16 time is taken, 16 tokens are compared with that loop in float32.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from flashmhf import quantize
from flashmhf.models.presets import preset
from flashmhf.testing import relative_l2

from .harness import environment, suite
from .harness.fp8 import Fp8SwiGLU

BATCHES, CONTEXTS, NEW, ROUNDS, SKIPPED = (1, 8, 32), (512, 4096), 96, 3, 8
MODELS = {"flashmhf": "flashmhf-1.3b", "swiglu": "swiglu-1.3b"}
KEPT = "flashmhf, bf16 projections"
FP8_MODELS = {"flashmhf": "flashmhf-1.3b", KEPT: "flashmhf-1.3b", "swiglu": "swiglu-1.3b"}
COMPILED_TOKENS = 64  # at most, of a compiled FP8 network
FP8_DISTANCE = 0.3  # at most, of FP8 logits from those of bf16, relative L2


class _Clock:
    """A streamer that keeps the time at which each token reached the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    def seconds(self) -> float:
        """A token, after the first SKIPPED; the first entry is the prompt's."""
        times = self.times[1 + SKIPPED :]
        return (times[-1] - times[0]) / (len(times) - 1)


class _Waiting:
    """Adds up the time in which the host waits for events inside the block."""

    def __enter__(self) -> _Waiting:
        self.waits, self._original = [], torch.cuda.Event.synchronize

        def synchronize(event: torch.cuda.Event) -> None:
            begin = time.perf_counter()
            self._original(event)
            self.waits.append(time.perf_counter() - begin)

        torch.cuda.Event.synchronize = synchronize
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.Event.synchronize = self._original

    def seconds(self) -> float:
        waits = self.waits[SKIPPED:]
        return sum(waits) / len(waits)


def generate(model, ids: torch.Tensor, new: int = NEW, **settings):
    return model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=1, **settings)


def prompt(batch: int, context: int) -> torch.Tensor:
    return torch.randint(2, 50_000, (batch, context), device="cuda", generator=torch.Generator("cuda").manual_seed(0))


def timed(model, ids: torch.Tensor) -> tuple[float, float]:
    """(seconds a token, seconds a token in which the host worked)."""
    clock = _Clock()
    with _Waiting() as waiting:
        generate(model, ids, cache_implementation="static", streamer=clock)
    return clock.seconds(), clock.seconds() - waiting.seconds()


def check(name: str) -> None:
    """Raises AssertionError where the static cache gives other tokens than transformers' loop, in float32 with fewer layers."""
    model = AutoModelForCausalLM.from_config(preset(name).config(num_hidden_layers=2)).to("cuda").eval()
    ids = prompt(2, 100)
    assert torch.equal(generate(model, ids, 16, cache_implementation="static"), generate(model, ids, 16)), name


class _CompiledForFewTokens(torch.nn.Module):
    """``network``, compiled for at most COMPILED_TOKENS tokens: a prompt's compilation is not part of the comparison."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network, self.compiled = network, torch.compile(network, fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.compiled if x.shape[:-1].numel() <= COMPILED_TOKENS else self.network)(x)


def build(name: str, device: str = "cuda"):
    with torch.device(device):
        return AutoModelForCausalLM.from_config(preset(name).config(max_position_embeddings=8192), dtype=torch.bfloat16).eval()


@torch.no_grad()
def quantised(key: str):
    """The FP8 model of FP8_MODELS. Raises AssertionError where its logits are not near those of bf16."""
    model, ids = build(FP8_MODELS[key]), prompt(1, 2 * COMPILED_TOKENS)
    expected = model(ids).logits.double()
    for layer in model.model.layers:
        plain = layer.mlp
        layer.mlp = Fp8SwiGLU(plain) if key == "swiglu" else quantize.to_fp8(plain, projections=key != KEPT)
        if key != KEPT:
            layer.mlp = _CompiledForFewTokens(layer.mlp)
    distance = relative_l2(model(ids).logits, expected)
    assert distance <= FP8_DISTANCE, (key, distance)
    print(f"{key}: logits {distance:.3f} from bf16", flush=True)
    return model


def own_loop(models: dict) -> list[dict]:
    """transformers' loop at batch 1; the best of two rounds."""
    ids, best = prompt(1, CONTEXTS[0]), dict.fromkeys(models, float("inf"))
    torch.cuda.empty_cache()
    for _ in range(2):
        for key, model in models.items():
            clock = _Clock()
            generate(model, ids, streamer=clock)
            best[key] = min(best[key], clock.seconds())
    rows = [
        {"batch": 1, "context": CONTEXTS[0], "subject": f"{key} transformers", "tokens_per_s": 1 / seconds} for key, seconds in best.items()
    ]
    print(*rows, sep="\n")
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--fp8", action="store_true", help="feed-forward networks in FP8")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this PyTorch sees no CUDA GPU")
    for name in () if options.fp8 else MODELS.values():
        check(name)
    models = {key: quantised(key) for key in FP8_MODELS} if options.fp8 else {}
    models |= {f"{key} bf16" if options.fp8 else key: build(name) for key, name in MODELS.items()}
    rows = []
    for context in options.contexts:
        for batch in options.batches:
            ids = prompt(batch, context)
            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(ROUNDS):
                for key, model in models.items():
                    found.setdefault(key, []).append(timed(model, ids))
            for key, measured in found.items():
                seconds, host = (statistics.median(values) for values in zip(*measured, strict=True))
                row = {"batch": batch, "context": context, "subject": key, "tokens_per_s": batch / seconds}
                row |= {"ms_per_token": 1e3 * seconds, "host_ms_per_token": 1e3 * host}
                for baseline in ("swiglu", "swiglu bf16"):
                    if key.startswith("flashmhf") and baseline in found:
                        ratios = (theirs[0] / ours[0] for ours, theirs in zip(measured, found[baseline], strict=True))
                        row[f"x_{baseline.replace(' ', '_')}"] = statistics.median(ratios)
                rows.append(row)
                print(row, flush=True)
    if not options.fp8:
        rows += own_loop(models)
    parameters = {key: sum(p.numel() for p in build(name, "meta").parameters()) for key, name in MODELS.items()}
    record = {"environment": environment.describe(torch.device("cuda", 0)), "parameters": parameters, "new_tokens": NEW, "rows": rows}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        suite.write_json(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
