"""The operator: Hopper beside Triton, and reproducible gradients."""

from __future__ import annotations

from ..harness.markdown import table
from ..records import Records, by, conditions, machine, span
from ..suites import operator


def _figures(row: dict | None) -> tuple[str, ...]:
    return (f"{row['ms']['p50']:.2f}", f"{row['tflops']:.0f}", f"{row['x_product']:.2f}") if row else ("", "", "")


def sixteen_bits(records: Records) -> str:
    """Hopper beside Triton at every shape of more than a few tokens, then where and how each was measured."""
    sizes = ("direction", "T", "H", "d_h", "E", "d_e")
    triton, lines = by(records["triton"]["rows"], *sizes), []
    for direction in ("forward", "backward"):
        for key, rows in by(records[direction]["rows"], *sizes).items():
            if key[0] == direction and key[1] > operator.GRAPH_TOKENS:
                beside = triton.get(key, {}).get(direction)
                shape = ", ".join(map(str, key[2:]))
                lines.append([direction, f"{key[1]:,}", shape, *_figures(rows[direction]), *_figures(beside)])
    notes = (
        "Medians at sustained clocks, bf16. TFLOP/s count useful operations, 6 T H d_h E d_e forward and 16 backward. "
        "÷ product: the rate over that of an 8192³ bf16 matrix product of the same run."
    )
    made = "\n".join(f"- {conditions(name.capitalize(), records[name])}" for name in ("forward", "backward", "triton"))
    figures = ("TFLOP/s", "÷ product")
    header = ["operator", "T", "H, d_h, E, d_e", "Hopper ms", *figures, "Triton ms", *figures]
    return f"{table(header, lines)}\n\n{notes}\n\n{made}"


def deterministic(records: Records) -> str:
    """By how much reproducible gradients lengthen the operator's backward, by head width."""
    record, more = records["backward"], {}
    for (tokens, width, *_), rows in by(record["rows"], "T", "d_h", "H", "E").items():
        if tokens > operator.GRAPH_TOKENS and {"backward", "deterministic backward"} <= rows.keys():
            longer = rows["deterministic backward"]["ms"]["p50"] / rows["backward"]["ms"]["p50"]
            more.setdefault(str(width), []).append(max(0.0, 100 * (longer - 1)))
    cells = ["longer backward pass, %", *(span(percent, 0) for percent in more.values())]
    return f"{table(['head width', *more], [cells])}\n\n{machine('The operator; a range spans the sizes', record)}"
