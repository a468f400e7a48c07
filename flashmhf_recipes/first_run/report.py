"""What the bare command leaves: a table on the terminal and a picture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

import flashmhf
from flashmhf import backends

from .accuracy import Accuracy
from .speed import Measurement, Setting, modules

logger = logging.getLogger(__name__)

COLORS = {"SwiGLU": "tab:orange", "SwiGLU compiled": "tab:red", "naive MH-FFN": "tab:gray", "FlashMHF": "tab:blue"}
COMPARED = ("FlashMHF", "SwiGLU")
FIGURES = {
    "forward_ms": "inference, ms",
    "forward_mib": "peak memory at inference, MiB",
    "step_ms": "training step, ms",
    "step_mib": "peak memory of a training step, MiB",
}


def headline(setting: Setting) -> str:
    """Return one line: version, machine, and the back end that runs there."""
    device, dtype = setting.device, setting.dtype
    sizes = {"d_h": setting.d_model // setting.num_heads, "d_e": setting.subnet_dim}
    usable = (name for name, backend in backends.BACKENDS.items() if not backend.why_not(device, dtype, **sizes))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return f"flashmhf {flashmhf.__version__} | {machine} | torch {torch.__version__} | back end {next(usable)}"


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return lines with the first column aligned to the left, the others to the right; an empty row is a blank one."""
    widths = [max(len(row[i]) for row in rows if row) for i in range(len(rows[0]))]
    lines = ((cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(row)) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def table(setting: Setting, accuracies: Sequence[Accuracy] = (), measurements: Sequence[Measurement] = ()) -> str:
    """Return one column a network: errors, then time and memory."""
    names = [name for name in COLORS if name in modules(setting)]
    rows: list[tuple[str, ...]] = [("", *names)]

    def add(title: str, cells: dict[str, float | str]) -> None:
        rows.append((title, *(_cell(cells.get(name, "-")) for name in names)))

    for kind in dict.fromkeys(a.kind for a in accuracies):
        worst = max((a for a in accuracies if a.kind == kind), key=lambda a: a.error / a.limit)
        label = f"{kind}: largest error vs float64 ({worst.tensor}, limit {worst.limit:.1e})"
        add(label, {"FlashMHF": f"{worst.error:.1e}{'' if worst.passed else ' FAILED'}"})
    if measurements:
        rows.append(())
        ours, theirs = setting.layers
        layers = "one layer" if ours == theirs == 1 else f"{ours} layers, {theirs} of SwiGLU"
        what = f"{layers}, d_model {setting.d_model}, {str(setting.dtype).removeprefix('torch.')}"
        add(f"{what}: parameters", {m.module: m.parameters for m in measurements})
        for attribute, title in FIGURES.items():
            each = f"{title} (one layer)" if attribute.endswith("mib") and ours > 1 else title
            for tokens in dict.fromkeys(m.tokens for m in measurements):
                cells = {m.module: getattr(m, attribute) for m in measurements if m.tokens == tokens}
                add(f"  {each}, {tokens:,} tokens", cells)
    return headline(setting) + "\n\n" + _aligned(rows)


def meaning(setting: Setting, accuracies: Sequence[Accuracy], measurements: Sequence[Measurement]) -> str:
    """Return in three sentences what the table shows."""
    failed, tokens = sum(not a.passed for a in accuracies), max(m.tokens for m in measurements)
    ours, theirs = (next(m for m in measurements if (m.module, m.tokens) == (name, tokens)) for name in COMPARED)
    found = f"{failed} of {len(accuracies)} are outside" if failed else f"all {len(accuracies)} are within"
    time = {name: getattr(ours, name) / getattr(theirs, name) for name in ("step_ms", "forward_ms")}
    where = {"cuda": "GPU", "cpu": "CPU (README.md has GPUs, where fused kernels run)"}[setting.device.type]
    return f"""\
Errors against float64: {found} their limits, which rounding in the same precision sets.
A training step on {tokens:,} tokens needs {ours.step_mib / theirs.step_mib:.2f} of SwiGLU's memory at equal parameters.
It takes {time["step_ms"]:.2f} of SwiGLU's time, inference {time["forward_ms"]:.2f}, on this {where}."""


def picture(path: Path, setting: Setting, measurements: Sequence[Measurement]) -> bool:
    """Draw memory and time of a training step, on a GPU of inference, too; return whether the PNG was written. One that
    cannot be drawn is a warning: the table has it all."""
    panels = ["step_mib", "step_ms"] + ["forward_mib", "forward_ms"] * (setting.device.type == "cuda")
    try:
        from matplotlib.figure import Figure  # without pyplot, which would need a display

        figure = Figure(figsize=(5.5 * len(panels), 4.8), layout="constrained")
        for axis, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
            _draw(axis, setting, measurements, panel)
        figure.suptitle(headline(setting))
        figure.savefig(path, dpi=110, format="png")
    except Exception as error:  # fonts, caches, disks: matplotlib raises whatever they do
        logger.warning("%s was not drawn: %s: %s", path, type(error).__name__, " ".join(str(error).split()))
        return False
    return True


def _draw(axis, setting: Setting, measurements: Sequence[Measurement], attribute: str) -> None:
    tokens = sorted({m.tokens for m in measurements})
    for name, color in COLORS.items():
        if points := [(m.tokens, getattr(m, attribute)) for m in measurements if m.module == name]:
            axis.plot(*zip(*points, strict=True), "o-", color=color, label=name)
    each = "one layer" if attribute.endswith("mib") or setting.layers == (1, 1) else "all layers"
    axis.set(title=f"{FIGURES[attribute]} ({each})", xlabel="tokens", xscale="log", yscale="log")
    axis.set_xticks(tokens, [f"{count:,}" for count in tokens], rotation=30)
    axis.minorticks_off()
    axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(True, which="both", alpha=0.3)
    axis.legend(fontsize=9)
