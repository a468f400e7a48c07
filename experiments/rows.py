"""Finished runs as rows of equal settings, and what lies between the rows of two networks."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from runs import finished_runs

# Settings that only some commits of compare.py had, with what the others did.
EARLIER = json.loads((Path(__file__).parent / "results" / "earlier_settings.json").read_text(encoding="utf-8"))
# Student's t, 97.5 %, for 1, 2, ... degrees of freedom
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Row:
    """Runs with equal settings: seed to validation loss."""

    configuration: dict[str, object]
    non_embedding: int
    losses: dict[int, float]
    records: list[dict]

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses.values())

    @property
    def tokens(self) -> int:
        return math.prod(self.configuration[name] for name in ("steps", "batch", "context"))

    @property
    def layers(self) -> int:
        return self.configuration["layers"]

    @property
    def is_long(self) -> bool:
        """Whether the run is of the long trainings, which are evaluated on the way."""
        return "evaluations" in self.records[0]

    @property
    def per_parameter(self) -> float:
        """The tokens of a run per parameter beside the embedding."""
        return self.tokens / self.non_embedding

    @property
    def title(self) -> str:
        """The size and the tokens of the training, such as "26M, 59M tokens"."""
        return f"{self.configuration['size'].partition(',')[0]}, {self.tokens / 1e6:.0f}M tokens"


def interval(values: list[float]) -> float | None:
    """Half the 95 % interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return T975[min(len(values) - 1, len(T975)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def settings(line: dict) -> dict[str, object]:
    """A run's configuration without name and seed, in one form for all commits of compare.py."""
    found = EARLIER | {key: value for key, value in line["configuration"].items() if key not in ("name", "seed")}
    rates = found["rates"] | {"projection": found.pop("projection_rate", found["rates"].get("projection", 1.0))}
    return found | {"rates": {role: rate for role, rate in rates.items() if rate != 1.0}}


def rows(files: Iterable[Path]) -> list[Row]:
    """Rows by mean loss, sizes apart."""
    found: dict[str, Row] = {}
    for _, line in sorted(finished_runs(files).items()):
        configuration = settings(line)
        row = Row(configuration, line["non_embedding"], {}, [])
        row = found.setdefault(json.dumps(configuration, sort_keys=True), row)
        row.losses[line["configuration"]["seed"]] = line["validation_loss"]
        row.records.append(line)
    return sorted(found.values(), key=lambda row: (row.non_embedding // 2_000_000, row.mean))


def best_first(row: Row) -> tuple[int, float]:
    return -len(row.losses), row.mean


def pairs(found: list[Row]) -> list[tuple[Row, Row]]:
    """Return FlashMHF's and SwiGLU's best row (most seeds, then the lowest loss) of each size that has both with a
    common seed. After it come FlashMHF's rows of other depths in the same settings."""
    chosen, ranked = [], sorted(found, key=best_first, reverse=True)
    best = {(row.configuration["ffn"], row.configuration["size"]): row for row in ranked}  # the last one of each stays
    sizes = {row.configuration["size"]: (row.configuration["non_embedding"], row.per_parameter) for row in found}
    for size in sorted(sizes, key=sizes.__getitem__):
        ours, theirs = best.get(("flashmhf", size)), best.get(("swiglu", size))
        if not (ours and theirs and set(ours.losses) & set(theirs.losses)):
            continue
        shape = {"layers": None, "width": None, "subnets": None}
        rest = [row for row in found if row.configuration | shape == ours.configuration | shape]
        depths = {row.layers: row for row in rest if row.layers != ours.layers}
        chosen += [(row, theirs) for row in (ours, *depths.values())]
    return chosen


def differences(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Return FlashMHF's loss minus SwiGLU's for each seed that both have."""
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def on_the_way(record: dict) -> dict[int, float]:
    """Tokens seen -> loss, whose kinds of text count as they do in the final loss; the samples have as much of each."""
    if not record.get("evaluations"):
        return {}
    kinds = record["validation"]
    share = (record["validation_loss"] - kinds["prose"]) / (kinds["code"] - kinds["prose"])
    return {each["tokens"]: share * each["code"] + (1 - share) * each["prose"] for each in record["evaluations"]}


def losses_after(row: Row, tokens: float) -> dict[int, float]:
    """Seed -> loss after ``tokens``, on the line between two evaluations; at the end of a run its final loss."""
    found = {}
    for record in row.records:
        points = on_the_way(record) | {row.tokens: record["validation_loss"]}
        found[record["configuration"]["seed"]] = float(np.interp(tokens, list(points), list(points.values())))
    return found


def differences_on_the_way(ours: Row, theirs: Row) -> dict[int, float]:
    """Tokens seen -> FlashMHF's loss minus SwiGLU's on the way, the mean over the seeds that both rows have."""
    ways = [{record["configuration"]["seed"]: on_the_way(record) for record in row.records} for row in (ours, theirs)]
    found: dict[int, list[float]] = {}
    for mine, other in ((ways[0][seed], ways[1][seed]) for seed in ways[0].keys() & ways[1].keys()):
        for tokens in mine.keys() & other.keys():
            found.setdefault(tokens, []).append(mine[tokens] - other[tokens])
    return {tokens: statistics.mean(values) for tokens, values in sorted(found.items())}
