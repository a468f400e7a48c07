"""Several GPUs of one host against one of them: the module by heads, and whole-model training.

    $ python -m benchmarks.distributed --out benchmarks/results/distributed          # all GPUs of this host
    $ python -m benchmarks.distributed --ranks 2 --parts train
    $ python -m benchmarks.distributed --smoke --ranks 4                             # CPU processes over gloo, tiny

One process per device, all started here, NVLink multicast off. The parts, in the order in which they run:

module       the module by heads at the efficiency table's shape (T = 32,256), over 2, 4, 8 ranks, against one GPU
compiled     the compiled module by heads over all ranks: an all-reduce; sequence parallelism; the same, asynchronous
train        models of --scale on one GPU (each process trains alone), under FSDP2, tensor parallelism, and both

A layout is "fsdp2 N", "tp N" or "fsdp2 M x tp N" over all ranks, made by the recipe (flashmhf_recipes.layout). Training
has --micro-batch sequences per group of ranks that see the same ones. ``x_one`` is the speed-up over one GPU; of
training it is tokens/s over ranks times those of one GPU. ``open_communication_ms`` is the time of a step in which
collectives run and no other kernel does.

Every part runs in processes of its own. One that fails is a row with its reason, behind those that it has. Exit status
1: a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
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
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.spawn import ProcessException, start_processes

import flashmhf
from flashmhf.distributed import HeadParallel
from flashmhf.models import FlashMHFConfig
from flashmhf_recipes.layout import Layout

from .harness import environment
from .harness.markdown import conditions
from .harness.measure import clear
from .harness.training import ALONE, Training, trainable
from .run import report, rounded

PARTS = ("module", "compiled", "train")
FFNS = ("flashmhf", "swiglu")
TP_SIZES = (2, 4, 8)
ROWS, PASSES = 5, 10
TIMEOUT = datetime.timedelta(minutes=3)  # of a collective: the longest wait is for another process to compile
# A program that uses NVLink multicast can put the GPUs of a host that others share out of service.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
SHAPE = {"d_model": 2048, "heads": 16, "subnets": 22, "subnet_dim": 384, "tokens": 32_256}
SMOKE_SHAPE = {"d_model": 64, "heads": 4, "subnets": 2, "subnet_dim": 16, "tokens": 64}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=torch.cuda.device_count(), help="processes (all GPUs of this host)")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--out", type=Path, metavar="PREFIX", help="write PREFIX_xRANKS_DEVICE.json")
    add("--smoke", action="store_true", help="CPU and gloo, tiny")
    add("--steps", type=int, default=12, help="of train, without the first ones that do not count (12)")
    add("--length", type=int, help="tokens of a sequence of train (4096)")
    add("--micro-batch", type=int, default=4, help="of train (4)")
    add("--scale", default="1.3b", help="of train: a preset's, or 7b (1.3b)")
    add("--subjects", nargs="+", default=FFNS, help="of train, as --ways of benchmarks.run")
    add("--fused-loss", action="store_true", help="of train: a loss that never holds all logits")
    add("--layouts", nargs="+", metavar="NAME", help='of train, such as "fsdp2 4" (all)')
    add("--limit", type=float, default=600.0, metavar="SECONDS", help="no part goes on after it")
    options = parser.parse_args(arguments)
    options.length = options.length or (32 if options.smoke else 4096)
    if options.ranks < 2:
        parser.error(f"--ranks is {options.ranks}; at least 2")
    if not options.smoke and torch.cuda.device_count() < options.ranks:
        parser.error(f"{torch.cuda.device_count()} CUDA devices; --ranks is {options.ranks}")
    return options


class Job:
    """One process's view: its device, and what is measured."""

    def __init__(self, rank: int, options: argparse.Namespace):
        self.rank, self.ranks, self.options = rank, options.ranks, options
        self.gpu = not options.smoke
        self.device = torch.device("cuda", rank) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        self.dtype = torch.bfloat16 if self.gpu else torch.float32

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object]) -> float:
        """A call's time, the median of ROWS rows of PASSES calls, of the slowest process; all make it at the same time.
        The calls of a row follow each other without waiting for the device, as the layers of a model do.
        """
        for _ in range(3):
            call()
        samples = []
        for _ in range(ROWS):
            self.synchronize()
            dist.barrier()
            self.synchronize()
            start = time.perf_counter()
            for _ in range(PASSES):
                call()
            self.synchronize()
            samples.append((time.perf_counter() - start) / PASSES)
        slowest = torch.tensor(statistics.median(samples), device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return 1e3 * slowest.item()

    def tp_sizes(self, heads: int) -> list[int]:
        return [size for size in TP_SIZES if self.ranks % size == 0 and heads % size == 0]

    def layouts(self, *heads: int) -> dict[str, Layout]:
        """One GPU, and every layout over all ranks that divides these numbers of heads."""
        found = {"one": ALONE, f"fsdp2 {self.ranks}": Layout(1, self.ranks, 1)}
        for tp in (size for size in self.tp_sizes(self.ranks) if all(number % size == 0 for number in heads)):
            shards = self.ranks // tp
            found[f"fsdp2 {shards} x tp {tp}" if shards > 1 else f"tp {tp}"] = Layout(1, shards, tp)
        return found

    def free(self) -> None:
        torch._dynamo.reset()
        gc.collect()
        clear(self.device)
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()


# The module


def forward(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return torch.no_grad()(functools.partial(module, x))


def backward(module: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)

    def call() -> None:
        module(leaf).backward(grad)
        module.zero_grad(set_to_none=True)
        leaf.grad = None

    return call


def module_setup(job: Job) -> tuple[flashmhf.FlashMHF, Callable[..., nn.Module], torch.Tensor]:
    """The module on one device, a function that makes copies sharded over some ranks, and tokens [T, d_model]."""
    shape = SMOKE_SHAPE if job.options.smoke else SHAPE
    torch.manual_seed(0)
    like = {"device": job.device, "dtype": job.dtype}
    size = shape["d_model"], shape["heads"], shape["subnets"], shape["subnet_dim"]
    one = flashmhf.FlashMHF(*size, **like)

    def sharded(ranks: int, **options) -> nn.Module:
        copy = flashmhf.FlashMHF(*size, **like)
        copy.load_state_dict(one.state_dict())
        mesh = init_device_mesh(job.device.type, (job.ranks // ranks, ranks), mesh_dim_names=("same", "tp"))
        return parallelize_module(copy, mesh["tp"], HeadParallel(**options))

    return one, sharded, torch.randn(shape["tokens"], shape["d_model"], **like)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.01 * expected.abs().max().item())


def module(job: Job) -> Iterator[dict]:
    one, sharded, x = module_setup(job)
    ways = {"forward": forward, "forward and backward": backward}
    alone = {name: job.milliseconds(way(one, x)) for name, way in ways.items()}
    for name, ms in alone.items():
        yield {"part": "module", "direction": name, "tp": 1, "subject": "flashmhf", "status": "ok", "ms": {"p50": ms}}
    for tp in job.tp_sizes(one.num_heads):
        many = sharded(tp)
        check(forward(many, x)(), forward(one, x)())
        for name, way in ways.items():
            ms = job.milliseconds(way(many, x))
            row = {"part": "module", "direction": name, "tp": tp, "subject": "flashmhf", "status": "ok"}
            yield row | {"ms": {"p50": ms}, "x_one": alone[name] / ms}


def compiled(job: Job) -> Iterator[dict]:
    """``fused_operators`` are those of symmetric memory that the compiled code calls. On CPUs there is none of them."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code
    from torch.distributed import _symmetric_memory

    one, sharded, tokens = module_setup(job)
    mine = tokens.tensor_split(job.ranks)[job.rank].contiguous()
    expected = forward(one, tokens)()
    alone = job.milliseconds(forward(torch.compile(lambda x: one(x), fullgraph=True, dynamic=False), tokens))
    yield {"part": "compiled", "tp": 1, "subject": "one", "status": "ok", "ms": {"p50": alone}}
    if one.num_heads % job.ranks:
        return
    ways = ("all-reduce", False, False), ("sequence", True, False), ("sequence, asynchronous", True, True)
    for name, sequence, pipelined in ways:
        job.free()
        layouts = {"input_layouts": Shard(0), "output_layouts": Shard(0)} if sequence else {}
        many, x = sharded(job.ranks, **layouts), mine if sequence else tokens
        if pipelined and job.gpu:
            # deprecated from torch 2.11 on, but Inductor still asks whether it was called
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                _symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        with config.patch(_micro_pipeline_tp=pipelined and job.gpu):
            # Not the module alone: its hooks, which hold the collectives, would be graphs of their own.
            call = forward(torch.compile(lambda x, many=many: many(x), fullgraph=True, dynamic=False), x)
            out, code = run_and_get_code(call)
        check(out, expected.tensor_split(job.ranks)[job.rank] if sequence else expected)
        ms = job.milliseconds(call)
        fused = sorted(set(re.findall(r"symm_mem\.(fused_\w+)", "".join(code))))
        row = {"part": "compiled", "tp": job.ranks, "subject": name, "status": "ok", "ms": {"p50": ms}}
        yield row | {"x_one": alone / ms, "fused_operators": fused}


# Training


def config_of(job: Job, subject: str, scale: str) -> tuple[FlashMHFConfig, list[int]]:
    """The model's configuration, and the numbers of heads that tensor parallelism divides."""
    multi_head, sizes = subject.startswith("flashmhf"), {}
    if job.options.smoke:
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 4} | ({"ffn_num_heads": 4} if multi_head else {})
    config = trainable(subject, "tiny" if job.options.smoke else scale, job.options.length, **sizes)
    heads = [config.num_attention_heads, config.num_key_value_heads, *([config.ffn_num_heads] if multi_head else [])]
    return config, heads


def train(job: Job) -> Iterator[dict]:
    speed: dict[str, float] = {}
    for ffn in job.options.subjects:
        name, _, checkpointed = ffn.partition(":")  # as --ways of benchmarks.run
        config, heads = config_of(job, name, job.options.scale)
        settings = {"length": job.options.length, "compiled": job.gpu, "fused_loss": job.options.fused_loss}
        settings["checkpointing"] = {"blocks": True}.get(checkpointed, checkpointed)
        for layout_name, layout in job.layouts(*heads).items():
            if layout_name not in (job.options.layouts or [layout_name]):
                continue
            job.free()
            sequences = job.options.micro_batch * layout.data_processes
            found = Training(config, job.device, layout, **settings).measure(sequences, job.options.steps)
            row = {"part": "train", "layout": layout_name, "sequences": sequences, "subject": ffn, "status": "ok"}
            row |= found
            if layout is ALONE:
                speed[ffn] = row["tokens_per_s"]
            elif ffn in speed:
                row["x_one"] = row["tokens_per_s"] / (job.ranks * speed[ffn])
            yield row


# Processes


def process(rank: int, folder: Path, options: argparse.Namespace, part: str) -> None:
    """Run ``part``; leave its rows in ``folder``, and in PART.txt why it ended before the last."""
    os.environ.update(ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    if options.smoke:
        torch.set_num_threads(1)
    try:
        job, rows = Job(rank, options), []
        dist.init_process_group(
            "nccl" if job.gpu else "gloo", init_method=f"file://{folder / part}.store", rank=rank,
            world_size=options.ranks, device_id=job.device if job.gpu else None, timeout=TIMEOUT,
        )  # fmt: skip
        where = environment.describe(job.device) | {"variables": ENVIRONMENT, "ranks": options.ranks}
        for row in globals()[part](job):
            rows.append(row)
            if rank == 0:
                print(json.dumps({name: value for name, value in row.items() if name != "losses"}), flush=True)
                write(folder / f"{part}.json", {"environment": where, "rows": rows})
    except BaseException as error:
        traceback.print_exc()
        # another's failure may follow from this
        with contextlib.suppress(FileExistsError), open(folder / f"{part}.txt", "x", encoding="utf-8") as file:
            file.write(environment.brief(error))
        os._exit(1)  # the other processes wait in a collective, and so would this one's end
    dist.destroy_process_group()


def write(path: Path, content: object) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(rounded(content), indent=1) + "\n")
    partial.replace(path)


def run(folder: Path, options: argparse.Namespace, part: str, deadline: float) -> str | None:
    """Run ``part`` in new processes; return why they ended before its end, or None."""
    method = "forkserver" if options.smoke else "spawn"
    if options.smoke:
        multiprocessing.get_context(method).set_forkserver_preload(["benchmarks.distributed"])  # imports once for all
    children = start_processes(process, (folder, options, part), options.ranks, join=False, start_method=method)
    try:
        while not children.join(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished within --limit {options.limit:g}")
    except (ProcessException, TimeoutError) as error:
        for child in children.processes:
            child.kill()  # it waits in a collective
            child.join(10)  # a process that waits for its GPU does not end
        written = folder / f"{part}.txt"
        return written.read_text() if written.exists() else str(error)
    return None


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    deadline, rows, where = time.monotonic() + options.limit, [], environment.describe(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        for part in (part for part in PARTS if part in options.parts):
            reason, path = run(Path(name), options, part, deadline), Path(name, f"{part}.json")
            if path.exists():
                found = json.loads(path.read_text(encoding="utf-8"))
                rows, where = rows + found["rows"], found["environment"]
            if reason is not None:
                rows.append({"part": part, "subject": "all", "status": "failed", "reason": reason})
    settings = {name: getattr(options, name) for name in ("ranks", "steps", "scale", "length", "micro_batch")}
    record = {"suite": "distributed", "environment": where, "rows": rows, "settings": settings}
    if options.out:
        path = Path(f"{options.out.with_suffix('')}_x{options.ranks}_{environment.short_device(where['device'])}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, record)
    print(f"{conditions(record)}\n\n{report(record)}")
    return 0 if all(row["status"] == "ok" for row in record["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
