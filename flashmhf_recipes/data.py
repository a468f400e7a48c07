"""Documents to packed tokens on disk, and a data set whose order is a function of the seed alone.

A run takes documents in a random order that its seed fixes, joins their tokens with an end-of-text token after each, and stores them once
as a flat file; a training sample is one block of it. Sample i of a run is fixed by (file, seed, i), so resuming needs nothing but i.
"""

from __future__ import annotations

import json
import os
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from .documents import DataError, Piece, Report, find_files, read_dataset, read_documents

GROUP, GROUP_PIECES = 8 << 20, 1024  # characters and pieces tokenised together
SAMPLED_DOCUMENTS, SAMPLED_CHARACTERS = 256, 4096  # from which characters a token are estimated, and how many of each
MANIFEST = "manifest.json"


def encode(pieces: Iterable[Piece], tokenizer) -> Iterator[np.ndarray]:
    """Token ids of one piece after the other, with an end-of-text token after every document."""
    for group in _groups(pieces):
        encoded = tokenizer([piece.text for piece in group], add_special_tokens=False, return_attention_mask=False, verbose=False)
        for piece, ids in zip(group, encoded["input_ids"], strict=True):
            yield np.asarray(ids + [tokenizer.eos_token_id] if piece.last else ids, np.uint32)


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


class Files:
    """The documents of files in a random order. One pass counts them; every use of some of them is one more pass.

    Args:
        paths: as for :func:`flashmhf_recipes.documents.find_files`.
        text_field: of records and tables.
        seed: fixes the order.
        bar: show progress on stderr.

    Raises DataError as ``read_documents`` does, and when there is no document.
    """

    def __init__(self, paths: Iterable[str | Path], text_field: str = "text", seed: int = 0, bar: bool = False):
        self.text_field, self.seed, self.bar, self.report = text_field, seed, bar, Report()
        self.files = find_files(paths, self.report)
        sizes, size, self._sample, draw = array("Q"), 0, [], random.Random(seed)
        with tqdm(desc="reading", unit="character", unit_scale=True, disable=not bar) as progress:
            for piece in read_documents(self.files, self.report, text_field):
                if not size:
                    self._draw(len(sizes), piece.text[:SAMPLED_CHARACTERS], draw)
                size += len(piece.text)
                progress.update(len(piece.text))
                if piece.last:
                    sizes.append(size)
                    size = 0
        if not sizes:
            raise DataError("no text is left to train on: " + "; ".join(self.report.lines()))
        self.sizes = np.frombuffer(sizes, np.uint64).astype(np.int64)
        self.order = np.random.default_rng(seed).permutation(len(sizes))

    def _draw(self, number: int, text: str, draw: random.Random) -> None:
        """Keeps a uniform sample of the documents so far (reservoir sampling)."""
        if number < SAMPLED_DOCUMENTS:
            self._sample.append(text)
        elif (slot := draw.randrange(number + 1)) < SAMPLED_DOCUMENTS:
            self._sample[slot] = text

    def texts(self, characters: int) -> Iterator[str]:
        """Text of as many documents as have ``characters``, the first in the order."""
        for _, piece in self._pieces(self.order[: self._enough(0, characters)]):
            yield piece.text

    def _enough(self, start: int, characters: float) -> int:
        """The end of the shortest part of the order that begins at ``start`` and has so many characters."""
        return min(len(self.order), start + 1 + int(np.searchsorted(np.cumsum(self.sizes[self.order[start:]]), characters)))

    def _pieces(self, numbers: np.ndarray) -> Iterator[tuple[int, Piece]]:
        """(document, piece) of the documents with these numbers, in the order of the files."""
        chosen = np.zeros(len(self.order) + 1, bool)
        chosen[numbers] = True
        last, number = int(numbers.max()), 0
        for piece in read_documents(self.files, Report(), self.text_field):
            if chosen[number]:
                yield number, piece
            number += piece.last
            if number > last:
                return
        raise DataError(f"the files have changed while they were read: {number:,} documents instead of {len(self.order):,}")

    def write(self, path: Path, tokenizer, dtype: np.dtype, max_tokens: int | None, progress) -> tuple[int, str]:
        """Tokens of the documents, in the order, to ``path``; returns their number and a line that says what they are part of.

        The disk holds them twice for a while.
        """
        unordered = path.with_name(path.name + ".unordered")
        starts, lengths = np.zeros((2, len(self.order)), np.int64)
        per_token = sum(map(len, self._sample)) / sum(map(len, encode((Piece(text, True) for text in self._sample), tokenizer)))
        used = count = 0
        limit = np.inf if max_tokens is None else max_tokens
        with unordered.open("wb") as out:
            while count < limit and used < len(self.order):
                end = self._enough(used, 1.05 * per_token * (limit - count))
                for number, ids in self._encoded(self.order[used:end], tokenizer, lengths, limit):
                    if not lengths[number]:
                        starts[number] = count
                    lengths[number] += len(ids)
                    count += len(ids)
                    out.write(ids.astype(dtype).tobytes())
                    progress(len(ids))
                used = end
        read = np.memmap(unordered, dtype, mode="r", shape=(count,))
        written, documents = 0, 0
        with path.open("wb") as out:
            for number in self.order[:used]:
                part = read[starts[number] : starts[number] + lengths[number]]
                out.write(part[: int(min(len(part), limit - written))].tobytes())
                written, documents = int(min(limit, written + len(part))), documents + 1
                if written >= limit:
                    break
            _sync(out)
        unordered.unlink()
        exact = used == len(self.order) and lengths.max() < limit
        everything = count if exact else max(written, round(self.sizes.sum() / per_token))
        return written, self._part(written, everything, exact, documents)

    def _encoded(self, numbers: np.ndarray, tokenizer, lengths: np.ndarray, limit: float) -> Iterator[tuple[int, np.ndarray]]:
        """(document, token ids of a piece); what a document has beyond ``limit`` tokens is left out."""
        pending = deque()

        def pieces() -> Iterator[Piece]:
            for number, piece in self._pieces(numbers):
                if lengths[number] < limit:
                    pending.append(number)
                    yield piece

        for ids in encode(pieces(), tokenizer):
            yield pending.popleft(), ids

    def _part(self, written: int, everything: int, exact: bool, documents: int) -> str:
        if exact and written == everything:
            return f"using all {written:,} tokens, their documents in an order drawn with seed {self.seed}"
        share = f"{documents:,} of {len(self.order):,} documents, drawn with seed {self.seed}"
        return f"using {written:,} of {'' if exact else 'about '}{everything:,} tokens: {share}"


class Stream:
    """The documents that ``read`` yields, in its order and read no further than needed. ``read`` counts them in its argument.

    Raises DataError when there is no document.
    """

    def __init__(self, read: Callable[[Report], Iterable[Piece]]):
        self.read, self.report = read, Report()

    def _pieces(self) -> Iterator[Piece]:
        self.report = Report()
        yield from self.read(self.report)
        if not self.report.documents:
            raise DataError("no text is left to train on: " + "; ".join(self.report.lines()))

    def texts(self, characters: int) -> Iterator[str]:
        """Text of documents with at least ``characters`` in all, where there are so many."""
        for piece in self._pieces():
            yield piece.text
            characters -= len(piece.text)
            if characters <= 0:
                return

    def write(self, path: Path, tokenizer, dtype: np.dtype, max_tokens: int | None, progress) -> tuple[int, str]:
        """As :meth:`Files.write`."""
        count, limit = 0, np.inf if max_tokens is None else max_tokens
        with path.open("wb") as out:
            for ids in encode(self._pieces(), tokenizer):
                ids = ids[: int(min(len(ids), limit - count))]
                out.write(ids.astype(dtype).tobytes())
                count += len(ids)
                progress(len(ids))
                if count >= limit:
                    break
            _sync(out)
        return count, f"using all {count:,} tokens" if count < limit else f"using {count:,} tokens; what follows was not read"


def dataset(name: str, split: str = "train", text_field: str = "text", seed: int = 0) -> Stream:
    """A data set of the ``datasets`` library, "name" or "name:config", its files and the records nearby in an order that the seed fixes."""
    path, _, config = name.partition(":")
    return Stream(lambda report: read_dataset(path, config or None, split, report, text_field, seed))


def _sync(out) -> None:
    out.flush()
    os.fsync(out.fileno())


def store(directory: Path, source: Files | Stream, tokenizer, max_tokens: int | None, bar: bool = False) -> dict:
    """Tokens of ``source`` in directory/tokens.bin, at most ``max_tokens``; returns the manifest. Complete tokens are left as they are.

    Safe to interrupt: the files get their names when they are complete.
    """
    manifest_path = directory / MANIFEST
    if manifest_path.exists():
        return json.loads(manifest_path.read_text())
    directory.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    partial = directory / "tokens.partial"
    with tqdm(desc="tokenising", unit="token", unit_scale=True, disable=not bar) as progress:
        count, line = source.write(partial, tokenizer, dtype, max_tokens, progress.update)
    partial.replace(directory / "tokens.bin")
    report = source.report
    manifest = {"tokens": count, "dtype": dtype.name, "report": [*report.lines(), line], "skipped": dict(report.skipped)}
    manifest_path.with_suffix(".partial").write_text(json.dumps(manifest, indent=1) + "\n")
    manifest_path.with_suffix(".partial").replace(manifest_path)
    return manifest


def held_out_start(tokens: np.ndarray, held_out: int, length: int, end_of_text: int) -> int:
    """Where the held-out tokens begin, about ``held_out`` before the end: with a document, so that none is on both sides.

    The first document that begins in the last ``held_out`` tokens, or the last one before them, where that leaves between half and
    one and a half times as many, and a block of ``length`` on both sides; else inside a document, ``held_out`` before the end.
    """
    wanted = len(tokens) - held_out
    low, high = max(wanted - held_out // 2, length, 1), min(wanted + held_out // 2, len(tokens) - length)
    starts = np.flatnonzero(tokens[low - 1 : high] == end_of_text) + low
    after = starts[starts >= wanted]
    return int(after[0] if len(after) else starts[-1] if len(starts) else wanted)


def load(directory: Path) -> np.ndarray:
    """The stored tokens, mapped from disk. Raises DataError where they are damaged."""
    path, tokens = directory / MANIFEST, directory / "tokens.bin"
    try:
        manifest = json.loads(path.read_text())
        dtype, count = np.dtype(manifest["dtype"]), int(manifest["tokens"])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error!r}") from error
    size = tokens.stat().st_size if tokens.exists() else 0
    if size != count * dtype.itemsize:
        raise DataError(f"{tokens} is damaged: it has {size:,} bytes, and by {MANIFEST} {count:,} tokens of {dtype.itemsize} bytes")
    return np.memmap(tokens, dtype, mode="r", shape=(count,))


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
