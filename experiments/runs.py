"""The runs of a queue, and the lines that finished ones leave."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """One training. ``heads``, ``subnets``, ``width`` as in FlashMHFConfig: d_ff = E d_e, a head's width, the keys of a
    head. ``projection_rate`` as in flashmhf.param_groups. ``min_rate``: the last learning rate over the peak."""

    name: str
    ffn: str
    width: int
    heads: int | None = None
    subnets: int | None = None
    size: str = "26M"
    non_embedding: int = 25_600_000
    d_model: int = 512
    layers: int = 8
    attention_heads: int = 8
    optimizer: str = "muon"
    learning_rate: float = 2.8e-3
    projection_rate: float = 1.0
    min_rate: float = 0.0
    warmup: int = 200
    weight_decay: float = 0.1
    steps: int = 7936
    batch: int = 64
    micro_batch: int = 64
    context: int = 1024
    seed: int = 0

    @property
    def batch_tokens(self) -> int:
        return self.batch * self.context


def read_queue(path: Path) -> list[Run]:
    """The runs of a queue file. Raises TypeError for unknown settings, ValueError for names that are not unique."""
    queue = json.loads(path.read_text(encoding="utf-8"))
    runs = [Run(**queue.get("defaults", {}) | settings) for settings in queue["runs"]]
    names = [run.name for run in runs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: not unique: {', '.join(repeated)}")
    return runs


def finished_runs(files: Iterable[Path]) -> dict[str, dict]:
    """The finished runs of files by name, as ``record`` wrote them, a line each."""
    lines = (line for path in files if path.exists() for line in path.read_text(encoding="utf-8").splitlines())
    return {run["run"]: run for run in map(json.loads, lines)}


def write_lines(path: Path, lines: Iterable[dict]) -> None:
    """Append a line a run, at once."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
