"""The records in benchmarks/results: read, sorted, and what a table says of the machine and of numbers in them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

DEVICES = ("h100", "h200")
SCALES = ("tiny", "26m", "57m", "58m", "128m", "370m", "1.3b", "7b")


class Records:
    """The records below ``root``, by the part of their name before the device. Where decode has a record of its own,
    the rows of ``layer`` for decode are those of it.
    """

    def __init__(self, root: pathlib.Path):
        self.folder = root / "benchmarks" / "results"

    def read(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def __getitem__(self, name: str) -> dict:
        names = [f"{name}_{device}.json" for device in DEVICES]
        chosen = next((each for each in names if (self.folder / each).exists()), names[-1])
        record, apart = self.read(chosen), chosen.replace("layer_", "decode_")
        if name == "layer" and (self.folder / apart).exists():
            rows = [row for row in record["rows"] if row["group"] != "decode"]
            record["rows"] = rows + [row for row in self.read(apart)["rows"] if row["group"] == "decode"]
        return record

    def parts(self, name: str) -> list[dict]:
        """The records ``name_PART_DEVICE.json`` of all devices."""
        return [self.read(path.name) for path in sorted(self.folder.glob(f"{name}_*_*.json"))]

    def several_gpus(self, part: str) -> dict[int, dict]:
        """Number of GPUs of one host -> the record of `benchmarks.distributed`, of those that have ``part``."""
        found = {}
        for path in (p for device in reversed(DEVICES) for p in self.folder.glob(f"distributed_x*_{device}.json")):
            record = self.read(path.name)
            if by(record["rows"], "part").get((part,)):
                found[record["environment"]["ranks"]] = record
        if not found:
            raise FileNotFoundError(f"{self.folder} has no record distributed_xN_DEVICE.json with {part}")
        return dict(sorted(found.items()))


def by(rows: list[dict], *names: str) -> dict[tuple, dict[str, dict]]:
    """Subject -> row, for each combination of ``names``, in the rows' order; rows without a number are left out."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["status"] == "ok":
            found.setdefault(tuple(row.get(name) for name in names), {})[row["subject"]] = row
    return found


def by_scale(rows: list[dict], *names: str) -> list[tuple[tuple, dict[str, dict]]]:
    return sorted(by(rows, "scale", *names).items(), key=lambda item: SCALES.index(item[0][0]))


def gpu(record: dict) -> str:
    """Return the short name of the record's device, such as "H100"."""
    return record["environment"]["device"].removeprefix("NVIDIA ").split()[0]


def torch_of(record: dict) -> str:
    return record["environment"]["packages"]["torch"].partition("+")[0]


def machine(what: str, record: dict) -> str:
    """The caption of a table that says where it was measured; the record has the rest."""
    return f"*{what}. Measured on an {gpu(record)} with torch {torch_of(record)}.*"


def software(what: str, records: Iterable[dict]) -> str:
    """The caption of a table whose lines name their GPUs."""
    return f"*{what}. Measured with torch {' and '.join(sorted(set(map(torch_of, records))))}.*"


def conditions(what: str, record: dict) -> str:
    """Where a table of developers' pages was measured."""
    where = record["environment"]
    commit = f", commit {where['commit']}" if where.get("commit") else ""
    return f"{what}: {where['device']}, torch {where['packages']['torch']}, {where['date']}{commit}."


def span(values: Iterable[float], digits: int = 2) -> str:
    """Return "1.1 to 1.3", or one number if the least and the largest value round to the same."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (found[0], found[-1])))


def fixed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator
