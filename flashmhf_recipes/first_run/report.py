"""The bare command's results as one table and one picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..plots import draw
from .study import Accuracy, Measurement, Setting, headline
from .tiny_lm import Trained

COLUMNS = ("SwiGLU", "naive MH-FFN", "FlashMHF")
FIGURES = {"forward_ms": "forward, ms", "step_ms": "training step, ms", "peak_mib": "peak memory of a step, MiB"}
COLORS = {"SwiGLU": "tab:orange", "naive MH-FFN": "tab:gray", "FlashMHF": "tab:blue"}


@dataclass
class Results:
    """The results of a run so far. Table and picture leave out empty parts."""

    setting: Setting
    accuracies: list[Accuracy] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    not_trained: str | None = None
    text: str = ""
    trained: dict[str, Trained] = field(default_factory=dict)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if math.isnan(value):
        return "n/a"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _aligned(rows: Iterable[tuple[str, ...]]) -> str:
    """Aligns the first column to the left and the others to the right. An empty row becomes a blank line."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows if row) for i in range(max(map(len, rows)))]
    lines = ((cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(row)) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def check_table(accuracies: list[Accuracy]) -> str:
    """One row a tensor: its error, the error of PyTorch code in the same precision, the limit."""
    rows = [("back end", "dtype", "tensor", "error", "PyTorch's", "limit", "")]
    for a in accuracies:
        figures = (f"{value:.2e}" for value in (a.error, a.plain, a.limit))
        rows.append((a.backend, str(a.dtype).removeprefix("torch."), a.tensor, *figures, "ok" if a.passed else "FAILED"))
    return _aligned(rows)


def table(results: Results) -> str:
    """The table of a run: one column a module; blocks for errors, time and memory, and the language model."""
    rows: list[tuple[str, ...]] = [("", *COLUMNS)]
    for backend, dtype in dict.fromkeys((a.backend, a.dtype) for a in results.accuracies):
        chosen = [a for a in results.accuracies if (a.backend, a.dtype) == (backend, dtype)]
        worst = max(chosen, key=lambda a: a.error / a.limit)
        label = f"{backend} {str(dtype).removeprefix('torch.')}: largest error vs float64 ({worst.tensor}, limit {worst.limit:.1e})"
        rows.append((label, "-", "-", f"{worst.error:.1e}{'' if worst.passed else ' FAILED'}"))
    by_place = {(m.module, m.length): m for m in results.measurements}
    lengths = list(dict.fromkeys(m.length for m in results.measurements))
    if lengths:
        s = results.setting
        title = f"one layer, d_model {s.d_model}, batch {s.batch}, {str(s.dtype).removeprefix('torch.')}: parameters"
        rows += [(), (title, *(_number(by_place[name, lengths[0]].parameters) for name in COLUMNS))]
        for attribute, title in FIGURES.items():
            for length in lengths:
                figures = (_number(getattr(by_place[name, length], attribute)) if (name, length) in by_place else "-" for name in COLUMNS)
                rows.append((f"  {title}, length {length}", *figures))
    if results.not_trained:
        rows += [(), (f"language model: {results.not_trained}", *("-" for _ in COLUMNS))]
    if results.trained:
        steps = len(results.trained[COLUMNS[-1]].losses)
        parameters = {name: trained.parameters for name, trained in results.trained.items()}
        held_out = {name: trained.held_out for name, trained in results.trained.items()}
        rows += [
            (),
            (f"language model on {results.text}: parameters", *(_number(parameters.get(name)) for name in COLUMNS)),
            (f"  held-out loss after {steps} steps, nats/byte", *(_number(held_out.get(name)) for name in COLUMNS)),
        ]
    return headline(results.setting) + "\n\n" + _aligned(rows)


def picture(results: Results, path: Path) -> bool:
    """Draw time and memory over length, and the training curves; return whether the PNG was written."""

    def paint(figure) -> None:
        from matplotlib import ticker

        time_axis, memory_axis, loss_axis = figure.subplots(1, 3)
        for axis, attribute in ((time_axis, "step_ms"), (memory_axis, "peak_mib")):
            for name in COLUMNS:
                points = [(m.length, getattr(m, attribute)) for m in results.measurements if m.module == name]
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=COLORS[name], label=name)
            axis.set(title=FIGURES[attribute], xlabel=f"length (batch {results.setting.batch})", xscale="log", yscale="log")
            axis.set_xticks(sorted({m.length for m in results.measurements}), minor=False)
            axis.xaxis.set_minor_locator(ticker.NullLocator())
            for formatted in (axis.xaxis.set_major_formatter, axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                formatted(ticker.StrMethodFormatter("{x:,.0f}"))
        for name, trained in results.trained.items():
            smoothed = [statistics.fmean(trained.losses[max(0, step - 9) : step + 1]) for step in range(len(trained.losses))]
            loss_axis.plot(smoothed, color=COLORS[name], label=f"{name}, held out {_number(trained.held_out)}")
            loss_axis.plot(len(trained.losses) - 1, trained.held_out, "o", color=COLORS[name])
        loss_axis.set(title="language model: loss (nats/byte)", xlabel="step")
        for axis in (time_axis, memory_axis, loss_axis):
            axis.grid(True, which="both", alpha=0.3)
            if axis.get_legend_handles_labels()[1]:
                axis.legend()
        figure.suptitle(headline(results.setting))

    return draw(path, (15, 4.5), paint, dpi=110)
