"""The runs of compare.py as a table and plots with 95 % confidence intervals.

report.py collect FILE... RESULTS    one file a run from files that compare.py --append wrote
report.py table RESULTS... [--reference NAME] [--markdown FILE] [--plot FILE.png]

Runs that differ in nothing but seed and name are one row: mean validation loss, Student's interval of the mean, difference to the
reference's row over the seeds that both have (equal batches, so most of the noise is common).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from compare import read_run

# Student's t, 97.5 %, for 1, 2, ... degrees of freedom
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Row:
    """Runs with equal settings: seed to validation loss."""

    name: str
    configuration: dict[str, object]
    non_embedding: int
    losses: dict[int, float]
    curves: list[list[dict]]

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses.values())


def interval(values: Iterable[float]) -> float | None:
    """Half the 95 % interval of the mean; None for fewer than two values."""
    values = list(values)
    if len(values) < 2:
        return None
    return T975[min(len(values) - 1, len(T975)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def collect(files: Iterable[Path], results: Path) -> list[str]:
    """Writes RESULTS/NAME.jsonl for every run of the files; returns the names. A run without its last line is left out."""
    results.mkdir(parents=True, exist_ok=True)
    runs: list[list[str]] = []
    for file in files:
        for line in file.read_text().splitlines():
            if "run" in json.loads(line):
                runs.append([])
            runs[-1].append(line)
    complete = [run for run in runs if "validation_loss" in json.loads(run[-1])]
    for run in complete:
        (results / f"{json.loads(run[0])['run']}.jsonl").write_text("\n".join(run) + "\n")
    return [json.loads(run[0])["run"] for run in complete]


def rows(directories: Iterable[Path]) -> list[Row]:
    """Rows by mean loss, sizes apart; a row has the name of its first run."""
    found: dict[str, Row] = {}
    for path in sorted(path for directory in directories for path in directory.glob("*.jsonl")):
        first, *steps, last = read_run(path)
        configuration = {key: value for key, value in first["configuration"].items() if key not in ("name", "seed")}
        row = found.setdefault(json.dumps(configuration, sort_keys=True), Row(first["run"], configuration, first["non_embedding"], {}, []))
        row.losses[first["configuration"]["seed"]] = last["validation_loss"]
        row.curves.append(steps)
    return sorted(found.values(), key=lambda row: (row.non_embedding // 2_000_000, row.mean))


def noise(found: Iterable[Row]) -> float | None:
    """Standard deviation between seeds, pooled over the rows with more than one."""
    repeated = [list(row.losses.values()) for row in found if len(row.losses) > 1]
    freedom = sum(len(values) - 1 for values in repeated)
    return math.sqrt(sum(statistics.variance(values) * (len(values) - 1) for values in repeated) / freedom) if freedom else None


def best_reference(found: Iterable[Row], size: str) -> Row | None:
    """SwiGLU's row to compare with: of those with the most seeds, the lowest."""
    candidates = [row for row in found if row.configuration["ffn"] == "swiglu" and row.configuration["size"] == size]
    return min(candidates, key=lambda row: (-len(row.losses), row.mean), default=None)


def table(found: list[Row], reference: str | None) -> str:
    lines = [
        "| run | size | parameters | learning rate | seeds | validation loss | 95 % | difference | 95 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        size = row.configuration["size"]
        base = next((each for each in found if each.name == reference), None) if reference else best_reference(found, size)
        common = sorted(set(row.losses) & set(base.losses)) if base and base is not row and base.configuration["size"] == size else []
        differences = [row.losses[seed] - base.losses[seed] for seed in common]
        cells = [
            row.name,
            size,
            f"{row.non_embedding / 1e6:.2f} M",
            f"{row.configuration['learning_rate']:g}",
            ", ".join(map(str, sorted(row.losses))),
            f"{row.mean:.4f}",
            _half(interval(row.losses.values())),
            f"{statistics.mean(differences):+.4f}" if differences else "",
            _half(interval(differences)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    between = noise(found)
    if between is not None:
        lines += ["", f"Standard deviation between seeds: {between:.4f} nats (pooled over the rows with several seeds)."]
    return "\n".join(lines) + "\n"


def _half(value: float | None) -> str:
    return "" if value is None else f"± {value:.4f}"


def plot(found: list[Row], path: Path) -> None:
    """Validation losses with their intervals, and the training losses over the tokens."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 1.5 + 0.28 * max(12, len(found))))
    for index, row in enumerate(found):
        half = interval(row.losses.values())
        left.errorbar(row.mean, -index, xerr=half, fmt="o", capsize=3)
        left.plot(list(row.losses.values()), [-index] * len(row.losses), "k.", markersize=3)
        per_step = row.configuration["batch"] * row.configuration["context"]
        curve = row.curves[0]
        right.plot([step["step"] * per_step / 1e6 for step in curve], [step["loss"] for step in curve], linewidth=0.8)
    left.set_yticks([-index for index in range(len(found))], [f"{row.name} ({row.configuration['size']})" for row in found], fontsize=7)
    left.set_xlabel("validation loss (nats a token), 95 % of the mean; dots are runs")
    right.set(xlabel="tokens (millions)", ylabel="training loss of the first seed", ylim=(left.get_xlim()[0] - 0.3, left.get_xlim()[1] + 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("collect")
    add.add_argument("files", type=Path, nargs="+")
    add.add_argument("results", type=Path)
    add = commands.add_parser("table")
    add.add_argument("results", type=Path, nargs="+")
    add.add_argument("--reference", help="name of the row that the others are compared with; the best SwiGLU of the size otherwise")
    add.add_argument("--markdown", type=Path)
    add.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.command == "collect":
        print("\n".join(collect(options.files, options.results)))
        return
    found = rows(options.results)
    text = table(found, options.reference)
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
