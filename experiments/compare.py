"""Trains the networks of a queue one after another on the tokens of corpus.py.

compare.py QUEUE --tokens DIR --out RUNS [--minutes 8.5] [--pieces N] [--done RESULTS ...]

A queue is a JSON file: {"defaults": settings, "runs": [settings, ...]}, settings being the fields of Run. "grid":
{field: [values]} stands for every combination. "best_of": [names] takes over the settings of that run among those
finished which has the lowest validation loss; where none is finished, the entry is left for another call.

One process a GPU takes the first run that nobody holds and nobody has finished. A run is held by a file lock, so a
killed process gives its run back. A finished run is one line of RUNS/runs.jsonl (see ``record``). A run that is not
finished when the minutes are over, or is killed, goes on from RUNS/NAME.state in the next call: weights, optimizer and
step are kept, the batches follow from seed and step, and the losses are those of a run without the break. The state is
also written every two minutes.

Runs of one size train equal non-embedding parameters (checked, 1 %) on equal tokens in equal batches. A pass goes
through the pieces of the corpus in their order, and through the windows of each in an order drawn from the seed; each
window is seen once a pass. Runs of more than four passes are refused. A piece that is not there yet is waited for, so
that training can begin while the corpus is still tokenised. The network is that of flashmhf.models (a test compares
their losses) without transformers around it, so that one compiled block serves all layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import itertools
import json
import math
import os
import platform
import subprocess
import sys
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
from flashmhf.nn.optim import roles, vocabulary_weights

TOLERANCE = 0.01
PASSES = 4
EVALUATED = 26_000_000  # tokens between two evaluations along the way, about
SAMPLE = 256  # windows of each kind in one of them
CHECKED = 25  # steps between two looks at the clock
SAVED = 120  # seconds between two states at least


@dataclass(frozen=True)
class Run:
    """One training. ``heads``, ``subnets``, ``width`` as in FlashMHFConfig: d_ff = E d_e, a head's width, the keys of a
    head.

    rates: a role of flashmhf.nn.optim.roles to the factor on its learning rate; its weight decay is divided by it.
    decays: a role to its weight decay, before that division. router_std, value_scale, projections: on top of ``init``;
    "orthogonal" projections are random orthogonal matrices times the standard deviation that ``init`` gives them.
    gates: "normalised", the paper's, or "sigmoid", which do not lower each other. optimizer "muon": Muon for all
    matrices but the embedding, which AdamW trains with the rest.
    stacks: what of K, U and V is one matrix to Muon, a sub-network, "subnets", or a head's sub-networks side by side,
    "heads".
    """

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
    init: str = "balanced"
    q_norm: bool = False
    router_std: float | None = None
    value_scale: float = 1.0
    projections: str = "gaussian"
    gates: str = "normalised"
    backend: str = "auto"
    learning_rate: float = 2e-3
    min_rate: float = 0.1
    warmup: int = 90
    rates: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.3
    decays: dict[str, float] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    optimizer: str = "adamw"
    stacks: str = "subnets"
    steps: int = 900
    batch: int = 64
    micro_batch: int = 64
    context: int = 1024
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.context


@dataclass(frozen=True)
class Entry:
    """A queue's run before its settings are complete: ``best_of`` names the runs whose best one it builds on."""

    name: str
    settings: dict[str, object]
    best_of: tuple[str, ...] = ()

    def run(self, finished: dict[str, dict]) -> Run | None:
        """The run; None where none of ``best_of`` is finished."""
        if not self.best_of:
            return Run(**self.settings, name=self.name)
        results = [finished[name] for name in self.best_of if name in finished]
        if not results:
            return None
        settings = dict(min(results, key=lambda line: line["validation_loss"])["configuration"])
        for key, value in self.settings.items():  # rates and decays are added to, everything else is replaced
            settings[key] = settings[key] | value if isinstance(value, dict) else value
        return Run(**settings | {"name": self.name})


def read_queue(path: Path) -> list[Entry]:
    """The runs of a queue file, grids expanded;

    raises ValueError for names that are not unique and unknown settings.
    """
    queue = json.loads(path.read_text(encoding="utf-8"))
    short, known = {"learning_rate": "lr", "weight_decay": "wd"}, {each.name for each in dataclasses.fields(Run)}
    entries = []
    for entry in queue["runs"]:
        entry = dict(entry)
        base, grid, best_of = entry.pop("name"), entry.pop("grid", {}), tuple(entry.pop("best_of", ()))
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            name = "-".join(
                [
                    base,
                    *(
                        value if isinstance(value, str) else f"{short.get(key, key)}{value:g}"
                        for key, value in chosen.items()
                    ),
                ]
            )
            settings = ({} if best_of else queue.get("defaults", {})) | entry | chosen
            if unknown := sorted(set(settings) - known):
                raise ValueError(f"{path}, run {name}: unknown settings {', '.join(unknown)}")
            entries.append(Entry(name, settings, best_of))
    names = [entry.name for entry in entries]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: not unique: {', '.join(repeated)}")
    if unknown := sorted({name for entry in entries for name in entry.best_of} - set(names)):
        raise ValueError(f"{path}: best_of names no run of the queue: {', '.join(unknown)}")
    return entries


def read_runs(path: Path) -> list[dict]:
    """The finished runs of a file, a line each, as ``record`` wrote them."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def finished_runs(files: Iterable[Path]) -> dict[str, dict]:
    return {line["run"]: line for path in files if path.exists() for line in read_runs(path)}


class SigmoidGates(flashmhf.FlashMHF):
    """FlashMHF with R = 2 sigma(P) / E, which begins like R = sigma(P) / sum sigma(P), near 1 / E."""

    def _mix(self, q: Tensor) -> Tensor:
        q = self.normalise(q)
        with torch.autocast(q.device.type, enabled=False):
            p = torch.einsum("...hd,hde->...he", q.float(), self.router.float())
        return flashmhf.flash_mhf(q, *self._weights(), 2 / self.num_subnets * p.sigmoid(), backend=self.backend)


GATES = {"normalised": flashmhf.FlashMHF, "sigmoid": SigmoidGates}


def feed_forward(run: Run) -> nn.Module:
    if run.gates not in GATES or (run.ffn != "flashmhf" and run.gates != "normalised"):
        raise ValueError(
            f"{run.name}: gates is {run.gates!r}; supported: {', '.join(GATES)}, the second for ffn 'flashmhf' only"
        )
    match run.ffn:
        case "swiglu":
            module = flashmhf.SwiGLU(run.d_model, run.width)
        case "flashmhf":
            module = GATES[run.gates](
                run.d_model, run.heads, run.subnets, run.width // run.subnets, q_norm=run.q_norm, backend=run.backend
            )
        case "mh_ffn":
            module = flashmhf.MHFFN(run.d_model, run.heads, run.width, backend=run.backend)
        case "pkv":
            module = flashmhf.ParametricKV(run.d_model, run.heads, run.width)
        case "dense_moe":
            module = flashmhf.DenseMoE(run.d_model, run.subnets, run.width // run.subnets)
        case _:
            raise ValueError(f"{run.name}: ffn is {run.ffn!r}; supported: swiglu, flashmhf, mh_ffn, pkv, dense_moe")
    module.reset_parameters(run.init, num_layers=run.layers)
    with torch.no_grad():
        if run.router_std is not None:
            module.router.normal_(std=run.router_std)
        if run.value_scale != 1:
            module.v.mul_(run.value_scale)
        if run.projections == "orthogonal":
            for linear in (module.in_proj, module.out_proj):
                std = linear.weight.std()
                nn.init.orthogonal_(linear.weight).mul_(std * math.sqrt(run.d_model))
    return module


class Block(nn.Module):
    """A Llama block with rotary attention, as flashmhf.models builds it; its q, k and v projections are one product."""

    def __init__(self, run: Run):
        super().__init__()
        self.heads = run.attention_heads
        self.norm1, self.norm2 = (nn.RMSNorm(run.d_model, eps=1e-5) for _ in range(2))
        self.qkv, self.out = (
            nn.Linear(run.d_model, 3 * run.d_model, bias=False),
            nn.Linear(run.d_model, run.d_model, bias=False),
        )
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=0.02)
        self.ffn = feed_forward(run)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, d_model], cos and sin [L, head_dim / 2] -> [B, L, d_model]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Head(nn.Module):
    """Last norm, tied embedding and cross entropy."""

    def __init__(self, run: Run):
        super().__init__()
        self.norm = nn.RMSNorm(run.d_model, eps=1e-5)

    def forward(self, x: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            nn.functional.linear(self.norm(x), embedding).flatten(0, 1).float(), targets.flatten()
        )


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

    def compile_parts(self) -> None:
        """One graph serves all blocks, and all models with the same feed-forward network:

        compilation is most of a short run otherwise.
        """
        for part in (*self.blocks, self.head):
            part.compile(fullgraph=True, dynamic=False)


def non_embedding(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel()


def check_size(run: Run, model: Model) -> None:
    there = non_embedding(model)
    if abs(there - run.non_embedding) > TOLERANCE * run.non_embedding:
        raise ValueError(
            f"{run.name} has {there:,} non-embedding parameters; {run.size} is {run.non_embedding:,} within {TOLERANCE:.0%}"
        )


def optimizer_groups(run: Run, model: Model) -> list[dict[str, object]]:
    """A group a role, with the run's rates and decays;

    flashmhf.param_groups is the special case rates={"projection": 0.3}.
    """
    parameters, kinds = dict(model.named_parameters()), roles(model)
    unknown = sorted({*run.rates, *run.decays} - {"projection", "k", "u", "v", "router", "other", "undecayed"})
    if unknown:
        raise ValueError(f"{run.name}: rates or decays of unknown roles: {', '.join(unknown)}")
    groups = []
    for role in sorted(set(kinds.values())):
        rate = run.rates.get(role, 1.0)
        decay = run.decays.get(role, 0.0 if role == "undecayed" else run.weight_decay)
        members = [parameters[name] for name, kind in kinds.items() if kind == role]
        groups.append({"params": members, "lr": rate * run.learning_rate, "weight_decay": decay / rate})
    return groups


class MuonByHeads(flashmhf.Muon):
    """Muon to which K, U and V [H, E, d_e, d_h] are a matrix a head, [E d_e, d_h]."""

    def _step_alike(self, group: dict, parameters: list[Tensor]) -> None:
        if parameters[0].dim() < 4:
            return super()._step_alike(group, parameters)
        # views: what changes them changes the parameters
        joined = [nn.Parameter(each.detach().flatten(1, 2)) for each in parameters]
        for whole, parameter in zip(joined, parameters, strict=True):
            whole.grad = parameter.grad.flatten(1, 2)
            self.state[whole] = {name: value.flatten(1, 2) for name, value in self.state[parameter].items()}
        super()._step_alike(group, joined)
        for whole, parameter in zip(joined, parameters, strict=True):
            self.state[parameter] = {name: value.view_as(parameter) for name, value in self.state.pop(whole).items()}


MUON = {"subnets": flashmhf.Muon, "heads": MuonByHeads}


def make_optimizer(run: Run, model: Model, device: str) -> torch.optim.Optimizer:
    groups = optimizer_groups(run, model)
    if run.stacks not in MUON or (run.stacks != "subnets" and (run.optimizer, run.ffn) != ("muon", "flashmhf")):
        raise ValueError(
            f"{run.name}: stacks is {run.stacks!r}; supported: {', '.join(MUON)}, the second for flashmhf with muon only"
        )
    match run.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, betas=run.betas, fused=device == "cuda")
        case "muon":
            return MUON[run.stacks](muon_groups(groups, vocabulary_weights(model)), betas=run.betas)
    raise ValueError(f"{run.name}: optimizer is {run.optimizer!r}; supported: adamw, muon")


def muon_groups(groups: list[dict], vocabulary: set[int]) -> list[dict]:
    """Each group in two, those whose matrices Muon takes and the rest."""
    divided = []
    for group in groups:
        for muon in (True, False):
            members = [each for each in group["params"] if (each.dim() >= 2 and id(each) not in vocabulary) == muon]
            divided += [group | {"params": members, "muon": muon}] if members else []
    return divided


def schedule(run: Run, step: int) -> float:
    """Factor on the learning rates at ``step``: linear warm-up, cosine to min_rate."""
    done = max(0, step - run.warmup) / max(1, run.steps - run.warmup)
    return min(1.0, (step + 1) / max(1, run.warmup)) * (
        run.min_rate + (1 - run.min_rate) * 0.5 * (1 + math.cos(math.pi * done))
    )


class TimeUpError(Exception):
    """The minutes are over; the run's state is saved."""


@dataclass
class Tokens:
    """Token ids on the device, int32: ``pieces`` pieces to train on (None: those that are there), loaded when they are
    reached, and the validation text by kind."""

    directory: Path
    device: str
    pieces: int | None = None
    deadline: float = math.inf
    waited: float = 0.0  # seconds, for pieces
    stored: dict = field(init=False)
    validation: dict[str, Tensor] = field(init=False)
    loaded: dict[int, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.pieces = self.pieces or len(list(self.directory.glob("train-*.bin")))
        self.stored = json.loads((self.directory / "tokens.json").read_text())
        self.validation = {
            path.stem.partition("-")[2]: self._read(path) for path in sorted(self.directory.glob("val-*.bin"))
        }

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in (*self.loaded.values(), *self.validation.values()))

    def _read(self, path: Path) -> Tensor:
        return torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int32)).to(self.device)

    def piece(self, index: int) -> Tensor:
        """Piece ``index``, waited for where it is not there yet. Raises TimeUpError past the deadline."""
        path = self.directory / f"train-{index:02}.bin"
        while index not in self.loaded:
            if path.exists():
                self.loaded[index] = self._read(path)
            elif time.monotonic() > self.deadline:
                raise TimeUpError
            else:
                _wait(self.device)  # the steps that are queued are training
                begin = time.monotonic()
                time.sleep(1)
                self.waited += time.monotonic() - begin
        return self.loaded[index]

    def clock(self) -> float:
        """Seconds, the time spent waiting for pieces apart."""
        return time.monotonic() - self.waited

    def check(self, run: Run) -> None:
        """Raise ValueError where ``run`` takes more than four passes.

        The pieces are fair samples, so the first one stands for all.
        """
        there = self.pieces * len(self.piece(0))
        if run.tokens > PASSES * there:
            raise ValueError(
                f"{run.name}: steps is {run.steps}, {run.tokens / there:.1f} passes over {there:,} tokens; at most {PASSES}"
            )

    def batches(self, run: Run, first: int) -> Iterator[Tensor]:
        """Batches [batch, context + 1] of the run from step ``first`` on."""
        window = torch.arange(run.context + 1, device=self.device)
        for drawn, index in enumerate(index for _ in itertools.count() for index in range(self.pieces)):
            tokens = self.piece(index)
            generator = torch.Generator().manual_seed((run.seed << 32) + drawn)
            # windows of another pass have other borders
            shift = int(torch.randint(run.context, (), generator=generator))
            starts = torch.randperm((len(tokens) - 1 - shift) // run.context, generator=generator) * run.context + shift
            batches = starts[: len(starts) // run.batch * run.batch].to(self.device).view(-1, run.batch)
            for chosen in batches[first:]:
                yield tokens[chosen[:, None] + window]
            first = max(0, first - len(batches))


@dataclass
class Progress:
    """Where a run is and what it has recorded. ``timed`` steps took ``seconds``; not counted are compilation,
    evaluation, saving and waiting for pieces."""

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
    if changed := [key for key, value in dataclasses.asdict(run).items() if state["run"][key] != value]:
        raise ValueError(f"{path} was saved with other settings: {', '.join(changed)}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def train(run: Run, tokens: Tokens, device: str, compiled: bool, state: Path) -> dict[str, object]:
    """Train one network, from ``state`` on where that file is there; return its losses and speed.

    Raises TimeUpError past the deadline of ``tokens``, after saving ``state``. The caller removes it when the result is
    recorded.
    """
    torch.manual_seed(run.seed)
    with torch.device(device):
        model = Model(run, tokens.stored["vocabulary"])
    check_size(run, model)
    tokens.check(run)
    if compiled:
        model.compile_parts()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    optimizer = make_optimizer(run, model, device)
    peaks = [group["lr"] for group in optimizer.param_groups]
    progress = Progress(*(torch.zeros(run.steps, device=device) for _ in range(2)))
    begin = time.monotonic()
    if state.exists():
        progress = load(state, run, model, optimizer, device)
        begin -= progress.wall
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    every = max(1, round(EVALUATED / (run.batch * run.context)))
    batches, first, saved = tokens.batches(run, progress.step), progress.step, time.monotonic()
    warm, timed_from = min(5, (run.steps - first) // 2), None
    for step in range(first, run.steps):
        try:
            batch = next(batches)
            if step % CHECKED == 0 and step > first:  # elsewhere the host runs ahead
                _wait(device)
                if time.monotonic() > tokens.deadline:
                    raise TimeUpError
        except TimeUpError:
            progress.step, progress.wall = step, time.monotonic() - begin
            save(state, run, model, optimizer, progress)
            print(
                f"{run.name}: saved after {step} of {run.steps} steps; {json.dumps(progress.evaluations[-1:])}",
                flush=True,
            )
            raise
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(run, step)
        for part in batch.split(run.micro_batch):
            with autocast:
                loss = model(part.long())
            share = len(part) / run.batch
            (loss * share).backward()
            progress.losses[step] += loss.detach() * share
        progress.norms[step] = nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if timed_from is not None and (done % CHECKED == 0 or done % every == 0 or done == run.steps):
            _wait(device)
            now = tokens.clock()
            progress.timed, progress.seconds = (
                progress.timed + done - timed_from[0],
                progress.seconds + now - timed_from[1],
            )
            timed_from = (done, now)
        if done % every == 0 and done < run.steps:
            losses = validate(run, model, tokens, autocast, SAMPLE)
            progress.evaluations.append({"tokens": done * run.batch * run.context} | losses)
            if time.monotonic() - saved > SAVED:
                progress.step, progress.wall = done, time.monotonic() - begin
                save(state, run, model, optimizer, progress)
                saved = time.monotonic()
            timed_from = timed_from and (done, tokens.clock())
        if done == first + warm:
            _wait(device)
            timed_from = (done, tokens.clock())
    memory = torch.cuda.max_memory_allocated() - tokens.bytes if device == "cuda" else None
    losses = validate(run, model, tokens, autocast)
    return {
        "losses": progress.losses.tolist(),
        "norms": progress.norms.tolist(),
        "non_embedding": non_embedding(model),
        "evaluations": progress.evaluations,
        "validation_loss": losses.pop("all"),
        "validation": losses,
        "tokens_per_second": round(progress.timed * run.batch * run.context / progress.seconds)
        if progress.timed
        else None,
        "seconds": round(time.monotonic() - begin, 2),
        "peak_memory": memory,
    }


def validate(run: Run, model: Model, tokens: Tokens, autocast, sample: int | None = None) -> dict[str, float]:
    """Mean losses by kind and, as "all", of all their tokens, in windows of the context side by side.

    ``sample`` windows of each kind, evenly spaced, or all of them. The last batch of a kind stays out where it is not
    full.
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


def chosen_backend(run: Run, device: str) -> str | None:
    """The back end that the run's kernels took; None where its network has none."""
    if run.ffn not in ("flashmhf", "mh_ffn"):
        return None
    subnets = run.subnets or 1
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.empty(1, run.heads, run.d_model // run.heads, dtype=dtype, device=device)
    k = torch.empty(run.heads, subnets, run.width // subnets, run.d_model // run.heads, dtype=dtype, device=device)
    return flashmhf.info(q, k).chosen if run.backend == "auto" else run.backend


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def record(run: Run, result: dict[str, object], device: str, commit: str, tokens: Tokens) -> dict[str, object]:
    """The line of a run:

    configuration, versions, mean training loss and gradient norm of every ``every`` steps, evaluations, result.
    """
    every = max(10, run.steps // 100)
    means = {
        name: [round(float(np.mean(result[name][begin : begin + every])), 4) for begin in range(0, run.steps, every)]
        for name in ("losses", "norms")
    }
    return {
        "run": run.name,
        "configuration": dataclasses.asdict(run),
        "non_embedding": result["non_embedding"],
        "backend": chosen_backend(run, device),
        "commit": commit,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": {
            "flashmhf": flashmhf.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "corpus": {"tokenizer_sha256": tokens.stored["tokenizer_sha256"], "pieces": tokens.pieces},
        "every": every,
        **result,
        **means,
    }


def write_lines(path: Path, lines: Iterable[dict]) -> None:
    """Append a line a run, at once."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


@contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Whether the file's lock is held. It ends with the process that holds it, however that ends."""
    with path.open("a", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def work(options: argparse.Namespace, deadline: float) -> int:
    """Takes runs until none is left or the time is up; returns how many failed."""
    # a graph for each kind of network
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    torch.set_float32_matmul_precision("high")
    device, tokens, failed = options.device, None, 0
    locks, results = options.out / "locks", options.out / "runs.jsonl"
    locks.mkdir(parents=True, exist_ok=True)
    for entry in read_queue(options.queue):
        with _lock(locks / entry.name, wait=False) as held:
            finished = finished_runs([*options.done, results])
            if not held or entry.name in finished:
                continue
            run = entry.run(finished)
            if run is None:
                print(f"{entry.name}: left out, none of {', '.join(entry.best_of)} is finished", flush=True)
                continue
            if time.monotonic() + options.least > deadline:
                print(f"{run.name}: no time left", flush=True)
                break
            state = options.out / f"{run.name}.state"
            try:
                tokens = tokens or Tokens(options.tokens, device, options.pieces, deadline)
                result = train(run, tokens, device, options.compile, state)
            except TimeUpError:
                break
            except Exception:
                failed += 1
                print(f"{run.name}: failed\n{traceback.format_exc()}", flush=True)
                continue
            shown = {key: value for key, value in result.items() if key not in ("losses", "norms", "evaluations")}
            print(f"{run.name}: {json.dumps(shown)}", flush=True)
            with _lock(locks / ".runs", wait=True):
                write_lines(results, [record(run, result, device, options.commit, tokens)])
            state.unlink(missing_ok=True)
    return failed


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return found.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="further files of finished runs")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="of this call; an unfinished run is saved and goes on in the next one",
    )
    parser.add_argument("--least", type=float, default=60, help="seconds that must be left for a run to begin or go on")
    parser.add_argument(
        "--pieces", type=int, help="pieces to train on, the first ones, waited for; those that are there otherwise"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--workers", type=int, help="processes, one a GPU; all GPUs otherwise")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--commit", default=_commit())
    options = parser.parse_args(arguments)
    deadline = begin + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    # shared by the processes, and by the next call where --out is kept
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(name, str(options.out.resolve() / "cache" / name.partition("_")[0].lower()))
    workers = options.workers or (torch.cuda.device_count() if options.device == "cuda" else 1)
    if workers == 1:
        return min(1, work(options, deadline))
    command = [
        sys.executable,
        __file__,
        *(sys.argv[1:] if arguments is None else arguments),
        "--workers",
        "1",
        "--commit",
        options.commit,
    ]
    command += ["--minutes", str((deadline - time.monotonic()) / 60)]
    started = [subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}) for gpu in range(workers)]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
