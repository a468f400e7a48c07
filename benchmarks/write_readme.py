"""Writes the tables of README.md, benchmarks/README.md, csrc/forward/README.md and docs/ from the records in benchmarks/results.

    $ python -m benchmarks.write_readme            # after a record has changed
    $ python -m benchmarks.write_readme --check    # changes nothing; exit status 1 when a file disagrees with the records

A table stands between the markers ``<!-- NAME: begin (benchmarks/write_readme.py) -->`` and ``<!-- NAME: end -->``. It is made from the
record of the first device of DEVICES that has one.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable

from .harness.markdown import table, with_block
from .suites import operator, tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICES = ("h100", "h200")
WRITER = "benchmarks/write_readme.py"
KEPT = ", 16-bit projections"  # of subjects of older records
OPERATOR_COLUMNS = ("operator", "T", "H, d_h, E, d_e", "Hopper ms", "TFLOP/s", "÷ product", "Triton ms", "TFLOP/s", "÷ product")


class Records:
    """The records below ``root``, by the part of their name before the device."""

    def __init__(self, root: pathlib.Path):
        self.folder = root / "benchmarks" / "results"

    def __getitem__(self, name: str) -> dict:
        paths = [self.folder / f"{name}_{device}.json" for device in DEVICES]
        return json.loads(next((path for path in paths if path.exists()), paths[-1]).read_text())


def machine(what: str, record: dict) -> str:
    """Where it was measured: the caption of a table in a user's page, whose record has the rest."""
    where = record["environment"]
    return f"*{what}: {where['device']}, torch {where['packages']['torch'].partition('+')[0]}.*"


def conditions(what: str, record: dict) -> str:
    where = record["environment"]
    commit = f", commit {where['commit']}" if where.get("commit") else ""
    return f"{what}: {where['device']}, torch {where['packages']['torch']}, {where['date']}{commit}."


def by(rows: list[dict], *names: str) -> dict[tuple, dict[str, dict]]:
    """Subject -> row, for each combination of what ``names`` have, in the rows' order; rows without a number are left out."""
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


def decode(records: Records) -> str:
    record = records["layer"]
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
    record, found = records["train"], {}
    for row in record["rows"]:
        found.setdefault((row["scale"], row["blocks"], row["checkpointing"], row["batch"], row["length"]), {})[row["subject"]] = row
    lines = []
    for (scale, blocks, checkpointing, batch, length), rows in found.items():
        ours, theirs = ({} if rows[name]["status"] != "ok" else rows[name] for name in ("flashmhf", "swiglu"))
        gib = [f"{row['memory_mib'] / 1024:.1f}" if row else "" for row in (ours, theirs)]
        rates = [fixed(row.get("tokens_per_s"), 0) for row in (ours, theirs)]
        setting = [scale.upper(), f"{batch} x {length:,}", blocks, "yes" if checkpointing else "no"]
        lines.append([*setting, *rates, fixed(ours.get("x_swiglu"), 2), *gib, fixed(ours.get("mfu"), 2)])
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
    header = ["model", "prompts", *(f"{cell}{way}" for way in ("", ", compiled") for cell in ("FlashMHF ms", "SwiGLU ms", "ratio"))]
    return f"{table(header, lines)}\n\n{machine('Models with random weights, bf16, to the last token of each prompt', record)}"


def generate_table(records: Records) -> str:
    record, lines = records["generate"], []
    for (scale, batch, context), rows in by(record["rows"], "scale", "batch", "context").items():
        ours, theirs = (rows.get(name, {}) for name in ("flashmhf", "swiglu"))
        rates = [fixed(row.get("tokens_per_s"), 0) for row in (ours, theirs)]
        ms = ours.get("ms", {}).get("p50")
        lines.append([scale.upper(), str(batch), f"{context:,}", *rates, fixed(ours.get("x_swiglu"), 2), fixed(ms, 2)])
    header = ["model", "batch", "context", "FlashMHF tokens/s", "SwiGLU tokens/s", "ratio", "FlashMHF, ms per step"]
    return f"{table(header, lines)}\n\n{machine('Models with random weights, bf16', record)}"


def _without_e4m3_projections(record: dict) -> list[dict]:
    """Return a record's rows. Of an older one, which has FP8 networks with projections in e4m3, too, those with 16-bit ones alone."""
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
    header = ["batch", "context", "model", "tokens/s", "ms a step", "÷ SwiGLU in FP8", "÷ SwiGLU in 16 bits"]
    return f"{table(header, lines)}\n\n{conditions('`generate`', record)}"


def fp8_operator_table(records: Records) -> str:
    record = records["fp8"]
    parts = {part: [row for row in record["rows"] if row["part"] == part] for part in ("operator", "decode")}
    lines = []
    for (d_h, tokens), rows in sorted(by(parts["operator"], "d_h", "T").items(), key=lambda item: (item[0][0], -item[0][1])):
        row = rows["fp8"]
        ratios = [fixed(row.get(name), 2) for name in ("x_16 bits", "x_product", "x_swiglu fp8")]
        lines.append([str(d_h), f"{tokens:,}", f"{row['tflops']:.0f}", *ratios])
    header = ["d_h", "T", "TFLOP/s", "÷ our bf16 kernel", "÷ bf16 8192³ product", "÷ SwiGLU in FP8"]
    copy = record["before"]["copy_gb_per_s"]
    few = [
        [str(tokens), *(f"{1e3 * rows[name]['ms']['p50']:.1f}" for name in ("fp8", "16 bits")), f"{rows['fp8']['gb_per_s'] / copy:.2f}"]
        for (tokens,), rows in by(parts["decode"], "T").items()
    ]
    few_header = ["T, d_h = 128", "µs", "bf16 kernel µs", "share of a copy's bandwidth"]
    return f"{table(header, lines)}\n\n{table(few_header, few)}\n\n{conditions('Operator', record)}"


def fp8_networks_table(records: Records) -> str:
    record, tokens = records["fp8_networks"], {}
    for (count, way), rows in by(_without_e4m3_projections(record), "T", "way").items():
        tokens.setdefault(count, {})[way] = f"{rows['flashmhf']['x_swiglu']:.2f}"
    lines = [[f"{count:,}", ratios["graph"], ratios["called"]] for count, ratios in tokens.items()]
    return f"{table(['T', 'in CUDA graphs', 'called'], lines)}\n\n{machine('Whole networks with bf16 projections', record)}"


def groups_table(records: Records) -> str:
    """The forward with g = H / H_kv heads that share weights: TFLOP/s of many tokens, µs of few from a CUDA graph."""
    found = [records[name] for name in ("groups", "groups_heads")]  # the first ended within H = 32
    cells: dict[tuple[str, int, int], dict[int, dict]] = {}
    for row in (row for record in found for row in record["rows"]):
        if row["subject"] in ("gated forward", "forward"):
            cells.setdefault((row["subject"], -row["H"], row["T"]), {})[row["H"] // row["H_kv"]] = row
    groups = sorted({group for rows in cells.values() for group in rows})
    lines = []
    for (subject, heads, tokens), rows in sorted(cells.items(), reverse=True):
        few = tokens <= operator.GRAPH_TOKENS
        figures = [f"{1e3 * rows[g]['ms']['p50']:.1f}" if few else f"{rows[g]['tflops']:.0f}" for g in groups]
        gate = "router" if subject == "gated forward" else "R given"
        lines.append([str(-heads), f"{tokens:,}", gate, "µs" if few else "TFLOP/s", *figures])
    header = ["H", "T", "gate", "unit", *(f"g = {group}" for group in groups)]
    notes = [conditions(what, record) for what, record in zip(("H = 16", "H = 32 and 64"), found, strict=True)]
    return "\n\n".join([table(header, lines), *notes])


SERVING_COLUMNS = {"module": "FlashMHF layer", "swiglu": "SwiGLU layer", "piece": "FlashMHF piece", "piece swiglu": "SwiGLU piece"}


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
    header = ["tokens", *(f"{SERVING_COLUMNS[name]}, µs" for name in names), "layers, SwiGLU ÷ FlashMHF", "pieces, SwiGLU ÷ FlashMHF"]
    what = "Above 1 FlashMHF is faster. bf16, CUDA graphs; FlashMHF(2048, 16, 22, 384), SwiGLU 8,192 wide"
    return f"{table(header, lines)}\n\n{machine(what, record)}"


BLOCKS: dict[str, dict[str, Callable[[Records], str]]] = {
    "README.md": {"headline": headline},
    "benchmarks/README.md": {
        "summary": summary,
        "decode": decode,
        "operator": operator_table,
        "fp8": fp8_operator_table,
        "generate fp8": generate_fp8_table,
    },
    "docs/language-models.md": {"training": training_table},
    "csrc/forward/README.md": {"groups": groups_table},
    "docs/fp8.md": {"networks": fp8_networks_table},
    "docs/serving.md": {"generate": generate_table, "serving": serving_table},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when a file disagrees with the records")
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
