"""Whole language models of FlashMHF beside SwiGLU with random weights: prefill, generation with a static cache,
training.

Beside the presets' scales, prefill and generation take "26m" and "57m": the pairs whose losses docs/quality.md
compares.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from flashmhf import quantize
from flashmhf.models import FlashMHFConfig
from flashmhf.models.presets import preset
from flashmhf.testing import relative_l2

from ..harness import timing
from ..harness.measure import Cell, Context, Prepared, attempt, clear, require
from ..harness.training import Training
from .fp8 import Fp8SwiGLU

FFNS = ("flashmhf", "swiglu")
NEW, SKIPPED = 96, 8  # tokens generated, and of them before the time counts: they hold the captures
BATCHES = {"prefill": (1, 8), "generate": (1, 8, 64, 256), "train": (8,)}
SMALLER = {("train", "1.3b"): (4,)}  # what fits into 80 GB without checkpointing
COMPILED_TOKENS = 64  # at most, of a compiled FP8 network
FP8_DISTANCE = 0.3  # at most, of FP8 logits from those of bf16, relative L2
RUNS = Path(__file__).resolve().parents[2] / "experiments/results/runs.jsonl"
TRAINED = {  # models of RUNS
    "flashmhf-26m": "long-flash128-8L-zero-lr5",
    "swiglu-26m": "long-swiglu-9L-zero-lr5",
    "flashmhf-57m": "long-57m-flash128-8L-lr2",
    "swiglu-57m": "long-57m-swiglu",
}
VOCABULARY = 16_384  # of the models of RUNS


def configuration(name: str, **sizes: object) -> FlashMHFConfig:
    """The configuration of a preset, or of a model that experiments/compare.py trained."""
    if name not in TRAINED:
        return preset(name).config(**sizes)
    run = next(line for line in map(json.loads, RUNS.read_text().splitlines()) if line["run"] == TRAINED[name])[
        "configuration"
    ]
    return FlashMHFConfig(
        ffn_type=run["ffn"],
        vocab_size=VOCABULARY,
        hidden_size=run["d_model"],
        intermediate_size=run["width"],
        num_hidden_layers=run["layers"],
        num_attention_heads=run["attention_heads"],
        ffn_num_heads=run["heads"],
        ffn_num_subnets=run["subnets"],
        tie_word_embeddings=True,
        **sizes,
    )


def build(name: str, context: Context, **sizes):
    with context.device:
        return AutoModelForCausalLM.from_config(configuration(name, **sizes), dtype=context.dtype).eval()


def prompt(context: Context, batch: int, length: int) -> torch.Tensor:
    """Token numbers [batch, length], the same in every run."""
    return torch.randint(2, 256, (batch, length), generator=torch.Generator().manual_seed(0)).to(context.device)


def prefill_cell(scale: str, batch: int, length: int, blocks: tuple[str, ...]) -> Cell:
    """The last token's logits of ``batch`` prompts, eager and with every block compiled."""

    @torch.no_grad()
    def prepare(ffn: str, compiled: bool, context: Context, ids: torch.Tensor) -> Prepared:
        model = build(f"{ffn}-{scale}", context, max_position_embeddings=max(length, 4096))
        run = torch.no_grad()(functools.partial(model, ids, use_cache=False, logits_to_keep=1))
        row = {"parameters": sum(p.numel() for p in model.parameters())}
        if compiled:
            expected = run().logits
            # Beyond Dynamo's limit the blocks of later cells would run eagerly, under the name of compiled ones.
            torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 256, True
            for block in model.model.layers:
                block.compile(dynamic=False)
            row["error"] = require({"logits": relative_l2(run().logits, expected.double())}, 0.05)
        if (beyond := timing.peak_memory(run, context.device)) is not None:
            row["memory_mib"] = (sum(p.nbytes for p in model.parameters()) + beyond) / 2**20
        return Prepared(run, 1, row)

    kinds = [(ffn, way == "compiled") for way in blocks for ffn in FFNS]
    subjects = {f"{ffn}{' compiled' * on}": functools.partial(prepare, ffn, on) for ffn, on in kinds}
    row = {"part": "prefill", "scale": scale, "batch": batch, "length": length}
    faster = {"swiglu": ("swiglu", 1.0), "swiglu compiled": ("swiglu compiled", 1.0)}
    return Cell(row, subjects, lambda context: prompt(context, batch, length), faster_than=faster, window_scale=5)


# Generation


class _Clock:
    """A streamer that keeps the time at which each token reached the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    def seconds(self) -> float:
        """Per token after the first SKIPPED; the first entry is the prompt's."""
        times = self.times[1 + SKIPPED :]
        return (times[-1] - times[0]) / (len(times) - 1)


class _CompiledForFewTokens(torch.nn.Module):
    """``network``, compiled for at most COMPILED_TOKENS tokens:

    a prompt's compilation is not part of the comparison.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network, self.compiled = network, torch.compile(network, fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.compiled if x.shape[:-1].numel() <= COMPILED_TOKENS else self.network)(x)


def generate(model, ids: torch.Tensor, new: int, **settings):
    return model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=1, **settings)


@functools.cache
@torch.no_grad()
def generating(subject: str, scale: str, device: torch.device, dtype: torch.dtype):
    """The model of a subject, kept for all cells.

    Raises RedCheckError for FP8 logits that are not near those of 16 bits.
    """
    context = Context(device, dtype)
    model = build(f"{subject.split()[0]}-{scale}", context, max_position_embeddings=8192)
    if "fp8" not in subject:
        return model
    ids = prompt(context, 1, 2 * COMPILED_TOKENS)
    expected = model(ids).logits.double()
    for layer in model.model.layers:
        # Compiled, so that a quantisation is one kernel.
        layer.mlp = (
            _CompiledForFewTokens(Fp8SwiGLU(layer.mlp)) if subject == "swiglu fp8" else quantize.to_fp8(layer.mlp)
        )
    require({"FP8 logits": relative_l2(model(ids).logits, expected)}, FP8_DISTANCE)
    return model


@dataclass(frozen=True)
class GenerateCell:
    """Tokens per second of ``model.generate`` with a static cache;

    the models take turns, and a round's rates are compared.
    """

    scale: str
    batch: int
    length: int
    subjects: tuple[str, ...]
    new: int

    def measure(self, context: Context) -> list[dict]:
        row = {"part": "generate", "scale": self.scale, "batch": self.batch, "context": self.length}
        rows = {name: {**row, "subject": name} for name in self.subjects}
        ids, times = prompt(context, self.batch, self.length), {}
        for _ in range(1 + context.rounds):
            for name in self.subjects:
                if "status" in rows[name]:
                    continue
                clear(context.device)
                found = attempt(lambda name=name: {"seconds": self._seconds(name, ids, context)})
                if "seconds" in found:
                    times.setdefault(name, []).append(found["seconds"])
                else:
                    rows[name] |= found
        for name, seconds in ((name, values[1:]) for name, values in times.items() if "status" not in rows[name]):
            middle = statistics.median(seconds)
            rows[name] |= {
                "status": "ok",
                "ms": {"p50": 1e3 * middle},
                "tokens_per_s": self.batch / middle,
                "samples": len(seconds),
            }
            for other in ("swiglu", "swiglu fp8"):
                if other in times and name.startswith("flashmhf"):
                    ratios = [theirs / ours for ours, theirs in zip(seconds, times[other][1:], strict=True)]
                    rows[name][f"x_{other}"] = statistics.median(ratios)
        return list(rows.values())

    def _seconds(self, name: str, ids: torch.Tensor, context: Context) -> float:
        clock = _Clock()
        model = generating(name.removesuffix(", dynamic cache"), self.scale, context.device, context.dtype)
        cache = {} if name.endswith("dynamic cache") else {"cache_implementation": "static"}
        generate(model, ids, self.new, streamer=clock, **cache)
        return clock.seconds()


# Training


@dataclass(frozen=True)
class TrainCell:
    """Steps of both models at one batch, eager or with every block compiled, with or without activation checkpointing."""

    scale: str
    batch: int
    length: int
    steps: int
    compiled: bool
    checkpointing: bool

    def measure(self, context: Context) -> list[dict]:
        row = {"part": "train", "scale": self.scale, "batch": self.batch, "length": self.length}
        row |= {"blocks": "compiled" if self.compiled else "eager", "checkpointing": self.checkpointing}
        rows = []
        for ffn in FFNS:
            torch._dynamo.reset()
            clear(context.device)
            found = attempt(functools.partial(self._train, ffn, context))
            rows.append({**row, "subject": ffn} | found)
        if all(found["status"] == "ok" for found in rows):
            rows[0]["x_swiglu"] = rows[1]["ms"]["p50"] / rows[0]["ms"]["p50"]
        return rows

    def _train(self, ffn: str, context: Context) -> dict:
        name = f"{ffn}-{self.scale}"
        settings = {"length": self.length, "compiled": self.compiled, "checkpointing": self.checkpointing}
        return {"status": "ok"} | Training(name, context.device, **settings).measure(self.batch, self.steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scales", nargs="+", default=("128m", "370m", "1.3b"), metavar="NAME", help="of the presets; 26m, 57m"
    )
    parser.add_argument("--batches", type=int, nargs="+", metavar="N")
    parser.add_argument(
        "--contexts", type=int, nargs="+", metavar="N", help="tokens of a prompt or of a training sequence"
    )
    parser.add_argument("--fp8", action="store_true", help="generate: also with feed-forward networks in FP8")
    parser.add_argument(
        "--blocks",
        nargs="+",
        choices=("eager", "compiled"),
        default=("eager", "compiled"),
        help="train and model: both",
    )
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=("off", "on"), help="train: both")
    parser.add_argument("--new", type=int, default=NEW, help=f"generate: tokens ({NEW})")
    parser.add_argument("--steps", type=int, default=10, help="train: steps that count (10)")


def cells(options: argparse.Namespace, context: Context) -> list:
    subjects = (
        *FFNS,
        *(("flashmhf fp8", "swiglu fp8") if options.fp8 else ("flashmhf, dynamic cache", "swiglu, dynamic cache")),
    )
    settings = [(blocks == "compiled", on == "on") for blocks in options.blocks for on in options.checkpointing]
    found = []
    for part in options.parts:
        for scale in options.scales:
            for length in options.contexts or {"prefill": (4096,), "generate": (512,), "train": (4096,)}[part]:
                for batch in options.batches or SMALLER.get((part, scale), BATCHES[part]):
                    if part == "prefill":
                        found.append(prefill_cell(scale, batch, length, options.blocks))
                    elif part == "generate":
                        found.append(GenerateCell(scale, batch, length, subjects, options.new))
                    else:
                        found += [TrainCell(scale, batch, length, options.steps, *setting) for setting in settings]
    return found
