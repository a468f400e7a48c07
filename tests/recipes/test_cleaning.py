"""A path in any spelling is one directory; cleaning up neither ends a run nor touches what its user made."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from lm_runs import At, options, start
from transformers import BloomConfig, BloomForCausalLM

from flashmhf_recipes import checkpoints, cli, pretrained, tokenizer, training
from flashmhf_recipes.errors import DataError, OptionError, TrainingError

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = dict(steps=1, batch=2, save_every=1, report_to=[])


def failing(number: int):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_run_lies_in_one_directory_in_any_spelling(text, tmp_path, monkeypatch):
    """The run, its checkpoints and its model; resumed and continued with its own tokens by other spellings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    os.symlink(tmp_path, tmp_path / "link")
    shutil.copy(text, tmp_path / "copy.txt")
    assert start("~/run", Path("~/copy.txt"), **SHORT).output == tmp_path / "run"
    assert training.resume("../link/run", steps=2, bar=False).output == tmp_path / "run"
    assert not list(Path().iterdir()) and pretrained.locate("~/run") == str(tmp_path / "run")
    for path in (tmp_path / "run").iterdir():
        if path.name not in ("data", "tokenizer"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    start("../link/run", text, data=[], tokens="~/run", **SHORT)
    assert pretrained.load("../run", device="cpu")[0].num_parameters() > 0


def test_several_chat_templates(text, tmp_path):
    """They are files in a folder; a longer run writes its model over a shorter one's."""
    made = tokenizer.train([text.read_text()], 300)
    made.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    made.save_pretrained(tmp_path / "tokenizer")
    run = start(tmp_path / "run", text, tokenizer=str(tmp_path / "tokenizer"), **SHORT).output
    (run / "additional_chat_templates" / "mine.txt").write_text("mine")
    training.resume(run, steps=2, bar=False)
    assert tokenizer.load(str(run)).chat_template.keys() == {"default", "tools"}
    assert (run / "config.json").exists() and not (run / checkpoints.UNFINISHED).exists()
    assert (run / "additional_chat_templates" / "mine.txt").read_text() == "mine"


def test_what_cannot_be_removed_stays(text, tmp_path, monkeypatch):
    """As a file that is open over NFS, or another user's."""

    def busy(path, *, dir_fd=None, do) -> None:
        if dir_fd is not None or "checkpoint" in str(path):
            failing(errno.EBUSY)()
        do(path)

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, partial(busy, do=getattr(os, name)))
    run = start(tmp_path / "run", text, **SHORT | {"steps": 4}).output
    assert [path.name for path in checkpoints.numbered_checkpoints(run)] == [f"checkpoint-{i}" for i in (1, 2, 3, 4)]


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_passed_over(tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "x.json").write_text("{}" if step == 1 else "{", "utf-8")
        if step < 3:
            checkpoints.mark_complete(tmp_path / f"checkpoint-{step}")
    monkeypatch.setattr(Path, "rename", failing(errno.EPERM))
    checkpoints.set_aside_unusable(tmp_path)
    assert [path.name for path in checkpoints.complete_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert caplog.text.count("it is passed over where it is (Operation not permitted)") == 2


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EIO])
def test_file_systems_without_fsync_or_permissions(number, text, tmp_path, monkeypatch):
    """But a failed write of a checkpoint is an error, with the file's name."""
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    monkeypatch.setattr(Path, "chmod", failing(errno.EPERM))
    synced = At("on_step_end", 1, lambda **_: monkeypatch.setattr(os, "fsync", failing(number)))
    if number == errno.EIO:
        with pytest.raises(TrainingError, match=r"checkpoint-1 could not be written: .*Input/output error: '.*config"):
            start(tmp_path / "run", text, [synced], **SHORT)
        assert not list((tmp_path / "run").glob("checkpoint-*"))
    else:
        run = start(tmp_path / "run", text, [synced], **SHORT).output
        assert (run / "checkpoint-1" / checkpoints.MARK).exists()


@pytest.mark.parametrize("made", [True, False])
def test_a_failed_start_keeps_its_reason_and_the_users_directory(made, tmp_path, monkeypatch):
    output, binary = tmp_path / "mine", tmp_path / "b.txt"
    binary.write_bytes(b"abc\0def")
    if made:
        output.mkdir(mode=0o700)
        monkeypatch.chdir(output)
        before = output.stat().st_ino
    with pytest.raises(DataError, match="NUL"):
        start("." if made else output, binary, **SHORT)
    assert not made or (output.stat().st_ino == before and not list(output.iterdir()))
    assert output.exists() == made
    monkeypatch.setattr(Path, "unlink", failing(errno.EACCES))
    with pytest.raises(DataError, match="NUL"):
        start(output, binary, **SHORT)


def test_an_error_of_a_step_is_no_failed_checkpoint(text, tmp_path):
    """It is told as it is, and a directory of the user's is not removed for it."""

    def fail(**_):
        (tmp_path / "run" / "checkpoint-77").mkdir()
        raise RuntimeError("of a step")

    with pytest.raises(RuntimeError, match="^of a step$"):
        start(tmp_path / "run", text, [At("on_step_begin", 1, fail)], **SHORT | {"steps": 2})
    assert (tmp_path / "run" / "checkpoint-77").exists()


def test_quantize_makes_a_new_directory_whole_or_not_at_all(uninterrupted, tmp_path, monkeypatch):
    output, model = tmp_path / "a" / "fp8", str(uninterrupted[0].output)
    settings = dict(tokenizer_name=None, device="cpu", dtype="bfloat16")
    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="could not be written: .*No space"):
        patch.setattr(checkpoints, "save_pretrained", failing(errno.ENOSPC))
        pretrained.save_fp8(model, output, **settings)
    assert not list(output.parent.iterdir())
    pretrained.save_fp8(model, output, **settings)
    assert (output / "config.json").exists()
    (tmp_path / "mine.partial").mkdir()
    for taken in (output, tmp_path / "mine"):
        with pytest.raises(OptionError, match=f"output is '{taken}', and {taken}.* is there already; choose a new dir"):
            pretrained.save_fp8(model, taken, **settings)


@pytest.mark.parametrize("rank", ["1", "", "0"])
def test_a_rank_without_a_launcher_is_one_process(rank, text, tmp_path, monkeypatch):
    """It may be the node's: accelerate looks at LOCAL_RANK."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert (start(tmp_path / "run", text, **SHORT).output / "config.json").exists()


@pytest.mark.parametrize("name", ["LOCAL_RANK", "RANK", "WORLD_SIZE"])
def test_a_launch_that_is_not_whole_is_refused_by_name(name, text, tmp_path, monkeypatch):
    for variable in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(variable, "" if variable == name else "0")
    with pytest.raises(OptionError, match=f"the environment has .*'{name}': ''.*; supported: integers in all"):
        start(tmp_path / "run", text, **SHORT)
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_maximum_length(text, tmp_path, capsys):
    """BLOOM's configuration has none."""
    BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "bloom"
    )
    tokenizer.train([text.read_text()], 300).save_pretrained(tmp_path / "bloom")
    none = dict.fromkeys(("preset", "vocab_size"))
    given = none | SHORT | dict(init_from=str(tmp_path / "bloom"), learning_rate=1e-3)
    with pytest.raises(OptionError, match="length must be given: the configuration of .*bloom has no maximum"):
        training.start(options(tmp_path / "run", text, **given, length=None), bar=False)
    assert not (tmp_path / "run").exists()
    run = start(tmp_path / "run", text, **given, length=16).output
    assert cli.main(f"eval --model {run} --data {text} --device cpu --window 16".split()) == 0
