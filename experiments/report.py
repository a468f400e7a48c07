"""The runs of compare.py as a table and plots with 95 % confidence intervals.

report.py collect FILE... RESULTS    takes the runs of compare.py's files into RESULTS, in place of earlier ones of these names
report.py table RESULTS... [--reference NAME] [--markdown FILE] [--plot FILE.png]
report.py document [--check]         the blocks of docs/quality.md from experiments/results, and the plot beside it

Runs that differ in nothing but seed and name are one row: mean validation loss, Student's interval of the mean, difference to the
reference's row over the seeds that both have (equal batches, so most of the noise is common).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from compare import Run, finished_runs, write_lines

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCUMENT, PLOT = "experiments/results/runs.jsonl", "docs/quality.md", "docs/quality.png"
MARK = "(experiments/report.py)"
NETWORKS = {"swiglu": "SwiGLU", "flashmhf": "FlashMHF", "mh_ffn": "MH-FFN", "pkv": "PKV", "dense_moe": "Dense-MoE"}

# Student's t, 97.5 %, for 1, 2, ... degrees of freedom
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Row:
    """Runs with equal settings: seed to validation loss."""

    name: str
    configuration: dict[str, object]
    non_embedding: int
    losses: dict[int, float]
    records: list[dict]

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
    """Take the runs of the files into RESULTS, sorted by name; return the names. Later ones take the place of earlier ones."""
    found = finished_runs(files)
    together = finished_runs([results]) | found
    partial = results.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    write_lines(partial, (together[name] for name in sorted(together)))
    partial.replace(results)
    return list(found)


def rows(files: Iterable[Path]) -> list[Row]:
    """Rows by mean loss, sizes apart; a row has the name of its first run."""
    found: dict[str, Row] = {}
    for name, line in sorted(finished_runs(files).items()):
        complete = dataclasses.asdict(Run(**line["configuration"]))  # an older run lacks the fields added since
        configuration = {key: value for key, value in complete.items() if key not in ("name", "seed")}
        row = found.setdefault(json.dumps(configuration, sort_keys=True), Row(name, configuration, line["non_embedding"], {}, []))
        row.losses[line["configuration"]["seed"]] = line["validation_loss"]
        row.records.append(line)
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
        difference, half = against(row, base if base is not None and base.configuration["size"] == size else None)
        cells = [
            row.name,
            size,
            f"{row.non_embedding / 1e6:.2f} M",
            f"{row.configuration['learning_rate']:g}",
            ", ".join(map(str, sorted(row.losses))),
            f"{row.mean:.4f}",
            _half(interval(row.losses.values())),
            difference,
            half,
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
        first = row.records[0]
        per_loss = first["every"] * row.configuration["batch"] * row.configuration["context"] / 1e6
        right.plot([per_loss * count for count in range(1, len(first["losses"]) + 1)], first["losses"], linewidth=0.8)
    left.set_yticks([-index for index in range(len(found))], [f"{row.name} ({row.configuration['size']})" for row in found], fontsize=7)
    left.set_xlabel("validation loss (nats a token), 95 % of the mean; dots are runs")
    right.set(xlabel="tokens (millions)", ylabel="training loss of the first seed", ylim=(left.get_xlim()[0] - 0.3, left.get_xlim()[1] + 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def network(row: Row) -> str:
    """The feed-forward network, its sizes and the model's layers."""
    settings = row.configuration
    sizes = [f"d_h {settings['d_model'] // settings['heads']}"] if settings["heads"] else []
    sizes += [f"E {settings['subnets']}"] if settings["subnets"] else []
    return " ".join([NETWORKS[settings["ffn"]], ", ".join([*sizes, f"d_ff {settings['width']}", f"{settings['layers']} layers"])])


def recipe(row: Row) -> str:
    """Every setting by which rows of one size and network differ."""
    settings = row.configuration
    parts = [settings["init"], f"wd {settings['weight_decay']:g}"]
    parts += [f"{role} rate x{rate:g}" for role, rate in sorted(settings["rates"].items())]
    parts += [f"{role} wd {decay:g}" for role, decay in sorted(settings["decays"].items())]
    parts += [settings["backend"]] if settings["backend"] != "auto" else []
    parts += [f"warm-up {settings['warmup']}"] if settings["warmup"] != 90 else []
    parts += ["q_norm"] if settings["q_norm"] else []
    parts += ["orthogonal projections"] if settings["projections"] == "orthogonal" else []
    parts += [settings["optimizer"]] if settings["optimizer"] != "adamw" else []
    parts += [f"router std {settings['router_std']:g}"] if settings["router_std"] is not None else []
    parts += [f"V x{settings['value_scale']:g}"] if settings["value_scale"] != 1 else []
    return ", ".join(parts)


def size_order(found: Iterable[Row]) -> list[str]:
    sizes = {row.configuration["size"]: row.non_embedding for row in found}
    return sorted(sizes, key=sizes.__getitem__)


def runs_block(found: list[Row]) -> str:
    """A table a size: every configuration's place."""
    text = []
    for size in size_order(found):
        these = [row for row in found if row.configuration["size"] == size]
        base = best_reference(found, size)
        text += [f"**{size}**", ""]
        text += [
            "| place | network | settings | learning rate | seeds | validation loss | 95 % | to SwiGLU | 95 % |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for place, row in enumerate(sorted(these, key=lambda row: row.mean), 1):
            difference, half = against(row, base)
            cells = [
                str(place),
                network(row),
                recipe(row),
                f"{row.configuration['learning_rate']:g}",
                ", ".join(map(str, sorted(row.losses))),
                f"{row.mean:.4f}",
                _half(interval(row.losses.values())),
                difference,
                half,
            ]
            text.append("| " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text).rstrip()


def against(row: Row, base: Row | None) -> tuple[str, str]:
    """Mean difference to the reference over common seeds, and half its interval; empty where there is none."""
    common = sorted(set(row.losses) & set(base.losses)) if base is not None and base is not row else []
    differences = [row.losses[seed] - base.losses[seed] for seed in common]
    return (f"{statistics.mean(differences):+.4f}" if differences else "", _half(interval(differences)))


def bars_block(found: list[Row]) -> str:
    """The best rows of each size with the most seeds, the defaults against the official settings, and the noise."""
    lines = []
    for size in size_order(found):
        base = best_reference(found, size)
        flash = [row for row in found if row.configuration["ffn"] == "flashmhf" and row.configuration["size"] == size]
        if base is None or not flash:
            continue
        best = min(flash, key=lambda row: (-len(row.losses), row.mean))
        lines.append(
            f"- {size}: {network(best)} ({recipe(best)}) {best.mean:.4f}, {network(base)} ({recipe(base)}) {base.mean:.4f}: "
            f"{_difference(best, base)}. Each is the lowest of the rows with the most seeds."
        )
    for row in found:
        settings = row.configuration
        if settings["ffn"] == "swiglu" or settings["init"] != "official":
            continue
        same = {**settings, "init": "balanced", "rates": {"projection": 0.3}}
        default = next((each for each in found if each.configuration == same), None)
        if default is not None:
            lines.append(
                f"- {settings['size']}, {network(row)}: default settings minus official ones in the same run: {_difference(default, row)}."
            )
    for row in found:
        repeated = next(
            (
                each
                for each in found
                if row.configuration["backend"] == "triton" and each.configuration == {**row.configuration, "backend": "auto"}
            ),
            None,
        )
        if repeated is not None:
            lines.append(f"- {network(row)} with the Triton back end minus the same run with hopper: {_difference(row, repeated)}.")
    between = noise(found)
    if between is not None:
        lines.append(f"- Standard deviation between seeds: {between:.4f} nats, pooled over the rows with several seeds.")
    lines.append(f"- {sum(len(row.losses) for row in found)} runs, {len(found)} configurations.")
    return "\n".join(lines)


def _difference(row: Row, base: Row) -> str:
    difference, half = against(row, base)
    seeds = len(set(row.losses) & set(base.losses))
    return f"{difference or 'no common seed'} nats{' ' + half if half else ''} ({seeds} common seed{'s' * (seeds != 1)})"


BLOCKS = {"bars": bars_block, "runs": runs_block}


def documented(text: str, found: list[Row]) -> str:
    """``text`` with its blocks renewed. Raises ValueError when a marker is missing."""
    for name, write in BLOCKS.items():
        begin, end = f"<!-- {name}: begin {MARK} -->", f"<!-- {name}: end -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise ValueError(f"the text lacks the markers {begin!r} and {end!r}")
        text = f"{before}{begin}\n\n{write(found)}\n\n{end}{after}"
    return text


def document(root: Path, check: bool) -> int:
    """Writes the blocks of docs/quality.md and its plot; with ``check``, 1 where the blocks differ from the results."""
    found, path = rows([root / RESULTS]), root / DOCUMENT
    text = path.read_text()
    wanted = documented(text, found)
    if check:
        if text != wanted:
            print(f"{DOCUMENT} disagrees with {RESULTS}: run python experiments/report.py document", file=sys.stderr)
        return int(text != wanted)
    path.write_text(wanted)
    plot(found, root / PLOT)
    return 0


def main(arguments: list[str] | None = None) -> int:
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
    add = commands.add_parser("document")
    add.add_argument("--check", action="store_true", help="change nothing; exit status 1 when the blocks disagree with the results")
    add.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this script's)")
    options = parser.parse_args(arguments)
    if options.command == "collect":
        print("\n".join(collect(options.files, options.results)))
        return 0
    if options.command == "document":
        return document(options.root, options.check)
    found = rows(options.results)
    text = table(found, options.reference)
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)
    if options.plot:
        plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
