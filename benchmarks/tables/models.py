"""Whole models: training, prefill, generation, on one GPU."""

from __future__ import annotations

from collections.abc import Iterable

from ..harness.markdown import table
from ..records import Records, by, by_scale, fixed, gpu, machine, ratio, span
from .layers import FASTER, PAPER, Layers

UNKNOWN = "not measured"
BOTH = {"flashmhf", "swiglu"}
Cells = dict[tuple[str, bool], dict[tuple, dict[str, dict]]]


def training_cells(records: Records) -> tuple[dict, Cells]:
    """A record, and (blocks, checkpointed) -> (scale, batch, length) -> network -> row, of whole models in training."""
    cells: Cells = {(blocks, checkpointed): {} for blocks in ("eager", "compiled") for checkpointed in (False, True)}
    record = records["train"]
    for key, rows in by(record["rows"], "blocks", "checkpointing", "scale", "batch", "length").items():
        cells[key[:2]][key[2:]] = rows
    return record, cells


def training(records: Records) -> str:
    """A line per setting of compiled models, both in it; a model that did not run has no figures."""
    record, lines = records["train"], []
    compiled = [row for row in record["rows"] if row["blocks"] == "compiled"]
    for (scale, checkpointing, batch, length), rows in by_scale(compiled, "checkpointing", "batch", "length"):
        pair = [rows.get(name, {}) for name in ("flashmhf", "swiglu")]
        speeds = [row.get("tokens_per_s") for row in pair]
        gib = [f"{row['memory_mib'] / 1024:.1f}" if row else "" for row in pair]
        setting = f"{scale.upper()}, {batch} x {length:,}" + ", checkpointed" * checkpointing
        figures = [*(fixed(rate, 0) for rate in speeds), fixed(ratio(*speeds), 2), *gib, fixed(pair[0].get("mfu"), 2)]
        lines.append([setting, *figures])
    header = ["model, batch", "FlashMHF, tokens/s", "SwiGLU, tokens/s", FASTER]
    header += ["FlashMHF, GiB", "SwiGLU, GiB", "FlashMHF's MFU"]
    what = machine("Compiled blocks, AdamW under bf16 autocast; memory is the peak", record)
    return f"{table(header, lines, words=(0,))}\n\n{what}"


def training_depth(records: Records) -> str:
    """A line per depth of the 1.3B model in training, against SwiGLU's 24 layers."""
    record, lines = records["train_depth"], []
    found = {(row["subject"], row["checkpointing"]): row for row in record["rows"]}
    titles = {"swiglu": "SwiGLU, 24", "swiglu, networks checkpointed": "the same, its networks checkpointed"}
    titles |= {"flashmhf": "FlashMHF, 20"} | {f"flashmhf {each} layers": f"FlashMHF, {each}" for each in (21, 22)}
    for subject, title in titles.items():
        cells = [title]
        for checkpointed in (False, True):
            row = found.get((subject, checkpointed), {})
            speed = ratio(row.get("tokens_per_s"), found["swiglu", checkpointed]["tokens_per_s"])
            memory = ratio(row.get("memory_mib"), 1024)
            cells += [fixed(row.get("tokens_per_s"), 0), fixed(speed, 2), fixed(memory, 1)]
        lines.append(cells)
    header = ["layers", "tokens/s", FASTER, "GiB", "checkpointed, tokens/s", FASTER, "GiB"]
    what = "1.3B, batches of 4 x 4,096 tokens, compiled blocks, AdamW under bf16 autocast"
    return f"{table(header, lines, words=(0,))}\n\n{machine(what, record)}"


def prefill(records: Records) -> str:
    """Whole models over prompts, every block compiled."""
    record, lines = records["model"], []
    for (scale, batch, length), rows in by(record["rows"], "scale", "batch", "length").items():
        ours, theirs = (rows.get(f"{name} compiled", {}).get("ms", {}).get("p50") for name in ("flashmhf", "swiglu"))
        cells = [fixed(ours, 1), fixed(theirs, 1), fixed(ratio(theirs, ours), 2)]
        lines.append([scale.upper(), f"{batch} x {length:,}", *cells])
    header = ["model", "prompts", "FlashMHF, ms", "SwiGLU, ms", FASTER]
    what = "Compiled blocks, random weights, bf16, to the last token of each prompt"
    return f"{table(header, lines)}\n\n{machine(what, record)}"


def generation_rates(record: dict) -> list[tuple[tuple, dict[str, dict[str, float]]]]:
    """(scale, batch, context) -> network -> cache -> tokens per second, where both networks have one."""
    found: dict[tuple, dict[str, dict[str, float]]] = {}
    for (*key, cache), rows in by_scale(record["rows"], "batch", "context", "cache"):
        for name in BOTH & rows.keys():
            found.setdefault(tuple(key), {}).setdefault(name, {})[cache] = rows[name]["tokens_per_s"]
    return [(key, networks) for key, networks in found.items() if networks.keys() == BOTH]


def generation_ratio(networks: dict[str, dict[str, float]]) -> float:
    """FlashMHF's faster cache over SwiGLU's."""
    return max(networks["flashmhf"].values()) / max(networks["swiglu"].values())


def generation(records: Records) -> str:
    record = records["generate"]
    found = generation_rates(record)
    caches = [cache for cache in ("static", "dynamic") if any(cache in each["swiglu"] for _, each in found)]
    lines = []
    for (scale, batch, context), networks in found:
        rates = [fixed(networks[name].get(cache), 0) for name in ("flashmhf", "swiglu") for cache in caches]
        lines.append([scale.upper(), str(batch), f"{context:,}", *rates, f"{generation_ratio(networks):.2f}"])
    header = [f"{name}, {cache} cache" for name in ("FlashMHF", "SwiGLU") for cache in caches]
    what = (
        "Tokens per second of transformers' `generate`, prompts included, random weights, bf16; transformers compiles "
        "the model for a static cache, before the time counts. The ratio is of the faster caches"
    )
    return f"{table(['model', 'batch', 'prompt', *header, FASTER], lines)}\n\n{machine(what, record)}"


def vllm(records: Records) -> str:
    """Tokens per second of vLLM's engine."""
    record = records["vllm"]
    rates = {
        each["model"]: {(row["part"], row["prompt"], row["batch"]): row["tokens_s"] for row in each["rows"]}
        for each in record["models"]
    }
    llama, lines = rates["llama-24"], []
    for key, rate in llama.items():
        ours = [rates[f"flashmhf-{layers}"][key] for layers in (20, 21)]
        cells = [fixed(rate, 0), *(cell for each in ours for cell in (fixed(each, 0), f"{each / rate:.2f}"))]
        lines.append([key[0], f"{key[1]:,}", str(key[2]), *cells])
    header = ["Llama, 24 layers", "FlashMHF, 20", "speed ÷ Llama's", "FlashMHF, 21", "speed ÷ Llama's"]
    what = (
        f"Tokens per second of vLLM {record['environment']['packages']['vllm']}, 1.3B models of equal parameters with "
        "random weights, bf16, CUDA graphs"
    )
    return f"{table(['part', 'prompt', 'batch', *header], lines, words=(0,))}\n\n{machine(what, record)}"


def _compared(speeds: list[float], memories: Iterable[float] = ()) -> list[str]:
    """Cells of the decision table for what was measured: speed and memory."""
    return [span(speeds) if speeds else UNKNOWN, span(memories) if memories else UNKNOWN]


def decision(records: Records) -> str:
    """One line per question that a reader decides by; what no record has is said to be unmeasured."""
    layers = Layers(records)
    step = span(layers.times("ms", "training"))
    less, less_prefill = (span(1 / each for each in layers.times("beyond", group)) for group in ("training", "latency"))
    checkpointed = span(layers.times("ms", "training", "swiglu_checkpointed"))
    lines = [
        ["layers alone, decode", span(layers.times("ms", "decode")), UNKNOWN],
        ["layers alone, prefill", span(layers.times("ms", "latency")), less_prefill],
        ["layers alone, training step", step, less],
        ["the same, SwiGLU eager and checkpointed", checkpointed, "see whole models"],
    ]
    prompts = records["model"]
    for way in ("", " compiled"):
        names = ("flashmhf" + way, "swiglu" + way)
        cells = by(prompts["rows"], "scale", "batch", "length").items()
        pairs = {key: [cell[name] for name in names] for key, cell in cells if cell.keys() >= set(names)}
        speeds = [theirs["ms"]["p50"] / ours["ms"]["p50"] for ours, theirs in pairs.values()]
        less = [ours["memory_mib"] / theirs["memory_mib"] for ours, theirs in pairs.values() if "memory_mib" in ours]
        what = f"whole model, prefill, {way.strip() or 'eager'}"
        lines.append([what, *_compared(speeds, less)])
    found = generation_rates(records["generate"])
    speeds = [generation_ratio(networks) for _, networks in found]
    lines.append(["whole model at 1.3B, generation", *_compared(speeds)])
    record, trained = training_cells(records)
    ways = {"": (False, False), ", both checkpointed": (True, True), ", only SwiGLU checkpointed": (False, True)}
    for blocks in ("eager", "compiled"):
        for name, checkpointed in ways.items():
            mine, other = (trained[(blocks, way)] for way in checkpointed)
            keys = [key for key in mine if "flashmhf" in mine[key] and "swiglu" in other.get(key, {})]
            pairs = [(mine[key]["flashmhf"], other[key]["swiglu"]) for key in keys]
            speeds = [ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in pairs]
            less = [ours["memory_mib"] / theirs["memory_mib"] for ours, theirs in pairs]
            what = f"whole model, training step, {blocks}{name}"
            lines.append([what, *_compared(speeds, less)])
    header = ["what", FASTER, "memory ÷ SwiGLU's"]
    note = (
        f"*Layers alone: {PAPER.layers} and {PAPER.swiglu_layers} layers, SwiGLU compiled; their memory is the peak of "
        "one layer beyond weights and input. Whole models: 128M, 370M and 1.3B, both run in the same way, generation "
        f"in the faster way; their memory is the peak of everything. One {gpu(layers.record)}.*"
    )
    return f"{table(header, lines, words=(0,))}\n\n{note}"
