"""Two GPUs against one: the operator and the module by heads, and whole-model training under FSDP2 and tensor parallelism.

    python benchmarks/distributed.py --results benchmarks/results     # two H200s, about five minutes
    python benchmarks/distributed.py --smoke --results DIRECTORY      # two CPU processes over gloo, tiny: that it runs

One process a device, all started here, NVLink multicast off. The parts, in the order in which they run:

module      the operator and the module by heads at the efficiency table's shape (T = 32,256) in bf16, against one GPU
compiled    the compiled module by heads: an all-reduce; sequence parallelism; PyTorch's asynchronous tensor parallelism
collectives all-gather, reduce-scatter and all-reduce of bf16 tensors
one         FlashMHF-1.3B on the first GPU and SwiGLU-1.3B on the second, at the same time; there then FlashMHF again, the control
layouts     a FlashMHF of the 128M preset's size, in float32 and in bf16, with deterministic algorithms: one GPU, the control, FSDP2, TP
<ffn> fsdp2, <ffn> tp2    the trainings of ``one`` on both GPUs

The trainings take the same batches of 8 sequences of 4096 tokens with AdamW and every block compiled: one GPU in two micro-batches of 4,
FSDP2 in 4 a GPU, and tensor parallelism in two micro-batches of 4 on both. All are programs of fully_shard, on one GPU and under tensor
parallelism over a mesh of size one, so that all have the same arithmetic: float32 weights, gathered as bf16 and kept until the backward
pass, and float32 sums of the gradients. Learning rates, their warm-up and parameter groups are those of the package's
recipe; --rate and --warmup are others. The part ``layouts`` says what the layout alone does to a loss: no block is compiled, sums have a
fixed order, and its rate rises to the preset's within the 50 steps.
Written: distributed_<device>.json with times, speed-ups, tokens/s and times of a step's phases (medians of the steps after the compiling
ones), MFU, peak memory, every loss, the kernels' time of one further step by phase and kind, and the bars of the project's scaling goal
with whether each is met. The record is written anew after every part: a part that fails or that --limit leaves out has its reason there,
and the parts after a failed one run in new processes. Exit status 1 when a part has no result or a bar is not met.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import itertools
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import flashmhf
from flashmhf.distributed import parallelize, shard_placement
from flashmhf_recipes.flops import peak_flops, training_flops_per_token

from .harness import environment

RANKS = 2
WARM_UP = 3  # steps that hold the compilation
# Of the package's recipe for this size: the learning rate rises linearly to PEAK_RATE after RATE_STEPS, 1.5 % of the steps.
PEAK_RATE, RATE_STEPS, BETAS, WEIGHT_DECAY = 1e-3, 6135, (0.9, 0.95), 0.1
LENGTH = 4096
ROWS, PASSES = 5, 10
MIB = 2**20
OURS, BASELINE = "flashmhf", "swiglu"
ONE, FSDP, TP = "one", "fsdp2", "tp2"
AGAIN = "again"  # the control: the same training once more
ALL_REDUCE, SEQUENCE, ASYNCHRONOUS = "compiled", "compiled, sequence parallel", "compiled, sequence parallel, asynchronous"
PARTS = ("module", "compiled", "collectives", "layouts", ONE, f"{OURS} {FSDP}", f"{BASELINE} {FSDP}", f"{OURS} {TP}", f"{BASELINE} {TP}")
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=3)  # the longest wait is for the other process to compile and to train alone
# A program that uses NVLink multicast can put the GPUs of a host that others share out of service.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
BARS = {
    "fsdp2 tokens/s over 2 x one GPU, flashmhf": 0.94,
    "the same, flashmhf minus swiglu": -0.02,
    "module forward, tp2 speed-up": 1.75,
    f"module forward, {ALL_REDUCE}, tp2 speed-up": 1.75,
    f"module forward, {ASYNCHRONOUS}, tp2 speed-up": 1.75,
    "module forward and backward, tp2 speed-up": 1.7,
    "tokens/s, flashmhf over swiglu, one GPU": 1.0,
    "tokens/s, flashmhf over swiglu, fsdp2": 1.0,
}
LOSS_TOLERANCE = 1e-3
LAYOUTS_RATE = 3e-3  # the 128M preset's

OP_SHAPE = {"d_model": 2048, "heads": 16, "subnets": 22, "subnet_dim": 384, "tokens": 32_256}
OP_SMOKE = {"d_model": 64, "heads": 4, "subnets": 2, "subnet_dim": 16, "tokens": 64}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default="benchmarks/results", metavar="DIR")
    parser.add_argument("--smoke", action="store_true", help="CPU and gloo, tiny")
    parser.add_argument("--steps", type=int, default=50, help="of FlashMHF; SwiGLU, whose speed alone counts, trains 15 at most")
    parser.add_argument("--length", type=int, help=f"tokens of a sequence (default: {LENGTH})")
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=RATE_STEPS, metavar="STEPS", help="after which the rate is reached")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="no part goes on after it")
    options = parser.parse_args()
    options.length = options.length or (32 if options.smoke else LENGTH)
    return options


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
        """A pass's time, the median of five rows of ten passes; the slower process's where both take part, else that of the first alone.

        The passes of a row follow each other without waiting for the device, as the layers of a model do.
        """
        samples = []
        if together or self.rank == 0:
            for _ in range(3):
                call()
            for _ in range(ROWS):
                self.synchronize()
                if together:
                    dist.barrier()
                    self.synchronize()
                start = time.perf_counter()
                for _ in range(PASSES):
                    call()
                self.synchronize()
                samples.append((time.perf_counter() - start) / PASSES)
        slowest = torch.tensor(statistics.median(samples) if samples else 0.0, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def free(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def forward(module: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> Callable[[], object]:
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


def module_setup(job: Job) -> tuple[flashmhf.FlashMHF, Callable[..., nn.Module], torch.Tensor]:
    """The module on one device, a function that makes sharded copies of it, and tokens [T, d_model]."""
    shape = OP_SMOKE if job.options.smoke else OP_SHAPE
    torch.manual_seed(0)
    settings = {"device": job.device, "dtype": job.dtype}
    size = shape["d_model"], shape["heads"], shape["subnets"], shape["subnet_dim"]
    one = flashmhf.FlashMHF(*size, **settings)

    def sharded(**options) -> nn.Module:
        copy = flashmhf.FlashMHF(*size, **settings)
        copy.load_state_dict(one.state_dict())
        return parallelize(copy, job.mesh, **options)

    return one, sharded, torch.randn(shape["tokens"], shape["d_model"], **settings)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.01 * expected.abs().max().item())


def speed_ups(job: Job) -> dict[str, dict[str, float]]:
    one, sharded, tokens = module_setup(job)
    many, sequence = sharded(), sharded(sequence_dim=1)
    x = tokens.view(8, -1, one.d_model)
    mine = x.tensor_split(RANKS, 1)[job.rank].contiguous()
    check(forward(many, x)(), forward(one, x)())
    check(forward(sequence, mine)(), forward(one, x)().tensor_split(RANKS, 1)[job.rank])
    results = {}

    def measure(name: str, one_pass: Callable, many_pass: Callable) -> None:
        alone, both = job.seconds(one_pass, together=False), job.seconds(many_pass, together=True)
        results[name] = {"one_ms": 1e3 * alone, "tp2_ms": 1e3 * both, "speed_up": alone / both}
        if name == "module forward":
            results[name] |= {"one_kernels_ms": kernel_times(job, one_pass), "tp2_kernels_ms": kernel_times(job, many_pass)}
        job.log(f"{name}: one {1e3 * alone:.3f} ms, tp2 {1e3 * both:.3f} ms, speed-up {alone / both:.3f}")

    q = torch.randn(len(tokens), one.num_heads, one.head_dim, device=job.device, dtype=job.dtype)
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
    return results


def compiled(job: Job) -> dict[str, object]:
    """The compiled module's forward by heads: an all-reduce; sequence parallelism; and the same with asynchronous tensor parallelism.

    Speed-ups are over the compiled module on one GPU. ``fused_operators`` are those of symmetric memory that the compiled code calls.
    Symmetric memory is CUDA's: with --smoke the code is compiled without it.
    """
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    one, sharded, tokens = module_setup(job)
    mine = tokens.tensor_split(RANKS)[job.rank].contiguous()
    expected = forward(one, tokens)()
    alone = torch.compile(lambda x: one(x), fullgraph=True, dynamic=False)
    one_ms = 1e3 * job.seconds(forward(alone, tokens), together=False)
    results: dict[str, object] = {"one_ms": one_ms, "one_eager_ms": 1e3 * job.seconds(forward(one, tokens), together=False)}
    for name, sequence, pipelined in ((ALL_REDUCE, False, False), (SEQUENCE, True, False), (ASYNCHRONOUS, True, True)):
        job.free()
        module, operand = (sharded(sequence_dim=0), mine) if sequence else (sharded(), tokens)
        if pipelined and not job.options.smoke:
            with warnings.catch_warnings():  # deprecated from torch 2.11 on, but Inductor still asks whether it was called
                warnings.simplefilter("ignore", FutureWarning)
                torch.distributed._symmetric_memory.enable_symm_mem_for_group(job.mesh.get_group().group_name)
        with config.patch(_micro_pipeline_tp=pipelined and not job.options.smoke):
            # Not the module alone: its hooks, which hold the collectives, would be graphs of their own.
            call = forward(torch.compile(lambda x, module=module: module(x), fullgraph=True, dynamic=False), operand)
            out, code = run_and_get_code(call)
        check(out, expected.tensor_split(RANKS)[job.rank] if sequence else expected)
        seconds = job.seconds(call, together=True)
        fused = sorted(set(re.findall(r"symm_mem\.(fused_\w+)", "".join(code))))
        results[name] = {"tp2_ms": 1e3 * seconds, "speed_up": one_ms / (1e3 * seconds), "fused_operators": fused}
        results[name]["kernels_ms"] = kernel_times(job, call)
        job.log(f"{name}: {json.dumps(results[name])}")
    return results


def language_model(job: Job, kind: str, scale: str) -> nn.Module:
    from flashmhf.models import FlashMHFForCausalLM
    from flashmhf.models.presets import preset

    config = preset(f"{kind}-{'tiny' if job.options.smoke else scale}").config()
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


class Phases:
    """The device's time between marks in a step, by the names of the later marks; nothing on CPUs."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, name: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))

    def milliseconds(self) -> dict[str, float]:
        """Of the marks so far, which are forgotten. The device must have passed them."""
        times: dict[str, float] = {}
        for (_, start), (name, end) in itertools.pairwise(self.marks):
            times[name] = times.get(name, 0.0) + start.elapsed_time(end)
        self.marks.clear()
        return times


class Training:
    """One model's training, on this process's device alone or on all.

    dtype: of the computation. rate, warmup: the learning rate rises linearly to ``rate`` within ``warmup`` steps.
    """

    def __init__(self, job: Job, kind: str, mode: str, *, scale: str, dtype: torch.dtype, compiled: bool, rate: float, warmup: int):
        self.job, self.mode = job, mode
        self.model = model = language_model(job, kind, scale)
        self.flops = training_flops_per_token(model, job.options.length)
        self.parameters = sum(p.numel() for p in model.parameters())
        size = {ONE: (RANKS, 1, 1), FSDP: (1, RANKS, 1), TP: (1, 1, RANKS)}[mode]
        mesh = init_device_mesh(job.device.type, size, mesh_dim_names=("program", "dp", "tp"))
        if mode == TP:
            parallelize(model, mesh["tp"])
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        settings = {"mesh": mesh["dp"], "shard_placement_fn": shard_placement(mesh["dp"].size()), "mp_policy": policy}
        for layer in model.model.layers:
            if compiled:
                layer.compile(fullgraph=True, dynamic=False, backend="aot_eager" if job.options.smoke else "inductor")
            fully_shard(layer, **settings, reshard_after_forward=False)
        fully_shard(model, **settings, reshard_after_forward=False)
        groups = flashmhf.param_groups(model, rate, WEIGHT_DECAY)
        self.optimizer = torch.optim.AdamW(groups, rate, BETAS, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / warmup))
        self.phases = Phases(job.device)
        model.model.register_forward_hook(self._after_blocks)

    def _after_blocks(self, _: nn.Module, args: object, output) -> None:
        self.phases.mark("blocks, forward")
        output.last_hidden_state.register_hook(lambda grad: self.phases.mark("head and loss, backward"))

    def step(self, batch: torch.Tensor, during: Callable[[str, Callable], Any] = lambda phase, call: call()) -> torch.Tensor:
        """The step's loss. ``during`` calls what belongs to a phase."""
        self.phases.mark("start")
        micro = [batch.chunk(RANKS)[self.job.rank]] if self.mode == FSDP else batch.chunk(2)
        total = torch.zeros((), device=batch.device)
        for part in micro:
            loss = during("forward", lambda part=part: self.model(input_ids=part, labels=part).loss / len(micro))
            self.phases.mark("head and loss, forward")
            during("backward", loss.backward)
            self.phases.mark("blocks, backward")
            total += loss.detach()
        during("optimizer", self._update)
        self.phases.mark("clipping and optimizer")
        return total

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)

    def kernels(self, batch: torch.Tensor) -> dict[str, dict[str, float]]:
        """Milliseconds of one step's kernels by kind, forward, backward and in the optimizer."""
        sums: dict[str, dict[str, float]] = {}

        def during(phase: str, call: Callable[[], Any]) -> Any:
            returned: list[Any] = []
            for kind, time_ in kernel_times(self.job, lambda: returned.append(call())).items():
                sums.setdefault(phase, {})[kind] = sums.get(phase, {}).get(kind, 0.0) + time_
            return returned[0]

        self.step(batch, during)
        return sums


def train(job: Job, kind: str, mode: str, steps: int) -> dict[str, object]:
    """Losses, speed and memory of ``steps`` steps."""
    job.free()
    started = time.perf_counter()
    options = job.options
    training = Training(job, kind, mode, scale="1.3b", dtype=torch.bfloat16, compiled=True, rate=options.rate, warmup=options.warmup)
    length, sequences = job.options.length, 4 if job.options.smoke else 8
    losses, times, phases = [], [], []
    for batch in batches(training.model.config.vocab_size, sequences, length, steps):
        batch = batch.to(job.device)
        job.synchronize()
        start = time.perf_counter()
        total = training.step(batch)
        job.synchronize()
        times.append(time.perf_counter() - start)
        phases.append(training.phases.milliseconds())
        if mode == FSDP:
            dist.all_reduce(total)
            total /= RANKS
        losses.append(total.item())
        if len(losses) == WARM_UP and job.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    speed = sequences * length / statistics.median(times[WARM_UP:])
    peak, gpus = peak_flops(job.device), 1 if mode == ONE else RANKS
    result = {
        "parameters": training.parameters,
        "tokens_per_s": speed,
        "mfu": None if peak is None else speed * training.flops / (peak * gpus),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if job.device.type == "cuda" else None,
        "first_step_s": times[0],
        "phases_ms": {name: statistics.median(step[name] for step in phases[WARM_UP:]) for name in phases[0]},
        "kernels_ms": training.kernels(batch),
        "losses": losses,
        "seconds": time.perf_counter() - started,
    }
    shown = {key: value for key, value in result.items() if key != "losses"}
    if job.rank == 0 or mode == ONE:
        print(f"{kind} {mode}: {json.dumps(shown)} loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
    return result


def layouts(job: Job) -> dict[str, list[float]]:
    """Losses of one small training in each layout, by "<dtype> <layout>". "one" runs on each GPU, the control on the second.

    The order of every sum is fixed, so that two runs of one program repeat each other's bits. PyTorch warns where it cannot fix one.
    float32 is computed by the eager back end, bf16 by the kernels.
    """
    length, curves = job.options.length // 8, {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    for dtype in (torch.float32, torch.bfloat16):
        for mode in (ONE, FSDP, TP):
            job.free()
            training = Training(job, OURS, mode, scale="128m", dtype=dtype, compiled=False, rate=LAYOUTS_RATE, warmup=job.options.steps)
            for network in training.model.modules():
                if isinstance(network, flashmhf.FlashMHF) and dtype == torch.float32:
                    network.backend = "eager"
            losses = []
            for batch in batches(training.model.config.vocab_size, 8, length, job.options.steps):
                losses.append(training.step(batch.to(job.device)))
                training.phases.marks.clear()
            curve = torch.stack(losses)
            if mode == FSDP:
                dist.all_reduce(curve)
                curve /= RANKS
            gathered = [torch.empty_like(curve) for _ in range(RANKS)]
            dist.all_gather(gathered, curve)
            name = str(dtype).removeprefix("torch.")
            curves[f"{name} {mode}"] = gathered[0].tolist()
            if mode == ONE:
                curves[f"{name} {AGAIN}"] = gathered[1].tolist()
            job.log(f"{name} {mode}: loss {curve[0]:.4f} -> {curve[-1]:.4f}")
    torch.use_deterministic_algorithms(False)
    return curves


KINDS = {
    "communication": ("nccl",),
    "flashmhf": ("flashmhf",),
    "attention": ("flash_fwd", "flash_bwd", "fmha", "cudnn"),
    "products": ("gemm", "nvjet", "cutlass", "cublas"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
}


def kernel_times(job: Job, step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the device's kernels in one call by kind. Kernels of several streams run at the same time."""
    if job.device.type != "cuda":
        step()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        job.synchronize()
    times = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in profile.key_averages():
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key.lower() for name in names)), "other")
        times[kind] += event.self_device_time_total / 1e3
    return times


def collectives(job: Job) -> list[dict[str, object]]:
    """Times of the collectives, and bytes that each process sends over the time."""
    rows = []
    for mib in (1,) if job.options.smoke else (1, 8, 32, 128):
        whole = torch.zeros(mib * MIB // 2, dtype=torch.bfloat16, device=job.device)
        part = whole.chunk(RANKS)[job.rank].clone()
        calls = {
            "all-gather": (lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part), 1),
            "reduce-scatter": (lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole), 1),
            "all-reduce": (lambda whole=whole: dist.all_reduce(whole), 2),
        }
        for name, (call, ways) in calls.items():
            seconds = job.seconds(call, together=True)
            sent = ways * mib * MIB * (RANKS - 1) / RANKS
            rows.append({"collective": name, "mib": mib, "ms": 1e3 * seconds, "sent_gb_per_s": sent / seconds / 1e9})
            job.log(json.dumps(rows[-1]))
    return rows


def steps_of(job: Job, kind: str) -> int:
    return job.options.steps if kind == OURS else min(job.options.steps, 15)


def one_each(job: Job) -> dict[str, dict[str, object]]:
    """Both models at the same time, one a device: neither has a host to itself, as when both devices train one model.

    The second device then trains FlashMHF once more, with the same batches: how far apart two runs of one program are.
    """
    results: list[dict[str, object] | None] = [None] * RANKS
    kinds = OURS, BASELINE
    mine = {kinds[job.rank]: train(job, kinds[job.rank], ONE, steps_of(job, kinds[job.rank]))}
    if job.rank:
        mine[AGAIN] = {"losses": train(job, OURS, ONE, job.options.steps)["losses"]}
    dist.all_gather_object(results, mine)
    return {name: run for part in results for name, run in part.items()}


def run_part(job: Job, part: str) -> object:
    calls = {"module": speed_ups, "compiled": compiled, "collectives": collectives, "layouts": layouts, ONE: one_each}
    if part in calls:
        return calls[part](job)
    kind, mode = part.split()
    return train(job, kind, mode, steps_of(job, kind))


def judged(results: dict[str, dict]) -> list[dict[str, object]]:
    """Each bar whose parts have results, with what was measured."""
    values = {}
    for name in ("module forward", "module forward and backward"):
        if "module" in results:
            values[f"{name}, tp2 speed-up"] = results["module"][name]["speed_up"]
    for name in (ALL_REDUCE, ASYNCHRONOUS):
        if "compiled" in results:
            values[f"module forward, {name}, tp2 speed-up"] = results["compiled"][name]["speed_up"]
    runs = {tuple(part.split()): run for part, run in results.items() if part.endswith((FSDP, TP))}
    runs |= {(kind, ONE): run for kind, run in results.get(ONE, {}).items()}
    speed = {key: run["tokens_per_s"] for key, run in runs.items() if "tokens_per_s" in run}
    ratio = {
        kind: speed[kind, FSDP] / (RANKS * speed[kind, ONE]) for kind in (OURS, BASELINE) if {(kind, FSDP), (kind, ONE)} <= speed.keys()
    }
    if OURS in ratio:
        values["fsdp2 tokens/s over 2 x one GPU, flashmhf"] = ratio[OURS]
    if len(ratio) == 2:
        values["the same, flashmhf minus swiglu"] = ratio[OURS] - ratio[BASELINE]
    for mode, where in ((ONE, "one GPU"), (FSDP, FSDP)):
        if {(OURS, mode), (BASELINE, mode)} <= speed.keys():
            values[f"tokens/s, flashmhf over swiglu, {where}"] = speed[OURS, mode] / speed[BASELINE, mode]
    rows = [{"bar": name, "at_least": BARS[name], "measured": value, "met": value >= BARS[name]} for name, value in values.items()]
    others = {"one GPU again": (AGAIN, ONE), FSDP: (OURS, FSDP), TP: (OURS, TP)}
    for name, other in others.items():
        if {other, (OURS, ONE)} <= runs.keys():
            rows.append(loss_bar(name, runs[other]["losses"], runs[OURS, ONE]["losses"]))
    curves = results.get("layouts", {})
    for name, losses in curves.items():
        dtype, mode = name.split()
        if mode != ONE:
            rows.append(loss_bar(f"128M deterministic {dtype}, {mode}", losses, curves[f"{dtype} {ONE}"]))
    return rows


def loss_bar(name: str, losses: list[float], expected: list[float]) -> dict[str, object]:
    gap = max(abs(one - two) for one, two in zip(losses, expected, strict=True))
    return {"bar": f"loss, {name} against one GPU", "at_most": LOSS_TOLERANCE, "measured": gap, "met": gap <= LOSS_TOLERANCE}


def process(rank: int, folder: Path, options: argparse.Namespace, parts: list[str]) -> None:
    """Runs ``parts`` and leaves a file of results for each in ``folder``, or the reason in error.txt."""
    os.environ.update(ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    if options.smoke:
        torch.set_num_threads(1)
    device = None if options.smoke else torch.device(f"cuda:{rank}")
    try:
        dist.init_process_group(
            "gloo" if options.smoke else "nccl",
            init_method=f"file://{folder / parts[0]}.store",
            rank=rank,
            world_size=RANKS,
            device_id=device,
            timeout=COLLECTIVE_TIMEOUT,
        )
        job = Job(rank, options)
        if rank == 0:
            write(folder / "environment.json", environment.describe(job.device) | {"variables": ENVIRONMENT, "gpus": RANKS})
        for part in parts:
            job.log(f"--- {part}")
            result = run_part(job, part)
            if rank == 0:
                write(folder / f"{part}.json", result)
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(FileExistsError), open(folder / "error.txt", "x") as file:  # the other one's failure may follow from this
            file.write(environment.brief(error))
        os._exit(1)  # the other process waits in a collective, and so would this one's end
    dist.destroy_process_group()


def write(path: Path, content: object) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


class Record:
    """What the parts in ``folder`` have left so far, as one file."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.options = folder, options
        self.errors: dict[str, str] = {}
        self.started = time.monotonic()

    def done(self) -> list[str]:
        return [part for part in PARTS if (self.folder / f"{part}.json").exists()]

    def update(self) -> list[dict[str, object]]:
        """Writes the record and returns its bars."""
        described = self.folder / "environment.json"
        if not described.exists():
            return []
        record = json.loads(described.read_text())
        results = {part: json.loads((self.folder / f"{part}.json").read_text()) for part in self.done()}
        bars = judged(results)
        seconds = time.monotonic() - self.started
        shape = {name: getattr(self.options, name) for name in ("length", "rate", "warmup")}
        measured = shape | {"seconds": seconds, "results": results, "errors": self.errors, "bars": bars}
        name = "cpu" if self.options.smoke else "h200" if "H200" in str(record["device"]) else "gpu"
        output = Path(self.options.results)
        output.mkdir(parents=True, exist_ok=True)
        write(output / f"distributed_{name}.json", record | measured)
        return bars


def run_pair(record: Record, options: argparse.Namespace, parts: list[str]) -> str | None:
    """Runs ``parts`` in a pair of processes; why it ended before the last one, or None."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=process, args=(rank, record.folder, options, parts)) for rank in range(RANKS)]
    for child in children:
        child.start()
    reason, done = None, len(record.done())
    while reason is None and any(child.is_alive() for child in children):
        time.sleep(0.2)
        if len(record.done()) > done:
            done = len(record.done())
            record.update()
        if any(child.exitcode for child in children):
            written = record.folder / "error.txt"
            reason = written.read_text() if written.exists() else f"exit status {[child.exitcode for child in children]}"
            written.unlink(missing_ok=True)
        elif time.monotonic() - record.started > options.limit:
            reason = f"not finished within --limit {options.limit:g}"
    for child in children:
        if reason is not None:
            child.kill()  # it waits in a collective
        child.join(10)  # a process that waits for its GPU does not end
    return reason


def main() -> int:
    options = arguments()
    if not options.smoke and torch.cuda.device_count() < RANKS:
        print(f"error: {torch.cuda.device_count()} CUDA devices; this needs {RANKS}, or --smoke", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        record = Record(Path(folder), options)
        parts = [part for part in PARTS if part in options.parts]
        while parts:
            reason = run_pair(record, options, parts)
            parts = [part for part in parts if part not in record.done()]
            late = time.monotonic() - record.started > options.limit
            if parts:
                failed, parts = (parts, []) if late else (parts[:1], parts[1:])
                record.errors.update(dict.fromkeys(failed, reason or "no result"))
        bars = record.update()
    for row in bars:
        print(f"{'met    ' if row['met'] else 'NOT MET'} {row['bar']}: {row['measured']:.4g}", flush=True)
    for part, reason in record.errors.items():
        print(f"NO RESULT {part}: {reason}", flush=True)
    return 1 if record.errors or not (options.smoke or all(row["met"] for row in bars)) else 0


if __name__ == "__main__":
    sys.exit(main())
