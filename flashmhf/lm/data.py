"""Text to packed tokens on disk: readers that survive bad data, and a data set whose order is a function of the seed alone.

Documents are read and tokenised as a stream, joined with an end-of-text token between them, and stored once as a flat token file; a
training sample is one block of it. Sample i of a run is fixed by (file, seed, i), so resuming needs nothing but i.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

PIECE = 1 << 20  # bytes of text handed to the tokenizer at once: bounds memory for files and lines of any size
GROUP, GROUP_PIECES = 8 << 20, 1024  # characters and pieces tokenised together
LONGEST_RECORD = 64 << 20  # bytes of a JSON line
NAMED_SKIPS = 5
TEXT, JSON_LINES, PARQUET = (".txt", ".text", ".md"), (".jsonl", ".ndjson"), (".parquet",)
MANIFEST = "manifest.json"
SUFFIXES = (*TEXT, *JSON_LINES, *PARQUET)


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


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files themselves, and those with a known suffix below directories, sorted. Raises DataError for what is not there."""
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in SUFFIXES)
            if not below:
                raise DataError(f"{path} has no files ending in {', '.join(SUFFIXES)} (.gz too)")
            files += below
        elif not path.exists():
            raise DataError(f"{path} does not exist")
        elif _suffix(path) not in SUFFIXES:
            raise DataError(f"{path} ends in {path.suffix!r}; supported: {', '.join(SUFFIXES)}, and .gz of the text formats")
        else:
            files.append(path)
    return files


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def read_documents(files: Iterable[Path], report: Report, text_field: str = "text") -> Iterator[Piece]:
    """Pieces of the files' documents. A text file is one document; a JSON line or Parquet row has one in ``text_field``.

    Empty and binary files, lines that are not UTF-8 and records without text are left out and counted in ``report``; over-long
    text lines are cut. Raises DataError for unreadable and damaged files and for Parquet files without the column.
    """
    for path in files:
        report.files += 1
        try:
            yield from _read_file(path, report, text_field)
        except (OSError, EOFError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def _read_file(path: Path, report: Report, text_field: str) -> Iterator[Piece]:
    if path.stat().st_size == 0:
        report.skip("empty file", str(path))
        return
    if _suffix(path) in PARQUET:
        yield from _read_parquet(path, report, text_field)
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        head = stream.read(1 << 16)
        if b"\0" in head:
            report.skip("binary file", str(path))
            return
        stream.seek(0)
        reader = _read_text if _suffix(path) in TEXT else _read_json_lines
        yield from reader(stream, path, report, text_field)


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
        except (json.JSONDecodeError, RecursionError):
            report.skip("record not JSON", place)
            continue
        yield from _record(record.get(text_field) if isinstance(record, dict) else None, place, report, text_field)


def _read_parquet(path: Path, report: Report, text_field: str) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if text_field not in file.schema_arrow.names:
            raise DataError(f"{path} has no column {text_field!r}; columns: {', '.join(file.schema_arrow.names)}")
        number = 0
        for batch in file.iter_batches(1024, columns=[text_field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield from _record(value, f"{path}:{number}", report, text_field)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def read_dataset(name: str, config: str | None, split: str, report: Report, text_field: str = "text") -> Iterator[Piece]:
    """Documents of a data set of the ``datasets`` library, streamed."""
    import datasets

    try:
        stream = datasets.load_dataset(name, config, split=split, streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"data set {name!r} cannot be opened: {error}") from error
    report.files += 1
    for number, record in enumerate(stream):
        yield from _record(record.get(text_field), f"{name}:{number}", report, text_field)


def _record(value: object, place: str, report: Report, text_field: str) -> Iterator[Piece]:
    if not isinstance(value, str):
        report.skip(f"record without a string in {text_field!r}", place)
    elif not value.strip():
        report.skip("record with empty text", place)
    else:
        report.documents += 1
        for start in range(0, len(value), PIECE):
            yield Piece(value[start : start + PIECE], last=start + PIECE >= len(value))


# Tokens on disk


def encode(pieces: Iterable[Piece], tokenizer) -> Iterator[np.ndarray]:
    """Token ids of groups of pieces, an end-of-text token after every document."""
    for group in _groups(pieces):
        encoded = tokenizer([piece.text for piece in group], add_special_tokens=False, return_attention_mask=False, verbose=False)
        ends = ([tokenizer.eos_token_id] if piece.last else [] for piece in group)
        yield np.concatenate([np.asarray(ids + end, np.uint32) for ids, end in zip(encoded["input_ids"], ends, strict=True)])


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Enough pieces at once for the tokenizer's threads, few enough for memory."""
    group, characters = [], 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if characters >= GROUP or len(group) == GROUP_PIECES:
            yield group
            group, characters = [], 0
    if group:
        yield group


def source_key(settings: object, files: Iterable[Path], tokenizer) -> str:
    """Changes whenever the files (name, size, time), the tokenizer or the settings do."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([settings, stats, tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def store(directory: Path, key: str, pieces: Callable[[Report], Iterable[Piece]], tokenizer, max_tokens: int | None, progress=None) -> dict:
    """Tokens of ``pieces`` in directory/tokens.bin, at most ``max_tokens``; returns the manifest, which is reused if the key is the same.

    Safe to interrupt: the files get their names when they are complete. Raises DataError when nothing is left to read.
    """
    manifest_path = directory / MANIFEST
    if manifest_path.exists():
        manifest = json.loads(manifest_path.read_text())
        if manifest["key"] != key:
            raise DataError(f"{directory} holds the tokens of other data, another tokenizer or settings; choose another output directory")
        return manifest
    directory.mkdir(parents=True, exist_ok=True)
    report, count = Report(), 0
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    partial = directory / "tokens.partial"
    with partial.open("wb") as out:
        for ids in encode(pieces(report), tokenizer):
            ids = ids if max_tokens is None else ids[: max_tokens - count]
            out.write(ids.astype(dtype).tobytes())
            count += len(ids)
            if progress is not None:
                progress(len(ids))
            if max_tokens is not None and count >= max_tokens:
                break
        out.flush()
        os.fsync(out.fileno())
    if not report.documents and not count:
        raise DataError("no text is left to train on: " + "; ".join(report.lines()))
    partial.replace(directory / "tokens.bin")
    manifest = {"key": key, "tokens": count, "dtype": np.dtype(dtype).name, "report": report.lines(), "skipped": dict(report.skipped)}
    manifest_path.with_suffix(".partial").write_text(json.dumps(manifest, indent=1) + "\n")
    manifest_path.with_suffix(".partial").replace(manifest_path)
    return manifest


def load(directory: Path) -> np.ndarray:
    """The stored tokens, mapped from disk."""
    manifest = json.loads((directory / MANIFEST).read_text())
    return np.memmap(directory / "tokens.bin", manifest["dtype"], mode="r", shape=(manifest["tokens"],))


class Blocks(Dataset):
    """Samples of ``length`` tokens: ``samples`` of them, passing over the blocks in an order drawn anew for every pass.

    Sample i is block ``permutation(seed, i // blocks)[i % blocks]``; without a seed the blocks come in file order.
    """

    def __init__(self, tokens: np.ndarray, length: int, samples: int | None = None, seed: int | None = None):
        self.tokens, self.length, self.seed = tokens, length, seed
        self.blocks = len(tokens) // length
        if not self.blocks:
            raise DataError(f"the data has {len(tokens):,} tokens, less than one block of {length:,}; give more text or a shorter length")
        self.samples = self.blocks if samples is None else samples
        self._pass, self._order = -1, None

    def __len__(self) -> int:
        return self.samples

    def block(self, index: int) -> int:
        """The block that sample ``index`` is."""
        number, position = divmod(index, self.blocks)
        if self.seed is None:
            return position
        if number != self._pass:
            self._pass, self._order = number, np.random.default_rng((self.seed, number)).permutation(self.blocks)
        return int(self._order[position])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.block(index) * self.length
        ids = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}
