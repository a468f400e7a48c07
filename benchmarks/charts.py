"""Draws the charts of the documentation from the newest records: ``python -m benchmarks.charts``."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .suites.tables import stack_ms
from .write_readme import Records

ROOT = Path(__file__).resolve().parents[1]
OURS, OTHERS = "#3949ab", "#9e9e9e"
NAMES = {
    "flashmhf_hopper": "flashmhf",
    "swiglu_compiled": "SwiGLU, compiled",
    "swiglu": "SwiGLU, eager",
    "official": "official Triton kernel",
}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "flashmhf", "font.family": "sans-serif", "font.size": 9}


def cell(record: dict, group: str, length: int | None = None) -> dict[str, dict]:
    """Return subject -> row of the paper's shape in one group of measurements, without subjects that have no number."""
    rows = [row for row in record["rows"] if (row["group"], row["shape"], row["status"]) == (group, "paper", "ok")]
    return {row["subject"]: row for row in rows if length in (None, row["length"])}


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


def overview(record: dict, length: int = 4032) -> Figure:
    """Draw the forward's time and both memories at one length (batch 8)."""
    forward, training = cell(record, "latency", length), cell(record, "training", length)
    figure = Figure(figsize=(10.5, 2.9), layout="constrained")
    axes = figure.subplots(1, 3)
    bars(
        axes[0],
        {name: stack_ms(row) for name, row in forward.items()},
        f"Inference, {8 * length:,} tokens",
        "ms, all layers",
    )
    inference = {name: row["memory_mib"]["beyond"] for name, row in forward.items() if name != "official"}
    bars(axes[1], inference, "Memory, inference", "MiB per layer, beyond weights")
    trained = {
        name: training[name]["memory_mib"]["beyond"] for name in ("flashmhf_hopper", "swiglu_compiled", "swiglu")
    }
    bars(axes[2], trained, "Memory, training", "MiB per layer, beyond weights")
    return figure


def speedup(record: dict) -> Figure:
    """Draw how many times faster 20 FlashMHF layers are than 24 SwiGLU layers, for decode and prefill, by the number of
    tokens.
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for other, style in (("swiglu_compiled", "-"), ("swiglu", "--")):
        points = {}
        for group in ("decode", "latency"):
            rows = [
                row for row in record["rows"] if (row["group"], row["shape"], row["status"]) == (group, "paper", "ok")
            ]
            by_tokens: dict[int, dict[str, float]] = {}
            for row in rows:
                by_tokens.setdefault(row["tokens"], {})[row["subject"]] = stack_ms(row)
            points |= {
                t: ms[other] / ms["flashmhf_hopper"]
                for t, ms in by_tokens.items()
                if {other, "flashmhf_hopper"} <= ms.keys()
            }
        tokens = sorted(points)
        axes.plot(
            tokens,
            [points[t] for t in tokens],
            style,
            marker="o",
            markersize=3,
            color=OURS,
            label=f"against {NAMES[other]}",
        )
    axes.axhline(1, color=OTHERS, linewidth=1)
    axes.set(xscale="log", xlabel="tokens in the batch", ylabel="times faster", ylim=(0.9, None))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as an SVG file that is equal whenever its data are."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def main() -> int:
    import matplotlib

    record = Records(ROOT)["layer"]
    with matplotlib.rc_context(STYLE):
        save(overview(record), ROOT / "docs" / "assets" / "overview.svg")
        save(speedup(record), ROOT / "docs" / "assets" / "speedup.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
