"""Curves of training runs."""

from __future__ import annotations

from pathlib import Path


def draw_losses(runs: dict[str, list[dict]], path: Path) -> None:
    """Training loss, and held-out loss where there is one, over steps, one colour a run.

    ``runs`` maps a run's name to the rows of its metrics.jsonl.
    """
    from matplotlib.figure import Figure  # pyplot would need a display and keep every figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (name, rows) in enumerate(runs.items()):
        for key, style, label in (("loss", "-", name), ("eval_loss", "o--", f"{name}, held out")):
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    partial = path.with_name("partial-" + path.name)
    figure.savefig(partial, dpi=150)
    partial.replace(path)
