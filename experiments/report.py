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

from rows import Row, best_first, differences, differences_on_the_way, interval, losses_after, pairs, rows
from runs import finished_runs, write_lines

sys.path.append(str(Path(__file__).resolve().parent.parent))
from benchmarks.write_readme import ROOT, renew

RESULTS = "experiments/results/runs.jsonl"
PLOTS = "docs/assets/quality.svg", "docs/assets/quality_on_the_way.svg"
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


def plots(found: list[Row], folder: Path) -> None:
    """Draw FlashMHF's loss minus SwiGLU's: PLOTS[0], a point and interval per pair of finished long trainings, and
    PLOTS[1], the same difference on the way there."""
    import matplotlib
    from matplotlib.figure import Figure

    from benchmarks.charts import OTHERS, OURS, STYLE, save

    long = sorted((pair for pair in pairs(found) if pair[0].is_long), key=lambda pair: -pair[0].layers / pair[1].layers)
    with matplotlib.rc_context(STYLE):
        ended = Figure(figsize=(5.4, 0.5 + 0.36 * len(long)), layout="constrained")
        way = Figure(figsize=(5.4, 3), layout="constrained")
        axes, lines = ended.subplots(), way.subplots()
        for place, (ours, theirs) in enumerate(long):
            each = differences(ours.losses, theirs.losses)
            axes.errorbar(statistics.mean(each), place, xerr=interval(each), fmt="o", capsize=3, color=OURS)
            style = {"color": OURS, "linewidth": 1.5, "alpha": 0.4 + 0.6 * place / max(1, len(long) - 1)}
            if points := differences_on_the_way(ours, theirs):
                line = [100 * tokens / ours.tokens for tokens in points], list(points.values())
                lines.plot(*line, linestyle=("-", "--", "-.", ":")[place % 4], label=_pair_name(ours, theirs), **style)
        axes.set_yticks(range(len(long)), [_pair_name(*pair) for pair in long])
        axes.set(xlabel="FlashMHF's loss − SwiGLU's, nats: left is better", xlim=(-0.03, 0.03))
        axes.set_ylim(-0.6, len(long) - 0.4)
        axes.axvline(0, color=OTHERS, linewidth=1)
        axes.grid(alpha=0.3, axis="x")
        lines.set(xlabel="share of the training, %", ylabel="difference, nats", ylim=(-0.02, 0.06), xlim=(0, 100))
        lines.axhline(0, color=OTHERS, linewidth=1)
        lines.legend(frameon=False, fontsize=9)
        for figure, name in zip((ended, way), PLOTS, strict=True):
            save(figure, folder / name)


def _pair_name(ours: Row, theirs: Row) -> str:
    return f"{ours.title.partition(',')[0]}, {ours.layers} layers for {theirs.layers}"


def network(row: Row) -> str:
    """The feed-forward network, its sizes and the model's layers."""
    settings = row.configuration
    sizes = [f"d_h {settings['d_model'] // settings['heads']}"] if settings["heads"] else []
    sizes += [f"E {settings['subnets']}"] if settings["subnets"] else []
    sizes += ["q_norm"] * settings["q_norm"] + [f"d_ff {settings['width']}", f"{settings['layers']} layers"]
    return f"{NETWORKS[settings['ffn']]} {', '.join(sizes)}"


def _compared(ours: dict[int, float], theirs: dict[int, float]) -> list[str]:
    """Both mean losses; their difference over the seeds that both have, with half its interval; how many those are."""
    found = differences(ours, theirs)
    half = interval(found)
    losses = [f"{statistics.mean(each.values()):.3f}" for each in (ours, theirs)]
    return [*losses, f"{statistics.mean(found):+.4f}" + ("" if half is None else f" ± {half:.4f}"), str(len(found))]


def _table(header: list[str], lines: list[list[str]]) -> str:
    rule = "|---" * len(header) + "|"
    return "\n".join([f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def _speed_on_an_h100(row: Row, found: list[Row]) -> float | None:
    """Tokens per second, the mean over the runs of this model at any rate and of any length, which leave it alone;
    None where no run was timed."""
    free = {"learning_rate": None, "size": None, "steps": None}
    same = (each for each in found if each.configuration | free == row.configuration | free)
    records = (record for each in same for record in each.records if "H100" in record["device"])
    speeds = [record["tokens_per_second"] for record in records if record["tokens_per_second"]]
    return statistics.mean(speeds) if speeds else None


def pairs_block(found: list[Row]) -> str:
    """A line per pair of the long trainings: loss, speed on an H100, memory."""
    lines = []
    for ours, theirs in (pair for pair in pairs(found) if pair[0].is_long):
        speed, other = (_speed_on_an_h100(row, found) for row in (ours, theirs))
        memory = [f"{row.records[0]['peak_memory'] / 2**30:.1f}" for row in (ours, theirs)]
        *compared, seeds = _compared(ours.losses, theirs.losses)
        cells = [ours.title, f"{ours.layers} for {theirs.layers}", *compared]
        lines.append([*cells, f"{speed / other:.2f}" if speed and other else "–", *memory, seeds])
    header = ["size, tokens", "layers", "loss", "SwiGLU's", "difference, nats", "speed ÷ SwiGLU's", "GiB", "SwiGLU's"]
    return _table([*header, "seeds"], lines)


def longer_block(found: list[Row]) -> str:
    """A line per 20 tokens per parameter of the trainings that see 40 and more: the losses of both networks there."""
    lines = []
    for ours, theirs in (pair for pair in pairs(found) if pair[0].is_long and pair[0].per_parameter > 39):
        ends = round(ours.per_parameter)
        points = {each: each * ours.non_embedding for each in range(20, ends, 20)} | {ends: ours.tokens}
        for per_parameter, tokens in points.items():
            there = (losses_after(row, tokens) for row in (ours, theirs))
            lines.append([_pair_name(ours, theirs), str(per_parameter), *_compared(*there)])
    return _table(["pair", "tokens per parameter", "loss", "SwiGLU's", "difference, nats", "seeds"], lines)


def short_block(found: list[Row]) -> str:
    """A line per size of the short trainings: both networks' best rows, and what lies between them."""
    lines = []
    for ours, theirs in (pair for pair in pairs(found) if not pair[0].is_long):
        sizes = [ours.title, f"{ours.per_parameter:.1f}", f"{ours.layers} for {theirs.layers}"]
        lines.append([*sizes, *_compared(ours.losses, theirs.losses)])
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
        networks.setdefault((row.title, name), []).append(row)
    lines = []
    for (size, name), of_network in networks.items():
        best_row, *others = sorted(of_network, key=best_first)
        tried = "; ".join(f"{_rate(row)}: {row.mean:.3f}" for row in others) or "–"
        cells = [size, name, _rate(best_row), f"{best_row.mean:.3f}", tried, str(len(best_row.losses))]
        speeds = _speeds(record for row in of_network for record in row.records)
        lines.append([*cells, speeds, f"{best_row.records[0]['peak_memory'] / 2**30:.1f}"])
    header = ["size, tokens", "network", "best setting (learning rate)", "loss", "other settings: loss", "seeds"]
    return _table([*header, "million tokens/s", "memory, GiB"], lines)


BLOCKS = {
    "docs/quality.md": {"pairs": pairs_block, "longer": longer_block},
    "experiments/README.md": {"long": long_block, "short": short_block},
}


def document(root: Path, check: bool) -> int:
    """Writes the blocks of the documents and the plot; with ``check``, 1 where the blocks differ from the results."""
    found = rows([root / RESULTS])
    stale = renew(root, BLOCKS, found, "experiments/report.py", check)
    if not check:
        plots(found, root)
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
