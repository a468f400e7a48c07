"""Runs that are stopped, damaged, moved or lengthened go on without loss, and remove only what a run wrote."""

import errno
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from lm_runs import HELD_OUT, At, interrupt, options, same_run, start

from flashmhf_recipes import checkpoints, cli, data, metrics, pretrained, training
from flashmhf_recipes.errors import DataError, TrainingError

pytestmark = pytest.mark.usefixtures("one_thread")


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
    """A run killed while tokenising finds a relative path from elsewhere; later it does not look for it."""
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


@pytest.mark.parametrize(("number", "event", "step", "saved"), [
    (signal.SIGINT, "on_step_begin", 6, 7),
    (signal.SIGTERM, "on_step_begin", 9, 10),  # an evaluation is due
    (signal.SIGTERM, "on_prediction_step", 10, 10),
    (signal.SIGTERM, "on_save", 10, 11),
    (signal.SIGTERM, "on_prediction_step", 20, 20),  # the last step
])  # fmt: skip
def test_a_signal_finishes_the_step_and_saves(number, event, step, saved, text, expected, tmp_path):
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    output = tmp_path / "run"
    with pytest.raises(training.Stopped, match=f"by {number.name} after step {saved}, which is saved") as stopped:
        start(output, text, [signals(number, event, step)], **HELD_OUT)
    assert stopped.value.signum == number and (output / f"checkpoint-{saved}" / "complete").exists()
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)] == handlers
    if event == "on_prediction_step":  # the resumed run makes it again, and is stopped in it, too
        with pytest.raises(training.Stopped, match=f"after step {saved}"):
            training.resume(output, bar=False, callbacks=[signals(number, event, step)])
    training.resume(output, bar=False)
    same_run(output, expected)


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(("name", "damage"), [
    *((name, half) for name in ("model.safetensors", "optimizer.pt", "trainer_state.json")),
    ("model.safetensors", lambda content: bytes(len(content))),
    ("complete", lambda content: b"x"),
    ("complete", lambda content: b"[]"),
    ("trainer_state.json", lambda content: b"\xff" * len(content)),
    ("rng_state.pth", lambda content: content.replace(b"numpy", b"NUMPY")),
])  # fmt: skip
def test_a_damaged_checkpoint_is_set_aside(name, damage, run, expected, caplog):
    checkpoint = run / "checkpoint-20"
    (checkpoint / name).write_bytes(damage((checkpoint / name).read_bytes()))
    training.resume(run, bar=False)
    same_run(run, expected)
    assert re.search(rf"checkpoint-20 is damaged: {name}.*it is now damaged-checkpoint-20", caplog.text)
    assert (run / "damaged-checkpoint-20" / name).exists()


def test_a_failure_of_the_reader_is_not_damage(run, expected, monkeypatch):
    """The error of a library, of memory or of the file system says nothing of the file, nor does one of the user's."""
    (run / "checkpoint-20" / "notes.json").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            training.resume(run, bar=False)
        for error in (OSError(errno.EIO, "Input/output error"), MemoryError()):
            patch.setattr(checkpoints.json, "loads", lambda *_, error=error: raise_(error))
            with pytest.raises(type(error)):
                checkpoints.damage(run / "checkpoint-20")
    assert not list(run.glob("damaged*"))
    training.resume(run, bar=False)
    same_run(run, expected)


def raise_(error: BaseException):
    raise error


@pytest.mark.parametrize(("changed", "message"), [
    ({"data/manifest.json": None}, "data has no manifest.json: checkpoint-20 cannot go on with its batches"),
    ({"data/manifest.json": b"x"}, "manifest.json is damaged: JSONDecodeError"),
    ({"data/manifest.json": b"{}"}, "manifest.json is damaged: KeyError"),
    ({"data/tokens.bin": None}, r"tokens.bin is damaged: it has 0 bytes, and by manifest.json [\d,]+ tokens of uint16"),
    ({"data/tokens.bin": b"short"}, "tokens.bin is damaged: it has 5 bytes"),
    ({"checkpoint-10/optimizer.pt": None, "checkpoint-20/model.safetensors": b"short"},
     "no checkpoint that loads; damaged are: .*-10, damaged-checkpoint-20"),
    ({"checkpoint-10": None, "checkpoint-20": None, "config.json": b"{}"},
     "has a finished model but no checkpoint; train it further with init_from="),
    ({"run.json": b""}, "run.json holds no options that this version knows: Expecting value"),
    ({"run.json": {"preset": "swiglu-tiny"}}, "run.json describes a model with intermediate_size = 352; supported: "),
    ({"run.json": {"model": {"num_hidden_layers": 1}}}, "run.json .* num_hidden_layers = 1; supported: 2, as checkpo"),
    ({"run.json": {"vocab_size": 999}}, "run.json describes a model with vocab_size = 999; supported: "),
    ({"run.json": b"[]"}, "run.json holds no options that this version knows: unsupp"),
    ({"run.json": b'{"param_groups": true, "output": "x", "later": 1}'}, "unexpected keyword argument 'later'"),
])  # fmt: skip
def test_a_run_that_cannot_go_on_is_refused(changed, message, run):
    """Tokens made anew could be others, and nothing is trained from the first step, at the second attempt either."""
    metrics_before = (run / metrics.FILE).read_text()
    for path, content in ((run / name, content) for name, content in changed.items()):
        if isinstance(content, dict):
            path.write_text(json.dumps(json.loads(path.read_text()) | content))
        elif content is not None:
            path.write_bytes(content)
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for _ in range(2):
        with pytest.raises((ValueError, TrainingError), match=message):
            training.resume(run, steps=40, bar=False)
    assert (run / metrics.FILE).read_text() == metrics_before


def test_only_what_a_run_wrote_is_touched(run, expected):
    """Directories of the user keep their names; a checkpoint that was cut off is renamed, twice to another."""
    for name in ("checkpoint-mine", "checkpoint-best", "checkpoint-15", "incomplete-checkpoint-15"):
        (run / name).mkdir()
        (run / name / "notes.txt").write_text(name)
    training.resume(run, bar=False)
    same_run(run, expected)
    for name in ("checkpoint-mine", "checkpoint-best", "incomplete-checkpoint-15"):
        assert (run / name / "notes.txt").read_text() == name
    assert (run / "incomplete-checkpoint-15-2" / "notes.txt").read_text() == "checkpoint-15"


def test_a_run_keeps_to_the_umask_an_ignored_signal_and_the_checkpoints_it_may_keep(text, tmp_path):
    """A shell ignores SIGINT in its background jobs; old checkpoints go when a newer one is complete."""
    umask, handler = os.umask(0o027), signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupted = [signals(signal.SIGINT, "on_step_begin", 1)]
    try:
        result = start(tmp_path / "run", text, interrupted, save_every=3, keep=3, arguments={"report_to": []})
    finally:
        os.umask(umask)
        signal.signal(signal.SIGINT, handler)
    assert result.steps == 20
    assert sorted(path.name for path in result.output.glob("checkpoint-*")) == [f"checkpoint-{i}" for i in (15, 18, 20)]
    assert {path.stat().st_mode & 0o777 for path in result.output.rglob("*") if path.is_file()} == {0o640}


def test_a_failed_start_leaves_the_directory_free(text, tmp_path, monkeypatch, capsys):
    """Every error is one line with status 2, and the corrected command works in the same directory, resumed, too."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    command = f"train --output run --preset tiny --data {text} --steps 3 --device cpu --vocab-size 300".split()
    command += "--length 32 --batch 4 --eval-fraction 0.1 --log-every 2 --model-set ffn_q_norm=true".split()
    for arguments, message in {
        "--set optim=nosuch": "arguments: nosuch is not a valid OptimizerNames",
        "--length 100000": "less than one block",
        "--data empty.txt": "no text is left to train on",
        "--tokenizer nosuch.json": "no tokenizer could be loaded",
    }.items():
        assert cli.main([*command, *arguments.split()]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, error
        assert error.splitlines()[-1].startswith("flashmhf: error: ") and not Path("run", "run.json").exists(), error
    for steps, arguments in {3: command, 5: "train --output run --resume --steps 5".split()}.items():
        assert cli.main(arguments) == 0
        assert re.search(f"^{steps} steps, loss .*, held out ", capsys.readouterr().out, re.MULTILINE)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["ffn_q_norm"] is True


def test_only_the_first_process_makes_the_data(text, tmp_path, monkeypatch):
    """The others go on when the first has failed, and their files would stand in the way of the corrected command."""
    monkeypatch.setattr(training, "first_process", lambda: False)
    with pytest.raises(TrainingError, match="run has no data: the first process failed"):
        start(tmp_path / "run", text)
    assert not (tmp_path / "run").exists()


def test_a_failed_start_keeps_complete_tokens(text, expected, tmp_path):
    """An error in the first step, as of memory, does not cost the tokens."""
    fail = At("on_step_begin", 0, lambda **_: raise_(RuntimeError("out of memory")))
    output = tmp_path / "run"
    with pytest.raises(RuntimeError, match="out of memory"):
        start(output, text, callbacks=[fail], **HELD_OUT)
    assert sorted(path.name for path in output.iterdir() if path.name != "runs") == ["data", "tokenizer"]
    with pytest.raises(FileExistsError, match=f"holds tokenizer, data, .* or train on its tokens with tokens={output}"):
        start(output, text)
    with pytest.raises(DataError, match="less than one block"):
        start(output, text, data=[], tokens=str(output), length=10**6)
    start(output, text, data=[], tokens=str(output), **HELD_OUT)
    same_run(output, expected)


def test_two_processes_do_not_train_one_run(text, tmp_path):
    """As a job that the scheduler starts again while the first one runs: the second is refused and names the first."""

    def run_again(**_):
        for again in (lambda: training.resume(output, bar=False), lambda: start(output, text)):
            with pytest.raises(FileExistsError, match=f"(in use by process {os.getpid()} on .|holds a run already)"):
                again()

    output = tmp_path / "run"
    assert start(output, text, callbacks=[At("on_step_end", 1, run_again)], steps=1).steps == 1
    assert training.resume(output, bar=False).steps == 1


@pytest.mark.parametrize("name", [
    "data", "metrics.jsonl", "config.json", "model.safetensors", "checkpoint-5", "tokenizer.json",
    "generation_config.json",
])  # fmt: skip
def test_a_start_overwrites_nothing(name, text, tmp_path):
    output = tmp_path / "run"
    output.mkdir()
    (output / name).mkdir() if name in ("data", "checkpoint-5") else (output / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"holds {name}, which a run would overwrite"):
        start(output, text)
    assert [path.name for path in output.iterdir()] == [name]
    assert (output / name).is_dir() or (output / name).read_text() == "mine"


def test_a_longer_run_states_its_schedule(uninterrupted, run, text, tmp_path, caplog):
    """Learning rates from the resumption on are those of a run of that length. Stopped again, the run is its last
    checkpoint: evaluated, it was the model of the shorter run."""
    (run / metrics.FILE).unlink()
    as_before = training.resume(run, bar=False)
    assert (as_before.loss, as_before.eval_loss) == (uninterrupted[0].loss, uninterrupted[0].eval_loss)
    with pytest.raises(training.Stopped):
        training.resume(run, steps=30, bar=False, callbacks=[signals(signal.SIGTERM, "on_step_begin", 24)])
    assert pretrained.locate(str(run)) == str(run / "checkpoint-25")
    stated = "the run ends after 30 steps instead of 20, and its schedule with it: the learning rate of step 21 is"
    assert stated in caplog.text and json.loads((run / "run.json").read_text())["steps"] == 30
    assert training.resume(run, bar=False).steps == 30
    whole = start(tmp_path / "whole", text, steps=30, log_every=1, **HELD_OUT).output
    rates, expected = (
        {row["step"]: row["learning_rate"] for row in metrics.read_rows(o) if "loss" in row} for o in (run, whole)
    )
    assert [step for step in rates if step > 20] == [25, 30]
    assert all(rates[step] == expected[step] for step in (25, 30))
    with pytest.raises(ValueError, match="steps is 30; the run has done 30 steps"):
        training.resume(run, steps=30, bar=False)
    for name, value in (("steps", 40.5), ("steps", "40"), ("tp", 0), ("dp_shard", -1)):
        with pytest.raises(ValueError, match=rf"^{name} is {value!r}; supported: integers from 1 to"):
            training.resume(run, bar=False, **{"steps": 40} | {name: value})
    assert (run / "config.json").exists()  # the first of them took the finished model with it


@pytest.fixture(scope="module")
def other_text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("other") / "other.txt"
    path.write_text("".join(f"{i % 10} the gate weighs what each head finds.\n" for i in range(2000)))
    return path


def further(output: Path, text: Path, start: Path, **settings):
    given = dict.fromkeys(("preset", "vocab_size", "length"))
    given |= dict(init_from=str(start), learning_rate=1e-3, steps=4, log_every=1)
    return options(output, text, **{**given, **settings})


def test_further_training_of_a_run(expected, other_text, tmp_path, monkeypatch):
    """It begins with the model's loss on the new data; killed before it has read the data, it needs no model."""
    source, copy, output = tmp_path / "source", tmp_path / "copy.txt", tmp_path / "run"
    shutil.copytree(expected, source)
    shutil.copy(other_text, copy)
    whole = training.start(further(tmp_path / "whole", other_text, expected), bar=False)
    model, _ = pretrained.load(str(expected), device="cpu")
    blocks = data.Blocks(data.load(whole.output / "data"), 128, 32, 0)
    ids = [blocks[i]["input_ids"] for i in range(8)]
    first = sum(model(row[None], labels=row[None]).loss.item() for row in ids) / 8
    assert metrics.read_rows(whole.output)[0]["loss"] == pytest.approx(first, rel=1e-4)
    ours, theirs = (output / "tokenizer" / "tokenizer.json" for output in (whole.output, expected))
    assert ours.read_text() == theirs.read_text()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "local", interrupt)
        training.start(further(output, copy, source), bar=False)
    shutil.rmtree(source)
    with pytest.raises(KeyboardInterrupt):
        training.resume(output, bar=False, callbacks=[At("on_step_end", 2, interrupt)])
    copy.unlink()
    training.resume(output, bar=False)
    same_run(output, whole.output)


@pytest.mark.parametrize(("settings", "message"), [
    ({"preset": "tiny"}, "preset cannot be given with init_from"),
    ({"model": {"ffn_q_norm": True}}, "model cannot be given with init_from"),
    ({"steps": None}, "steps must be given with init_from"),
    ({"learning_rate": None}, "learning_rate must be given with init_from"),
    ({"tokenizer": "x"}, "tokenizer cannot be given with init_from: .* has a tokenizer"),
    ({"length": 256}, "length is 256; the model of init_from has 128 positions"),
])  # fmt: skip
def test_refused_further_training(settings, message, expected, other_text, tmp_path):
    with pytest.raises(ValueError, match=message):
        training.start(further(tmp_path / "run", other_text, expected, **settings), bar=False)
    assert not (tmp_path / "run").exists()


def test_further_training_on_tokens_of_another_tokenizer(expected, other_text, tmp_path):
    other = start(tmp_path / "other", other_text, vocab_size=270, steps=1).output
    with pytest.raises(ValueError, match="tokens has tokens of another tokenizer"):
        training.start(further(tmp_path / "run", other_text, expected, data=[], tokens=str(other)), bar=False)


def test_a_full_disk_loses_nothing(text, expected, tmp_path, monkeypatch):
    """What was saved before stays, and the run goes on where there is space again."""
    output = interrupted(options(tmp_path / "run", text, **HELD_OUT), 12)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch, pytest.raises((TrainingError, OSError), match="No space left|not be written"):
        patch.setattr(torch, "save", lambda *_, **__: raise_(full))
        training.resume(output, bar=False)
    assert [path.name for path in output.glob("*checkpoint-*")] == ["checkpoint-10"]
    training.resume(output, bar=False)
    same_run(output, expected)


def test_a_file_system_without_locks_is_warned_of(run, monkeypatch, caplog):
    """Lustre may be mounted without them."""
    monkeypatch.setattr(training.fcntl, "flock", lambda *_: raise_(OSError(errno.ENOSYS, "Function not implemented")))
    training.resume(run, bar=False)
    assert f"{run} cannot be locked (Function not implemented): see to it that one process trains" in caplog.text


@pytest.mark.parametrize(("where", "times", "message"), [
    ("step", 1, "stopped by SIGTERM after step 3, which is saved; continue with: flashmhf train --resume --output"),
    ("step", 2, "a second signal ends at once"),
    ("tokens", 1, "stopped by SIGTERM before the first step; continue with: flashmhf train --resume --output"),
])  # fmt: skip
def test_the_command_stops_on_signals(where, times, message, text, tmp_path, monkeypatch, capfd):
    start, encode = training.start, data.encode

    def send(**_):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "_exit", sys.exit)
    if where == "step":
        monkeypatch.setattr(training, "start", lambda run: start(run, callbacks=[At("on_step_begin", 2, send)]))
    else:
        monkeypatch.setattr(data, "encode", lambda *args: send() or encode(*args))
    command = f"train --preset tiny --vocab-size 300 --length 32 --steps 5 --device cpu --data {text}".split()
    try:
        status = cli.main([*command, "--output", str(tmp_path / "run")])
    except SystemExit as ended:
        status = ended.code
    error = capfd.readouterr().err
    assert status == 143 and message in error and "Traceback" not in error
    assert (tmp_path / "run" / "checkpoint-3" / "complete").exists() == ((where, times) == ("step", 1))
