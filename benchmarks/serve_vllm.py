"""vLLM's engine with FlashMHF models beside a Llama of equal parameters: prefill and decode with random weights.

    python -m benchmarks.serve_vllm --out benchmarks/results/vllm

needs vLLM, on GPUs. Each model is served by a process of its own; the visible GPUs are divided among the models,
``--tensor-parallel`` to each, and serve one at a time. CUDA graphs are captured for the numbers of sequences that are
timed alone, which takes less time than vLLM's own list and leaves these as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

MODELS = {  # name: network, scale, vLLM's quantization or the record in the configuration
    "llama-24": ("swiglu", "1.3b", None),
    "flashmhf-20": ("flashmhf", "1.3b", None),
    "flashmhf-21": ("flashmhf 21 layers", "1.3b", None),
    "llama-24-fp8": ("swiglu", "1.3b", "fp8"),
    "flashmhf-20-fp8": ("flashmhf", "1.3b", "stored"),
    "llama-32": ("swiglu", "7b", None),
    "flashmhf-27": ("flashmhf", "7b", None),
    "llama-32-fp8": ("swiglu", "7b", "fp8"),
    "flashmhf-27-fp8": ("flashmhf", "7b", "stored"),
}
# of the engine's host and its sums over GPUs; others may be secrets
STEERING = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ALLREDUCE_USE_SYMM_MEM")
DECODE, PREFILL, PROMPT, LONG = (1, 8, 32, 128, 256), (1, 8), 512, 4096
ROUND_S = 2  # at least; a generation of few sequences is shorter and varies with the host


def write_config(name: str, directory: Path) -> None:
    """Write config.json alone: the engine draws the weights."""
    from transformers import LlamaConfig

    from benchmarks.harness.training import configuration
    from flashmhf.models import FlashMHFFp8Config

    network, scale, quantization = MODELS[name]
    stored = configuration(network, scale, max_position_embeddings=2 * LONG, dtype="bfloat16").to_dict()
    if name.startswith("llama"):
        shared = LlamaConfig().to_dict().keys() - {"model_type", "transformers_version"}
        stored = LlamaConfig(**{key: stored[key] for key in shared & stored.keys()}).to_dict()
    stored["architectures"] = ["LlamaForCausalLM" if name.startswith("llama") else "FlashMHFForCausalLM"]
    if quantization == "stored":
        stored["quantization_config"] = FlashMHFFp8Config().to_dict()
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(stored))


def run(engine, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """Return the seconds until every prompt has its first token, and the tokens per second after it."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{start}-{index}", {"prompt_token_ids": prompt}, sampling)
    counts: dict[str, int] = {}
    first = last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
        now = time.perf_counter()
        if first is None and len(counts) == len(prompts):
            first = now, sum(counts.values())
        if first and (last is None or max(counts.values()) < new):
            last = now, sum(counts.values())  # while every request runs
    return first[0] - start, (last[1] - first[1]) / max(last[0] - first[0], 1e-9)


def measure(name: str, directory: Path, options: argparse.Namespace) -> dict:
    """Serve one model in this process; its figures are medians, with all rounds beside them."""
    import torch
    from vllm import EngineArgs, LLMEngine

    torch.manual_seed(0)
    quantization, new, rounds = MODELS[name][2], options.new, options.rounds
    decode = options.decode or (DECODE if quantization is None else (1, 32))
    settings = {
        "model": str(directory), "dtype": "bfloat16", "load_format": "dummy",
        "quantization": None if quantization == "stored" else quantization, "skip_tokenizer_init": True,
        "enable_prefix_caching": False, "max_model_len": LONG + 1, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": options.memory, "tensor_parallel_size": options.tensor_parallel,
        "kv_cache_memory_bytes": round(options.kv_cache * 2**30) if options.kv_cache else None,
        "compilation_config": {"cudagraph_capture_sizes": sorted(set(decode))},
    }  # fmt: skip
    started = time.perf_counter()
    engine = LLMEngine.from_engine_args(EngineArgs(**settings, disable_log_stats=True))
    record = {"model": name, "quantization": quantization, "start_s": round(time.perf_counter() - started, 1)}
    record["engine"] = {key: value for key, value in settings.items() if key not in ("model", "quantization")}
    vocabulary = engine.model_config.get_vocab_size()

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(vocabulary, (count, length)).tolist()

    run(engine, prompts(4, PROMPT), 8)
    rows = []
    for batch in options.prefill:
        samples = [run(engine, prompts(batch, LONG), 1)[0] for _ in range(rounds + 1)][1:]
        seconds = statistics.median(samples)
        row = {"part": "prefill", "batch": batch, "prompt": LONG, "tokens_s": batch * LONG / seconds}
        rows.append(row | {"samples_s": samples})
    for batch in decode:
        started = time.perf_counter()
        run(engine, prompts(batch, PROMPT), new)
        count = rounds * math.ceil(ROUND_S / (time.perf_counter() - started))
        samples = [run(engine, prompts(batch, PROMPT), new)[1] for _ in range(count)]
        rate = statistics.median(samples)
        rows.append(
            {"part": "decode", "batch": batch, "prompt": PROMPT, "tokens_s": rate, "ms_step": 1e3 * batch / rate}
            | {"samples_tokens_s": samples}
        )
    for row in rows:
        print(name, {key: value for key, value in row.items() if not key.startswith("samples")}, flush=True)
    return record | {"rows": rows}


def alone(name: str, gpus: range, folder: Path, options: argparse.Namespace) -> dict:
    """Measure one model in a process of its own on these GPUs; its output goes to a file."""
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.serve_vllm", "--one", name, "--out", str(result)]
    for option in ("new", "rounds", "memory", "kv-cache", "tensor-parallel", "prefill", "decode"):
        value = getattr(options, option.replace("-", "_"))
        command += [f"--{option}", *map(str, value if isinstance(value, (list, tuple)) else [value])] if value else []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = ",".join(seen.split(",")[gpu] if seen else str(gpu) for gpu in gpus)
    with log.open("w") as file:
        done = subprocess.run(
            command, env=os.environ | {"CUDA_VISIBLE_DEVICES": devices}, stdout=file, stderr=subprocess.STDOUT
        )
    print(*[line for line in log.read_text().splitlines() if line.startswith(name)], sep="\n", flush=True)
    if not result.exists():  # it is written last of all: an engine that ends badly has still been measured
        return {"model": name, "status": f"failed: {done.returncode}", "error": log.read_text()[-4000:]}
    return json.loads(result.read_text())


def write(options: argparse.Namespace, results: dict[str, dict]) -> None:
    """Write what is measured so far."""
    import torch

    from benchmarks.harness import environment

    about = environment.describe(torch.device("cuda"))
    about["packages"]["vllm"] = version("vllm")
    about["variables"] = {name: os.environ[name] for name in STEERING if name in os.environ}
    record = {"suite": "vllm", "environment": about, "models": [results[model] for model in sorted(results)]}
    target = options.out.with_name(f"{options.out.name}_{environment.short_device(about['device'])}.json")
    target.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:5], help="those of 1.3B")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, nargs="+", default=PREFILL, metavar="N", help=f"prompts of {LONG:,}")
    parser.add_argument("--decode", type=int, nargs="+", metavar="N", help="sequences")
    parser.add_argument("--memory", type=float, default=0.9, help="share of a GPU's memory that the engine takes (0.9)")
    parser.add_argument("--kv-cache", type=float, metavar="GIB", help="a GPU's cache, beside other work on it")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs of each model (1)")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.one:
            write_config(options.one, folder / "model")
            options.out.write_text(json.dumps(measure(options.one, folder / "model", options)))
            return 0
        import torch

        count, ranks = torch.cuda.device_count(), options.tensor_parallel
        if ranks < 1 or count < ranks or count % ranks:
            parser.error(f"--tensor-parallel is {ranks}, of {count} visible GPUs; supported: numbers that divide them")
        results: dict[str, dict] = {}
        groups: queue.SimpleQueue[range] = queue.SimpleQueue()
        for first in range(0, count, ranks):
            groups.put(range(first, first + ranks))

        def serve(model: str) -> None:
            gpus = groups.get()
            results[model] = alone(model, gpus, folder, options)
            groups.put(gpus)
            with lock:
                write(options, results)

        lock = threading.Lock()
        with ThreadPoolExecutor(groups.qsize()) as pool:
            list(pool.map(serve, options.models))
    failed = [result for result in results.values() if "error" in result]
    for result in failed:
        print(result["model"], result["error"], file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
