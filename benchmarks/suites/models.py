"""Whole language models of FlashMHF beside SwiGLU with random weights: prefill, generation by transformers, training.

Beside the presets' scales there are "7b", and "26m", "57m" and "58m": the models whose losses docs/quality.md compares,
the last with FlashMHF of 10 and 11 layers beside 12 of SwiGLU. ``--layers 21`` adds FlashMHF with 21 layers and as many
parameters to presets.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from flashmhf import quantize
from flashmhf.testing import relative_l2

from ..harness import timing
from ..harness.measure import Cell, Context, Prepared, attempt, clear, require
from ..harness.training import TRAINED, Training, configuration, trainable
from .fp8 import Fp8SwiGLU

FFNS = ("flashmhf", "swiglu")
NEW = 128  # tokens generated
CACHES = ("static", "dynamic")  # transformers compiles the model for the first
CHECKPOINTED = {"": False, "blocks": True, "networks": "networks", "q": "q"}  # what backward computes again, in rows
BATCHES = {"prefill": (1, 8), "generate": (1, 8, 32), "train": (8,)}
SMALLER = {("train", "1.3b"): (4,)}  # what fits into 80 GB without checkpointing
FP8_DISTANCE = 0.3  # at most, of FP8 logits from those of bf16, relative L2


def build(subject: str, scale: str, context: Context, **sizes):
    with context.device:
        return AutoModelForCausalLM.from_config(configuration(subject, scale, **sizes), dtype=context.dtype).eval()


@torch.no_grad()
def in_fp8(model: nn.Module, subject: str, ids: torch.Tensor) -> nn.Module:
    """The model, with networks in FP8 where its subject says so. Raises RedCheckError for logits far from before."""
    if subject.endswith(" fp8"):
        expected = model(ids, logits_to_keep=1).logits.double()
        for layer in model.model.layers:
            layer.mlp = Fp8SwiGLU(layer.mlp) if subject == "swiglu fp8" else quantize.to_fp8(layer.mlp)
        require({"FP8 logits": relative_l2(model(ids, logits_to_keep=1).logits, expected)}, FP8_DISTANCE)
    return model


def prompt(context: Context, batch: int, length: int) -> torch.Tensor:
    """Token numbers [batch, length], the same in every run."""
    return torch.randint(2, 256, (batch, length), generator=torch.Generator().manual_seed(0)).to(context.device)


def allow_many_graphs() -> None:
    """Beyond Dynamo's limit models of later cells would run eagerly, under the name of compiled ones."""
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 256, True
    torch._dynamo.config.accumulated_recompile_limit = 1024


def prefill_cell(
    scale: str, batch: int, length: int, blocks: tuple[str, ...], networks: tuple[str, ...] = FFNS
) -> Cell:
    """The last token's logits of ``batch`` prompts, eager and with every block compiled."""

    @torch.no_grad()
    def prepare(network: str, compiled: bool, context: Context, ids: torch.Tensor) -> Prepared:
        model = build(network.removesuffix(" fp8"), scale, context, max_position_embeddings=max(length, 4096))
        row = {"parameters": sum(p.numel() for p in model.parameters())}
        model = in_fp8(model, network, ids[:1])
        run = torch.no_grad()(functools.partial(model, ids, use_cache=False, logits_to_keep=1))
        if compiled:
            expected = run().logits
            allow_many_graphs()
            for block in model.model.layers:
                block.compile(dynamic=False)
            limit = FP8_DISTANCE if network.endswith(" fp8") else 0.05
            row["error"] = require({"logits": relative_l2(run().logits, expected.double())}, limit)
        if (beyond := timing.peak_memory(run, context.device)) is not None:
            weights = itertools.chain(model.parameters(), model.buffers())
            row["memory_mib"] = (sum(weight.nbytes for weight in weights) + beyond) / 2**20
            row["gpu_ms"] = timing.kernels(run).all / 1e6
        return Prepared(run, 1, row)

    kinds = [(network, way == "compiled") for way in blocks for network in networks]
    subjects = {f"{network}{' compiled' * on}": functools.partial(prepare, network, on) for network, on in kinds}
    row = {"part": "prefill", "scale": scale, "batch": batch, "length": length}
    faster = {name: (name, 1.0) for name in subjects if name.startswith("swiglu")}
    return Cell(row, subjects, lambda context: prompt(context, batch, length), faster_than=faster, window_scale=5)


# Generation


@functools.cache
@torch.no_grad()
def generating(subject: str, scale: str, device: torch.device, dtype: torch.dtype):
    """The model of a subject, for all cells."""
    context = Context(device, dtype)
    model = build(subject.removesuffix(" fp8"), scale, context, max_position_embeddings=8192)
    return in_fp8(model, subject, prompt(context, 1, 128))


@dataclass(frozen=True)
class GenerateCell:
    """Tokens per second of ``model.generate``, prompt included, with a static cache and a dynamic one.

    The first call of each subject, which compiles, is a figure of its own. Then the subjects take turns. ``x_swiglu``
    is the rate over that of SwiGLU's faster cache; ``gpu_ms``: in which kernels run, whatever the host takes.
    """

    scale: str
    batch: int
    length: int
    subjects: tuple[str, ...]
    new: int
    caches: tuple[str, ...] = CACHES

    @property
    def row(self) -> dict:
        return {"part": "generate", "scale": self.scale, "batch": self.batch, "context": self.length, "new": self.new}

    def measure(self, context: Context) -> list[dict]:
        rows = {
            (cache, name): self.row | {"cache": cache, "subject": name}
            for name in self.subjects
            for cache in self.caches
        }
        ids, times = prompt(context, self.batch, self.length), {}
        allow_many_graphs()
        for turn in range(1 + context.rounds):
            for key in [key for key in rows if "status" not in rows[key]]:
                if turn == 0:
                    clear(context.device)
                if time.monotonic() > context.deadline:
                    rows[key] |= {"status": "skipped", "reason": "the time budget was used up"}
                    continue
                found = attempt(lambda key=key: {"seconds": self._seconds(*key, ids, context)})
                if "seconds" in found:
                    times.setdefault(key, []).append(found["seconds"])
                else:
                    rows[key] |= found
        done = {key: statistics.median(seconds[1:]) for key, seconds in times.items() if "status" not in rows[key]}
        for key, seconds in done.items():
            rate = {"ms": {"p50": 1e3 * seconds}, "tokens_per_s": self.batch * self.new / seconds}
            rows[key] |= {"status": "ok"} | rate | {"first_s": times[key][0], "samples": len(times[key]) - 1}
            if context.device.type == "cuda":
                run = functools.partial(self._seconds, *key, ids, context)
                rows[key]["gpu_ms"] = timing.kernels(run).all / 1e6
            for other in ("swiglu", "swiglu fp8"):
                theirs = [done[cache, name] for cache, name in done if name == other]
                if theirs and key[1].startswith("flashmhf"):
                    rows[key][f"x_{other}"] = min(theirs) / seconds
        return list(rows.values())

    def _seconds(self, cache: str, name: str, ids: torch.Tensor, context: Context) -> float:
        model = generating(name, self.scale, context.device, context.dtype)
        settings = {"cache_implementation": "static"} if cache == "static" else {}
        start = time.perf_counter()
        out = model.generate(
            ids, max_new_tokens=self.new, do_sample=False, eos_token_id=None, pad_token_id=1, **settings
        )
        out[:, -1].tolist()  # waits for the device
        return time.perf_counter() - start


# Training


@dataclass(frozen=True)
class TrainCell:
    """Steps of one network, eager or with every block compiled; ``checkpointed``: a key of CHECKPOINTED."""

    scale: str
    batch: int
    length: int
    steps: int
    compiled: bool
    fused_loss: bool
    network: str
    checkpointed: str

    @property
    def row(self) -> dict:
        row = {"part": "train", "scale": self.scale, "batch": self.batch, "length": self.length}
        row |= {"blocks": "compiled" if self.compiled else "eager", "checkpointing": CHECKPOINTED[self.checkpointed]}
        return row | {"subject": self.network}

    def measure(self, context: Context) -> list[dict]:
        torch._dynamo.reset()
        clear(context.device)
        return [self.row | attempt(functools.partial(self._train, context))]

    def _train(self, context: Context) -> dict:
        settings = {"length": self.length, "compiled": self.compiled, "fused_loss": self.fused_loss}
        config = trainable(self.network, self.scale, self.length)
        training = Training(config, context.device, **settings, checkpointing=CHECKPOINTED[self.checkpointed])
        return {"status": "ok", "fused_loss": self.fused_loss} | training.measure(self.batch, self.steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scales", nargs="+", default=("128m", "370m", "1.3b"), metavar="NAME", help="presets'; 7b, 26m, 57m, 58m")
    add("--layers", type=int, nargs="+", default=(), metavar="N", help="also FlashMHF of other depths")
    add("--batches", type=int, nargs="+", metavar="N")
    add("--contexts", type=int, nargs="+", metavar="N", help="tokens of a prompt or of a sequence")
    add("--fp8", action="store_true", help="generate, model: also with feed-forward networks in FP8")
    add("--caches", nargs="+", choices=CACHES, default=CACHES, help="generate: both")
    add("--blocks", nargs="+", choices=(ways := ("eager", "compiled")), default=ways, help="train and model: both")
    add("--ways", nargs="+", metavar="NETWORK[:blocks|:networks|:q]", help="train: what backward computes again")
    add("--fused-loss", action="store_true", help="train: a loss that never holds all logits")
    add("--new", type=int, default=NEW, help=f"generate: tokens ({NEW})")
    add("--steps", type=int, default=10, help="train: steps that count (10)")


def cells(options: argparse.Namespace, context: Context) -> list:
    found = []
    for part in options.parts:
        for scale in options.scales:
            ours = [name for name, its in TRAINED if its == scale and name != "swiglu"] or ["flashmhf"]
            networks = (*ours, *(f"flashmhf {layers} layers" for layers in options.layers), "swiglu")
            ways = options.ways or (*networks, *(f"{network}:blocks" for network in networks), "swiglu:networks")
            networks += ("flashmhf fp8", "swiglu fp8") if options.fp8 else ()
            for length in options.contexts or {"prefill": (4096,), "generate": (512,), "train": (4096,)}[part]:
                for batch in options.batches or SMALLER.get((part, scale), BATCHES[part]):
                    size = scale, batch, length
                    if part == "prefill":
                        found.append(prefill_cell(*size, options.blocks, networks))
                    elif part == "generate":
                        found.append(GenerateCell(*size, networks, options.new, tuple(options.caches)))
                    else:
                        settings = [
                            (options.steps, blocks == "compiled", options.fused_loss) for blocks in options.blocks
                        ]
                        parted = [(name, kind) for name, _, kind in (way.partition(":") for way in ways)]
                        found += [TrainCell(*size, *setting, *way) for setting in settings for way in parted]
    return found
