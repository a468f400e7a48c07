"""Text as the token files that compare.py reads.

    $ python experiments/corpus.py PATH... OUT [--tokenizer FILE]

Documents are text files, and the field "text" of JSON lines and Parquet (The Pile, PG19, ...), read as by the recipe. A
hash of a document's name decides whether it is validation text, so the split does not change when files are added. OUT
gets tokenizer.json (trained on a sample where none is given), train-00.bin and val-prose.bin (uint16), and tokens.json.

The corpus of the recorded runs is source code and prose of 157 public packages: corpus.json has their versions, hashes
and licences, and names the commit whose corpus.py downloads, cleans and divides them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flashmhf_recipes.documents import find_files, read

VOCABULARY, EOS = 16384, "<eos>"
VALIDATION, SAMPLE = 50, 32  # one document of this many is validation text, trains the tokenizer
GROUP = 1024  # documents that are tokenised together


def documents(paths: list[Path]) -> Iterator[tuple[int, str]]:
    """A number drawn from the name, and the text, of each document."""
    for path in find_files(paths)[0]:
        for index, record in enumerate(read([path])):
            yield int.from_bytes(hashlib.sha256(f"{path.name}:{index}".encode()).digest()[:8], "big"), record["text"]


def train_tokenizer(paths: list[Path]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[EOS], initial_alphabet=alphabet)
    sample = (text for number, text in documents(paths) if number % VALIDATION and number // VALIDATION % SAMPLE == 0)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def tokenise(paths: list[Path], tokenizer: Tokenizer, out: Path) -> dict[str, object]:
    """Write the files of OUT. Returns what tokens.json holds."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    end, counts = tokenizer.token_to_id(EOS), {"train-00": 0, "val-prose": 0}
    waiting: dict[str, list[str]] = {name: [] for name in counts}
    streams = {name: (out / f"{name}.bin").open("wb") for name in counts}

    def write(name: str) -> None:
        for each in tokenizer.encode_batch_fast(waiting[name]):
            np.array([*each.ids, end], np.uint16).tofile(streams[name])
            counts[name] += len(each.ids) + 1
        waiting[name] = []

    for number, text in documents(paths):
        name = "train-00" if number % VALIDATION else "val-prose"
        waiting[name].append(text)
        if len(waiting[name]) == GROUP:
            write(name)
    for name, stream in streams.items():
        write(name)
        stream.close()
    digest = hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest()
    found = {"tokenizer_sha256": digest, "vocabulary": tokenizer.get_vocab_size(), "parts": counts}
    (out / "tokens.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json of at most 65,536 tokens, with <eos>")
    options = parser.parse_args(arguments)
    given = options.tokenizer and Tokenizer.from_file(str(options.tokenizer))
    print(json.dumps(tokenise(options.paths, given or train_tokenizer(options.paths), options.out)))


if __name__ == "__main__":
    main()
