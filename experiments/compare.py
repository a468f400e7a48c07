"""Trains the networks of a queue one after another on the tokens of corpus.py.

$ python experiments/compare.py QUEUE --tokens DIR --out RUNS [--minutes 8.5]

A queue is a JSON file: {"defaults": settings, "runs": [settings, ...]}, settings being the fields of Run. A call takes
the first run that nobody holds (by a file lock) or has finished, several at once one each. A finished run is a line of
RUNS/runs.jsonl, which names its commit. A run that is stopped goes on from RUNS/NAME.state in the next call, with the
same losses. Networks of one size have equal parameters beside the embedding (1 %) and see equal batches. The model is
that of flashmhf.models without transformers around it, so that one compiled block serves all layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import math
import platform
import subprocess
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import flashmhf
from flashmhf.nn.network import Network

TOLERANCE = 0.01  # of the number of parameters
PASSES = 4  # over the corpus, at most
EVALUATED = 26_000_000  # tokens between two evaluations along the way, about
SAMPLE = 256  # windows of each kind in one of them
CHECKED, SAVED = 25, 120  # steps between two looks at the clock, seconds between two states at least


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


# The model


def feed_forward(run: Run) -> Network:
    networks = {
        "swiglu": lambda: flashmhf.SwiGLU(run.d_model, run.width),
        "flashmhf": lambda: flashmhf.FlashMHF(run.d_model, run.heads, run.subnets, run.width // run.subnets),
        "mh_ffn": lambda: flashmhf.MHFFN(run.d_model, run.heads, run.width),
        "pkv": lambda: flashmhf.ParametricKV(run.d_model, run.heads, run.width),
        "dense_moe": lambda: flashmhf.DenseMoE(run.d_model, run.subnets, run.width // run.subnets),
    }
    if run.ffn not in networks:
        raise ValueError(f"{run.name}: ffn is {run.ffn!r}; supported: {', '.join(networks)}")
    network = networks[run.ffn]()
    network.reset_parameters(num_layers=run.layers)
    return network


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    """A Llama block with rotary attention, as flashmhf.models builds it; its q, k and v projections are one product."""

    def __init__(self, run: Run):
        super().__init__()
        self.heads = run.attention_heads
        self.norm1, self.norm2 = (nn.RMSNorm(run.d_model, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(run.d_model, 3 * run.d_model, bias=False)
        self.out = nn.Linear(run.d_model, run.d_model, bias=False)
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=0.02)
        self.ffn = feed_forward(run)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, d_model], cos and sin [L, head_dim / 2] -> [B, L, d_model]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class Head(nn.Module):
    """Last norm, tied embedding and cross entropy."""

    def __init__(self, run: Run):
        super().__init__()
        self.norm = nn.RMSNorm(run.d_model, eps=1e-5)

    def forward(self, x: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        logits = nn.functional.linear(self.norm(x), embedding)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model(nn.Module):
    def __init__(self, run: Run, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, run.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.layers))
        self.head = Head(run)
        half = run.d_model // run.attention_heads // 2
        angles = torch.arange(run.context)[:, None] / 10_000 ** (torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, L + 1] -> mean loss of predicting each from those before it."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x, self.embedding.weight, tokens[:, 1:])

    @property
    def non_embedding(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters()) - self.embedding.weight.numel()


def make_model(run: Run, vocabulary: int, device: str) -> Model:
    """The model from the run's seed. Raises ValueError for another number of parameters than that of its size."""
    torch.manual_seed(run.seed)
    with torch.device(device):
        model = Model(run, vocabulary)
    if abs(model.non_embedding - run.non_embedding) > TOLERANCE * run.non_embedding:
        found = f"{run.name} has {model.non_embedding:,} non-embedding parameters"
        raise ValueError(f"{found}; {run.size} is {run.non_embedding:,} within {TOLERANCE:.0%}")
    return model


def make_optimizer(run: Run, model: Model, device: str) -> torch.optim.Optimizer:
    rates = {"projection_rate": run.projection_rate, "muon": run.optimizer == "muon"}
    groups = flashmhf.param_groups(model, run.learning_rate, run.weight_decay, **rates)
    if run.optimizer == "muon":
        return flashmhf.Muon(groups, betas=(0.9, 0.95))
    if run.optimizer != "adamw":
        raise ValueError(f"{run.name}: optimizer is {run.optimizer!r}; supported: adamw, muon")
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")


def schedule(run: Run, step: int) -> float:
    """Factor on the learning rates at ``step``: linear warm-up, cosine to min_rate."""
    done = max(0, step - run.warmup) / max(1, run.steps - run.warmup)
    cosine = run.min_rate + (1 - run.min_rate) * 0.5 * (1 + math.cos(math.pi * done))
    return min(1.0, (step + 1) / max(1, run.warmup)) * cosine


# The text


class Tokens:
    """Token ids on the device, int32: pieces to train on, train-NN.bin, and validation text by kind, val-KIND.bin."""

    def __init__(self, directory: Path, device: str):
        def read(pattern: str) -> dict[str, Tensor]:
            files = {path.stem.partition("-")[2]: np.fromfile(path, np.uint16) for path in directory.glob(pattern)}
            return {name: torch.from_numpy(files[name].astype(np.int32)).to(device) for name in sorted(files)}

        self.stored = json.loads((directory / "tokens.json").read_text(encoding="utf-8"))
        self.pieces, self.validation = list(read("train-*.bin").values()), read("val-*.bin")
        self.bytes = sum(each.nbytes for each in (*self.pieces, *self.validation.values()))

    def batches(self, run: Run, first: int) -> Iterator[Tensor]:
        """Batches [batch, context + 1] from step ``first`` on.

        A pass goes through the pieces in their order, and through the windows of each in one drawn from the seed; each
        window is seen once a pass, and has other borders in the next. Raises ValueError for more than four passes.
        """
        passes = run.steps * run.batch_tokens / sum(map(len, self.pieces))
        if passes > PASSES:
            raise ValueError(f"{run.name}: steps is {run.steps}, {passes:.1f} passes over the text; at most {PASSES}")
        device = self.pieces[0].device
        window = torch.arange(run.context + 1, device=device)
        for drawn in range(PASSES * 2 * len(self.pieces)):
            tokens = self.pieces[drawn % len(self.pieces)]
            generator = torch.Generator().manual_seed((run.seed << 32) + drawn)
            shift = int(torch.randint(run.context, (), generator=generator))
            starts = torch.randperm((len(tokens) - 1 - shift) // run.context, generator=generator) * run.context + shift
            batches = starts[: len(starts) // run.batch * run.batch].to(device).view(-1, run.batch)
            for chosen in batches[first:]:
                yield tokens[chosen[:, None] + window]
            first = max(0, first - len(batches))


def validate(run: Run, model: Model, tokens: Tokens, autocast, sample: int | None = None) -> dict[str, float]:
    """Mean losses by kind and, as "all", of all tokens, in ``sample`` windows a kind, evenly spaced, or all. The last
    batch of a kind stays out where it is not full.
    """
    sums, counts = {}, {}
    for kind, text in tokens.validation.items():
        windows = text.unfold(0, run.context + 1, run.context)
        if sample is not None and len(windows) > sample:
            windows = windows[torch.arange(sample, device=text.device) * len(windows) // sample]
        batches = [batch for batch in windows.split(run.micro_batch) if len(batch) == run.micro_batch] or [windows]
        with autocast:  # with gradients on: without, every block would be compiled again
            sums[kind] = sum(model(batch.long()).item() for batch in batches)
        counts[kind] = len(batches)
    means = {kind: round(sums[kind] / counts[kind], 5) for kind in sums}
    return means | {"all": round(sum(sums.values()) / sum(counts.values()), 5)}


# The training


class TimeUpError(Exception):
    """The minutes are over; the run's state is saved."""


@dataclass
class Progress:
    """Where a run is and what it has recorded. ``timed`` steps took ``seconds``; compilation, evaluation and saving do
    not count."""

    losses: Tensor
    norms: Tensor
    step: int = 0
    evaluations: list[dict] = field(default_factory=list)
    timed: int = 0
    seconds: float = 0.0
    wall: float = 0.0


def save(path: Path, run: Run, model: Model, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    partial = path.with_suffix(".partial")
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"run": dataclasses.asdict(run), **parts, "progress": vars(progress)}, partial)
    partial.replace(path)


def load(path: Path, run: Run, model: Model, optimizer: torch.optim.Optimizer, device: str) -> Progress:
    """Restore what ``save`` wrote. Raises ValueError where it is the state of other settings."""
    state = torch.load(path, map_location=device, weights_only=True)
    if changed := [key for key, value in dataclasses.asdict(run).items() if state["run"].get(key) != value]:
        raise ValueError(f"{path} was saved with other settings: {', '.join(changed)}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def train_step(
    run: Run, model: Model, optimizer: torch.optim.Optimizer, peaks: list[float], batch: Tensor, autocast,
    progress: Progress,
) -> None:  # fmt: skip
    """Take the step ``progress.step``, and record its loss and the norm of its gradient on the device."""
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * schedule(run, progress.step)
    for part in batch.split(run.micro_batch):
        with autocast:
            loss = model(part.long())
        share = len(part) / run.batch
        (loss * share).backward()
        progress.losses[progress.step] += loss.detach() * share
    progress.norms[progress.step] = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    progress.step += 1


def train(run: Run, tokens: Tokens, device: str, state: Path, deadline: float, compiled: bool) -> dict[str, object]:
    """Train one network, from ``state`` on if there is one; return its losses and speed. Raises TimeUpError past the
    deadline, after saving ``state``.
    """
    model = make_model(run, tokens.stored["vocabulary"], device)
    if compiled:
        for part in (*model.blocks, model.head):
            part.compile(fullgraph=True, dynamic=False)
    optimizer = make_optimizer(run, model, device)
    peaks = [group["lr"] for group in optimizer.param_groups]
    progress, begin = Progress(*(torch.zeros(run.steps, device=device) for _ in range(2))), time.monotonic()
    if state.exists():
        progress = load(state, run, model, optimizer, device)
        begin -= progress.wall
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    every = max(1, round(EVALUATED / run.batch_tokens))
    first, saved, timed_from = progress.step, time.monotonic(), None
    warm = first + min(5, (run.steps - first) // 2)  # steps from here on are timed

    def keep() -> None:
        progress.wall = time.monotonic() - begin
        save(state, run, model, optimizer, progress)

    for _, batch in zip(range(first, run.steps), tokens.batches(run, first), strict=False):
        train_step(run, model, optimizer, peaks, batch, autocast, progress)
        done = progress.step
        ended, evaluated = done == run.steps, done % every == 0 and done < run.steps
        if not (ended or evaluated or done == warm or done % CHECKED == 0):
            continue  # the host runs ahead
        wait()
        if timed_from:
            progress.timed += done - timed_from[0]
            progress.seconds += time.monotonic() - timed_from[1]
        if evaluated:
            losses = validate(run, model, tokens, autocast, SAMPLE)
            progress.evaluations.append({"tokens": done * run.batch_tokens} | losses)
            if time.monotonic() - saved > SAVED:
                keep()
                saved = time.monotonic()
        if done % CHECKED == 0 and not ended and time.monotonic() > deadline:
            keep()
            print(f"{run.name}: saved after {done} of {run.steps} steps; {progress.evaluations[-1:]}", flush=True)
            raise TimeUpError
        if done >= warm:
            wait()
            timed_from = done, time.monotonic()
    memory = torch.cuda.max_memory_allocated() - tokens.bytes if device == "cuda" else None
    losses = validate(run, model, tokens, autocast)
    speed = round(progress.timed * run.batch_tokens / progress.seconds) if progress.timed else None
    return {
        "losses": progress.losses.tolist(), "norms": progress.norms.tolist(), "non_embedding": model.non_embedding,
        "evaluations": progress.evaluations, "validation_loss": losses.pop("all"), "validation": losses,
        "tokens_per_second": speed, "seconds": round(time.monotonic() - begin, 2), "peak_memory": memory,
    }  # fmt: skip


# The queue


def record(run: Run, result: dict[str, object], device: str, commit: str, tokens: Tokens) -> dict[str, object]:
    """The line of a run: configuration, versions, mean loss and norm of every ``every`` steps, evaluations, result."""
    every = max(10, run.steps // 100)
    means = {
        name: [round(float(np.mean(result[name][begin : begin + every])), 4) for begin in range(0, run.steps, every)]
        for name in ("losses", "norms")
    }
    packages = {"flashmhf": flashmhf.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "run": run.name, "configuration": dataclasses.asdict(run), "commit": commit,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": packages | {"python": platform.python_version()},
        "corpus": {"tokenizer_sha256": tokens.stored["tokenizer_sha256"], "pieces": len(tokens.pieces)}, "every": every,
        **result, **means,
    }  # fmt: skip


def finished_runs(files: Iterable[Path]) -> dict[str, dict]:
    """The finished runs of files by name, as ``record`` wrote them, a line each."""
    lines = (line for path in files if path.exists() for line in path.read_text(encoding="utf-8").splitlines())
    return {run["run"]: run for run in map(json.loads, lines)}


def write_lines(path: Path, lines: Iterable[dict]) -> None:
    """Append a line a run, at once."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


@contextmanager
def lock(path: Path, wait: bool) -> Iterator[bool]:
    """Whether the file's lock is held. It ends with the process that holds it, however that ends."""
    with path.open("a", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def current_commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    deadline = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of this call")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default=current_commit())
    options = parser.parse_args(arguments)
    deadline += 60 * options.minutes
    device, tokens, failed = options.device, Tokens(options.tokens, options.device), 0
    # a graph for each kind of network
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    torch.set_float32_matmul_precision("high")
    locks, results = options.out / "locks", options.out / "runs.jsonl"
    locks.mkdir(parents=True, exist_ok=True)
    for run in read_queue(options.queue):
        with lock(locks / run.name, wait=False) as held:
            if not held or run.name in finished_runs([results]):
                continue
            state = options.out / f"{run.name}.state"
            try:
                if time.monotonic() > deadline:
                    raise TimeUpError
                result = train(run, tokens, device, state, deadline, compiled=device == "cuda")
            except TimeUpError:
                break
            except Exception:
                failed = 1
                print(f"{run.name}: failed\n{traceback.format_exc()}", flush=True)
                continue
            with lock(locks / ".runs", wait=True):
                write_lines(results, [record(run, result, device, options.commit, tokens)])
            state.unlink(missing_ok=True)
            print(f"{run.name}: validation loss {result['validation_loss']}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
