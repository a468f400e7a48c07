"""Documents from files: every record is one, and a broken file is refused by name."""

from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from .errors import DataError

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # of text formats
_UNPAIRED_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can write it ("\\ud800"), and no tokenizer takes it


class LeftOut(Counter):
    """What is not read, counted by its kind."""

    def __str__(self) -> str:
        return "".join(f"; left out: {count:,} {kind}" for kind, count in sorted(self.items()) if count)


def find_files(paths: str | Path | Iterable[str | Path]) -> tuple[list[Path], LeftOut]:
    """Return the files named and those below directories, each once, and counts of the rest. Raises DataError."""
    files, left_out = [], LeftOut()
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    for path in (Path(os.path.expanduser(path)) for path in paths):
        below = list(_below(path, left_out)) if path.is_dir() else [path] if reader(path) else []
        if not path.exists():
            raise DataError(f"{path} does not exist")
        if not below:
            found = "has no files that can be read" if path.is_dir() else f"ends in {path.suffix!r}"
            raise DataError(f"{path} {found}; supported: {', '.join(READERS)}{left_out}")
        files += below
    # a file given twice would be on both sides of a split
    return list({path.resolve(): path for path in files}.values()), left_out


def _below(directory: Path, left_out: LeftOut) -> Iterator[Path]:
    seen = set()
    for folder, folders, names in os.walk(directory, followlinks=True):
        seen.add(os.path.realpath(folder))
        # under such names programs keep their own: .git, .ipynb_checkpoints, ._x, _temporary, __MACOSX
        hidden = {name for name in (*folders, *names) if name.startswith((".", "_"))}
        left_out["hidden files and folders"] += len(hidden)
        shown = sorted({*folders} - hidden)
        folders[:] = (name for name in shown if os.path.realpath(os.path.join(folder, name)) not in seen)
        for path in (Path(folder, name) for name in sorted({*names} - hidden)):
            if path.is_file() and reader(path):
                yield path
            else:
                kind = f"files ending in {path.suffix!r}" if path.suffix else "files without a suffix"
                left_out[kind if path.is_file() else "links to nothing, pipes and devices"] += 1


def read(files: Iterable[Path], text_field: str = "text") -> Iterator[dict[str, str]]:
    """Yield {"text": a text file, or a record's ``text_field``} in order. Raises DataError that names the file."""
    import pyarrow

    for path in files:
        try:
            for value in reader(path)(path, text_field):
                yield {"text": _text_of(value, text_field)}
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _text_of(value: object, field: str) -> str:
    """Return a record's text, "" for None and for text that no tokenizer takes. Raises ValueError for other types."""
    if isinstance(value, bytes):  # Impala and old versions of Spark write text so
        value = value.decode("utf-8")
    if not isinstance(value, str | None):
        raise ValueError(f"{field!r} holds a value of type {type(value).__name__}; supported: text")
    return value if value and not _UNPAIRED_SURROGATE.search(value) else ""


def _check_column(field: str, names: Iterable[str]) -> None:
    """Raise ValueError, with the columns that there are, unless ``field`` is one of them, and once."""
    if (found := list(names).count(field)) != 1:
        what = f"{found} columns" if found else "no column"
        raise ValueError(f"it has {what} {field!r}; columns: {', '.join(names)}")


def _text(path: Path, text_field: str) -> Iterator[str]:
    with _opened(path) as stream:
        text = stream.read()
    if "\0" in text:
        raise ValueError("it has NUL characters and looks like a binary file")
    yield text


def _json_lines(path: Path, text_field: str) -> Iterator[object]:
    names: dict[str, None] = {}
    with _opened(path) as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # also integers of thousands of digits
                raise ValueError(f"line {number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"line {number} is not a JSON object")
            names |= dict.fromkeys(record)
            yield record.get(text_field)
    if names:  # a field that no record has is a mistake; one that some do not have is a document without text
        _check_column(text_field, names)


def _opened(path: Path) -> TextIO:
    """Return the file's text, decompressed."""
    import pyarrow

    compression = COMPRESSED.get(path.suffix.lower())
    raw = io.BufferedReader(pyarrow.input_stream(str(path), compression=compression), 1 << 20)
    return io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


def _parquet(path: Path, text_field: str) -> Iterator[object]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        _check_column(text_field, file.schema_arrow.names)
        for batch in file.iter_batches(1024, columns=[text_field]):
            yield from batch.column(0).to_pylist()


_TEXT_READERS = dict.fromkeys((".txt", ".text", ".md"), _text) | dict.fromkeys((".jsonl", ".ndjson"), _json_lines)
READERS = {suffix + compression: read for suffix, read in _TEXT_READERS.items() for compression in ("", *COMPRESSED)}
READERS |= {".parquet": _parquet}


def reader(path: Path):
    """Return the function that reads ``path``, by the end of its name, or None."""
    return next((read for suffix, read in READERS.items() if path.name.lower().endswith(suffix)), None)
