"""Writes the tables of README.md, benchmarks/README.md and docs/ from the records in benchmarks/results.

    $ python -m benchmarks.write_readme            # after a record has changed
    $ python -m benchmarks.write_readme --check    # changes nothing; exit status 1 when a file disagrees with the records

A table or a paragraph stands between the markers ``<!-- NAME: begin (benchmarks/write_readme.py) -->`` and ``<!-- NAME:
end -->``. It is made from the record of the first device of DEVICES that has one. Users' pages say what was measured
and on which device; commits and dates stand in the records and in developers' pages.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterable

import flashmhf

from .harness.markdown import table, with_block
from .suites import operator, tables
from .suites.shapes import BATCH, SHAPES
from .suites.subjects import SUBJECTS

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICES = ("h100", "h200")
WRITER = "benchmarks/write_readme.py"
KEPT = ", 16-bit projections"  # of subjects of older records
OPERATOR_COLUMNS = (
    "operator",
    "T",
    "H, d_h, E, d_e",
    "Hopper ms",
    "TFLOP/s",
    "÷ product",
    "Triton ms",
    "TFLOP/s",
    "÷ product",
)


class Records:
    """The records below ``root``, by the part of their name before the device.

    Where decode has a record of its own, the rows of ``layer`` for decode are those of it.
    """

    def __init__(self, root: pathlib.Path):
        self.folder = root / "benchmarks" / "results"

    def __getitem__(self, name: str) -> dict:
        paths = [self.folder / f"{name}_{device}.json" for device in DEVICES]
        path = next((path for path in paths if path.exists()), paths[-1])
        record, apart = json.loads(path.read_text()), path.with_name(path.name.replace("layer_", "decode_"))
        if name == "layer" and apart.exists():
            rows = [row for row in record["rows"] if row["group"] != "decode"]
            record["rows"] = rows + [row for row in json.loads(apart.read_text())["rows"] if row["group"] == "decode"]
        return record

    def find(self, name: str) -> dict | None:
        """Return a record that this version of flashmhf wrote, or None."""
        if not any((self.folder / f"{name}_{device}.json").exists() for device in DEVICES):
            return None
        record = self[name]
        return record if record["environment"]["flashmhf"] == flashmhf.__version__ else None

    def several_gpus(self, part: str) -> dict[int, dict]:
        """Number of GPUs -> the record of so many GPUs of one host, which `benchmarks.distributed` writes, of those
        that have ``part``.
        """
        found = {}
        for path in (
            path for device in reversed(DEVICES) for path in self.folder.glob(f"distributed_x*_{device}.json")
        ):
            record = json.loads(path.read_text())
            if by(record["rows"], "part").get((part,)):
                found[record["environment"]["ranks"]] = record
        if not found:
            raise FileNotFoundError(f"{self.folder} has no record distributed_xN_DEVICE.json with {part}")
        return dict(sorted(found.items()))


def gpu(record: dict) -> str:
    """Return the short name of the record's device, such as "H100"."""
    return record["environment"]["device"].removeprefix("NVIDIA ").split()[0]


def place(record: dict) -> str:
    """Where it was measured, for a user's page; the record has the rest."""
    return f"on an {gpu(record)} with torch {record['environment']['packages']['torch'].partition('+')[0]}"


def machine(what: str, record: dict) -> str:
    """The caption of a table that says where it was measured."""
    return f"*{what}. Measured {place(record)}.*"


def software(what: str, records: Iterable[dict]) -> str:
    """The caption of a table whose lines name their GPUs."""
    versions = sorted({record["environment"]["packages"]["torch"].partition("+")[0] for record in records})
    return f"*{what}. Measured with torch {' and '.join(versions)}.*"


def measured(records: Records) -> str:
    """Where the tables of a page without such captions were measured."""
    places = dict.fromkeys(place(records[name]) for name in ("layer", "model"))
    return f"The tables of this page were measured {' and '.join(places)}."


def span(values: Iterable[float], digits: int = 2) -> str:
    """Return "1.1 to 1.3", or one number if the least and the largest value round to the same."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (found[0], found[-1])))


def conditions(what: str, record: dict) -> str:
    where = record["environment"]
    commit = f", commit {where['commit']}" if where.get("commit") else ""
    return f"{what}: {where['device']}, torch {where['packages']['torch']}, {where['date']}{commit}."


def by(rows: list[dict], *names: str) -> dict[tuple, dict[str, dict]]:
    """Subject -> row, for each combination of what ``names`` have, in the rows' order;

    rows without a number are left out.
    """
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["status"] == "ok":
            found.setdefault(tuple(row[name] for name in names), {})[row["subject"]] = row
    return found


def fixed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def headline(records: Records) -> str:
    return tables.headline(records["layer"])


def summary(records: Records) -> str:
    return tables.summary_table(records["layer"])


# Whole layers, in users' pages

OTHERS = ("swiglu_compiled", "swiglu")  # compiled SwiGLU first: it is what a reader would run instead


def faster(record: dict, group: str, subject: str) -> dict[int, float]:
    """Number of tokens -> the time of ``subject``'s layers over that of FlashMHF's, in one group of a layer record."""
    rows, found = tables.Rows(record), {}
    for size in rows.sizes(group):
        ratio = tables.ratio(*(rows.value("stack_ms", group, name, size) for name in (subject, rows.ours)))
        if ratio is not None:
            found[size if group == "decode" else BATCH * size] = ratio
    return found


def training(record: dict, what: str, subject: str) -> float:
    """FlashMHF's time over that of ``subject`` (stack_ms), or the memory of ``subject`` over FlashMHF's (beyond), in
    training.
    """
    rows = tables.Rows(record)
    ours, other = (rows.value(what, "training", name) for name in (rows.ours, subject))
    return ours / other if what == "stack_ms" else other / ours


def longer(ratio: float) -> str:
    """Return "23 % longer than" for 1.23 and "6 % less than" for 0.94."""
    return f"{100 * (ratio - 1):.0f} % longer than" if ratio >= 1 else f"{100 * (1 - ratio):.0f} % less than"


def pitch(records: Records) -> str:
    record, model = records["layer"], SHAPES["paper"]
    ratios = [ratio for group in ("decode", "latency") for ratio in faster(record, group, "swiglu_compiled").values()]
    memory = training(record, "beyond", "swiglu_compiled")
    compiled = longer(training(record, "stack_ms", "swiglu_compiled"))
    return (
        f"**On an {gpu(record)}, inference with the feed-forward layers is {span(ratios, 1)} times faster than with compiled SwiGLU of "
        f"equal parameters ({model.layers} layers instead of {model.swiglu_layers}), and whole models generate "
        f"{generation_span(records)} times as many tokens per second. In training a layer needs {memory:.1f} times less memory for "
        f"activations and gradients.** In exchange, a training step of these layers takes {compiled} with compiled SwiGLU. "
        f"{whole_training(records)}"
    )


def layers_in_short(records: Records) -> str:
    record = records["layer"]
    decode, prefill = (faster(record, group, "swiglu_compiled") for group in ("decode", "latency"))
    official = faster(record, "latency", "official").values()  # none where the official code was not there
    beside = f", {span(official)} times faster than the official Triton kernel" if official else ""
    liger = faster(record, "latency", "swiglu_liger").values()
    than_liger = f", {span(liger)} times faster than Liger's" if liger else ""
    memory = training(record, "beyond", "swiglu_compiled")
    compiled, checkpointed = (
        longer(training(record, "stack_ms", name)) for name in ("swiglu_compiled", "swiglu_checkpointed")
    )
    return (
        f"- **Decode:** {span(decode.values())} times faster than compiled SwiGLU, least at {min(decode, key=decode.get):,} tokens.\n"
        f"- **Prefill:** {span(prefill.values())} times faster than compiled SwiGLU{than_liger}{beside}.\n"
        f"- **Training:** a step takes {compiled} with compiled SwiGLU and {checkpointed} with checkpointed SwiGLU (eager). A layer needs "
        f"{memory:.1f} times less memory for activations and gradients than a compiled SwiGLU layer."
    )


def layer_prefill_table(records: Records) -> str:
    record = records["layer"]
    rows, lines = tables.Rows(record), []
    for length in rows.sizes("latency"):
        times = [rows.value("stack_ms", "latency", name, length) for name in (rows.ours, *OTHERS)]
        lines.append(
            [
                f"{BATCH * length:,}",
                *(fixed(ms, 1) for ms in times),
                *(fixed(tables.ratio(ms, times[0]), 2) for ms in times[1:]),
            ]
        )
    header = ["tokens", "FlashMHF, ms", "SwiGLU compiled, ms", "SwiGLU eager, ms", "faster than compiled", "than eager"]
    return f"{table(header, lines)}\n\n*All layers, batch 8.*"


def layer_memory_table(records: Records) -> str:
    record = records["layer"]
    rows, lines = tables.Rows(record), []
    for length in rows.sizes("latency"):
        memory = [rows.value("beyond", "latency", name, length) for name in (rows.ours, *OTHERS, "mhffn_naive")]
        lines.append(
            [f"{BATCH * length:,}", *(fixed(mib, 0) for mib in memory), fixed(tables.ratio(memory[1], memory[0]), 1)]
        )
    header = [
        "tokens",
        "FlashMHF",
        "SwiGLU compiled",
        "SwiGLU eager",
        "multi-head in plain PyTorch",
        "less than compiled",
    ]
    return f"{table(header, lines)}\n\n*Peak of one layer beyond weights and input, MiB.*"


def implementations_table(records: Records) -> str:
    """Every implementation at the lengths at which all are measured."""
    record = records["layer"]
    rows = tables.Rows(record)
    found = by([row for row in record["rows"] if row["group"] == "latency"], "length")
    lengths = [length for (length,), subjects in found.items() if "dense_moe" in subjects]
    lines = []
    for name in found[(lengths[0],)]:
        times = [rows.value("stack_ms", "latency", name, length) for length in lengths]
        ours = [rows.value("stack_ms", "latency", rows.ours, length) for length in lengths]
        cells = [
            cell
            for ms, our in zip(times, ours, strict=True)
            for cell in (fixed(ms, 1), fixed(tables.ratio(ms, our), 2))
        ]
        lines.append([SUBJECTS[name].title, *cells])
    header = [
        "implementation",
        *(cell for length in lengths for cell in (f"{BATCH * length:,} tokens, ms", "÷ FlashMHF")),
    ]
    return f"{table(header, lines)}\n\n*All layers, forward.*"


def layer_training_table(records: Records) -> str:
    record = records["layer"]
    rows = tables.Rows(record)
    length = rows.sizes("training")[0]
    lines = []
    for name in by([row for row in record["rows"] if row["group"] == "training"], "length")[(length,)]:
        time, memory = (rows.value(what, "training", name) for what in ("stack_ms", "beyond"))
        lines.append(
            [SUBJECTS[name].title, f"{time:.1f}", f"{training(record, 'stack_ms', name):.2f}", f"{memory:,.0f}"]
        )
    header = ["implementation", "ms", "FlashMHF's time ÷ this", "MiB per layer"]
    return f"{table(header, lines)}\n\n*Forward and backward of all layers, {BATCH * length:,} tokens.*"


def layer_decode_table(records: Records) -> str:
    record = records["layer"]
    rows = tables.Rows(record)
    ratios, lines = [faster(record, "decode", name) for name in OTHERS], []
    for tokens in rows.sizes("decode"):
        micro = [1e3 * rows.find("decode", name, tokens)["ms"]["p50"] for name in (rows.ours, *OTHERS)]
        lines.append([f"{tokens:,}", *(f"{us:.1f}" for us in micro), *(f"{ratio[tokens]:.2f}" for ratio in ratios)])
    header = [
        "tokens",
        "FlashMHF, µs per layer",
        "SwiGLU compiled, µs",
        "SwiGLU eager, µs",
        "all layers: faster than compiled",
        "than eager",
    ]
    return f"{table(header, lines)}\n\n*From CUDA graphs.*"


def other_gpus(records: Records) -> str:
    """What the back end of other GPUs costs, as far as a Hopper GPU can tell."""
    record = records["layer"]
    rows, shares = tables.Rows(record), []
    for group in ("latency", "training"):
        for length in rows.sizes(group):
            ours, other = (
                rows.value("stack_ms", group, name, length) for name in ("flashmhf_triton", "swiglu_compiled")
            )
            if None not in (ours, other):
                shares.append((group, ours / other))
    forward, step = (span(share for found, share in shares if found == group) for group in ("latency", "training"))
    less = tables.ratio(*(rows.value("beyond", "training", name) for name in ("swiglu_compiled", "flashmhf_triton")))
    return (
        f"**On Triton expect FlashMHF to be slower than SwiGLU, and smaller in memory.** Only Hopper GPUs have been timed. On an "
        f"{gpu(record)} Triton's forward pass takes {forward} times as long as compiled SwiGLU's and a training step {step} times; "
        f"a layer in training needs {less:.1f} times less memory for activations and gradients. Run `flashmhf` on an A100, an RTX 4090 or "
        "any other GPU before you decide."
    )


def speed_answer(records: Records) -> str:
    record, model = records["layer"], SHAPES["paper"]
    decode, prefill = (faster(record, group, "swiglu_compiled") for group in ("decode", "latency"))
    compiled = longer(training(record, "stack_ms", "swiglu_compiled"))
    return (
        f"Yes for inference on Hopper GPUs, if you take {model.layers} FlashMHF layers where SwiGLU has {model.swiglu_layers}; no for the "
        f"time of a training step. Against compiled SwiGLU at d_model {model.d_model:,} on an {gpu(record)}, the feed-forward layers are "
        f"{span(decode.values())} times faster in decode (1 to {max(decode):,} tokens at once) and {span(prefill.values())} times in "
        f"prefill, and their training step takes {compiled} SwiGLU's. A whole model saves attention layers, too: it generates "
        f"{generation_span(records)} times as many tokens per second ({gpu(records['generate'])}).{whole_prefill(records)}"
    )


# Whole models

UNKNOWN = "not measured"
SCALES = ("tiny", "26m", "57m", "128m", "370m", "1.3b")
Cells = dict[tuple[str, bool], dict[tuple, dict[str, dict]]]


def whole_models(records: Records, blocks: str) -> tuple[dict, dict[str, dict[str, dict]]]:
    """A record, and scale -> network -> row of models trained without checkpointing, from the smallest to the largest,
    where both ran.
    """
    record, cells = training_cells(records)
    found = {key[0]: rows for key, rows in cells[(blocks, False)].items() if {"flashmhf", "swiglu"} <= rows.keys()}
    return record, {scale: found[scale] for scale in sorted(found, key=SCALES.index)}


def of_swiglu(models: dict[str, dict[str, dict]], what: str) -> list[float]:
    return [rows["flashmhf"][what] / rows["swiglu"][what] for rows in models.values()]


def saved(models: dict[str, dict[str, dict]]) -> str:
    return f"{span((100 * (1 - ratio) for ratio in of_swiglu(models, 'memory_mib')), 0)} % less memory"


def whole_training(records: Records) -> str:
    """How models that both networks trained compiled and without checkpointing compare."""
    record, models = whole_models(records, "compiled")
    if not models:
        return "The training of whole models has not been measured."
    scales = [scale.upper() for scale in models]
    what = (
        f"A whole {scales[0]} model trains"
        if len(scales) == 1
        else f"Whole models of {scales[0]} to {scales[-1]} parameters train"
    )
    speed = span(of_swiglu(models, "tokens_per_s"))
    return f"{what} at {speed} of SwiGLU's speed with compiled blocks, in {saved(models)} ({gpu(record)})."


def training_answer(records: Records) -> str:
    """The same in percent, and without compilation."""
    record, models = whole_models(records, "compiled")
    if not models:
        return whole_training(records)
    gains = dict(zip(models, (round(100 * (ratio - 1)) for ratio in of_swiglu(models, "tokens_per_s")), strict=True))
    said = [f"{abs(gain)} % {'faster' if gain >= 0 else 'slower'} at {scale.upper()}" for scale, gain in gains.items()]
    ends = " and ".join(dict.fromkeys((said[0], said[-1])))
    eager = [round(100 * (ratio - 1)) for ratio in of_swiglu(whole_models(records, "eager")[1], "tokens_per_s")]
    without = f" Without compilation it is {span(eager, 0)} % faster." if eager and min(eager) > 0 else ""
    return f"About equal. With compiled blocks FlashMHF trains {ends}, in {saved(models)} ({gpu(record)}).{without}"


def whole_prefill(records: Records) -> str:
    """How compiled models compare over prompts: the least and the most favourable setting."""
    record = records.find("model")
    found = by(record["rows"], "scale", "batch", "length") if record else {}
    names = ("flashmhf compiled", "swiglu compiled")
    pairs = {
        key: [cell[name]["ms"]["p50"] for name in names] for key, cell in found.items() if cell.keys() >= set(names)
    }
    ratios = sorted((theirs / ours, key) for key, (ours, theirs) in pairs.items())
    ends = [f"{ratio:.2f} ({scale.upper()}, {batch} x {length:,} tokens)" for ratio, (scale, batch, length) in ratios]
    return (
        f" Compiled, it reads prompts at {' to '.join(dict.fromkeys((ends[0], ends[-1])))} of SwiGLU's speed."
        if ends
        else ""
    )


def training_cells(records: Records) -> tuple[dict, Cells]:
    """A record, and (blocks, checkpointed) -> (scale, batch, length) -> network -> row, of whole models in training.

    Without a record of the suite `train` by this version: the single GPU of `benchmarks.distributed`.
    """
    cells: Cells = {(blocks, checkpointed): {} for blocks in ("eager", "compiled") for checkpointed in (False, True)}
    record = records.find("train")
    if record is None:
        record = next(iter(records.several_gpus("train").values()))
        cells[("compiled", False)] = {("1.3b", 0, 0): trained(record)}
        return record, cells
    for (blocks, checkpointed, *key), rows in by(
        record["rows"], "blocks", "checkpointing", "scale", "batch", "length"
    ).items():
        cells[(blocks, checkpointed)][tuple(key)] = rows
    return record, cells


def _compared(record: dict, scales: list[str], speeds: list[float], memories: Iterable[float] = ()) -> list[str]:
    """Cells of the decision table for what was measured at ``scales``: speed, memory, where."""
    if not speeds:
        return [UNKNOWN, UNKNOWN, ""]
    where = f"{gpu(record)}, {', '.join(scale.upper() for scale in sorted(set(scales), key=SCALES.index))}"
    return [span(speeds), span(memories) if memories else UNKNOWN, where]


def decision_table(records: Records) -> str:
    """One line per question that a reader decides by; what no record has is said to be unmeasured."""
    record, model = records["layer"], SHAPES["paper"]
    rows = tables.Rows(record)
    memories = [
        [rows.value("beyond", "latency", name, n) for name in ("swiglu_compiled", rows.ours)]
        for n in rows.sizes("latency")
    ]
    less = [compiled / ours for compiled, ours in memories]
    where = f"{gpu(record)}, {model.layers} layers against {model.swiglu_layers}"
    speed = {name: f"{1 / training(record, 'stack_ms', f'swiglu_{name}'):.2f}" for name in ("compiled", "checkpointed")}
    memory = f"{training(record, 'beyond', 'swiglu_compiled'):.2f}"
    lines = [
        ["layers alone, decode", span(faster(record, "decode", "swiglu_compiled").values()), UNKNOWN, where],
        ["layers alone, prefill", span(faster(record, "latency", "swiglu_compiled").values()), span(less), where],
        ["layers alone, training step", speed["compiled"], memory, where],
        ["the same, SwiGLU eager and checkpointed", speed["checkpointed"], "see whole models", where],
    ]
    prompts = records.find("model")
    found = by(prompts["rows"], "scale", "batch", "length") if prompts else {}
    for way in ("", " compiled"):
        names = ("flashmhf" + way, "swiglu" + way)
        pairs = {key: [cell[name] for name in names] for key, cell in found.items() if cell.keys() >= set(names)}
        speeds = [theirs["ms"]["p50"] / ours["ms"]["p50"] for ours, theirs in pairs.values()]
        less = [theirs["memory_mib"] / ours["memory_mib"] for ours, theirs in pairs.values() if "memory_mib" in ours]
        lines.append(
            [
                f"whole model, prefill, {way.strip() or 'eager'}",
                *_compared(prompts, [key[0] for key in pairs], speeds, less),
            ]
        )
    generated = generation(records["generate"])
    speeds = [cell["flashmhf"]["x_swiglu"] for cell in generated.values()]
    lines.append(["whole model, generation", *_compared(records["generate"], [key[0] for key in generated], speeds)])
    record, cells = training_cells(records)
    for blocks in ("eager", "compiled"):
        for name, *checkpointed in (
            ("", False, False),
            (", both checkpointed", True, True),
            (", only SwiGLU checkpointed", False, True),
        ):
            mine, other = (cells[(blocks, way)] for way in checkpointed)
            keys = [key for key in mine if "flashmhf" in mine[key] and "swiglu" in other.get(key, {})]
            pairs = [(mine[key]["flashmhf"], other[key]["swiglu"]) for key in keys]
            speeds = [ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in pairs]
            less = [theirs["memory_mib"] / ours["memory_mib"] for ours, theirs in pairs]
            lines.append(
                [
                    f"whole model, training step, {blocks}{name}",
                    *_compared(record, [key[0] for key in keys], speeds, less),
                ]
            )
    lines.append(["loss at equal parameters", "[see quality](quality.md)", "", ""])
    header = ["what", "speed ÷ SwiGLU's", "SwiGLU's memory ÷ FlashMHF's", "measured"]
    note = (
        "*Above 1 FlashMHF is better. Layers alone are compared with compiled SwiGLU; their memory is the peak of one layer beyond weights "
        "and input. Whole models are compared with SwiGLU models run in the same way; their memory is the peak of everything.*"
    )
    return f"{table(header, lines, words=(0, 3))}\n\n{note}"


def models_table(records: Records) -> str:
    """Whole models over prompts, or that there is no record."""
    return prefill_table(records) if records.find("model") else "The prefill of whole models has not been measured."


# Several GPUs


def trained(record: dict, layout: str = "one") -> dict[str, dict]:
    """Network -> its row of training on one GPU, or in another layout, in a record of `benchmarks.distributed`."""
    return by([row for row in record["rows"] if row["part"] == "train"], "layout").get((layout,), {})


def several_gpus_training(records: Records) -> str:
    found, lines = records.several_gpus("train"), []
    for name, title in (("flashmhf", "FlashMHF-1.3B"), ("swiglu", "SwiGLU-1.3B")):
        for ranks, several in found.items():
            row = trained(several).get(name)
            for other in several["rows"] if row else ():
                if (other["part"], other["subject"], other["status"]) == ("train", name, "ok") and other[
                    "layout"
                ] != "one":
                    layout = (
                        other["layout"].replace("fsdp2", "FSDP2 over").replace("tp", "TP over").replace(" x ", " × ")
                    )
                    memory = f"{other['memory_mib'] / row['memory_mib']:.2f}"
                    lines.append([title, f"{ranks} {gpu(several)}s, {layout}", f"{other['x_one']:.2f}", memory])
    header = ["model", "layout", "speed ÷ that of as many single GPUs", "memory per GPU ÷ that of one"]
    note = software(
        "Compiled blocks, bf16, sequences of 4,096 tokens. Single GPUs train at the same time, each its own copy",
        found.values(),
    )
    return f"{table(header, lines)}\n\n{note}"


def expected_memory(records: Records) -> str:
    """The largest model's memory per GPU with FSDP2 over all, measured or computed from that on one."""
    record, models = whole_models(records, "compiled")
    if not models:
        return "Not measured."
    scale, rows = list(models.items())[-1]
    row = rows["flashmhf"]
    gib = {ranks: row["memory_mib"] / 1024 - 16 * row["parameters"] * (1 - 1 / ranks) / 2**30 for ranks in (1, 2, 4, 8)}
    places, more, cells = [f"one {gpu(record)}"], [], {1: f"{gib[1]:.0f} GiB"}
    for ranks, several in records.several_gpus("train").items():
        if sharded := trained(several, f"fsdp2 {ranks}").get("flashmhf"):
            more.append(sharded["memory_mib"] / 1024 - gib[ranks])
            cells[ranks] = f"{gib[ranks] + more[-1]:.0f} GiB"
            places.append(f"{ranks} {gpu(several)}s")
    cells = {
        ranks: cells.get(ranks) or f"{span([each + over for over in more], 0)} GiB, estimated"
        for ranks, each in gib.items()
    }
    batch = f"{row.get('batch', 4)} sequences of {row.get('length', 4096):,} tokens"
    where = f"Measured on {', '.join(places)}; estimates are computed, with the {span(more, 0)} GiB added by which these exceeded it"
    note = f"*FlashMHF-{scale.upper()} with AdamW, {batch} per GPU at once. {where}.*"
    return f"{table(['GPUs', *map(str, cells)], [['memory per GPU', *cells.values()]])}\n\n{note}"


def several_gpus_module(records: Records) -> str:
    found, lines = records.several_gpus("module"), []
    for ranks, record in found.items():
        rows = [row for row in record["rows"] if row["status"] == "ok"]
        for row in rows:
            if row["part"] == "module" and row["tp"] == ranks:
                lines.append(
                    [row["direction"], f"{ranks} {gpu(record)}s", f"{row['ms']['p50']:.2f}", f"{row['x_one']:.2f}"]
                )
            if row["part"] == "compiled" and row["tp"] == ranks:
                way = row["subject"].replace("sequence", "sequence parallel")
                lines.append(
                    [
                        f"forward, compiled, {way}",
                        f"{ranks} {gpu(record)}s",
                        f"{row['ms']['p50']:.2f}",
                        f"{row['x_one']:.2f}",
                    ]
                )
    note = software("One FlashMHF network (d_model 2,048, 16 heads), 32,256 tokens, bf16", found.values())
    return f"{table(['what', 'GPUs', 'ms', 'times faster than one GPU'], lines)}\n\n{note}"


# Sentences with a price in them


def deterministic_price(records: Records) -> str:
    """What reproducible gradients cost, by head width."""
    record, extra = records["backward"], {}
    for (tokens, width, *_), rows in by(record["rows"], "T", "d_h", "H", "E").items():
        if tokens > operator.GRAPH_TOKENS and {"backward", "deterministic backward"} <= rows.keys():
            ratio = rows["deterministic backward"]["ms"]["p50"] / rows["backward"]["ms"]["p50"]
            extra.setdefault(width, []).append(max(0.0, 100 * (ratio - 1)))
    costs = ", ".join(f"{span(percent, 0)} % at {width}" for width, percent in sorted(extra.items()))
    return (
        f"On an {gpu(record)} reproducible gradients lengthen the operator's backward pass, by head width: {costs}. A range spans the "
        "sizes measured. A training step has other work, too, and loses less."
    )


def fp8_price(records: Records) -> str:
    """What FP8 gains and costs."""
    record, networks, generated, evaluated = (
        records[name] for name in ("fp8", "fp8_networks", "generate_fp8", "fp8_model")
    )
    rows = [row for row in record["rows"] if (row["part"], row["subject"]) == ("operator", "fp8")]
    graphs = by([row for row in _without_e4m3_projections(networks) if row["way"] == "graph"], "T")
    whole = [
        row["flashmhf in 16 bits"]["ms"]["p50"] / row["flashmhf"]["ms"]["p50"]
        for row in graphs.values()
        if "flashmhf" in row
    ]
    cells = by(_without_e4m3_projections(generated), "batch", "context").values()
    gain = [row["flashmhf fp8"]["tokens_per_s"] / row["flashmhf"]["tokens_per_s"] for row in cells]
    loss = {row["subject"]: row["loss"] for row in _without_e4m3_projections(evaluated)}
    return (
        f"Against bf16, the operator becomes {span((row['x_16 bits'] for row in rows), 1)} times faster ({gpu(record)}), a whole "
        f"feed-forward network in a CUDA graph {span(whole, 1)} times ({gpu(networks)}), and generation with a 1.3B model "
        f"{span((100 * (ratio - 1) for ratio in gain), 0)} % ({gpu(generated)}). The operator's relative error is "
        f"{max(row['error'] for row in rows):.3f}, and the held-out loss of a trained 26M model rose from {loss['bf16']:.4f} to "
        f"{loss['fp8']:.4f} ({100 * (loss['fp8'] / loss['bf16'] - 1):.2f} %)."
    )


def decode(records: Records) -> str:
    record = records["decode"]
    return f"{tables.decode_table(record)}\n\n{conditions('Decode', record)}"


def _figures(row: dict | None) -> tuple[str, ...]:
    return (f"{row['ms']['p50']:.2f}", f"{row['tflops']:.0f}", f"{row['x_product']:.2f}") if row else ("", "", "")


def operator_table(records: Records) -> str:
    """Hopper beside Triton at every shape of more than a few tokens, then where and how each was measured."""
    sizes = ("direction", "T", "H", "d_h", "E", "d_e")
    triton, lines = by(records["triton"]["rows"], *sizes), []
    for direction in ("forward", "backward"):
        for key, rows in by(records[direction]["rows"], *sizes).items():
            if key[0] == direction and key[1] > operator.GRAPH_TOKENS:
                shape = ", ".join(map(str, key[2:]))
                beside = triton.get(key, {}).get(direction)
                lines.append([direction, f"{key[1]:,}", shape, *_figures(rows[direction]), *_figures(beside)])
    notes = [
        "Medians at sustained clocks, bf16. TFLOP/s count useful operations, 6 T H d_h E d_e forward and 16 backward. "
        "÷ product: the rate over that of an 8192³ bf16 matrix product of the same run.",
        *(f"- {conditions(name.capitalize(), records[name])}" for name in ("forward", "backward", "triton")),
    ]
    return "\n\n".join([table(list(OPERATOR_COLUMNS), lines), notes[0], "\n".join(notes[1:])])


def training_table(records: Records) -> str:
    """A line per setting, both models in it; a model that did not run has no figures."""
    record, found = records.find("train"), {}
    if record is None:
        return "The presets of 128M and 370M: not measured."
    for row in record["rows"]:
        found.setdefault((row["scale"], row["blocks"], row["checkpointing"], row["batch"], row["length"]), {})[
            row["subject"]
        ] = row
    lines = []
    for (scale, blocks, checkpointing, batch, length), rows in sorted(
        found.items(), key=lambda item: SCALES.index(item[0][0])
    ):
        ours, theirs = ({} if rows[name]["status"] != "ok" else rows[name] for name in ("flashmhf", "swiglu"))
        gib = [f"{row['memory_mib'] / 1024:.1f}" if row else "" for row in (ours, theirs)]
        speeds = [row.get("tokens_per_s") for row in (ours, theirs)]
        setting = [scale.upper(), f"{batch} x {length:,}", blocks, "yes" if checkpointing else "no"]
        lines.append(
            [
                *setting,
                *(fixed(rate, 0) for rate in speeds),
                fixed(tables.ratio(*speeds), 2),
                *gib,
                fixed(ours.get("mfu"), 2),
            ]
        )
    header = ["model", "batch", "blocks", "checkpointed", "FlashMHF tokens/s", "SwiGLU tokens/s", "ratio"]
    header += ["FlashMHF GiB", "SwiGLU GiB", "FlashMHF MFU"]
    return f"{table(header, lines)}\n\n{machine('Steps with AdamW under bf16 autocast; memory is the peak', record)}"


def prefill_table(records: Records) -> str:
    """Whole models over prompts, eager and with every block compiled."""
    record, lines = records["model"], []
    for (scale, batch, length), rows in by(record["rows"], "scale", "batch", "length").items():
        cells = [scale.upper(), f"{batch} x {length:,}"]
        for way in ("", " compiled"):
            ours, theirs = (rows.get(name + way, {}).get("ms", {}).get("p50") for name in ("flashmhf", "swiglu"))
            cells += [fixed(ours, 1), fixed(theirs, 1), fixed(theirs / ours if ours and theirs else None, 2)]
        lines.append(cells)
    header = [
        "model",
        "prompts",
        *(f"{cell}{way}" for way in ("", ", compiled") for cell in ("FlashMHF ms", "SwiGLU ms", "ratio")),
    ]
    return f"{table(header, lines)}\n\n*Models with random weights, bf16, to the last token of each prompt.*"


def generation(record: dict) -> dict[tuple, dict[str, dict]]:
    """(scale, batch, context) -> subject -> row, where both networks have a number."""
    cells = by(record["rows"], "scale", "batch", "context")
    return {key: rows for key, rows in cells.items() if {"flashmhf", "swiglu"} <= rows.keys()}


def generation_span(records: Records) -> str:
    """Return FlashMHF's tokens per second over SwiGLU's, such as "1.18 to 1.25"."""
    return span(rows["flashmhf"]["x_swiglu"] for rows in generation(records["generate"]).values())


def generate_table(records: Records) -> str:
    record, lines = records["generate"], []
    found = by(record["rows"], "scale", "batch", "context")
    for (scale, batch, context), rows in sorted(found.items(), key=lambda item: SCALES.index(item[0][0])):
        ours, theirs = (rows.get(name, {}) for name in ("flashmhf", "swiglu"))
        rates = [fixed(row.get("tokens_per_s"), 0) for row in (ours, theirs)]
        ms = ours.get("ms", {}).get("p50")
        lines.append([scale.upper(), str(batch), f"{context:,}", *rates, fixed(ours.get("x_swiglu"), 2), fixed(ms, 2)])
    header = ["model", "batch", "context", "FlashMHF tokens/s", "SwiGLU tokens/s", "ratio", "FlashMHF, ms per step"]
    said = f"FlashMHF models generate {generation_span(records)} times as many tokens per second as SwiGLU models of equal parameters."
    return f"{said}\n\n{table(header, lines)}\n\n{machine('Models with random weights, bf16', record)}"


def _without_e4m3_projections(record: dict) -> list[dict]:
    """Return a record's rows.

    Of an older one, which has FP8 networks with projections in e4m3, too, those with 16-bit ones alone.
    """
    kept = {row["subject"].removesuffix(KEPT) for row in record["rows"] if row["subject"].endswith(KEPT)}
    rows = (row for row in record["rows"] if row["subject"] not in kept)
    return [row | {"subject": row["subject"].removesuffix(KEPT)} for row in rows]


def generate_fp8_table(records: Records) -> str:
    record, lines = records["generate_fp8"], []
    for row in (row for row in _without_e4m3_projections(record) if row["status"] == "ok"):
        figures = [
            fixed(row["tokens_per_s"], 0),
            f"{row['ms']['p50']:.2f}",
            fixed(row.get("x_swiglu fp8"), 2),
            fixed(row.get("x_swiglu"), 2),
        ]
        lines.append([str(row["batch"]), f"{row['context']:,}", row["subject"], *figures])
    header = ["batch", "context", "model", "tokens/s", "ms per step", "÷ SwiGLU in FP8", "÷ SwiGLU in 16 bits"]
    return f"{table(header, lines)}\n\n{conditions('`generate`', record)}"


def fp8_operator_table(records: Records) -> str:
    record = records["fp8"]
    parts = {part: [row for row in record["rows"] if row["part"] == part] for part in ("operator", "decode")}
    lines = []
    for (d_h, tokens), rows in sorted(
        by(parts["operator"], "d_h", "T").items(), key=lambda item: (item[0][0], -item[0][1])
    ):
        row = rows["fp8"]
        ratios = [fixed(row.get(name), 2) for name in ("x_16 bits", "x_product", "x_swiglu fp8")]
        lines.append([str(d_h), f"{tokens:,}", f"{row['tflops']:.0f}", *ratios])
    header = ["d_h", "T", "TFLOP/s", "÷ our bf16 kernel", "÷ bf16 8192³ product", "÷ SwiGLU in FP8"]
    copy = record["before"]["copy_gb_per_s"]
    few = [
        [
            str(tokens),
            *(f"{1e3 * rows[name]['ms']['p50']:.1f}" for name in ("fp8", "16 bits")),
            f"{rows['fp8']['gb_per_s'] / copy:.2f}",
        ]
        for (tokens,), rows in by(parts["decode"], "T").items()
    ]
    few_header = ["T, d_h = 128", "µs", "bf16 kernel µs", "share of a copy's bandwidth"]
    return f"{table(header, lines)}\n\n{table(few_header, few)}\n\n{conditions('Operator', record)}"


def fp8_networks_table(records: Records) -> str:
    """Whole FP8 networks against an FP8 SwiGLU (layers of equal parameters) and against the same network in 16 bits."""
    record, lines = records["fp8_networks"], {}
    for (count, way), rows in by(_without_e4m3_projections(record), "T", "way").items():
        own = rows["flashmhf in 16 bits"]["ms"]["p50"] / rows["flashmhf"]["ms"]["p50"]
        lines.setdefault(count, {})[way] = f"{own:.2f}", f"{rows['flashmhf']['x_swiglu']:.2f}"
    header = [
        "tokens",
        "than bf16 FlashMHF, CUDA graph",
        "than bf16 FlashMHF, no graph",
        "than FP8 SwiGLU, CUDA graph",
        "than FP8 SwiGLU, no graph",
    ]
    cells = [
        [f"{count:,}", *(ways[way][i] for i in (0, 1) for way in ("graph", "called"))] for count, ways in lines.items()
    ]
    what = "Times faster, whole networks, d_model 2,048. SwiGLU: 24 layers against 20, two compiled row-wise `torch._scaled_mm`"
    return f"{table(header, cells)}\n\n{machine(what, record)}"


def groups_table(records: Records) -> str:
    """The forward with g = H / H_kv heads that share weights: TFLOP/s of many tokens, µs of few from a CUDA graph."""
    paths = [
        records.folder / f"{name}_{device}.json" for device in reversed(DEVICES) for name in ("groups", "groups_heads")
    ]
    cells: dict[tuple[str, int, int], dict[str, dict[int, dict]]] = {}
    notes = []
    for record in (json.loads(path.read_text()) for path in paths if path.exists()):
        notes.append(conditions(gpu(record), record))
        for row in record["rows"]:
            if row["subject"] in ("gated forward", "forward"):
                cell = cells.setdefault((row["subject"], -row["H"], row["T"]), {})
                cell.setdefault(gpu(record), {})[row["H"] // row["H_kv"]] = row
    groups = sorted({group for cell in cells.values() for rows in cell.values() for group in rows})
    lines = []
    for (subject, heads, tokens), cell in sorted(cells.items(), reverse=True):
        where, rows = list(cell.items())[-1]  # of a device in front of DEVICES where there is one
        few = tokens <= operator.GRAPH_TOKENS
        figures = [f"{1e3 * rows[g]['ms']['p50']:.1f}" if few else f"{rows[g]['tflops']:.0f}" for g in groups]
        gate = "router" if subject == "gated forward" else "R given"
        lines.append([where, str(-heads), f"{tokens:,}", gate, "µs" if few else "TFLOP/s", *figures])
    header = ["GPU", "H", "T", "gate", "unit", *(f"g = {group}" for group in groups)]
    return "\n\n".join([table(header, lines), *notes])


SERVING_COLUMNS = {
    "module": "FlashMHF layer",
    "swiglu": "SwiGLU layer, eager",
    "piece": "FlashMHF piece",
    "piece swiglu": "SwiGLU piece",
}
SERVED_PAIRS = (("module", "swiglu"), ("piece", "piece swiglu"))


def serving_table(records: Records) -> str:
    """Times in CUDA graphs; a subject that the record does not have is no column."""
    record = records["serving"]
    tokens = {count: rows for (count,), rows in by(record["rows"], "T").items()}
    names = [name for name in SERVING_COLUMNS if any(name in rows for rows in tokens.values())]
    lines = []
    for count, rows in tokens.items():
        us = {name: 1e3 * rows[name]["ms"]["p50"] for name in names}
        ratios = [f"{us['swiglu'] / us['module']:.2f}", f"{us['piece swiglu'] / us['piece']:.2f}"]
        lines.append([f"{count:,}", *(f"{us[name]:.1f}" for name in names), *ratios])
    header = [
        "tokens",
        *(f"{SERVING_COLUMNS[name]}, µs" for name in names),
        "layers, SwiGLU ÷ FlashMHF",
        "pieces, SwiGLU ÷ FlashMHF",
    ]
    layers, pieces = (
        [rows[a]["ms"]["p50"] / rows[b]["ms"]["p50"] for rows in tokens.values()] for a, b in SERVED_PAIRS
    )
    said = (
        f"One FlashMHF layer takes {span(layers)} times as long as one eager SwiGLU layer, depending on the tokens. The piece that an "
        f"engine runs between two calls of attention (sum, RMSNorm, layer, sum, RMSNorm) takes {span(pieces)} times as long."
    )
    what = "Above 1 FlashMHF is faster. bf16, CUDA graphs; FlashMHF(2048, 16, 22, 384), SwiGLU 8,192 wide"
    return f"{said}\n\n{table(header, lines)}\n\n{machine(what, record)}"


BLOCKS: dict[str, dict[str, Callable[[Records], str]]] = {
    "README.md": {"pitch": pitch, "headline": headline},
    "benchmarks/README.md": {
        "summary": summary,
        "decode": decode,
        "operator": operator_table,
        "groups": groups_table,
        "fp8": fp8_operator_table,
        "generate fp8": generate_fp8_table,
    },
    "docs/index.md": {"pitch": pitch},
    "docs/measurements.md": {
        "decide": decision_table,
        "in short": layers_in_short,
        "measured": measured,
        "prefill": layer_prefill_table,
        "memory": layer_memory_table,
        "decode": layer_decode_table,
        "training": layer_training_table,
        "implementations": implementations_table,
        "models": models_table,
    },
    "docs/faq.md": {
        "speed": speed_answer,
        "training": training_answer,
        "other gpus": other_gpus,
        "deterministic": deterministic_price,
        "fp8": fp8_price,
    },
    "docs/api.md": {"deterministic": deterministic_price},
    "docs/fp8.md": {"price": fp8_price, "networks": fp8_networks_table},
    "docs/serving.md": {"generate": generate_table, "serving": serving_table},
    "docs/scaling.md": {"memory": expected_memory, "training": several_gpus_training, "module": several_gpus_module},
    "docs/language-models.md": {"training": training_table},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 when a file disagrees with the records"
    )
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository (default: this script's)")
    options = parser.parse_args(arguments)
    records, stale = Records(options.root), 0
    for name, blocks in BLOCKS.items():
        path = options.root / name
        text = wanted = path.read_text()
        for block, write in blocks.items():
            wanted = with_block(wanted, block, write(records), WRITER)
        if text == wanted:
            continue
        stale += 1
        if options.check:
            print(f"{name} disagrees with benchmarks/results: run python -m benchmarks.write_readme", file=sys.stderr)
        else:
            path.write_text(wanted)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
