"""Runs that are stopped, damaged, moved or lengthened go on without loss, and nothing is removed that a run did not
write."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from lm_runs import HELD_OUT, At, interrupt, options, same_run, start

from flashmhf_recipes import data, metrics, training
from flashmhf_recipes.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread", "no_pictures")


@pytest.fixture(scope="module")
def no_pictures():
    """loss.png takes a quarter of such a short run; test_training.py looks at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "draw_losses", lambda *_: None)
        yield


@pytest.fixture
def expected(uninterrupted) -> Path:
    """The directory of an uninterrupted run."""
    return uninterrupted[0].output


@pytest.fixture
def run(expected, tmp_path) -> Path:
    """A copy of that run without its final model: checkpoints of steps 10 and 20."""
    output = tmp_path / "run"
    shutil.copytree(expected, output)
    for name in ("model.safetensors", "config.json"):
        (output / name).unlink()
    return output


def interrupted(options, step: int) -> Path:
    """A run that ends at ``step`` without saving."""
    with pytest.raises(KeyboardInterrupt):
        training.start(options, bar=False, callbacks=[At("on_step_end", step, interrupt)])
    return Path(options.output)


def test_a_resumed_run_needs_no_data(text, expected, tmp_path, monkeypatch):
    """A run killed while tokenising finds data with a relative path from another directory; later it does not look for
    it."""
    output, copy = tmp_path / "run", Path(shutil.copy(text, tmp_path / "copy.txt"))
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "encode", interrupt)
        start(output, Path("copy.txt"), **HELD_OUT)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(KeyboardInterrupt):
        training.resume(output, bar=False, callbacks=[At("on_step_end", 12, interrupt)])
    copy.unlink()
    training.resume(output, bar=False)
    same_run(output, expected)


def test_tokens_of_another_run(text, expected, tmp_path):
    """Several networks on one set of tokens: the same batches, the text tokenised once. A resumed run needs their
    source no more."""
    source = tmp_path / "source"
    shutil.copytree(expected, source)
    output = interrupted(options(tmp_path / "run", text, data=[], tokens=str(source), **HELD_OUT), 12)
    assert (output / "data" / "tokens.bin").samefile(source / "data" / "tokens.bin")  # a link takes no space
    shutil.rmtree(source)
    training.resume(output, bar=False)
    same_run(output, expected)
    with pytest.raises(DataError, match="holds no tokens: there is no data/manifest.json"):
        start(tmp_path / "other", text, data=[], tokens=str(tmp_path))


def signals(number: int, event: str, step: int) -> At:
    """A callback that sends this process a signal."""
    return At(event, step, lambda **_: os.kill(os.getpid(), number))


@pytest.mark.parametrize(
    ("number", "event", "step", "saved", "save_strategy"),
    [
        # which is the whole run: at its end the step's checkpoint is there
        (signal.SIGTERM, "on_step_begin", 6, 7, "epoch"),
        (signal.SIGINT, "on_step_begin", 6, 7, "steps"),
        (signal.SIGTERM, "on_step_begin", 9, 10, "steps"),  # an evaluation is due
        (signal.SIGTERM, "on_prediction_step", 10, 10, "steps"),
        (signal.SIGTERM, "on_save", 10, 11, "steps"),
        (signal.SIGTERM, "on_prediction_step", 20, 20, "steps"),  # the last step
    ],
)
def test_a_signal_finishes_the_step_and_saves(number, event, step, saved, save_strategy, text, expected, tmp_path):
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    output = tmp_path / "run"
    with pytest.raises(
        training.Stopped, match=f"stopped by {number.name} after step {saved}, which is saved"
    ) as stopped:
        run = options(output, text, arguments={"save_strategy": save_strategy}, **HELD_OUT)
        training.start(run, bar=False, callbacks=[signals(number, event, step)])
    assert stopped.value.signum == number and (output / f"checkpoint-{saved}" / "complete").exists()
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)] == handlers
    if event == "on_prediction_step":  # the resumed run makes it again, and is stopped in it, too
        with pytest.raises(training.Stopped, match=f"after step {saved}"):
            training.resume(output, bar=False, callbacks=[signals(number, event, step)])
    training.resume(output, bar=False)
    same_run(output, expected)
