"""Figures of a record: latency and memory by length on log axes as in the paper, and the roofline."""

from __future__ import annotations

import pathlib

from .paper import Rows
from .shapes import PAPER_MB, PAPER_MS
from .subjects import SUBJECTS

_PAPER_STYLE = {"linestyle": ":", "linewidth": 1, "markersize": 4, "color": "grey"}


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _by_length(rows: Rows, what: str) -> dict[str, list[tuple[int, float]]]:
    """Title -> (length, value) of the latency group."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows.all:
        value = (
            rows.value(what, "latency", row["subject"], row["length"]) if row["group"] == "latency" and row["shape"] == "paper" else None
        )
        if value is not None:
            curves.setdefault(row["title"], []).append((row["length"], value))
    return {title: sorted(points) for title, points in curves.items()}


def _figure(path: pathlib.Path, curves, paper, ylabel: str, title: str) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    for marker, (name, points) in zip("os^", paper.items(), strict=True):
        known = [(length, value) for length, value in points.items() if value is not None]
        axes.plot(*zip(*known, strict=True), marker=marker, label=f"{name} (paper, H100)", **_PAPER_STYLE)
    axes.set(xscale="log", yscale="log", xlabel="sequence length (batch 8)", ylabel=ylabel, title=title)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _roofline(rows: Rows, record: dict, path: pathlib.Path) -> None:
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
    peak = record["before"]["matmul_tflops"]
    for group, direction in (("kernel", "forward"), ("kernel", "training"), ("latency", "forward")):
        ours = [
            row
            for row in rows.all
            if (row["group"], row["direction"], row["status"]) == (group, direction, "ok")
            and row["subject"].startswith(("kernel", rows.ours or "kernel"))
        ]
        if ours:
            what = {"kernel": "kernel", "latency": "module"}[group] + (" forward and backward" if direction == "training" else " forward")
            points = sorted((row["tokens"], 100 * row["tflops"] / peak) for row in ours)
            left.plot(*zip(*points, strict=True), marker="o", label=what)
    for name in ("swiglu", "swiglu_compiled"):
        points = sorted(
            (r["tokens"], 100 * r["tflops"] / peak) for r in rows.all if (r["group"], r["subject"], r["status"]) == ("latency", name, "ok")
        )
        if points:
            left.plot(*zip(*points, strict=True), linestyle=":", marker=".", label=SUBJECTS[name].title)
    left.set(
        xscale="log", xlabel="tokens", ylabel=f"% of the measured 8192³ product ({peak:.0f} TFLOP/s)", ylim=(0, 115), title="Matrix rate"
    )
    copy = record["before"]["copy_gb_per_s"]
    for name in dict.fromkeys(row["subject"] for row in rows.all if row["group"] == "decode"):
        points = [(t, rows.value("gb_per_s", "decode", name, t)) for t in rows.sizes("decode")]
        known = [(t, 100 * value / copy) for t, value in points if value is not None]
        if known:
            right.plot(*zip(*known, strict=True), marker="o", label=SUBJECTS[name].title)
    right.set(
        xscale="log", xlabel="tokens", ylabel=f"% of the measured copy ({copy:.0f} GB/s)", ylim=(0, 115), title="Decode: weight traffic"
    )
    for axes in (left, right):
        axes.grid(True, which="both", alpha=0.25)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw(record: dict, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes each figure for which the record has data. Returns their paths."""
    rows, written = Rows(record), []
    for what, paper, ylabel, name in (
        ("stack_ms", PAPER_MS, "forward of the stack, ms", "latency.png"),
        ("total", PAPER_MB, "peak memory of one layer, MiB (paper: MB)", "memory.png"),
    ):
        if what == "total" and not any("memory_mib" in row for row in rows.all):
            continue
        curves = _by_length(rows, what)
        if curves:
            _figure(folder / name, curves, paper, ylabel, record["environment"]["device"])
            written.append(folder / name)
    if "matmul_tflops" in record["before"]:
        _roofline(rows, record, folder / "roofline.png")
        written.append(folder / "roofline.png")
    return written
