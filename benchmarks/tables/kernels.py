"""The operator: on Hopper, in Triton, with reproducible gradients."""

from __future__ import annotations

from ..harness.markdown import table
from ..records import Records, by, conditions, fixed, machine, span
from ..suites import operator

SIZES = ("direction", "T", "H", "d_h", "E", "d_e")


def sixteen_bits(records: Records) -> str:
    """Every shape of more than a few tokens on Hopper, then where and how it was measured."""
    lines = []
    for direction in ("forward", "backward"):
        for key, rows in by(records[direction]["rows"], *SIZES).items():
            if key[0] == direction and key[1] > operator.GRAPH_TOKENS:
                row, shape = rows[direction], ", ".join(map(str, key[2:]))
                figures = f"{row['ms']['p50']:.2f}", f"{row['tflops']:.0f}", f"{row['x_product']:.2f}"
                lines.append([direction, f"{key[1]:,}", shape, *figures])
    notes = (
        "Medians at sustained clocks, bf16. TFLOP/s count useful operations, 6 T H d_h E d_e forward and 16 backward. "
        "÷ product: the rate over that of an 8192³ bf16 matrix product of the same run."
    )
    made = "\n".join(f"- {conditions(name.capitalize(), records[name])}" for name in ("forward", "backward"))
    header = ["operator", "T", "H, d_h, E, d_e", "ms", "TFLOP/s", "÷ product"]
    return f"{table(header, lines)}\n\n{notes}\n\n{made}"


# What Triton compiled -> its records of many tokens and of few
CODES = {"Hopper's code": ("triton", "triton"), "A100's code": ("triton_sm80_operator", "triton_sm80")}


def triton(records: Records) -> str:
    """Triton's operator with many tokens, then with few: this GPU's code beside an A100's that runs on this GPU."""
    parts, notes = {"many tokens": {}, "few tokens": {}}, []
    for code, names in CODES.items():
        for (part, lines), record in zip(parts.items(), (records[name] for name in names), strict=True):
            notes.append(f"- {conditions(f'{code}, {part}', record)}")
            for key, rows in by(record["rows"], *SIZES).items():
                if all(key) and (key[1] <= operator.GRAPH_TOKENS) == (part == "few tokens"):
                    row, routed = rows[key[0]], rows.get(f"gated {key[0]}")
                    ms, weights = row["ms"]["p50"], row["flops"] / key[1]  # as many bytes as operations a token
                    share = weights / 1e6 / ms / record["before"]["copy_gb_per_s"]
                    few = f"{1e3 * ms:.1f}", f"{share:.2f}"
                    cells = lines.setdefault(key, [])
                    cells += few if part == "few tokens" else (f"{ms:.2f}", f"{row['x_product']:.2f}")
                    cells.append(fixed(routed and 100 * (routed["ms"]["p50"] / ms - 1), 0))
    many, few = (
        [f"{code}, {each}" for code in CODES for each in (unit, share, "with the router, % more")]
        for unit, share in (("ms", "÷ product"), ("µs", "weights: share of a copy's bandwidth"))
    )
    shapes = [[key[0], ", ".join(map(str, key[2:])), *cells] for key, cells in parts["many tokens"].items()]
    counts = [[str(key[1]), *cells] for key, cells in parts["few tokens"].items()]
    tables = table(["operator", "H, d_h, E, d_e", *many], shapes), table(["T, d_h = 128", *few], counts)
    return "\n\n".join((*tables, "\n".join(notes)))


def deterministic(records: Records) -> str:
    """By how much reproducible gradients lengthen the operator's backward, by head width."""
    record, more = records["backward"], {}
    for (tokens, width, *_), rows in by(record["rows"], "T", "d_h", "H", "E").items():
        if tokens > operator.GRAPH_TOKENS and {"backward", "deterministic backward"} <= rows.keys():
            longer = rows["deterministic backward"]["ms"]["p50"] / rows["backward"]["ms"]["p50"]
            more.setdefault(str(width), []).append(max(0.0, 100 * (longer - 1)))
    cells = ["longer backward pass, %", *(span(percent, 0) for percent in more.values())]
    return f"{table(['head width', *more], [cells])}\n\n{machine('The operator; a range spans the sizes', record)}"
