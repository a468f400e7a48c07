"""The runs of compare.py as tables and plot of docs/quality.md and of this folder's README, with 95 % intervals.

report.py collect FILE... RESULTS    takes runs of compare.py into RESULTS, in place of earlier ones of these names
report.py document [--check]         the blocks of both documents from experiments/results, and the plot

Runs that differ in nothing but seed and name are one row: mean validation loss, Student's interval of the mean,
difference to the other network's row over the seeds that both have (equal batches, so most of the noise is common).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from rows import Row, differences, differences_on_the_way, interval, most_seeds_then_lowest, pairs, rows
from runs import finished_runs, write_lines

sys.path.append(str(Path(__file__).resolve().parent.parent))
from benchmarks.write_readme import ROOT, renew

RESULTS, PLOT = "experiments/results/runs.jsonl", "docs/assets/quality.svg"
LONG_DECAY = 0.1  # the weight decay of a long run where nothing else is said
NETWORKS = {"swiglu": "SwiGLU", "flashmhf": "FlashMHF", "mh_ffn": "MH-FFN", "pkv": "PKV", "dense_moe": "Dense-MoE"}


def collect(files: Iterable[Path], results: Path) -> list[str]:
    """Take the runs of the files into RESULTS, sorted by name, later ones for earlier ones; return the names."""
    found = finished_runs(files)
    together = finished_runs([results]) | found
    partial = results.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    write_lines(partial, (together[name] for name in sorted(together)))
    partial.replace(results)
    return list(found)


def plot(found: list[Row], path: Path) -> None:
    """Draw FlashMHF's loss minus SwiGLU's: a line with point and interval per pair of finished models, long runs above,
    and the long runs' ways there inset."""
    import matplotlib
    from matplotlib.figure import Figure

    from benchmarks.charts import OTHERS, OURS, STYLE, save

    chosen = sorted(pairs(found), key=lambda pair: (pair[0].is_long, pair[0].per_parameter, pair[0].layers))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        inset = axes.inset_axes((0.07, 0.52, 0.56, 0.4))
        axes.axvline(0, color=OTHERS, linewidth=1)
        inset.axhline(0, color=OTHERS, linewidth=1)
        names, lines = [], iter(("-.", "-", "--", ":", (0, (5, 1))))
        for place, (ours, theirs) in enumerate(chosen):
            each, color = differences(ours, theirs), OURS if ours.is_long else OTHERS
            middle = statistics.mean(each)
            axes.errorbar(middle, place, xerr=interval(each), fmt="o", capsize=3, color=color, markersize=5)
            depths = f"{ours.title.partition(',')[0]}, {ours.layers} for {theirs.layers}"
            names.append(f"{depths} layers, {ours.per_parameter:.2g} tokens")
            if way := differences_on_the_way(ours, theirs):
                share = [tokens / ours.tokens for tokens in way]
                inset.plot(share, list(way.values()), linestyle=next(lines), color=OURS, linewidth=1, label=depths)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="FlashMHF's loss − SwiGLU's, nats", ylim=(-0.6, len(names) - 0.4))
        inset.set(ylim=(-0.02, 0.06), xlim=(0, 1))
        inset.tick_params(labelsize=7)
        inset.set_title("on the way, by the share of the training", fontsize=8, loc="left")
        inset.legend(frameon=False, fontsize=7, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.08))
        axes.grid(alpha=0.3, axis="x")
        for part in (axes, inset):
            part.spines[["top", "right"]].set_visible(False)
        save(figure, path)


def network(row: Row) -> str:
    """The feed-forward network, its sizes and the model's layers."""
    settings = row.configuration
    sizes = [f"d_h {settings['d_model'] // settings['heads']}"] if settings["heads"] else []
    sizes += [f"E {settings['subnets']}"] if settings["subnets"] else []
    sizes += ["q_norm"] * settings["q_norm"] + [f"d_ff {settings['width']}", f"{settings['layers']} layers"]
    return f"{NETWORKS[settings['ffn']]} {', '.join(sizes)}"


def _difference(ours: Row, theirs: Row) -> str:
    """The mean over the seeds that both have, and half its interval where there are several."""
    found = differences(ours, theirs)
    half = interval(found)
    return f"{statistics.mean(found):+.4f}" + ("" if half is None else f" ± {half:.4f}")


def _table(header: list[str], lines: list[list[str]]) -> str:
    rule = "|---" * len(header) + "|"
    return "\n".join([f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def _speed_on_an_h100(row: Row, found: list[Row]) -> float:
    """Tokens per second, the mean over the runs of this model at any learning rate, which leaves the speed alone."""
    rate = {"learning_rate": None}
    same = (each for each in found if each.configuration | rate == row.configuration | rate)
    records = (record for each in same for record in each.records if "H100" in record["device"])
    return statistics.mean(record["tokens_per_second"] for record in records if record["tokens_per_second"])


def pairs_block(found: list[Row]) -> str:
    """A line per pair of the long trainings: loss, speed on an H100, memory."""
    lines = []
    for ours, theirs in (pair for pair in pairs(found) if pair[0].is_long):
        losses = [f"{row.mean:.3f}" for row in (ours, theirs)]
        speed, other = (_speed_on_an_h100(row, found) for row in (ours, theirs))
        memory = [f"{row.records[0]['peak_memory'] / 2**30:.1f}" for row in (ours, theirs)]
        cells = [ours.title, f"{ours.layers} for {theirs.layers}", *losses, _difference(ours, theirs)]
        lines.append([*cells, f"{speed / other:.2f}", *memory, str(len(differences(ours, theirs)))])
    header = ["size, tokens", "layers", "loss", "SwiGLU's", "difference, nats", "speed ÷ SwiGLU's", "GiB", "SwiGLU's"]
    return _table([*header, "seeds"], lines)


def short_block(found: list[Row]) -> str:
    """A line per size of the short trainings: both networks' best rows, and what lies between them."""
    lines = []
    for ours, theirs in (pair for pair in pairs(found) if not pair[0].is_long):
        sizes = [ours.title, f"{ours.per_parameter:.1f}", f"{ours.layers} for {theirs.layers}"]
        losses = [f"{row.mean:.3f}" for row in (ours, theirs)]
        lines.append([*sizes, *losses, _difference(ours, theirs), str(len(differences(ours, theirs)))])
    header = ["size, tokens", "tokens per parameter", "layers", "loss", "SwiGLU's", "difference, nats", "seeds"]
    return _table(header, lines)


def _rate(row: Row) -> str:
    """The learning rate, whether it ends at zero, factors of parts of the network, and what else is unusual."""
    settings = row.configuration
    parts = {"projections": settings["rates"].get("projection", 1.0), "K, U and V": settings["rates"].get("k", 1.0)}
    factors = "".join(f", {part} x {factor:g}" for part, factor in parts.items() if factor != 1.0)
    rest = [f"weight decay {settings['weight_decay']:g}"] * (settings["weight_decay"] != LONG_DECAY)
    rest += ["Muon by heads"] * (settings["stacks"] == "heads")
    end = "" if settings["min_rate"] else " → 0"
    return ", ".join([f"{settings['learning_rate']:g}{end}{factors}", *rest])


def _speeds(records: Iterable[dict]) -> str:
    """Millions of tokens per second of training, the mean of the timed runs on each GPU; rates leave it alone."""
    found: dict[str, list[int]] = {}
    for record in (each for each in records if each["tokens_per_second"]):
        gpu = record["device"].removeprefix("NVIDIA ").split()[0]
        found.setdefault(gpu, []).append(record["tokens_per_second"])
    return ", ".join(f"{statistics.mean(speeds) / 1e6:.2f} ({gpu})" for gpu, speeds in sorted(found.items())) or "–"


def long_block(found: list[Row]) -> str:
    """A line per network of the runs evaluated on the way: its best rate, loss, speed and memory of training."""
    networks: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in found if row.is_long):
        name = network(row) + ", AdamW" * (row.configuration["optimizer"] == "adamw")
        networks.setdefault((row.configuration["size"].partition(",")[0], name), []).append(row)
    lines = []
    for (size, name), of_network in networks.items():
        best_row, *others = sorted(of_network, key=most_seeds_then_lowest)
        tried = "; ".join(f"{_rate(row)}: {row.mean:.3f}" for row in others) or "–"
        cells = [size, name, _rate(best_row), f"{best_row.mean:.3f}", tried, str(len(best_row.losses))]
        speeds = _speeds(record for row in of_network for record in row.records)
        lines.append([*cells, speeds, f"{best_row.records[0]['peak_memory'] / 2**30:.1f}"])
    header = ["size", "network", "best setting (learning rate)", "loss", "other settings: loss", "seeds"]
    return _table([*header, "million tokens/s", "memory, GiB"], lines)


BLOCKS = {
    "docs/quality.md": {"pairs": pairs_block, "short": short_block},
    "experiments/README.md": {"long": long_block},
}


def document(root: Path, check: bool) -> int:
    """Writes the blocks of the documents and the plot; with ``check``, 1 where the blocks differ from the results."""
    found = rows([root / RESULTS])
    stale = renew(root, BLOCKS, found, "experiments/report.py", check)
    if not check:
        plot(found, root / PLOT)
        return 0
    for name in stale:
        print(f"{name} disagrees with {RESULTS}: run python experiments/report.py document", file=sys.stderr)
    return int(bool(stale))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("collect")
    add.add_argument("files", type=Path, nargs="+")
    add.add_argument("results", type=Path)
    commands.add_parser("document").add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.command == "collect":
        print(f"{len(collect(options.files, options.results))} runs in {options.results}")
        return 0
    return document(ROOT, options.check)


if __name__ == "__main__":
    sys.exit(main())
