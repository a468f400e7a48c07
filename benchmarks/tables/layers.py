"""Whole layers: in training, in small batches, beside the paper's."""

from __future__ import annotations

from ..harness.markdown import table
from ..records import Records, by, fixed, machine, ratio
from ..suites.shapes import BATCH, SHAPES
from ..suites.subjects import SUBJECTS

PAPER = SHAPES["paper"]
SWIGLU = "swiglu_compiled"  # what a reader would run instead
FASTER = "speed ÷ SwiGLU's"  # the one direction of every ratio: above 1 FlashMHF is better


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


def implementations(records: Records) -> str:
    """Every implementation in the forward pass and in training, at the length of training."""
    layers, lines = Layers(records), []
    length = layers.sizes("training")[0]
    for name in dict.fromkeys(subject for group, subject in layers.rows if group in ("latency", "training")):
        cells = []
        for group in ("latency", "training"):
            ms, theirs = (layers.ms(group, each, length) for each in (name, SWIGLU))
            cells += [fixed(ms, 1), fixed(ratio(theirs, ms), 2), fixed(layers.beyond(group, name, length), 0)]
        lines.append([SUBJECTS[name].title, *cells])
    parts = (f"{part}{what}" for part in ("", "training ") for what in ("ms", "speed ÷ compiled SwiGLU's", "MiB"))
    what = f"Forward, then forward and backward of all layers, {BATCH * length:,} tokens; MiB of one layer"
    return f"{table(['implementation', *parts], lines)}\n\n{machine(what, layers.record)}"


def triton(records: Records) -> str:
    """Triton's layers against SwiGLU's of Triton's own products: this GPU's code, and an A100's on this GPU."""
    lines, found = [], {"Hopper": records["triton"], "an A100": records["triton_sm80"]}
    for code, record in found.items():
        for (group,), rows in by(record["rows"], "group").items():
            if group in ("latency", "training"):
                ms = {name: row["layers"] * row["ms"]["p50"] for name, row in rows.items()}
                what = "forward" if group == "latency" else "forward and backward"
                operator, layer = (ms[f"flashmhf_triton_{part}"] for part in ("operator", "compiled"))
                ratios = (f"{ms[SWIGLU] / each:.2f}" for each in (operator, layer))
                lines.append([code, what, *(fixed(each, 1) for each in (operator, layer, ms[SWIGLU])), *ratios])
    tokens = next(row["tokens"] for row in records["triton"]["rows"] if "tokens" in row)
    header = ["code for", "what", "operator, gates given, ms", "FlashMHF, ms", "SwiGLU, ms"]
    header += [f"operator, {FASTER}", f"FlashMHF, {FASTER}"]
    what = (
        f"{PAPER.layers} layers against {PAPER.swiglu_layers} of SwiGLU's, compiled, {tokens:,} tokens; with an A100's "
        "code all products are Triton's and take the A100's instructions"
    )
    return f"{table(header, lines, words=(0, 1))}\n\n{machine(what, records['triton_sm80'])}"


# The paper's table of efficiency (an H100): length -> ms of FlashMHF and SwiGLU, MB of a layer of each
PRINTED = {
    192: (6.80, 6.24, 184.1, 251.0), 768: (24.40, 24.72, 286.5, 606.0), 1920: (59.60, 63.12, 491.2, 1306.0),
    4032: (126.40, 127.44, 866.3, 2592.0), 16128: (497.40, 535.20, 3016.2, 9966.0),
}  # fmt: skip


def beside_the_paper(records: Records) -> str:
    """The paper's times and memory beside ours, with SwiGLU eager as there, and compiled."""
    layers, lines = Layers(records), []
    for length, (ours, theirs, mb, their_mb) in PRINTED.items():
        names = (layers.ours, "swiglu", SWIGLU)
        ms = [layers.ms("latency", name, length) for name in names]
        total = [layers.rows["latency", name][length]["memory_mib"]["total"] for name in names]
        printed = [fixed(ours, 1), fixed(theirs, 1), fixed(theirs / ours, 2), f"{mb / their_mb:.2f}"]
        found = [*(fixed(each, 1) for each in ms), *(fixed(each / ms[0], 2) for each in ms[1:])]
        lines.append([f"{length:,}", *printed, *found, f"{total[0] / total[1]:.2f}"])
    paper = ["FlashMHF, ms", "SwiGLU, ms", "speed ÷", "memory ÷"]
    header = ["length", *(f"paper: {name}" for name in paper)]
    header += ["here: FlashMHF, ms", "SwiGLU, eager", "compiled", "speed ÷ eager", "÷ compiled", "memory ÷ eager"]
    what = "Batch 8, all layers; memory is that of one layer with weights and input. The paper's GPU is an H100, too"
    return f"{table(header, lines)}\n\n{machine(what, layers.record)}"


SHOWN = (1, 16, 64, 256, 1024)  # tokens of the page's table on decode; the records have more


def decode(records: Records) -> str:
    """Small batches: a layer, what an engine runs between two calls of attention, and both for all layers."""
    layers, lines = Layers(records), []
    pieces = by(records["serving"]["rows"], "T")
    depth = PAPER.swiglu_layers / PAPER.layers
    for tokens in SHOWN:
        if piece := pieces.get((tokens,)):
            layer = {name: layers.rows["decode", name][tokens] for name in (layers.ours, SWIGLU)}
            cells = [f"{tokens:,}"]
            for pair in ((layer[layers.ours], layer[SWIGLU]), (piece["piece"], piece["piece swiglu"])):
                ours, theirs = (row["ms"]["p50"] for row in pair)
                cells += [f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{depth * theirs / ours:.2f}"]
            lines.append(cells)
    parts = (f"{what}, {unit}" for what in ("layer", "piece") for unit in ("µs", "SwiGLU's", "all ÷ SwiGLU's"))
    what = (
        f"bf16, CUDA graphs, compiled SwiGLU. All: the speed of {PAPER.layers} layers or pieces ÷ that of "
        f"{PAPER.swiglu_layers} of SwiGLU's"
    )
    return f"{table(['tokens', *parts], lines)}\n\n{machine(what, layers.record)}"
