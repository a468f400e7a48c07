"""Checkpoints of a run: ``checkpoint-N`` directories that transformers' Trainer writes and a mark makes complete.

The mark is a file ``complete`` with the size of every other file, written and synced last. A checkpoint without the
mark was cut off. Only marked checkpoints are ever removed; what cannot be used is renamed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .errors import TrainingError

MARK, UNFINISHED = "complete", "model.partial"
_NAME = re.compile(r"checkpoint-(\d+)")

logger = logging.getLogger(__name__)


def step_of(checkpoint: Path | None) -> int:
    """Return the step after which ``checkpoint`` was written; 0 for None."""
    return int(_NAME.fullmatch(checkpoint.name)[1]) if checkpoint else 0


def numbered_checkpoints(output: Path) -> list[Path]:
    """All ``checkpoint-N`` directories, oldest first. Other names (checkpoint-best) are not the Trainer's."""
    found = (path for path in output.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=step_of)


def complete_checkpoints(output: Path) -> list[Path]:
    """Checkpoints that were written to the end, oldest first."""
    return [path for path in numbered_checkpoints(output) if (path / MARK).exists()]


def mark_complete(checkpoint: Path) -> None:
    """Sync every file to disk, then write the mark, which so never outlives a file's content."""
    sizes = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        sync(path)
        sizes[str(path.relative_to(checkpoint))] = path.stat().st_size
    write_whole(checkpoint / MARK, json.dumps({"sizes": sizes}, indent=1) + "\n")
    sync(checkpoint)


def write_whole(path: Path, text: str) -> None:
    """Write a file that gets its name when it is on the disk."""
    unfinished = partial(path)
    unfinished.write_text(text, "utf-8")
    sync(unfinished)
    unfinished.replace(path)


def partial(path: Path) -> Path:
    """Return what ``path`` is called until it is whole."""
    return path.with_name(path.name + ".partial")


@contextmanager
def whole(directory: Path) -> Iterator[Path]:
    """Give a directory to fill, which gets its name when the block has ended; a kill leaves no half of it."""
    shutil.rmtree(unfinished := partial(directory), ignore_errors=True)
    unfinished.mkdir(parents=True, exist_ok=True)
    yield unfinished
    unfinished.rename(directory)


def save_pretrained(directory: str | Path, model: PreTrainedModel, tokenizer, **settings: object) -> None:
    """Write the model and its tokenizer, every file with the permissions that the umask leaves."""
    model.save_pretrained(directory, **settings)
    tokenizer.save_pretrained(directory)
    mode = (Path(directory) / "config.json").stat().st_mode
    for path in Path(directory).glob("*.safetensors"):  # which the library makes for their owner alone
        with suppress(OSError):  # file systems without permissions
            path.chmod(mode)


def sync(path: Path) -> None:
    """Have the file or directory written to the disk, where its file system can. Raises OSError for failed writes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # FUSE, Ceph and others know no fsync, or none of directories
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Remove the new directory ``path`` if the block has failed to write it, and raise TrainingError with the why."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(path, ignore_errors=True)  # a full disk needs its space
        reason = " ".join(str(error).split()).partition("Exception raised from")[0]  # torch adds a C++ trace
        raise TrainingError(f"{path} could not be written: {reason}") from error


def move_model(source: Path, output: Path) -> None:
    """Move a model's files to ``output``, which may hold one, config.json last: it says that there is a model."""
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):  # of the former one, perhaps in other files
        (output / name).unlink(missing_ok=True)
    files = (path for path in source.rglob("*") if path.is_file())  # also in folders, as chat templates are
    for path in sorted(files, key=lambda path: path == source / "config.json"):
        target = output / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    shutil.rmtree(source, ignore_errors=True)


def rotate(output: Path, keep: int) -> None:
    """Remove the oldest complete checkpoints but ``keep``, as far as possible. The mark goes first: a kill leaves none
    half removed. The Trainer's own rotation would remove the user's ``checkpoint-mine``, too."""
    for path in complete_checkpoints(output)[:-keep]:
        with suppress(OSError):
            (path / MARK).unlink()
        shutil.rmtree(path, ignore_errors=True)


def damage(checkpoint: Path) -> str | None:
    """Return why sizes or structure of its files are damaged, or None; nothing is unpickled. Raises OSError."""
    path = checkpoint / MARK
    try:
        for name, size in json.loads(path.read_bytes())["sizes"].items():
            path = checkpoint / name
            if size != (found := path.stat().st_size):
                raise ValueError(f"it has {found:,} bytes instead of {size:,}")
            match path.suffix:
                case ".safetensors":
                    with safe_open(path, "pt"):
                        pass
                case ".json":
                    json.loads(path.read_bytes())
                case ".pt" | ".pth" | ".bin":
                    with zipfile.ZipFile(path) as archive:
                        for member in (name for name in archive.namelist() if name.endswith("data.pkl")):
                            archive.read(member)  # what is small, with its checksum
    except (ValueError, TypeError, KeyError, FileNotFoundError, SafetensorError, zipfile.BadZipFile) as error:
        return f"{path.name} does not load ({' '.join(str(error).split())[:200]})"
    return None


def _set_aside(checkpoint: Path, kind: str, reason: str) -> None:
    """Rename ``checkpoint`` to ``kind``-checkpoint-N, with a number where the name is taken, and warn."""
    names = (f"{kind}-{checkpoint.name}{number}" for number in ("", *(f"-{i}" for i in range(2, 1000))))
    target = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    try:
        checkpoint.rename(target)
        now = f"it is now {target.name}"
    except OSError as error:  # the mark is what counts
        with suppress(OSError):
            (checkpoint / MARK).unlink(missing_ok=True)
        now = f"it is passed over where it is ({error.strerror})"
    logger.warning("%s %s; %s", checkpoint, reason, now)


def set_aside_unusable(output: Path) -> None:
    """Rename cut-off and damaged checkpoints until the newest loads. Raises TrainingError if none does."""
    for path in numbered_checkpoints(output):
        if not (path / MARK).exists():
            _set_aside(path, "incomplete", "was not written to the end")
    for path in reversed(complete_checkpoints(output)):
        if (reason := damage(path)) is None:
            return
        _set_aside(path, "damaged", f"is damaged: {reason}")
    damaged = sorted(path.name for path in output.glob("damaged-checkpoint-*"))
    if damaged:
        hint = "Restore one under its old name, or remove them to train from the first step on"
        raise TrainingError(f"{output} has no checkpoint that loads; damaged are: {', '.join(damaged)}. {hint}")
