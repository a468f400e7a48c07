"""Pictures: drawn without pyplot, which would need a display."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def draw(path: Path, size: tuple[float, float], paint: Callable[[object], None], dpi: int = 150) -> bool:
    """Write a PNG of ``size`` inches that ``paint`` draws on a matplotlib Figure; return whether it was written. A
    picture that cannot be drawn is a warning: what it shows is in other files, and no run should end for it.
    """
    try:
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        partial = path.with_name("partial-" + path.name)
        figure.savefig(partial, dpi=dpi, format="png")
        partial.replace(path)
    except Exception as error:  # fonts, caches, disks: matplotlib raises whatever they do
        logger.warning("%s was not drawn: %s: %s", path, type(error).__name__, " ".join(str(error).split()))
        return False
    return True


def draw_losses(rows: list[dict], path: Path) -> bool:
    """Draw the training loss of metrics.jsonl's ``rows``, and the held-out loss where there is one, over steps."""

    def paint(figure) -> None:
        axes = figure.subplots()
        for key, style, label in (("loss", "-", "training"), ("eval_loss", "o--", "held out")):
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), style, color="C0", label=label, linewidth=1, markersize=4)
        axes.set(xlabel="step", ylabel="loss (nats a token)")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)

    return draw(path, (7, 4.5), paint)
