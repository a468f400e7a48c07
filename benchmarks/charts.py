"""Draws the charts of the documentation from the newest records: ``python -m benchmarks.charts``."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .records import Records
from .tables.layers import Layers

ROOT = Path(__file__).resolve().parents[1]
OURS, OTHERS = "#3949ab", "#9e9e9e"
NAMES = {
    "flashmhf_hopper": "flashmhf", "swiglu_compiled": "SwiGLU, compiled", "swiglu": "SwiGLU, eager",
    "official": "official Triton kernel",
}  # fmt: skip
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "flashmhf", "font.family": "sans-serif", "font.size": 9}


def bars(axes, values: dict[str, float], title: str, unit: str) -> None:
    """Draw one horizontal bar per subject, ours first and in colour, each with its number."""
    names = [name for name in NAMES if name in values]
    bar = axes.barh(
        [NAMES[name] for name in names], [values[name] for name in names], color=[OURS, *[OTHERS] * (len(names) - 1)]
    )
    axes.bar_label(bar, fmt=lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.1f}", padding=3)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.set_xlabel(unit)
    axes.margins(x=0.18)
    axes.spines[["top", "right"]].set_visible(False)


def overview(layers: Layers, length: int = 4032) -> Figure:
    """Draw the forward's time and both memories at one length (batch 8)."""
    figure = Figure(figsize=(10.5, 2.9), layout="constrained")
    axes = figure.subplots(1, 3)

    def values(what: str, group: str, left_out: str = "") -> dict[str, float]:
        found = {name: getattr(layers, what)(group, name, length) for name in NAMES if name != left_out}
        return {name: value for name, value in found.items() if value is not None}

    bars(axes[0], values("ms", "latency"), f"Inference, {8 * length:,} tokens", "ms, all layers")
    memory = "MiB per layer, beyond weights"
    bars(axes[1], values("beyond", "latency", "official"), "Memory, inference", memory)
    bars(axes[2], values("beyond", "training", "official"), "Memory, training", memory)
    return figure


def speedup(layers: Layers) -> Figure:
    """Draw how many times faster 20 FlashMHF layers are than 24 SwiGLU layers, by the number of tokens."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for other, style in (("swiglu_compiled", "-"), ("swiglu", "--")):
        points = {
            layers.rows[group, other][size]["tokens"]: layers.ms(group, other, size)
            / layers.ms(group, layers.ours, size)
            for group in ("decode", "latency")
            for size in layers.sizes(group)
        }
        tokens = sorted(points)
        line = {"marker": "o", "markersize": 3, "color": OURS, "label": f"against {NAMES[other]}"}
        axes.plot(tokens, [points[t] for t in tokens], style, **line)
    axes.axhline(1, color=OTHERS, linewidth=1)
    axes.set(xlabel="tokens in the batch", ylabel="speed ÷ SwiGLU's", ylim=(0.9, None))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as an SVG file that is equal whenever its data are, under STYLE."""
    FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def main() -> int:
    layers = Layers(Records(ROOT))
    with matplotlib.rc_context(STYLE):
        save(overview(layers), ROOT / "docs" / "assets" / "overview.svg")
        save(speedup(layers), ROOT / "docs" / "assets" / "speedup.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
