"""Documents to tokens in one file, and a data set of its blocks, of which (file, seed, i) decides the sample i."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from .checkpoints import sync, whole
from .documents import LeftOut, find_files, read
from .errors import DataError, refuse
from .options import Options
from .tokenizer import load as load_tokenizer
from .tokenizer import token_numbers
from .tokenizer import train as train_tokenizer

# characters tokenised as one text, and such texts at once: bounds memory for documents of any size
PIECE, GROUP = 1 << 16, 256
TOKENIZER, DATA = "tokenizer", "data"  # in the directory of a run
TOKENS, MANIFEST = "tokens.bin", "manifest.json"  # in its data


@dataclass
class Documents:
    """Texts in the order in which a run takes them, and what there is to say of them."""

    records: Iterable[dict]  # of a run, walked once for the tokenizer and once for the tokens
    origin: str  # what the records are
    left_out: LeftOut  # documents without text are counted while they are read

    def __iter__(self) -> Iterator[str]:
        self.left_out["documents without text"] = 0
        for record in self.records:
            if (record["text"] or "").strip():
                yield record["text"]
            else:
                self.left_out["documents without text"] += 1

    def __str__(self) -> str:
        return f"{self.origin}{self.left_out}"


def local(paths: Iterable[str | Path], text_field: str, seed: int, cache: Path, bar: bool = False) -> Documents:
    """Return files' documents in a drawn order; ``cache`` gets a copy of their text. Raises DataError and OSError."""
    import datasets

    (datasets.enable_progress_bars if bar else datasets.disable_progress_bars)()
    files, left_out = find_files(paths)
    try:
        table = datasets.Dataset.from_generator(
            read, features=datasets.Features({"text": datasets.Value("large_string")}),
            gen_kwargs={"files": files, "text_field": text_field}, cache_dir=str(cache), writer_batch_size=64,
        )  # fmt: skip
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        causes = (error, error.__cause__, getattr(error.__cause__, "__cause__", None))
        raise next((cause for cause in causes if isinstance(cause, DataError | OSError)), error) from None
    origin = f"read {len(files):,} files, {len(table):,} documents, in an order drawn with seed {seed}"
    return Documents(table.shuffle(seed=seed), origin, left_out)


def encode(texts: Iterable[str], tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of one piece of text after the other, with an end-of-text token after every document."""
    marked = (piece for text in texts for piece in (*((part, False) for part in pieces(text)), ("", True)))
    while group := list(islice(marked, GROUP)):  # enough at once for the tokenizer's threads, few enough for memory
        plain = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = tokenizer([text for text, _ in group], **plain)
        for (_, end), ids in zip(group, encoded["input_ids"], strict=True):
            yield np.asarray([tokenizer.eos_token_id] if end else ids, np.uint32)


def pieces(text: str) -> list[str]:
    """Return ``text`` in pieces of at most PIECE characters, cut before white space if there is some."""
    return re.findall(rf"(?s).{{1,{PIECE}}}(?=(?<!\s)\s|\Z)|.{{{PIECE}}}", text)


def store(directory: Path, documents: Documents, tokenizer, max_tokens: int, bar: bool = False) -> str:
    """Write at most ``max_tokens`` tokens and their manifest; return what was read. Raises DataError without text."""
    dtype, count = np.dtype(np.uint16 if token_numbers(tokenizer) <= 1 << 16 else np.uint32), 0
    with (
        (directory / TOKENS).open("wb") as out,
        tqdm(desc="tokenising", unit="token", unit_scale=True, disable=not bar) as progress,
    ):
        for ids in encode(documents, tokenizer):
            ids = ids[: max_tokens - count]
            out.write(ids.astype(dtype).tobytes())
            count += len(ids)
            progress.update(len(ids))
            if count == max_tokens:
                break
        out.flush()
        sync(directory / TOKENS)
    if not count:
        raise DataError(f"no text is left to train on: {documents}")
    used = f"all {count:,} tokens" if count < max_tokens else f"{count:,} tokens; the documents after them are left out"
    manifest = {"tokens": count, "dtype": dtype.name, "report": f"{documents}; using {used}"}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    return manifest["report"]


def prepare(options: Options, bar: bool) -> None:
    """Make the run's tokens, and the tokenizer if it has none: trained, loaded or another run's."""
    output = Path(options.output)
    if options.tokens is not None:
        return _take_tokens(Path(options.tokens), output)
    # --data may hold the run's directory: what a killed process has left is gone by now
    with whole(output / DATA) as partial:
        cache = partial / "documents"
        documents = local(options.data, options.text_field, options.seed, cache, bar)
        if not (output / TOKENIZER).exists():
            given = options.tokenizer
            made = load_tokenizer(given) if given else train_tokenizer(documents, options.vocab_size, bar)
            save_tokenizer(made, output)
        trained = options.steps * options.batch * options.length
        wanted = math.ceil(trained / (1 - options.eval_fraction)) + options.length
        report = store(partial, documents, load_tokenizer(str(output / TOKENIZER)), wanted, bar)
        shutil.rmtree(cache, ignore_errors=True)
    if bar:
        tqdm.write(report)


def _take_tokens(source: Path, output: Path) -> None:
    """Link or copy the tokens and the tokenizer of the run ``source``, which ``output`` then needs no more."""
    if not (source / DATA / MANIFEST).exists():
        raise DataError(f"{source} holds no tokens: there is no {DATA}/{MANIFEST}")
    tokenizer = load_tokenizer(str(source / TOKENIZER))
    load(source / DATA)  # refuses what is damaged
    save_tokenizer(tokenizer, output)
    other = load_tokenizer(str(output / TOKENIZER)).get_vocab() != tokenizer.get_vocab()
    refuse(other, "tokens has tokens of another tokenizer than the model of init_from")
    with whole(output / DATA) as partial:
        for name in (TOKENS, MANIFEST):
            try:
                os.link(source / DATA / name, partial / name)  # tokens are never written in place
            except OSError:  # on another file system
                shutil.copyfile(source / DATA / name, partial / name)


def save_tokenizer(tokenizer, output: Path) -> None:
    """Write the run's tokenizer if it has none: a process that was killed may have written it."""
    if not (output / TOKENIZER).exists():
        with whole(output / TOKENIZER) as partial:
            tokenizer.save_pretrained(partial)


def load(directory: Path) -> np.ndarray:
    """Return the stored tokens, which are read as they are asked for. Raises DataError where they are damaged."""
    path, tokens = directory / MANIFEST, directory / TOKENS
    try:
        manifest = json.loads(path.read_text("utf-8"))
        dtype, count = np.dtype(manifest["dtype"]), int(manifest["tokens"])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error!r}") from error
    size = tokens.stat().st_size if tokens.exists() else 0
    if size != count * dtype.itemsize:
        raise DataError(f"{tokens} is damaged: it has {size:,} bytes, and by {MANIFEST} {count:,} tokens of {dtype}")
    return np.memmap(tokens, dtype, "r")


def split(tokens: np.ndarray, fraction: float, length: int, end_of_text: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (training tokens, held-out tokens or None): about ``fraction`` of the blocks, at the end, from the next
    document on, else from the one before, if that changes their number by at most half; else exactly as many."""
    blocks = len(tokens) // length
    if not (held_out := math.ceil(blocks * fraction)):
        return tokens, None
    if held_out >= blocks:
        raise DataError(f"{len(tokens):,} tokens are too few to hold {fraction:.0%} of the blocks of {length:,} out")
    held_out *= length
    wanted = len(tokens) - held_out
    low, high = max(wanted - held_out // 2, length, 1), min(wanted + held_out // 2, len(tokens) - length)
    starts = np.flatnonzero(tokens[low - 1 : high] == end_of_text) + low
    after = starts[starts >= wanted]
    start = int(after[0] if len(after) else starts[-1] if len(starts) else wanted)
    return tokens[:start], tokens[start:]


class Blocks(Dataset):
    """Samples of ``length`` tokens, in a new order every pass by ``seed``, or in file order. Raises DataError."""

    def __init__(self, tokens: np.ndarray, length: int, samples: int | None = None, seed: int | None = None):
        self.tokens, self.length, self.seed = tokens, length, seed
        self.blocks = len(tokens) // length
        if not self.blocks:
            found = f"the data has {len(tokens):,} tokens, less than one block of {length:,}"
            raise DataError(f"{found}; set a shorter length")
        self.samples = self.blocks if samples is None else samples
        self._pass, self._order = -1, None

    def __len__(self) -> int:
        return self.samples

    def block(self, index: int) -> int:
        """Return the block that sample ``index`` is."""
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
