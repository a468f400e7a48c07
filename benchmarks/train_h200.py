"""Language-model training on one GPU: FlashMHF-128M against SwiGLU-128M at the paper's batch and length.

    python benchmarks/train_h200.py --prepare TOKENS --text FILE_OR_DIR...    # CPU: tokenizer and tokens
    python benchmarks/train_h200.py --tokens TOKENS --results DIRECTORY       # GPU: both models, one after the other
    python benchmarks/train_h200.py --smoke --results DIRECTORY               # CPU, tiny: that it runs

Both models train with the package's own training (transformers' Trainer, bf16 autocast over float32 weights, AdamW, torch.compile)
from one seed on the same batches, with the package's defaults and a warm-up of the learning rate over 100 steps. Written:
lm_training_<device>.json with speed (median and quintiles over the logged steps after the warm-up ones, which hold the compilation),
MFU, peak memory after warm-up, graph breaks and every logged loss; and the curves as a PNG. Exit status 1 when a check fails: tokens/s
at least 0.90 of SwiGLU's, peak memory lower, no graph break, final loss within 5 % of SwiGLU's.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.utils import logging

import flashmhf
from flashmhf.models.presets import preset
from flashmhf_recipes import metrics, plots, training
from flashmhf_recipes.flops import training_flops_per_token

from .harness.environment import command, commit

SETTINGS = ("scale", "steps", "batch", "micro_batch", "length", "warm_up", "rate_warm_up", "log_every", "eager")
OURS, BASELINE = "flashmhf", "swiglu"
LOWEST_SPEED_RATIO, HIGHEST_LOSS_RATIO = 0.90, 1.05


class AfterWarmUp(TrainerCallback):
    """Starts the count of peak memory anew once compilation is over."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", metavar="DIR", help="make tokens there and stop")
    parser.add_argument("--text", nargs="+", metavar="PATH", help="for --prepare; without it Python's own sources")
    parser.add_argument("--tokens", metavar="DIR", help="what --prepare made")
    parser.add_argument("--results", default="benchmarks/results", metavar="DIR")
    parser.add_argument("--scale", default="128m")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rate-warm-up", type=int, default=100, help="steps over which the learning rate rises")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--warm-up", type=int, default=10, help="steps left out of the figures")
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--smoke", action="store_true", help="tiny models, a few steps, on the CPU")
    args = parser.parse_args()
    if args.smoke:
        args.scale, args.steps, args.batch, args.micro_batch, args.length = "tiny", 6, 4, 2, 64
        args.warm_up, args.rate_warm_up, args.log_every = 2, 2, 1
        torch.set_num_threads(1)
    return args


def prepare(directory: Path, text: list[str] | None, args: argparse.Namespace) -> None:
    """A tokenizer and the tokens of at most one run, in ``directory``."""
    with tempfile.TemporaryDirectory() as sources:
        if text is None:
            root = Path(sysconfig.get_path("stdlib"))
            files = [path for path in sorted(root.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(path.parts)]
            with (Path(sources) / "stdlib.jsonl").open("w") as out:
                for path in files[: 40 if args.smoke else None]:
                    out.write(json.dumps({"text": path.read_text(errors="replace")}) + "\n")
            text = [sources]
        options = training.Options(
            output=str(directory), preset=args.scale, data=text, steps=args.steps, batch=args.batch, micro_batch=1, length=args.length
        )
        training.prepare(options.resolve()[1])


def train(ffn: str, tokens: Path, output: Path, args: argparse.Namespace) -> dict:
    """One run's figures."""
    gc.collect()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    settings = {"save_strategy": "no", "report_to": []}
    if args.smoke:
        settings["torch_compile_backend"] = "aot_eager"
    options = training.Options(
        output=str(output),
        preset=args.scale,
        ffn=ffn,
        tokens=str(tokens),
        steps=args.steps,
        batch=args.batch,
        micro_batch=args.micro_batch,
        length=args.length,
        warmup=args.rate_warm_up,
        log_every=args.log_every,
        compile=not args.eager,
        device="cpu" if args.smoke else "auto",
        arguments=settings,
    )
    training.start(options, callbacks=[AfterWarmUp(args.warm_up)])
    rows = [row for row in metrics.read_rows(output) if "loss" in row]
    timed = [row for row in rows if row["step"] > args.warm_up and "tokens_per_second" in row]
    speeds = sorted(row["tokens_per_second"] for row in timed)
    config = preset(f"{ffn}-{args.scale}").config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shares = [row["mfu"] for row in timed if "mfu" in row]
    return {
        "model": f"{ffn}-{args.scale}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": training_flops_per_token(model, args.length),
        "tokens_per_second": {
            name: speeds[int(share * (len(speeds) - 1))] for name, share in (("p20", 0.2), ("median", 0.5), ("p80", 0.8))
        },
        "mfu": statistics.median(shares) if shares else None,
        "peak_memory_bytes": rows[-1].get("peak_memory_bytes"),
        "graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0),
        "graph_breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "losses": [[row["step"], row["loss"]] for row in rows],
    }


def environment() -> dict:
    gpu = torch.cuda.is_available()
    return {
        "command": command(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "flashmhf": flashmhf.__version__,
        "back_ends": {name: reason or "usable" for name, reason in flashmhf.info().reasons.items()},
    }


def verdicts(ours: dict, baseline: dict, args: argparse.Namespace) -> dict[str, bool]:
    """Which checks passed; without those that a CPU has no figure for."""
    found = {
        "no graph break": not (args.eager or ours["graph_breaks"]),
        "loss decreases alike": ours["losses"][-1][1]
        <= HIGHEST_LOSS_RATIO * baseline["losses"][-1][1]
        < ours["losses"][0][1] * HIGHEST_LOSS_RATIO,
    }
    if not args.smoke:
        found["tokens/s at least 0.90 of SwiGLU's"] = (
            ours["tokens_per_second"]["median"] >= LOWEST_SPEED_RATIO * baseline["tokens_per_second"]["median"]
        )
        found["peak memory lower"] = ours["peak_memory_bytes"] is not None and ours["peak_memory_bytes"] < baseline["peak_memory_bytes"]
    return found


def main() -> int:
    args = arguments()
    logging.disable_progress_bar()
    if args.prepare:
        prepare(Path(args.prepare), args.text, args)
        return 0
    results = Path(args.results)
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(args.tokens or Path(scratch) / "tokens")
        if args.tokens is None:
            prepare(tokens, args.text, args)
        ours, baseline = (train(ffn, tokens, Path(scratch) / ffn, args) for ffn in (OURS, BASELINE))
    checks = verdicts(ours, baseline, args)
    name = "smoke" if args.smoke else environment()["device"].replace("NVIDIA ", "").replace(" ", "_").lower()
    document = {
        "environment": environment(),
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "runs": [ours, baseline],
        "speed_ratio": ours["tokens_per_second"]["median"] / baseline["tokens_per_second"]["median"],
        "checks": checks,
    }
    (results / f"lm_training_{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    curves = {run["model"]: [{"step": step, "loss": loss} for step, loss in run["losses"]] for run in (ours, baseline)}
    plots.draw_losses(curves, results / f"lm_training_{name}.png")
    for run in (ours, baseline):
        share = "" if run["mfu"] is None else f", MFU {run['mfu']:.3f}"
        memory = "" if run["peak_memory_bytes"] is None else f", peak {run['peak_memory_bytes'] / 2**30:.2f} GiB"
        breaks = f"{sum(run['graph_breaks'].values())} graph breaks, {run['graphs']} graphs"
        speed = run["tokens_per_second"]["median"]
        print(
            f"{run['model']}: {speed:,.0f} tokens/s{share}{memory}, {breaks}, loss {run['losses'][0][1]:.3f} -> {run['losses'][-1][1]:.3f}"
        )
    print(
        f"speed ratio {document['speed_ratio']:.3f}; "
        + ", ".join(f"{name}: {'passed' if passed else 'FAILED'}" for name, passed in checks.items())
    )
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
