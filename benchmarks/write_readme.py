"""Writes the tables of README.md, benchmarks/README.md, csrc/forward/README.md and docs/ from the records in benchmarks/results.

    $ python benchmarks/write_readme.py            # after a record has changed
    $ python benchmarks/write_readme.py --check    # changes nothing; exit status 1 when a file disagrees with the records

A table stands between the markers ``<!-- NAME: begin (benchmarks/write_readme.py) -->`` and ``<!-- NAME: end -->``.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable

from .harness import operator, paper

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPERATOR_COLUMNS = ("operator", "T", "H, d_h, E, d_e", "Hopper ms", "TFLOP/s", "÷ product", "Triton ms", "TFLOP/s", "÷ product")


def read(root: pathlib.Path, name: str) -> dict:
    return json.loads((root / "benchmarks" / "results" / name).read_text())


def headline(root: pathlib.Path) -> str:
    return paper.headline(read(root, "h200/results.json"))


def summary(root: pathlib.Path) -> str:
    return paper.summary_table(read(root, "h200/results.json"))


def decode(root: pathlib.Path) -> str:
    record = read(root, "decode/results.json")
    return f"{paper.decode_table(record)}\n\n{_conditions('Decode', record)}"


def _figures(row: dict | None) -> tuple[str, ...]:
    return (f"{row['ms']['p50']:.2f}", f"{row['tflops']:.0f}", f"{row['x_matmul']:.2f}") if row else ("", "", "")


def _conditions(what: str, record: dict) -> str:
    where = record["environment"]
    commit = f", commit {where['commit']}" if where.get("commit") else ""
    return f"{what}: {where['device']}, torch {where['packages']['torch']}, {where['date']}{commit}."


def operator_table(root: pathlib.Path) -> str:
    """Hopper beside Triton at every shape of more than a few tokens, then where and how each was measured."""
    records = {name: read(root, f"{name}_h200.json") for name in ("forward", "backward", "triton")}
    sizes = ("T", "H", "d_h", "E", "d_e")
    triton = {(row["subject"], *(row[name] for name in sizes)): row for row in records["triton"]["rows"] if row["status"] == "ok"}
    lines = []
    for direction in ("forward", "backward"):
        for row in records[direction]["rows"]:
            if row["subject"] != direction or row["status"] != "ok" or row["T"] <= operator.GRAPH_TOKENS:
                continue
            beside = triton.get((direction, *(row[name] for name in sizes)))
            shape = ", ".join(str(row[name]) for name in sizes[1:])
            lines.append([direction, f"{row['T']:,}", shape, *_figures(row), *_figures(beside)])
    notes = [
        "Medians at sustained clocks, bf16. TFLOP/s count useful operations, 6 T H d_h E d_e forward and 16 backward. "
        "÷ product: the rate over that of an 8192³ bf16 matrix product of the same run.",
        *(f"- {_conditions(name.capitalize(), record)}" for name, record in records.items()),
    ]
    return "\n\n".join([paper.table(list(OPERATOR_COLUMNS), lines), notes[0], "\n".join(notes[1:])])


def training_table(root: pathlib.Path) -> str:
    record = read(root, "lm_training_h200.json")
    where, settings = record["environment"], record["settings"]
    lines = []
    for run in record["runs"]:
        (first, before), (last, after) = run["losses"][0], run["losses"][-1]
        memory, loss = f"{run['peak_memory_bytes'] / 2**30:.1f} GiB", f"{before:.2f}, {after:.2f}"
        lines.append([run["model"], f"{run['tokens_per_second']['median']:,.0f}", f"{run['mfu']:.3f}", memory, loss])
    header = ["preset", "tokens/s", "MFU", "peak memory", f"loss at step {first}, {last}"]
    size = f"batch {settings['batch']} x {settings['length']}, bf16, `torch.compile`"
    return f"{paper.table(header, lines)}\n\n{where['device']}, {where['date']}, {size}: `{where['command']}`."


def generate_table(root: pathlib.Path) -> str:
    record = read(root, "generate_h200.json")
    cells: dict[tuple[int, int], dict[str, dict]] = {}
    for row in record["rows"]:
        cells.setdefault((row["batch"], row["context"]), {})[row["subject"]] = row
    lines = []
    for (batch, context), rows in cells.items():
        ours, theirs = rows["flashmhf"], rows["swiglu"]
        rates = (f"{ours['tokens_per_s']:,.0f}", f"{theirs['tokens_per_s']:,.0f}", f"{ours['x_swiglu']:.2f}")
        lines.append([str(batch), f"{context:,}", *rates, f"{ours['ms_per_token']:.2f}", f"{ours['host_ms_per_token']:.2f}"])
    header = ["batch", "context", "FlashMHF tokens/s", "SwiGLU tokens/s", "ratio", "FlashMHF ms a step", "host ms a step"]
    return f"{paper.table(header, lines)}\n\n{_conditions('`generate`', record)}"


def generate_fp8_table(root: pathlib.Path) -> str:
    record = read(root, "generate_fp8_h200.json")
    lines = []
    for row in record["rows"]:
        ratios = [f"{row[name]:.2f}" if name in row else "" for name in ("x_swiglu", "x_swiglu_bf16")]
        figures = [f"{row['tokens_per_s']:,.0f}", f"{row['ms_per_token']:.2f}", *ratios]
        lines.append([str(row["batch"]), f"{row['context']:,}", row["subject"], *figures])
    header = ["batch", "context", "model", "tokens/s", "ms a step", "÷ SwiGLU in FP8", "÷ SwiGLU in bf16"]
    return f"{paper.table(header, lines)}\n\n{_conditions('`generate`', record)}"


def fp8_operator_table(root: pathlib.Path) -> str:
    record = read(root, "fp8_h200.json")
    lines = []
    for row in sorted(record["operator"], key=lambda row: (row["d_h"], -row["tokens"])):
        ratios = [f"{row[name]:.2f}" if name in row else "" for name in ("fp8 over bf16", "fp8 over product", "fp8 over swiglu fp8")]
        lines.append([str(row["d_h"]), f"{row['tokens']:,}", f"{row['tflops']['fp8']:.0f}", *ratios])
    header = ["d_h", "T", "TFLOP/s", "÷ our bf16 kernel", "÷ bf16 8192³ product", "÷ SwiGLU in FP8"]
    few = [
        [str(row["tokens"]), f"{row['us']['fp8']:.1f}", f"{row['us']['bf16']:.1f}", f"{row['share of copy']['fp8']:.2f}"]
        for row in record["decode"]
    ]
    few_header = ["T, d_h = 128", "µs", "bf16 kernel µs", "share of a copy's bandwidth"]
    return f"{paper.table(header, lines)}\n\n{paper.table(few_header, few)}\n\n{_conditions('Operator', {'environment': record})}"


def fp8_networks_table(root: pathlib.Path) -> str:
    record = read(root, "fp8_networks_h200.json")
    lines = []
    for row in record["networks"]:
        ratios = [row[way]["24 swiglu over 20"] for way in ("graph", "called")]
        figures = [f"{ratio[name]:.2f}" for ratio in ratios for name in ("flashmhf", "flashmhf, bf16 projections")]
        lines.append([f"{row['tokens']:,}", *figures])
    header = ["T", *(f"{way}, {kind} projections" for way in ("graphs", "called") for kind in ("e4m3", "bf16"))]
    return f"{paper.table(header, lines)}\n\n{_conditions('Networks', {'environment': record})}"


def groups_table(root: pathlib.Path) -> str:
    """The forward with g = H / H_kv heads that share weights: TFLOP/s of many tokens, µs of few from a CUDA graph."""
    records = [read(root, name) for name in ("groups_h200.json", "groups_heads_h200.json")]  # the first ended within H = 32
    cells: dict[tuple[str, int, int], dict[int, dict]] = {}
    for row in (row for record in records for row in record["rows"]):
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
    conditions = [_conditions(what, record) for what, record in zip(("H = 16", "H = 32 and 64"), records, strict=True)]
    return "\n\n".join([paper.table(header, lines), *conditions])


SERVING_COLUMNS = {
    "module": "module",
    "layer": "layer",
    "layer compiled": "compiled",
    "swiglu": "SwiGLU",
    "piece": "piece",
    "piece swiglu": "SwiGLU's piece",
}


def serving_table(root: pathlib.Path) -> str:
    record = read(root, "serving_layer_h200.json")
    tokens: dict[int, dict[str, dict]] = {}
    for row in record["rows"]:
        tokens.setdefault(row["tokens"], {})[row["subject"]] = row
    names = [name for name in SERVING_COLUMNS if any(name in rows for rows in tokens.values())]
    lines = []
    for count, rows in tokens.items():
        times = [f"{rows[name]['graph_us']:.1f}" for name in names]
        ratios = [f"{rows[name]['x_module']:.3f}" for name in ("layer", "layer compiled")]
        ratios.append(f"{rows['layer']['graph_us'] / rows['swiglu']['graph_us']:.2f}")
        piece = [f"{rows['piece']['x_piece_swiglu']:.2f}"] if "piece" in names else []
        host = [f"{rows[name]['host_us']:.0f}" for name in ("module", "layer")]
        lines.append([f"{count:,}", *times, *ratios, *piece, *host])
    header = ["T", *(f"{SERVING_COLUMNS[name]} µs" for name in names), "layer ÷ module", "compiled ÷ module", "layer ÷ SwiGLU"]
    header += ["piece ÷ SwiGLU's"] if "piece" in names else []
    header += ["host: module µs", "host: layer µs"]
    return f"{paper.table(header, lines)}\n\n{_conditions('Layer', record)} SwiGLU: d_ff 8192. Host: to queue one eager call."


BLOCKS: dict[str, dict[str, Callable[[pathlib.Path], str]]] = {
    "README.md": {"headline": headline},
    "benchmarks/README.md": {"summary": summary, "decode": decode, "operator": operator_table},
    "docs/language-models.md": {"training": training_table},
    "csrc/forward/README.md": {"groups": groups_table},
    "docs/fp8.md": {"operator": fp8_operator_table, "networks": fp8_networks_table, "generate": generate_fp8_table},
    "docs/serving.md": {"generate": generate_table, "serving": serving_table},
}


def with_block(text: str, name: str, block: str) -> str:
    """``text`` with the block between the markers of ``name`` replaced. Raises ValueError when the markers are missing."""
    begin, end = f"<!-- {name}: begin (benchmarks/write_readme.py) -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the text lacks the markers {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when a file disagrees with the records")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository (default: this script's)")
    options = parser.parse_args(arguments)
    stale = 0
    for name, blocks in BLOCKS.items():
        path = options.root / name
        text = wanted = path.read_text()
        for block, write in blocks.items():
            wanted = with_block(wanted, block, write(options.root))
        if text == wanted:
            continue
        stale += 1
        if options.check:
            print(f"{name} disagrees with benchmarks/results: run python benchmarks/write_readme.py", file=sys.stderr)
        else:
            path.write_text(wanted)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
