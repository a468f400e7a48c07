"""Writes the tables of README.md, benchmarks/README.md and docs/ from the records in benchmarks/results.

    $ python -m benchmarks.write_readme            # after a record has changed
    $ python -m benchmarks.write_readme --check    # changes nothing; exit status 1 when a file disagrees

A table stands between the markers ``<!-- NAME: begin (benchmarks/write_readme.py) -->`` and ``<!-- NAME: end -->``. It
is made from the record of the first device of DEVICES that has one. Sentences are written by hand; one that quotes a
table or a record names it in a comment before it, and a test looks for its figures there (tests/repository).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterable

import flashmhf

from .harness.markdown import table, with_block
from .suites import operator
from .suites.shapes import BATCH, SHAPES
from .suites.subjects import SUBJECTS

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICES = ("h100", "h200")
WRITER = "benchmarks/write_readme.py"
SCALES = ("tiny", "26m", "57m", "58m", "128m", "370m", "1.3b")
KEPT = ", 16-bit projections"  # of subjects of older records
UNKNOWN = "not measured"
BOTH = {"flashmhf", "swiglu"}
PAPER = SHAPES["paper"]
SWIGLU = "swiglu_compiled"  # what a reader would run instead
FASTER = "speed ÷ SwiGLU's"  # the one direction of every ratio: above 1 FlashMHF is better


class Records:
    """The records below ``root``, by the part of their name before the device. Where decode has a record of its own,
    the rows of ``layer`` for decode are those of it.
    """

    def __init__(self, root: pathlib.Path):
        self.folder = root / "benchmarks" / "results"

    def read(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> dict:
        names = [f"{name}_{device}.json" for device in DEVICES]
        chosen = next((each for each in names if (self.folder / each).exists()), names[-1])
        record, apart = self.read(chosen), chosen.replace("layer_", "decode_")
        if name == "layer" and (self.folder / apart).exists():
            rows = [row for row in record["rows"] if row["group"] != "decode"]
            record["rows"] = rows + [row for row in self.read(apart)["rows"] if row["group"] == "decode"]
        return record

    def find(self, name: str) -> dict | None:
        """Return a record that this version of flashmhf wrote, or None."""
        if not any((self.folder / f"{name}_{device}.json").exists() for device in DEVICES):
            return None
        record = self[name]
        return record if record["environment"]["flashmhf"] == flashmhf.__version__ else None

    def several_gpus(self, part: str) -> dict[int, dict]:
        """Number of GPUs of one host -> the record of `benchmarks.distributed`, of those that have ``part``."""
        found = {}
        for path in (p for device in reversed(DEVICES) for p in self.folder.glob(f"distributed_x*_{device}.json")):
            record = self.read(path.name)
            if by(record["rows"], "part").get((part,)):
                found[record["environment"]["ranks"]] = record
        if not found:
            raise FileNotFoundError(f"{self.folder} has no record distributed_xN_DEVICE.json with {part}")
        return dict(sorted(found.items()))


def by(rows: list[dict], *names: str) -> dict[tuple, dict[str, dict]]:
    """Subject -> row, for each combination of ``names``, in the rows' order; rows without a number are left out."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["status"] == "ok":
            found.setdefault(tuple(row.get(name) for name in names), {})[row["subject"]] = row
    return found


def by_scale(rows: list[dict], *names: str) -> list[tuple[tuple, dict[str, dict]]]:
    return sorted(by(rows, "scale", *names).items(), key=lambda item: SCALES.index(item[0][0]))


# Words


def gpu(record: dict) -> str:
    """Return the short name of the record's device, such as "H100"."""
    return record["environment"]["device"].removeprefix("NVIDIA ").split()[0]


def torch_of(record: dict) -> str:
    return record["environment"]["packages"]["torch"].partition("+")[0]


def machine(what: str, record: dict) -> str:
    """The caption of a table that says where it was measured; the record has the rest."""
    return f"*{what}. Measured on an {gpu(record)} with torch {torch_of(record)}.*"


def software(what: str, records: Iterable[dict]) -> str:
    """The caption of a table whose lines name their GPUs."""
    return f"*{what}. Measured with torch {' and '.join(sorted(set(map(torch_of, records))))}.*"


def conditions(what: str, record: dict) -> str:
    """Where a table of developers' pages was measured."""
    where = record["environment"]
    commit = f", commit {where['commit']}" if where.get("commit") else ""
    return f"{what}: {where['device']}, torch {where['packages']['torch']}, {where['date']}{commit}."


def span(values: Iterable[float], digits: int = 2) -> str:
    """Return "1.1 to 1.3", or one number if the least and the largest value round to the same."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (found[0], found[-1])))


def fixed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


# Whole layers


class Layers:
    """The record ``layer``: a group's sizes (decode: tokens; else tokens of a sequence) and figures of the paper's
    shape."""

    def __init__(self, records: Records):
        self.record = records["layer"]
        self.rows: dict[tuple[str, str], dict[int, dict]] = {}
        for row in self.record["rows"]:
            if row["shape"] == "paper" and row["status"] == "ok":
                size = row["batch"] if row["group"] == "decode" else row["length"]
                self.rows.setdefault((row["group"], row["subject"]), {})[size] = row
        self.ours = next(subject for _, subject in self.rows if subject.startswith("flashmhf_"))

    def sizes(self, group: str) -> list[int]:
        return sorted(self.rows[group, self.ours])

    def subjects(self, group: str) -> list[str]:
        return [subject for each, subject in self.rows if each == group]

    def ms(self, group: str, subject: str, size: int) -> float | None:
        """The median time of a layer times the model's number of layers."""
        row = self.rows.get((group, subject), {}).get(size)
        return None if row is None else row["layers"] * row["ms"]["p50"]

    def beyond(self, group: str, subject: str, size: int) -> float | None:
        """MiB of one layer beyond weights and input."""
        return self.rows.get((group, subject), {}).get(size, {}).get("memory_mib", {}).get("beyond")

    def times(self, what: str, group: str, subject: str = SWIGLU) -> list[float]:
        """That of ``subject`` over ours, "ms" or "beyond", at every size."""
        value = getattr(self, what)
        ratios = (ratio(value(group, subject, size), value(group, self.ours, size)) for size in self.sizes(group))
        return [each for each in ratios if each is not None]


def headline(records: Records) -> str:
    """Prefill of all layers beside compiled SwiGLU's, at every second length."""
    layers, lines = Layers(records), []
    for length in layers.sizes("latency")[::2]:
        ms, mib = (
            [value("latency", name, length) for name in (layers.ours, SWIGLU)] for value in (layers.ms, layers.beyond)
        )
        times = [*(fixed(each, 1) for each in ms), fixed(ratio(ms[1], ms[0]), 2)]
        lines.append([f"{BATCH * length:,}", *times, *(fixed(each, 0) for each in mib)])
    header = ["tokens", "FlashMHF, ms", "SwiGLU, ms", FASTER, "FlashMHF, MiB", "SwiGLU, MiB"]
    sizes = f"d_model {PAPER.d_model:,}, {PAPER.heads} heads, {PAPER.subnets} sub-networks of {PAPER.subnet_dim}"
    what = (
        f"Prefill, batch 8, bf16: {PAPER.layers} FlashMHF layers ({sizes}) and {PAPER.swiglu_layers} compiled SwiGLU "
        f"layers of equal parameters ({PAPER.swiglu_dim:,} wide). MiB: one layer's peak beyond weights and input"
    )
    return f"{table(header, lines)}\n\n{machine(what, layers.record)}"


def implementations_table(records: Records) -> str:
    """Every implementation in the forward pass and in training, at the length of training."""
    layers, lines = Layers(records), []
    length = layers.sizes("training")[0]
    for name in dict.fromkeys([*layers.subjects("latency"), *layers.subjects("training")]):
        cells = []
        for group in ("latency", "training"):
            ms, theirs = (layers.ms(group, each, length) for each in (name, SWIGLU))
            mib = layers.beyond(group, name, length)
            cells += [fixed(ms, 1), fixed(ratio(theirs, ms), 2), fixed(mib, 0)]
        lines.append([SUBJECTS[name].title, *cells])
    parts = (f"{part}{what}" for part in ("", "training ") for what in ("ms", "speed ÷ compiled SwiGLU's", "MiB"))
    what = f"Forward, then forward and backward of all layers, {BATCH * length:,} tokens; MiB of one layer"
    return f"{table(['implementation', *parts], lines)}\n\n{machine(what, layers.record)}"


def decode_table(records: Records) -> str:
    """Small batches: a layer, what an engine runs between two calls of attention, and both for all layers."""
    layers, lines = Layers(records), []
    pieces = by(records["serving"]["rows"], "T")
    depth = PAPER.swiglu_layers / PAPER.layers
    for tokens in layers.sizes("decode"):
        if (tokens,) in pieces:
            ours, theirs = (
                [layers.rows["decode", layer][tokens]["ms"]["p50"], pieces[tokens,][piece]["ms"]["p50"]]
                for layer, piece in ((layers.ours, "piece"), (SWIGLU, "piece swiglu"))
            )
            cells = [
                cell
                for ms, other in zip(ours, theirs, strict=True)
                for cell in (f"{1e3 * ms:.1f}", f"{1e3 * other:.1f}", f"{depth * other / ms:.2f}")
            ]
            lines.append([f"{tokens:,}", *cells])
    parts = (f"{what}, {unit}" for what in ("layer", "piece") for unit in ("µs", "SwiGLU's", "all ÷ SwiGLU's"))
    what = (
        f"bf16, CUDA graphs, compiled SwiGLU. All: the speed of {PAPER.layers} layers or pieces ÷ that of "
        f"{PAPER.swiglu_layers} of SwiGLU's"
    )
    return f"{table(['tokens', *parts], lines)}\n\n{machine(what, layers.record)}"


# Whole models

Cells = dict[tuple[str, bool], dict[tuple, dict[str, dict]]]


def training_cells(records: Records) -> tuple[dict, Cells]:
    """A record, and (blocks, checkpointed) -> (scale, batch, length) -> network -> row, of whole models in training."""
    cells: Cells = {(blocks, checkpointed): {} for blocks in ("eager", "compiled") for checkpointed in (False, True)}
    record = records["train"]
    for key, rows in by(record["rows"], "blocks", "checkpointing", "scale", "batch", "length").items():
        cells[key[:2]][key[2:]] = rows
    return record, cells


def training_table(records: Records) -> str:
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


def training_depth_table(records: Records) -> str:
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


def prefill_table(records: Records) -> str:
    """Whole models over prompts, every block compiled."""
    record, lines = records["model"], []
    for (scale, batch, length), rows in by(record["rows"], "scale", "batch", "length").items():
        ours, theirs = (rows.get(f"{name} compiled", {}).get("ms", {}).get("p50") for name in ("flashmhf", "swiglu"))
        cells = [fixed(ours, 1), fixed(theirs, 1), fixed(ratio(theirs, ours), 2)]
        lines.append([scale.upper(), f"{batch} x {length:,}", *cells])
    header = ["model", "prompts", "FlashMHF, ms", "SwiGLU, ms", FASTER]
    what = "Compiled blocks, random weights, bf16, to the last token of each prompt"
    return f"{table(header, lines)}\n\n{machine(what, record)}"


def generation(record: dict) -> list[tuple[tuple, dict[str, dict[str, float]]]]:
    """(scale, batch, context) -> network -> cache -> tokens per second, where both networks have one."""
    found: dict[tuple, dict[str, dict[str, float]]] = {}
    for (*key, cache), rows in by_scale(record["rows"], "batch", "context", "cache"):
        for name in BOTH & rows.keys():
            found.setdefault(tuple(key), {}).setdefault(name, {})[cache] = rows[name]["tokens_per_s"]
    return [(key, networks) for key, networks in found.items() if networks.keys() == BOTH]


def generation_ratio(networks: dict[str, dict[str, float]]) -> float:
    """FlashMHF's faster cache over SwiGLU's."""
    return max(networks["flashmhf"].values()) / max(networks["swiglu"].values())


def generate_table(records: Records) -> str:
    record = records["generate"]
    found = generation(record)
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


def _compared(speeds: list[float], memories: Iterable[float] = ()) -> list[str]:
    """Cells of the decision table for what was measured: speed and memory."""
    return [span(speeds) if speeds else UNKNOWN, span(memories) if memories else UNKNOWN]


def decision_table(records: Records) -> str:
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
    found = generation(records["generate"])
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


# Several GPUs


def trained(record: dict, layout: str = "one") -> dict[str, dict]:
    """Network -> its row of training on one GPU, or in another layout, in a record of `benchmarks.distributed`."""
    return by([row for row in record["rows"] if row["part"] == "train"], "layout").get((layout,), {})


def several_gpus_training(records: Records) -> str:
    """A line per layout, both networks in it."""
    found, lines = records.several_gpus("train"), []
    for ranks, several in found.items():
        rows = [row for row in several["rows"] if row["part"] == "train"]
        for (layout,), pair in by(rows, "layout").items():
            if layout != "one" and pair.keys() >= BOTH:
                ours, theirs = pair["flashmhf"], pair["swiglu"]
                name = layout.replace("fsdp2", "FSDP2 over").replace("tp", "TP over").replace(" x ", " × ")
                speeds = [ours["x_one"], theirs["x_one"], ours["tokens_per_s"] / theirs["tokens_per_s"]]
                memory = [row["memory_mib"] / 1024 for row in (ours, theirs)]
                cells = [*(fixed(each, 2) for each in speeds), *(fixed(each, 1) for each in memory)]
                lines.append([f"{ranks} {gpu(several)}s, {name}", *cells])
    header = ["layout", "FlashMHF's scaling", "SwiGLU's", FASTER, "FlashMHF, GiB per GPU", "SwiGLU, GiB"]
    what = (
        "1.3B, compiled blocks, bf16, sequences of 4,096 tokens. Scaling: the speed ÷ that of as many single GPUs, "
        "which train at the same time, each its own copy"
    )
    return f"{table(header, lines, words=(0,))}\n\n{software(what, found.values())}"


def expected_memory(records: Records) -> str:
    """The largest model's memory per GPU with FSDP2 over all, measured or computed from that on one."""
    record, cells = training_cells(records)
    (scale, batch, length), rows = max(cells["compiled", False].items(), key=lambda item: SCALES.index(item[0][0]))
    row = rows["flashmhf"]
    gib = {ranks: row["memory_mib"] / 1024 - 16 * row["parameters"] * (1 - 1 / ranks) / 2**30 for ranks in (1, 2, 4, 8)}
    places, more, cells = [f"one {gpu(record)}"], [], {1: f"{gib[1]:.0f} GiB"}
    for ranks, several in records.several_gpus("train").items():
        if sharded := trained(several, f"fsdp2 {ranks}").get("flashmhf"):
            more.append(sharded["memory_mib"] / 1024 - gib[ranks])
            cells[ranks] = f"{gib[ranks] + more[-1]:.0f} GiB"
            places.append(f"{ranks} {gpu(several)}s")
    for ranks, each in gib.items():
        cells.setdefault(ranks, f"{span([each + over for over in more], 0)} GiB, estimated")
    note = (
        f"*FlashMHF-{scale.upper()} with AdamW, {batch} sequences of {length:,} tokens per GPU at once. Measured on "
        f"{', '.join(places)}; estimates are computed, with the {span(more, 0)} GiB added by which these exceeded it.*"
    )
    columns = [str(ranks) for ranks in sorted(cells)]
    return f"{table(['GPUs', *columns], [['memory per GPU', *(cells[int(n)] for n in columns)]])}\n\n{note}"


def several_gpus_module(records: Records) -> str:
    found, lines = records.several_gpus("module"), []
    for ranks, record in found.items():
        for row in record["rows"]:
            if row["status"] == "ok" and row["part"] in ("module", "compiled") and row["tp"] == ranks:
                what = row.get("direction") if row["part"] == "module" else f"forward, compiled, {row['subject']}"
                what = what.replace("sequence", "sequence parallel")
                lines.append([what, f"{ranks} {gpu(record)}s", f"{row['ms']['p50']:.2f}", f"{row['x_one']:.2f}"])
    what = "One FlashMHF network (d_model 2,048, 16 heads), 32,256 tokens, bf16"
    return f"{table(['what', 'GPUs', 'ms', 'times faster than one GPU'], lines)}\n\n{software(what, found.values())}"


# FP8


def _without_e4m3_projections(record: dict) -> list[dict]:
    """Return a record's rows; of an older one those with 16-bit projections alone."""
    kept = {row["subject"].removesuffix(KEPT) for row in record["rows"] if row["subject"].endswith(KEPT)}
    rows = (row for row in record["rows"] if row["subject"] not in kept)
    return [row | {"subject": row["subject"].removesuffix(KEPT)} for row in rows]


def generate_fp8_table(records: Records) -> str:
    record, lines = records["generate_fp8"], []
    for row in (row for row in _without_e4m3_projections(record) if row["status"] == "ok"):
        ratios = [fixed(row.get(name), 2) for name in ("x_swiglu fp8", "x_swiglu")]
        lines.append([str(row["batch"]), f"{row['context']:,}", row["subject"], fixed(row["tokens_per_s"], 0), *ratios])
    header = ["batch", "prompt", "model", "tokens/s", "÷ SwiGLU in FP8", "÷ SwiGLU in 16 bits"]
    return f"{table(header, lines)}\n\n{conditions('`generate`', record)}"


def fp8_operator_table(records: Records) -> str:
    record = records["fp8"]
    parts = {part: [row for row in record["rows"] if row["part"] == part] for part in ("operator", "decode")}
    lines, sizes = [], by(parts["operator"], "d_h", "T").items()
    for (d_h, tokens), rows in sorted(sizes, key=lambda item: (item[0][0], -item[0][1])):
        row = rows["fp8"]
        ratios = [fixed(row.get(name), 2) for name in ("x_16 bits", "x_product", "x_swiglu fp8")]
        lines.append([str(d_h), f"{tokens:,}", f"{row['tflops']:.0f}", *ratios, f"{row['error']:.3f}"])
    header = ["d_h", "T", "TFLOP/s", "÷ our bf16 kernel", "÷ bf16 8192³ product", "÷ SwiGLU in FP8", "relative error"]
    copy, few = record["before"]["copy_gb_per_s"], []
    for (tokens,), rows in by(parts["decode"], "T").items():
        micro = [f"{1e3 * rows[name]['ms']['p50']:.1f}" for name in ("fp8", "16 bits")]
        few.append([str(tokens), *micro, f"{rows['fp8']['gb_per_s'] / copy:.2f}"])
    few_header = ["T, d_h = 128", "µs", "bf16 kernel µs", "share of a copy's bandwidth"]
    return f"{table(header, lines)}\n\n{table(few_header, few)}\n\n{conditions('Operator', record)}"


def fp8_networks_table(records: Records) -> str:
    """Whole FP8 networks against an FP8 SwiGLU (layers of equal parameters) and against the same network in 16 bits."""
    record, lines = records["fp8_networks"], {}
    for (count, way), rows in by(_without_e4m3_projections(record), "T", "way").items():
        own = rows["flashmhf in 16 bits"]["ms"]["p50"] / rows["flashmhf"]["ms"]["p50"]
        lines.setdefault(count, {})[way] = f"{own:.2f}", f"{rows['flashmhf']['x_swiglu']:.2f}"
    others, how = ("÷ bf16 FlashMHF's", "÷ FP8 SwiGLU's"), {"graph": "CUDA graph", "called": "no graph"}
    header = ["tokens", *(f"{other}, {name}" for other in others for name in how.values())]
    cells = [[f"{count:,}", *(ways[way][i] for i in (0, 1) for way in how)] for count, ways in lines.items()]
    what = (
        "The speed of whole FP8 networks, d_model 2,048. SwiGLU: 24 layers against 20, two compiled row-wise "
        "`torch._scaled_mm`"
    )
    return f"{table(header, cells)}\n\n{machine(what, record)}"


# The operator, and a layer as engines call it


def _figures(row: dict | None) -> tuple[str, ...]:
    return (f"{row['ms']['p50']:.2f}", f"{row['tflops']:.0f}", f"{row['x_product']:.2f}") if row else ("", "", "")


def operator_table(records: Records) -> str:
    """Hopper beside Triton at every shape of more than a few tokens, then where and how each was measured."""
    sizes = ("direction", "T", "H", "d_h", "E", "d_e")
    triton, lines = by(records["triton"]["rows"], *sizes), []
    for direction in ("forward", "backward"):
        for key, rows in by(records[direction]["rows"], *sizes).items():
            if key[0] == direction and key[1] > operator.GRAPH_TOKENS:
                beside = triton.get(key, {}).get(direction)
                shape = ", ".join(map(str, key[2:]))
                lines.append([direction, f"{key[1]:,}", shape, *_figures(rows[direction]), *_figures(beside)])
    notes = (
        "Medians at sustained clocks, bf16. TFLOP/s count useful operations, 6 T H d_h E d_e forward and 16 backward. "
        "÷ product: the rate over that of an 8192³ bf16 matrix product of the same run.\n\n"
    )
    notes += "\n".join(
        f"- {conditions(name.capitalize(), records[name])}" for name in ("forward", "backward", "triton")
    )
    figures = ("TFLOP/s", "÷ product")
    header = ["operator", "T", "H, d_h, E, d_e", "Hopper ms", *figures, "Triton ms", *figures]
    return f"{table(header, lines)}\n\n{notes}"


def deterministic_table(records: Records) -> str:
    """By how much reproducible gradients lengthen the operator's backward, by head width."""
    record, more = records["backward"], {}
    for (tokens, width, *_), rows in by(record["rows"], "T", "d_h", "H", "E").items():
        if tokens > operator.GRAPH_TOKENS and {"backward", "deterministic backward"} <= rows.keys():
            longer = rows["deterministic backward"]["ms"]["p50"] / rows["backward"]["ms"]["p50"]
            more.setdefault(str(width), []).append(max(0.0, 100 * (longer - 1)))
    cells = ["longer backward pass, %", *(span(percent, 0) for percent in more.values())]
    return f"{table(['head width', *more], [cells])}\n\n{machine('The operator; a range spans the sizes', record)}"


def vllm_table(records: Records) -> str:
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


BLOCKS: dict[str, dict[str, Callable[[Records], str]]] = {
    "README.md": {"headline": headline},
    "benchmarks/README.md": {
        "operator": operator_table,
        "fp8": fp8_operator_table,
        "generate fp8": generate_fp8_table,
    },
    "docs/measurements.md": {
        "decide": decision_table,
        "prefill": headline,
        "decode": decode_table,
        "implementations": implementations_table,
        "models": prefill_table,
    },
    "docs/api.md": {"deterministic": deterministic_table},
    "docs/fp8.md": {"networks": fp8_networks_table},
    "docs/serving.md": {"generate": generate_table, "vllm": vllm_table},
    "docs/scaling.md": {"memory": expected_memory, "training": several_gpus_training, "module": several_gpus_module},
    "docs/training.md": {"training": training_table},
    "docs/guides/sizes.md": {"depth": training_depth_table},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when a file disagrees")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository (default: this script's)")
    options = parser.parse_args(arguments)
    records, stale = Records(options.root), 0
    for name, blocks in BLOCKS.items():
        path = options.root / name
        text = wanted = path.read_text(encoding="utf-8")
        for block, write in blocks.items():
            wanted = with_block(wanted, block, write(records), WRITER)
        if text == wanted:
            continue
        stale += 1
        if options.check:
            print(f"{name} disagrees with benchmarks/results: run python -m benchmarks.write_readme", file=sys.stderr)
        else:
            path.write_text(wanted, encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
