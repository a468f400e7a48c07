"""What a reader decides by: FlashMHF's speed and memory over SwiGLU's, a line per question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..harness.markdown import table
from ..records import Records, by, gpu, span
from .layers import FASTER, PAPER, Layers
from .models import GENERATION, generation_rates, generation_ratio, training_cells

UNKNOWN = "not measured"


def decision(records: Records) -> str:
    """Layers alone, then whole models; what no record has is said to be unmeasured."""
    layers = Layers(records)
    lines = [*_layers(layers), *_prefill(records), *_generation(records), *_training(records)]
    header = ["what", FASTER, "memory ÷ SwiGLU's"]
    note = (
        f"*Layers alone: {PAPER.layers} and {PAPER.swiglu_layers} layers, SwiGLU compiled; their memory is the peak of "
        "one layer beyond weights and input. Whole models: 128M, 370M and 1.3B, compiled, both run in the same way, "
        f"generation in the faster way; their memory is the peak of everything. One {gpu(layers.record)}.*"
    )
    return f"{table(header, lines, words=(0,))}\n\n{note}"


def _layers(layers: Layers) -> Iterator[list[str]]:
    less, less_prefill = (
        _span(1 / each for each in layers.times("beyond", group)) for group in ("training", "latency")
    )
    yield ["layers alone, decode", _span(layers.times("ms", "decode")), UNKNOWN]
    yield ["layers alone, prefill", _span(layers.times("ms", "latency")), less_prefill]
    yield ["layers alone, training step", _span(layers.times("ms", "training")), less]
    checkpointed = _span(layers.times("ms", "training", "swiglu_checkpointed"))
    yield ["the same, SwiGLU eager and checkpointed", checkpointed, "see whole models"]


def _prefill(records: Records) -> Iterator[list[str]]:
    cells = by(records["model"]["rows"], "scale", "batch", "length").values()
    names = "flashmhf compiled", "swiglu compiled"
    pairs = [tuple(cell[each] for each in names) for cell in cells if cell.keys() >= set(names)]
    yield ["whole model, prefill", _span(theirs["ms"]["p50"] / ours["ms"]["p50"] for ours, theirs in pairs), UNKNOWN]


def _generation(records: Records) -> Iterator[list[str]]:
    for record in (records[name] for name in GENERATION):
        found = generation_rates(record)
        scale = found[0][0][0].upper()
        name = f"whole model at {scale}, generation ({gpu(record)})"
        yield [name, _span(generation_ratio(rates) for _, rates in found), UNKNOWN]


def _training(records: Records) -> Iterator[list[str]]:
    cells = training_cells(records["train"])
    ways = {"": (False, False), ", both checkpointed": (True, True), ", only SwiGLU checkpointed": (False, True)}
    for name, checkpointed in ways.items():
        ours, theirs = (cells.get(("compiled", way), {}) for way in checkpointed)
        both = ((ours[size].get("flashmhf"), theirs[size].get("swiglu")) for size in ours.keys() & theirs.keys())
        pairs = [pair for pair in both if all(pair)]
        faster = _span(mine["tokens_per_s"] / other["tokens_per_s"] for mine, other in pairs)
        yield [f"whole model, training step{name}", faster, _memory(pairs)]


def _memory(pairs: list[tuple[dict, dict]]) -> str:
    return _span(ours["memory_mib"] / theirs["memory_mib"] for ours, theirs in pairs if "memory_mib" in ours)


def _span(values: Iterable[float]) -> str:
    found = list(values)
    return span(found) if found else UNKNOWN
