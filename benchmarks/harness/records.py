"""Runs as rows of one CSV file. The rows of a run stay there when a newer record replaces the run's own."""

from __future__ import annotations

import csv
import pathlib

COLUMNS = ("date", "device", "torch", "commit", "record", "subject", "direction", "shape", "metric", "value", "ratio")


def rows(record: dict, name: str) -> list[dict]:
    """One row for every measured subject of the record called ``name``, of :mod:`.suite` or of :mod:`.operator`.

    Suite: ``value`` is the stack's ms, ``ratio`` that over FlashMHF's in the same cell. Operator: the ms of a call, and the rate over
    that of the matrix product of the same rounds.
    """
    where = record["environment"]
    fixed = {"record": name, "torch": where["packages"]["torch"]}
    fixed |= {column: where.get(column) or "" for column in ("date", "device", "commit")}
    measured = [row for row in record["rows"] if row["status"] == "ok"]
    describe = _suite_row if any("group" in row for row in measured) else _operator_row
    return [fixed | describe(row, measured) for row in measured]


def _suite_row(row: dict, measured: list[dict]) -> dict:
    same = ("group", "shape", "batch", "length", "direction")
    ours = next((r for r in measured if r["subject"].startswith("flashmhf_") and all(r[name] == row[name] for name in same)), None)
    return {
        "subject": row["subject"],
        "direction": row["direction"],
        "shape": f"{row['group']} {row['shape']} {row['batch']}x{row['length']}",
        "metric": "stack ms",
        "value": f"{row['stack_ms']:.6g}",
        "ratio": f"{row['stack_ms'] / ours['stack_ms']:.4g}" if ours else "",
    }


def _operator_row(row: dict, measured: list[dict]) -> dict:
    names = ["T", "H", "d_h", "E", "d_e"]
    if row.get("H_kv", row["H"]) != row["H"]:
        names.insert(2, "H_kv")
    return {
        "subject": f"{row['backend']} {row['subject']}",
        "direction": row["direction"],
        "shape": f"{row['dtype']} " + " ".join(f"{name}={row[name]}" for name in names),
        "metric": "ms",
        "value": f"{row['ms']['p50']:.6g}",
        "ratio": f"{row['x_matmul']:.4g}" if "x_matmul" in row else "",
    }


def append(record: dict, path: pathlib.Path, name: str | None = None) -> None:
    """Adds the run that was written to ``path`` (a file or a folder) to runs.csv beside it, which is made where there is none."""
    runs = path.parent / "runs.csv"
    new = not runs.exists()
    with runs.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows(record, name or path.name))
