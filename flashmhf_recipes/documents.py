"""Documents from files and data sets, as a stream that survives bad data: what is left out is counted and named."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

PIECE = 1 << 20  # bytes of text handed on at once: bounds memory for files and lines of any size
LONGEST_RECORD = 64 << 20  # bytes of a JSON line or a CSV field
NAMED_SKIPS = 5
BUFFERED_RECORDS = 10_000  # of a streamed data set, from which the next record is drawn at random
TEXT, JSON_LINES, CSV = (".txt", ".text", ".md"), (".jsonl", ".ndjson"), (".csv",)
PARQUET, ARROW = (".parquet",), (".arrow",)
COMPRESSED = (".gz", ".zst")  # of TEXT, JSON_LINES and CSV
SUFFIXES = (*TEXT, *JSON_LINES, *CSV, *PARQUET, *ARROW)


class DataError(ValueError):
    """The data cannot be trained or evaluated on; the message says why."""


class Piece(NamedTuple):
    """Part of a document; ``last`` closes it."""

    text: str
    last: bool


@dataclass
class Report:
    """What was read and what was left out, with the first few places of each kind."""

    files: int = 0
    documents: int = 0
    skipped: Counter = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, place: str) -> None:
        self.skipped[reason] += 1
        named = self.places.setdefault(reason, [])
        if len(named) < NAMED_SKIPS:
            named.append(place)

    def lines(self) -> list[str]:
        """For people: one line on what was read, one for each kind of skip."""
        found = [f"read {self.files:,} files, {self.documents:,} documents"]
        for reason, count in sorted(self.skipped.items()):
            more = ", …" if count > len(self.places[reason]) else ""
            found.append(f"{count:,} × {reason}: {', '.join(self.places[reason])}{more}")
        return found


def find_files(paths: Iterable[str | Path], report: Report | None = None) -> list[Path]:
    """The files themselves, and those with a known suffix below directories, sorted.

    Other files below directories are counted in ``report`` by suffix, and links to nothing. Raises DataError for what is not there.
    """
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            below = sorted(path.rglob("*"))
            files += (known := [p for p in below if p.is_file() and _suffix(p) in SUFFIXES])
            if not known:
                raise DataError(f"{path} has no files ending in {', '.join(SUFFIXES)} ({', '.join(COMPRESSED)} too)")
            for other in below if report else ():
                if not other.exists():
                    report.skip("link to nothing", str(other))
                elif other.is_file() and _suffix(other) not in SUFFIXES:
                    report.skip(f"file ending in {other.suffix!r}" if other.suffix else "file without a suffix", str(other))
        elif not path.exists():
            raise DataError(f"{path} does not exist")
        elif _suffix(path) not in SUFFIXES:
            supported = f"{', '.join(SUFFIXES)}, and {', '.join(COMPRESSED)} of the text formats"
            raise DataError(f"{path} ends in {path.suffix!r}; supported: {supported}")
        else:
            files.append(path)
    return list({path.resolve(): path for path in files}.values())  # a file given twice would be on both sides of a split


def _suffix(path: Path) -> str:
    """The suffix of the format, in lower case; that before .gz and .zst, which Parquet and Arrow files do not have."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return suffix if inner in (*PARQUET, *ARROW) else inner


def read_documents(files: Iterable[Path], report: Report, text_field: str = "text") -> Iterator[Piece]:
    """Pieces of the files' documents. A text file is one document; JSON lines, CSV, Parquet and Arrow rows have one in ``text_field``.

    Empty and binary files, text that is not UTF-8 and records without text are left out and counted in ``report``; over-long text lines
    are cut. Raises DataError for unreadable and damaged files, and for CSV, Parquet and Arrow files without the column.
    """
    for path in files:
        report.files += 1
        try:
            yield from _read_file(path, report, text_field)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def _read_file(path: Path, report: Report, text_field: str) -> Iterator[Piece]:
    if path.stat().st_size == 0:
        report.skip("empty file", str(path))
        return
    if _suffix(path) in PARQUET + ARROW:
        yield from _read_table(path, report, text_field)
        return
    with _opened(path) as stream:
        if b"\0" in stream.read(1 << 16):
            report.skip("binary file", str(path))
            return
    reader = _read_text if _suffix(path) in TEXT else _read_json_lines if _suffix(path) in JSON_LINES else _read_csv
    with _opened(path) as stream:
        yield from reader(stream, path, report, text_field)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed."""
    match path.suffix.lower():
        case ".gz":
            with gzip.open(path) as stream:
                yield stream
        case ".zst":
            import io

            import pyarrow

            with pyarrow.input_stream(str(path), compression="zstd") as stream, io.BufferedReader(stream, PIECE) as buffered:
                yield buffered
        case _:
            with path.open("rb") as stream:
                yield stream


def _read_text(stream: BinaryIO, path: Path, report: Report, text_field: str) -> Iterator[Piece]:
    parts, size, number, carried, found = [], 0, 0, b"", False
    while line := stream.readline(PIECE):
        line, cut = carried + line, not line.endswith(b"\n")
        carried = b""
        if cut and len(line) >= PIECE:
            line, carried = _split_incomplete(line)
            report.skip(f"line cut, over {PIECE:,} bytes", f"{path}:{number + 1}")
        number += not cut
        try:
            text = line.decode()
        except UnicodeDecodeError:
            report.skip("line not UTF-8", f"{path}:{number}")
            continue
        found = found or bool(text.strip())
        parts.append(text)
        size += len(line)
        if size >= PIECE:
            if found:  # nothing of a document is handed on before it is one
                yield Piece("".join(parts), last=False)
            parts, size = [], 0
    if carried:
        report.skip("line not UTF-8", f"{path}:{number + 1}")
    if not found:
        report.skip("file without text", str(path))
        return
    report.documents += 1
    yield Piece("".join(parts), last=True)


def _split_incomplete(data: bytes) -> tuple[bytes, bytes]:
    """Before and after the start of a UTF-8 sequence that the end of ``data`` cuts."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # a first byte: 0xxxxxxx, 110xxxxx, 1110xxxx, 11110xxx
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (data, b"") if length <= back else (data[:-back], data[-back:])
    return data, b""


def _read_json_lines(stream: BinaryIO, path: Path, report: Report, text_field: str) -> Iterator[Piece]:
    number = 0
    while line := stream.readline(LONGEST_RECORD):
        number += 1
        place = f"{path}:{number}"
        if len(line) == LONGEST_RECORD and not line.endswith(b"\n"):
            while (rest := stream.readline(LONGEST_RECORD)) and not rest.endswith(b"\n"):
                pass
            report.skip(f"record over {LONGEST_RECORD:,} bytes", place)
            continue
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError:
            report.skip("record not UTF-8", place)
            continue
        except (ValueError, RecursionError):  # JSONDecodeError, and integers of thousands of digits
            report.skip("record not JSON", place)
            continue
        yield from _record(record.get(text_field) if isinstance(record, dict) else None, place, report, text_field)


def _read_csv(stream: BinaryIO, path: Path, report: Report, text_field: str) -> Iterator[Piece]:
    """Rows under a line of column names; places are the lines on which records end."""
    csv.field_size_limit(LONGEST_RECORD)
    lines = iter(lambda: stream.readline(LONGEST_RECORD), b"")
    rows = csv.reader(line.decode(errors="surrogateescape") for line in lines)  # _record refuses what is not UTF-8
    names = [name.removeprefix("\ufeff") for name in next(rows, [])]
    if text_field not in names:
        raise _without_column(path, text_field, names)
    column = names.index(text_field)
    while True:
        try:
            row = next(rows, None)
        except csv.Error:
            report.skip("record not CSV", f"{path}:{rows.line_num}")
            continue
        if row is None:
            return
        if row:
            yield from _record(row[column] if column < len(row) else None, f"{path}:{rows.line_num}", report, text_field)


def _without_column(path: Path, text_field: str, names: list[str]) -> DataError:
    return DataError(f"{path} has no column {text_field!r}; columns: {', '.join(names)}")


def _read_table(path: Path, report: Report, text_field: str) -> Iterator[Piece]:
    """Rows of a Parquet or Arrow file; places are row numbers from 1 on."""
    import pyarrow

    number = 0
    try:
        for column in (_parquet_column if _suffix(path) in PARQUET else _arrow_column)(path, text_field):
            for scalar in column:
                number += 1
                try:
                    value = scalar.as_py()
                except UnicodeDecodeError:
                    report.skip("record not UTF-8", f"{path}:{number}")
                    continue
                yield from _record(value, f"{path}:{number}", report, text_field)
    except pyarrow.ArrowException as error:
        kind = "Parquet" if _suffix(path) in PARQUET else "Arrow"
        raise DataError(f"{path} is not a readable {kind} file: {error}") from error


def _parquet_column(path: Path, text_field: str) -> Iterator:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        if text_field not in file.schema_arrow.names:
            raise _without_column(path, text_field, file.schema_arrow.names)
        for batch in file.iter_batches(1024, columns=[text_field]):
            yield batch.column(0)


def _arrow_column(path: Path, text_field: str) -> Iterator:
    """Of the random-access format and of the stream format, in which the datasets library stores."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        with path.open("rb") as stream:
            is_file = stream.read(6) == b"ARROW1"
        with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source) as reader:
            if text_field not in reader.schema.names:
                raise _without_column(path, text_field, reader.schema.names)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                yield batch.column(reader.schema.get_field_index(text_field))


def read_dataset(
    name: str, config: str | None, split: str, report: Report, text_field: str = "text", seed: int | None = None
) -> Iterator[Piece]:
    """Documents of a data set of the ``datasets`` library, streamed; with a seed its files and the records nearby are shuffled."""
    import datasets

    try:
        stream = datasets.load_dataset(name, config, split=split, streaming=True)
        if seed is not None:
            stream = stream.shuffle(seed=seed, buffer_size=BUFFERED_RECORDS)
        report.files += 1
        for number, record in enumerate(stream):
            yield from _record(record.get(text_field), f"{name}:{number}", report, text_field)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"data set {name!r} cannot be read: {error}") from error


def _record(value: object, place: str, report: Report, text_field: str) -> Iterator[Piece]:
    if not isinstance(value, str):
        report.skip(f"record without a string in {text_field!r}", place)
    elif not value.strip():
        report.skip("record with empty text", place)
    elif not is_unicode(value):
        report.skip("record not UTF-8", place)
    else:
        report.documents += 1
        for start in range(0, len(value), PIECE):
            yield Piece(value[start : start + PIECE], last=start + PIECE >= len(value))


def is_unicode(text: str) -> bool:
    """Whether ``text`` has no unpaired surrogates, which JSON can write ("\\ud800") and which no tokenizer takes."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
