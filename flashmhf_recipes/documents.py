"""Documents from files: every record is one, and a broken file is refused by name."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from .errors import DataError

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # of text formats
_UNPAIRED_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can write it ("\\ud800"), and no tokenizer takes it


def find_files(paths: Iterable[str | Path]) -> tuple[list[Path], Counter]:
    """Return the files named and those with a known suffix below the directories named, sorted and each once, and
    counts of the rest there.

    Links are followed; a directory that is reached again through one is not read again. Raises DataError for a path
    that does not exist, a file of another type and a directory without files.
    """
    files, left_out = [], Counter()
    for path in map(Path, paths):
        below = list(_below(path, left_out)) if path.is_dir() else [path] if reader(path) else []
        if not path.exists():
            raise DataError(f"{path} does not exist")
        if not below:
            found = "has no files that can be read" if path.is_dir() else f"ends in {path.suffix!r}"
            raise DataError(f"{path} {found}; supported: {', '.join(READERS)}")
        files += below
    # a file given twice would be on both sides of a split
    return list({path.resolve(): path for path in files}.values()), left_out


def _below(directory: Path, left_out: Counter) -> Iterator[Path]:
    seen = set()
    for folder, folders, names in os.walk(directory, followlinks=True):
        seen.add(os.path.realpath(folder))
        folders[:] = sorted(name for name in folders if os.path.realpath(os.path.join(folder, name)) not in seen)
        for path in (Path(folder, name) for name in sorted(names)):
            if not path.exists():
                left_out["links to nothing"] += 1
            elif reader(path):
                yield path
            else:
                left_out[f"files ending in {path.suffix!r}" if path.suffix else "files without a suffix"] += 1


def read(files: Iterable[Path], text_field: str = "text") -> Iterator[dict[str, str]]:
    """Yield {"text": document} for the documents of ``files`` in order: a text file whole, of other formats every
    record's ``text_field``.

    A record without a text yields "". Raises DataError that names the file for one that cannot be read, that is
    damaged, binary or not UTF-8, with a line that is not JSON, or without the column.
    """
    import pyarrow

    for path in files:
        try:
            for value in reader(path)(path, text_field):
                yield {"text": value if isinstance(value, str) and not _UNPAIRED_SURROGATE.search(value) else ""}
        except (OSError, ValueError, RecursionError, csv.Error, pyarrow.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _text(path: Path, text_field: str) -> Iterator[str]:
    with _opened(path) as stream:
        text = stream.read()
    if "\0" in text:
        raise ValueError("it has NUL characters and looks like a binary file")
    yield text


def _json_lines(path: Path, text_field: str) -> Iterator[object]:
    with _opened(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.isspace():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:  # also integers of thousands of digits
                    raise ValueError(f"line {number} is not JSON: {error}") from error
                yield record.get(text_field) if isinstance(record, dict) else None


def _csv(path: Path, text_field: str) -> Iterator[str]:
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as stream:
        rows = csv.DictReader(stream, strict=True)
        _check_column(text_field, rows.fieldnames or ())
        for row in rows:
            if None in row:  # DictReader's key of surplus fields: most often of text whose comma is not quoted
                raise ValueError(f"line {rows.line_num} has more fields than there are columns")
            yield row[text_field]


def _opened(path: Path) -> TextIO:
    """Return the file's text, decompressed."""
    import pyarrow

    compression = COMPRESSED.get(path.suffix.lower())
    raw = io.BufferedReader(pyarrow.input_stream(str(path), compression=compression), 1 << 20)
    return io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


def _check_column(text_field: str, names: Iterable[str]) -> None:
    if (found := list(names).count(text_field)) != 1:
        raise ValueError(
            f"it has {f'{found} columns' if found else 'no column'} {text_field!r}; columns: {', '.join(names)}"
        )


def _parquet(path: Path, text_field: str) -> Iterator[object]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        _check_column(text_field, file.schema_arrow.names)
        for batch in file.iter_batches(1024, columns=[text_field]):
            yield from batch.column(0).to_pylist()


def _arrow(path: Path, text_field: str) -> Iterator[object]:
    """Both of Arrow's formats: with an index, and the stream in which the datasets library stores."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source, path.open("rb") as start:
        indexed = start.read(6) == b"ARROW1"
        with (pyarrow.ipc.open_file if indexed else pyarrow.ipc.open_stream)(source) as reader:
            _check_column(text_field, reader.schema.names)
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if indexed else reader:
                yield from batch.column(reader.schema.get_field_index(text_field)).to_pylist()


_TEXT_READERS = {
    **dict.fromkeys((".txt", ".text", ".md"), _text),
    **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
    ".csv": _csv,
}
READERS = {suffix + compression: read for suffix, read in _TEXT_READERS.items() for compression in ("", *COMPRESSED)}
READERS |= {".parquet": _parquet, ".arrow": _arrow}


def reader(path: Path):
    """Return the function that reads ``path``, by the end of its name, or None."""
    return next((read for suffix, read in READERS.items() if path.name.lower().endswith(suffix)), None)
