"""Two GPUs against one: the operator and the module by heads, and whole-model training under FSDP2 and tensor parallelism.

    python benchmarks/distributed.py --results benchmarks/results     # two H200s, under five minutes
    python benchmarks/distributed.py --smoke --results DIRECTORY      # two CPU processes over gloo, tiny: that it runs

One process a device, all started here. The module and the operator run at the efficiency table's shape (T = 32,256) in bf16.
FlashMHF-1.3B and SwiGLU-1.3B train on the same batches of 8 sequences of 4096 tokens with AdamW, bf16 autocast over float32 weights
and every block compiled: one GPU (two micro-batches of 4), FSDP2 (4 a GPU) and tensor parallelism (two micro-batches of 4 on both).
Written: distributed_<device>.json with times, speed-ups, tokens/s (median of the steps after the compiling ones), MFU, peak memory,
every loss, and the bars of the project's scaling goal with whether each is met. Exit status 1 when one is not.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashmhf
from flashmhf.bench import environment
from flashmhf.distributed import parallelize, shard_placement

RANKS = 2
WARM_UP = 3  # steps that hold the compilation
OURS, BASELINE = "flashmhf", "swiglu"
ONE, FSDP, TP = "one", "fsdp2", "tp2"
BARS = {
    "fsdp2 tokens/s over 2 x one GPU, flashmhf": 0.94,
    "the same, flashmhf minus swiglu": -0.02,
    "module forward, tp2 speed-up": 1.75,
    "module forward and backward, tp2 speed-up": 1.7,
    "tokens/s, flashmhf over swiglu, one GPU": 1.0,
    "tokens/s, flashmhf over swiglu, fsdp2": 1.0,
}
LOSS_TOLERANCE = 1e-3

OP_SHAPE = {"d_model": 2048, "heads": 16, "subnets": 22, "subnet_dim": 384, "tokens": 32_256}
OP_SMOKE = {"d_model": 64, "heads": 4, "subnets": 2, "subnet_dim": 16, "tokens": 64}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default="benchmarks/results", metavar="DIR")
    parser.add_argument("--smoke", action="store_true", help="CPU and gloo, tiny")
    parser.add_argument("--steps", type=int, default=50, help="of FlashMHF; SwiGLU, whose speed alone counts, trains 15 at most")
    parser.add_argument("--parts", nargs="+", choices=("module", "training"), default=["module", "training"])
    return parser.parse_args()


class Job:
    """One process's view: its device, the mesh of all processes, and what is measured."""

    def __init__(self, rank: int, options: argparse.Namespace):
        self.rank, self.options = rank, options
        self.device = torch.device("cpu" if options.smoke else f"cuda:{rank}")
        if not options.smoke:
            torch.cuda.set_device(self.device)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (RANKS,))
        self.dtype = torch.float32 if options.smoke else torch.bfloat16

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def log(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def seconds(self, call: Callable[[], object], together: bool) -> float:
        """The median of ten timed passes after three; the slower process's where both take part, else that of the first alone."""
        samples = []
        if together or self.rank == 0:
            for _ in range(3):
                call()
            for _ in range(10):
                self.synchronize()
                if together:
                    dist.barrier()
                start = time.perf_counter()
                call()
                self.synchronize()
                samples.append(time.perf_counter() - start)
        slowest = torch.tensor(statistics.median(samples) if samples else 0.0, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def free(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def speed_ups(job: Job) -> dict[str, dict[str, float]]:
    shape = OP_SMOKE if job.options.smoke else OP_SHAPE
    torch.manual_seed(0)
    settings = {"device": job.device, "dtype": job.dtype}
    size = shape["d_model"], shape["heads"], shape["subnets"], shape["subnet_dim"]
    one, many = flashmhf.FlashMHF(*size, **settings), flashmhf.FlashMHF(*size, **settings)
    many.load_state_dict(one.state_dict())
    parallelize(many, job.mesh)
    sequence = parallelize(flashmhf.FlashMHF(*size, **settings), job.mesh, sequence_dim=1)
    x = torch.randn(8, shape["tokens"] // 8, shape["d_model"], **settings)
    mine = x.tensor_split(RANKS, 1)[job.rank].contiguous()
    with torch.no_grad():
        torch.testing.assert_close(many(x), one(x), rtol=0.1, atol=0.01 * one(x).abs().max().item())
    results = {}

    def measure(name: str, one_pass: Callable, many_pass: Callable) -> None:
        alone, both = job.seconds(one_pass, together=False), job.seconds(many_pass, together=True)
        results[name] = {"one_ms": 1e3 * alone, "tp2_ms": 1e3 * both, "speed_up": alone / both}
        job.log(f"{name}: one {1e3 * alone:.3f} ms, tp2 {1e3 * both:.3f} ms, speed-up {alone / both:.3f}")

    def forward(module: nn.Module, tokens: torch.Tensor) -> Callable[[], object]:
        def call():
            with torch.no_grad():
                return module(tokens)

        return call

    def backward(module: nn.Module, tokens: torch.Tensor) -> Callable[[], object]:
        leaf, grad = tokens.clone().requires_grad_(), torch.randn_like(tokens)

        def call():
            module(leaf).backward(grad)
            module.zero_grad(set_to_none=True)
            leaf.grad = None

        return call

    heads, head_dim = shape["heads"], shape["d_model"] // shape["heads"]
    q = torch.randn(shape["tokens"], heads, head_dim, **settings)
    weights = [getattr(one, name).detach() for name in ("k", "u", "v", "router")]
    d_q = distribute_tensor(q, job.mesh, [Shard(1)])
    d_weights = [distribute_tensor(weight, job.mesh, [Shard(0)]) for weight in weights]
    gated = torch.ops.flashmhf.gated_forward
    measure("operator forward", lambda: gated(q, *weights, 1e-20), lambda: gated(d_q, *d_weights, 1e-20))
    gated_backward = torch.ops.flashmhf.gated_backward
    measure("operator backward", lambda: gated_backward(q, q, *weights, 1e-20), lambda: gated_backward(d_q, d_q, *d_weights, 1e-20))
    measure("module forward", forward(one, x), forward(many, x))
    measure("module forward and backward", backward(one, x), backward(many, x))
    measure("module forward, sequence parallel", forward(one, x), forward(sequence, mine))
    measure("module forward and backward, sequence parallel", backward(one, x), backward(sequence, mine))
    replicated = distribute_tensor(x, job.mesh, [Replicate()])
    assert replicated.to_local().shape == x.shape
    return results


def language_model(job: Job, kind: str) -> nn.Module:
    from flashmhf.lm import FlashMHFForCausalLM
    from flashmhf.lm.presets import preset

    config = preset(f"{kind}-{'tiny' if job.options.smoke else '1.3b'}").config()
    if job.options.smoke and kind == OURS:
        config.ffn_num_heads = 2
    config.tie_word_embeddings, config.use_cache = False, False
    torch.manual_seed(0)
    with job.device:
        return FlashMHFForCausalLM(config).float()


def batches(vocabulary: int, sequences: int, length: int, steps: int):
    """The same on every process: words of a Zipf distribution, each sequence half of them said twice, so that there is much to learn."""
    generator = torch.Generator().manual_seed(1)
    frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    for _ in range(steps):
        half = torch.multinomial(frequencies, sequences * length // 2, replacement=True, generator=generator).view(sequences, -1)
        yield torch.cat([half, half], 1)


def train(job: Job, kind: str, mode: str) -> dict[str, object] | None:
    """Losses, speed, memory; None on a process that takes no part."""
    from flashmhf.lm.flops import peak_flops, training_flops_per_token

    job.free()
    if mode == ONE and job.rank:
        dist.barrier()
        return None
    started = time.perf_counter()
    length, sequences = (32, 4) if job.options.smoke else (4096, 8)
    steps = job.options.steps if kind == OURS else min(job.options.steps, 15)
    model = language_model(job, kind)
    flops = training_flops_per_token(model, length)
    parameters = sum(p.numel() for p in model.parameters())
    if mode == TP:
        parallelize(model, job.mesh)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
        if mode == FSDP:
            fully_shard(layer, mesh=job.mesh, shard_placement_fn=shard_placement(RANKS))
    if mode == FSDP:
        fully_shard(model, mesh=job.mesh, shard_placement_fn=shard_placement(RANKS))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.1)
    losses, times = [], []
    for batch in batches(model.config.vocab_size, sequences, length, steps):
        batch = batch.to(job.device)
        job.synchronize()
        start = time.perf_counter()
        micro = [batch.chunk(RANKS)[job.rank]] if mode == FSDP else batch.chunk(2)
        total = torch.zeros((), device=job.device)
        for part in micro:
            with torch.autocast(job.device.type, torch.bfloat16):
                loss = model(input_ids=part, labels=part).loss / len(micro)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.synchronize()
        times.append(time.perf_counter() - start)
        if mode == FSDP:
            dist.all_reduce(total)
            total /= RANKS
        losses.append(total.item())
        if len(losses) == WARM_UP and job.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    speed = sequences * length / statistics.median(times[WARM_UP:])
    peak, gpus = peak_flops(job.device), 1 if mode == ONE else RANKS
    result = {
        "parameters": parameters,
        "tokens_per_s": speed,
        "mfu": None if peak is None else speed * flops / (peak * gpus),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if job.device.type == "cuda" else None,
        "first_step_s": times[0],
        "losses": losses,
        "seconds": time.perf_counter() - started,
    }
    shown = {key: value for key, value in result.items() if key != "losses"}
    job.log(f"{kind} {mode}: {json.dumps(shown)} loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if mode == ONE:
        dist.barrier()
    return result


def judged(record: dict) -> list[dict[str, object]]:
    """Each bar with what was measured."""
    values = {}
    for name in ("module forward", "module forward and backward"):
        if name in record["speed_ups"]:
            values[f"{name}, tp2 speed-up"] = record["speed_ups"][name]["speed_up"]
    runs = record["training"]
    if runs:
        speed = {(kind, mode): run["tokens_per_s"] for kind, modes in runs.items() for mode, run in modes.items()}
        ratio = {kind: speed[kind, FSDP] / (RANKS * speed[kind, ONE]) for kind in runs}
        values["fsdp2 tokens/s over 2 x one GPU, flashmhf"] = ratio[OURS]
        values["the same, flashmhf minus swiglu"] = ratio[OURS] - ratio[BASELINE]
        values["tokens/s, flashmhf over swiglu, one GPU"] = speed[OURS, ONE] / speed[BASELINE, ONE]
        values["tokens/s, flashmhf over swiglu, fsdp2"] = speed[OURS, FSDP] / speed[BASELINE, FSDP]
    rows = [{"bar": name, "at_least": BARS[name], "measured": value, "met": value >= BARS[name]} for name, value in values.items()]
    for mode in (FSDP, TP) if runs else ():
        pairs = zip(runs[OURS][mode]["losses"], runs[OURS][ONE]["losses"], strict=True)
        gap = max(abs(one - other) for one, other in pairs)
        rows.append({"bar": f"loss, {mode} against one GPU", "at_most": LOSS_TOLERANCE, "measured": gap, "met": gap <= LOSS_TOLERANCE})
    return rows


def process(rank: int, store: str, options: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    if options.smoke:
        torch.set_num_threads(1)
    device = None if options.smoke else torch.device(f"cuda:{rank}")
    backend = "gloo" if options.smoke else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, device_id=device)
    job = Job(rank, options)
    record = {**environment.describe(job.device), "gpus": RANKS, "speed_ups": {}, "training": {}}
    record["nccl"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    started = time.perf_counter()
    if "module" in options.parts:
        record["speed_ups"] = speed_ups(job)
    if "training" in options.parts:
        record["training"] = {kind: {mode: train(job, kind, mode) for mode in (ONE, FSDP, TP)} for kind in (OURS, BASELINE)}
    record["seconds"] = time.perf_counter() - started
    if rank == 0:
        write(record, options)
    dist.destroy_process_group()


def write(record: dict, options: argparse.Namespace) -> None:
    record["bars"] = judged(record)
    for row in record["bars"]:
        print(f"{'met    ' if row['met'] else 'NOT MET'} {row['bar']}: {row['measured']:.4g}", flush=True)
    name = "cpu" if options.smoke else "h200" if "H200" in str(record["device"]) else "gpu"
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"distributed_{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    options = arguments()
    if not options.smoke and torch.cuda.device_count() < RANKS:
        print(f"error: {torch.cuda.device_count()} CUDA devices; this needs {RANKS}, or --smoke", file=sys.stderr)
        return 2
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        children = [context.Process(target=process, args=(rank, store, options)) for rank in range(RANKS)]
        for child in children:
            child.start()
        while any(child.is_alive() for child in children):
            if any(child.exitcode for child in children):
                for child in children:
                    child.terminate()  # the other one waits in a collective
            time.sleep(0.2)
    if any(child.exitcode for child in children):
        return 1
    name = "cpu" if options.smoke else "*"
    record = json.loads(max(Path(options.results).glob(f"distributed_{name}.json"), key=os.path.getmtime).read_text())
    return 0 if options.smoke or all(row["met"] for row in record["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
