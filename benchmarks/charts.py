"""Draws the charts of the documentation from the newest records: ``python -m benchmarks.charts``.

A chart has no ground of its own, and its colours follow the reader's: light ink on a dark page. It is as wide as a
column of a page, so that a phone shrinks its labels by a third at most.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .records import Records
from .tables.layers import Layers

ROOT = Path(__file__).resolve().parents[1]
INK, OURS, OTHERS = "#24292f", "#3949ab", "#8c959f"
ON_DARK = {INK: "#e6edf3", OURS: "#9fa8da", OTHERS: "#8b949e"}
NAMED = 6  # kernels of a timeline
NAMES = {
    "flashmhf_hopper": "FlashMHF", "swiglu_compiled": "SwiGLU, compiled", "swiglu": "SwiGLU, eager",
    "official": "authors' Triton kernel",
}  # fmt: skip
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "flashmhf", "font.family": "sans-serif", "font.size": 10,
    "axes.titlesize": 10, "figure.facecolor": "none", "axes.facecolor": "none",
    "axes.spines.top": False, "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip


def bars(axes, values: dict[str, float], title: str) -> None:
    """Draw one horizontal bar per subject, ours first and in colour, each with its number."""
    names = [name for name in NAMES if name in values]
    bar = axes.barh(
        [NAMES[name] for name in names], [values[name] for name in names], color=[OURS, *[OTHERS] * (len(names) - 1)]
    )
    axes.bar_label(bar, fmt=lambda value: f"{value:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.set_xticks([])
    axes.margins(x=0.2)
    axes.spines["bottom"].set_visible(False)


def overview(layers: Layers, length: int = 4032) -> Figure:
    """Draw time and memory at one length (batch 8), in inference and in a training step: shorter is better."""
    figure = Figure(figsize=(5.4, 5.6), layout="constrained")
    figure.suptitle(f"{8 * length:,} tokens: shorter is better", x=0.02, ha="left", weight="bold")
    panels = figure.subplots(4, 1, height_ratios=(4, 3, 3, 3))
    for axes, (title, what, group) in zip(
        panels,
        (
            ("Inference: ms for all layers", "ms", "latency"),
            ("Training step: ms for all layers", "ms", "training"),
            ("Memory in inference: MiB for one layer", "beyond", "latency"),
            ("Memory in training: MiB for one layer", "beyond", "training"),
        ),
        strict=True,
    ):
        found = {name: getattr(layers, what)(group, name, length) for name in NAMES}
        shown = {name: value for name, value in found.items() if value is not None}
        bars(axes, {name: shown[name] for name in shown if what == "ms" or name != "official"}, title)
    return figure


def speedup(layers: Layers, noise: float = 0.02) -> Figure:
    """Draw how many times faster 20 FlashMHF layers are than 24 compiled SwiGLU layers, by the number of tokens, with
    a band of ``noise``: what runs of one chip differ by."""
    figure = Figure(figsize=(5.4, 3.2), layout="constrained")
    axes = figure.subplots()
    points = {
        layers.rows[group, "swiglu_compiled"][size]["tokens"]: layers.ms(group, "swiglu_compiled", size)
        / layers.ms(group, layers.ours, size)
        for group in ("decode", "latency")
        for size in layers.sizes(group)
    }
    tokens = sorted(points)
    ratios = [points[each] for each in tokens]
    low, high = ([ratio * (1 + sign * noise) for ratio in ratios] for sign in (-1, 1))
    axes.fill_between(tokens, low, high, color=OTHERS, alpha=0.3, linewidth=0)
    axes.plot(tokens, ratios, color=OURS, linewidth=2.5)
    axes.axhline(1, color=OTHERS, linewidth=1)
    axes.annotate("SwiGLU's speed", (1, 1), xytext=(0, 3), textcoords="offset points", color=OTHERS)
    axes.set(xlabel="tokens in the batch", ylabel="speed ÷ SwiGLU's", ylim=(0.98, None))
    axes.set_xscale("log")
    axes.set_xticks([1, 16, 256, 4096, 65536], ["1", "16", "256", "4k", "64k"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    return figure


def timeline(record: dict) -> Figure:
    """Draw a training step of both networks: on the host the ranges that it queues, on the GPU the kernels, ours in
    colour, the longest with a number that the list below names."""
    titles = {"flashmhf": "FlashMHF", "swiglu": "SwiGLU, compiled"}
    figure = Figure(figsize=(5.4, 5.6), layout="constrained")
    panels = figure.subplots(len(titles), 1, sharex=True)
    for axes, row in zip(panels, record["rows"], strict=True):
        for place, spans in ((1, row["ranges"]), (0, row["kernels"])):
            colours = [OURS if name.startswith("flashmhf") else OTHERS for name, *_ in spans]
            bars = [(start / 1e3, us / 1e3) for _, start, us in spans]
            axes.broken_barh(bars, (place - 0.3, 0.6), facecolors=colours, edgecolor="white", linewidth=0.5)
        queued, start, us = ", ".join(name for name, *_ in row["ranges"]), *row["ranges"][-1][1:]
        axes.annotate(queued, ((start + us) / 1e3, 1), xytext=(6, 0), textcoords="offset points", va="center")
        longest = sorted(sorted(row["kernels"], key=lambda each: -each[2])[:NAMED], key=lambda each: each[1])
        numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, *_ in longest), 1)}
        for name, start, us in longest:
            axes.annotate(str(numbers[name]), ((start + us / 2) / 1e3, -0.55), ha="center")
        axes.set_xlabel("\n".join(f"{number} {name[:60]}" for name, number in numbers.items()), loc="left", fontsize=8)
        axes.set_yticks([0, 1], ["GPU", "host"])
        axes.set_ylim(-0.8, 1.7)
        axes.set_title(f"{titles[row['subject']]}, {row['T']:,} tokens: ms", loc="left")
        axes.tick_params(labelbottom=True)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as an SVG file that is equal whenever its data are, under STYLE, in colours of the page."""
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    names = {INK: "ink", OURS: "ours", OTHERS: "others"}
    drawn = text.getvalue()
    for colour, name in names.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    light, dark = (
        "".join(f"--{name}:{colours[colour]};" for colour, name in names.items())
        for colours in ({colour: colour for colour in names}, ON_DARK)
    )
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    path.write_text(drawn.replace("<defs>", f"<defs>{style}", 1), encoding="utf-8")


def main() -> int:
    records = Records(ROOT)
    layers = Layers(records)
    with matplotlib.rc_context(STYLE):
        save(overview(layers), ROOT / "docs" / "assets" / "overview.svg")
        save(speedup(layers), ROOT / "docs" / "assets" / "speedup.svg")
        save(timeline(records["timeline"]), ROOT / "docs" / "assets" / "timeline.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
