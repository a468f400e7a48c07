"""Tiny training runs for tests: options, callbacks, processes, and when two runs are the same."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")  # skips every file of tests that imports this one
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from flashmhf_recipes import cli, data, documents, metrics, tokenizer, training  # noqa: E402
from flashmhf_recipes.errors import TrainingError  # noqa: E402

ROOT = Path(__file__).parents[2]
HELD_OUT = dict(eval_fraction=0.1, eval_every=10)


def options(output: Path, text: Path, arguments: dict | None = None, **settings) -> training.Options:
    """A small run; ``settings`` that are no options are TrainingArguments', as ``arguments`` are."""
    small = dict(preset="tiny", vocab_size=300, length=32, batch=8, micro_batch=4, device="cpu")
    small |= dict(steps=20, log_every=5, save_every=10)
    given = {**small, "output": str(output), "data": [str(text)], **settings}
    others = {name: given.pop(name) for name in given.keys() - training.Options.__dataclass_fields__.keys()}
    return training.Options(**given, arguments=others | (arguments or {}))


def start(output: Path, text: Path, callbacks: Iterable = (), **settings) -> training.Result:
    """Train with these options, without a bar."""
    return training.start(options(output, text, **settings), bar=False, callbacks=callbacks)


def store_tokens(text: Path, folder: Path) -> Path:
    """Lay a text's tokens in ``folder`` as a run does, without datasets, which may be missing on a GPU's machine."""
    texts = data.Documents([{"text": text.read_text(encoding="utf-8")}], "a text", documents.LeftOut())
    made = tokenizer.train(texts, 300)
    made.save_pretrained(folder / data.TOKENIZER)
    (folder / data.DATA).mkdir()
    data.store(folder / data.DATA, texts, made, 10_000)
    return folder


def torchrun(processes: int, *arguments: object) -> subprocess.CompletedProcess:
    """The command line in processes of their own."""
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"
    return run(*launcher, processes, "-m", "flashmhf_recipes", *arguments)


def launch(processes: int, *arguments: object, **fault: str) -> subprocess.CompletedProcess:
    """As torchrun does, in less time; with a fault DIE_AT or FAIL_AT."""
    return run(Path(__file__).with_name("lm_launch.py"), processes, *arguments, **fault)


def run(*arguments: object, **fault: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment() | fault, capture_output=True, text=True, timeout=240)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class At(TrainerCallback):
    """Calls ``action`` with the Trainer's keyword arguments (model, optimizer, ...) at an ``event`` after ``step``
    steps; None: always."""

    def __init__(self, event: str, step: int | None, action: Callable):
        def call(args, state, control, **kwargs) -> None:
            if step in (None, state.global_step):
                action(**kwargs)

        setattr(self, event, call)


def interrupt(*_, **__):
    """Stands for a function in which the process is killed, and ends a run without saving, as a crash does."""
    raise KeyboardInterrupt


def noting(batches: list[torch.Tensor]) -> At:
    """A callback that notes the tokens that a run's model sees."""
    hook = lambda module, _, inputs: batches.append(inputs["input_ids"].clone())  # noqa: E731
    return At("on_train_begin", None, lambda model, **_: model.register_forward_pre_hook(hook, with_kwargs=True))


def same_run(output: Path, expected: Path, rel: float = 0.0) -> None:
    """Assert that two finished runs have equal configurations, weights and metrics, or within a relative error."""
    ours, theirs = (load_file(run / "model.safetensors") for run in (output, expected))
    torch.testing.assert_close(ours, theirs, rtol=10 * rel, atol=rel)
    for row, other in zip(metrics.read_rows(output), metrics.read_rows(expected), strict=True):
        for name in ("tokens_per_second", "mfu", "peak_memory_bytes"):  # of the clock, and of the GPUs
            assert row.pop(name, 0) >= 0 <= other.pop(name, 0)
        assert row == pytest.approx(other, rel=rel, abs=0)
    assert (output / "config.json").read_text() == (expected / "config.json").read_text()


def die(**_):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(**_):
    raise TrainingError("this process has a fault of its own")


def command_line(arguments: Sequence[str]) -> int:
    """The command line in a process of several, with the faults that the environment names."""
    whole = training.start
    faults = [
        At("on_substep_end", int(os.environ.get("DIE_AT", "-1")), die),
        At("on_step_end", int(os.environ.get("FAIL_AT", "-1")), fail),
    ]
    training.start = lambda options: whole(options, callbacks=faults if os.environ["RANK"] == "1" else [])
    return cli.main(arguments)
