"""metrics.jsonl: one JSON object a line, in the order of training.

Keys: step, loss (nats a token), learning_rate, grad_norm, tokens (so far), tokens_per_second, mfu (where the GPU's peak is known),
peak_memory_bytes (CUDA), eval_loss (nats a token).
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = "metrics.jsonl"


def read_rows(output: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl; a last line torn by a kill is left out."""
    rows = []
    path = output / FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def append_row(output: Path, row: dict) -> None:
    with (output / FILE).open("a") as out:
        out.write(json.dumps(row) + "\n")


def keep_rows(output: Path, step: int) -> None:
    """Drops the rows after ``step``, which a resumed run records again."""
    rows = [row for row in read_rows(output) if row["step"] <= step]
    partial = output / (FILE + ".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(output / FILE)
