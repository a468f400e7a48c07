"""Tables, and blocks of a document that a program writes."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]], words: tuple[int, ...] = ()) -> str:
    """A Markdown table whose columns are aligned to the right, as numbers are; those of ``words`` to the left."""
    widths = [max(2, *(len(line[i]) for line in [header, *rows])) for i in range(len(header))]
    rule = ["-" * width if i in words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    sides = [str.ljust if i in words else str.rjust for i in range(len(widths))]
    cells = (
        [side(text, width) for side, text, width in zip(sides, line, widths, strict=True)]
        for line in (header, rule, *rows)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def with_block(text: str, name: str, block: str, writer: str) -> str:
    """``text`` with what stands between the markers of ``name`` and ``writer`` replaced by ``block``. The markers are
    ``<!-- NAME: begin (WRITER) -->`` and ``<!-- NAME: end -->``. Raises ValueError if one is missing.
    """
    begin, end = f"<!-- {name}: begin ({writer}) -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the text lacks the markers {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"


def conditions(record: dict) -> str:
    """One line: device, versions, clocks, the matrix product before and after, date and commit."""
    where, before, after = record["environment"], record.get("before", {}), record.get("after", {})
    parts = [
        where["device"],
        *(f"{name} {where['packages'][name]}" for name in ("torch", "triton") if where["packages"].get(name)),
    ]
    sensors = before.get("sensors", {})
    if "power_limit_w" in sensors:
        parts += [f"driver {sensors['driver']}", f"power limit {sensors['power_limit_w']} W"]
    if "matmul_tflops" in before and "matmul_tflops" in after:
        parts.append(
            f"bf16 8192³ product {before['matmul_tflops']:.0f} TFLOP/s before and {after['matmul_tflops']:.0f} after"
        )
    return ", ".join([*parts, where["date"]])
