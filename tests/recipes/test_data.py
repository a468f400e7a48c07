"""Text to packed tokens: what is not read is counted or refused by name; the seed decides the order."""

import gzip
import json
import os
import time

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from flashmhf_recipes import data, documents, tokenizer  # noqa: E402
from flashmhf_recipes.errors import DataError  # noqa: E402


def read(*paths, **kwargs) -> tuple[list[str], dict]:
    """The documents' texts, and what was left out."""
    files, left_out = documents.find_files(paths)
    return [record["text"] for record in documents.read(files, **kwargs)], dict(+left_out)


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train(["The quick brown fox jumps over the lazy dog. äöü 日本語 " * 20], 300)


def write(path, texts: list[str]) -> None:
    """One file of ``texts`` in the format that its name says."""
    lines = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts).encode()
    table = pyarrow.table({"text": texts, "other": range(len(texts))})
    match "".join(path.suffixes).lower():
        case ".jsonl":
            path.write_bytes(lines)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case ".jsonl.zst":
            with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
                out.write(lines)
        case ".parquet":
            parquet.write_table(table, path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.JSONL.ZST", "a.parquet"])
def test_every_record_is_a_document(name, tmp_path):
    texts = ["one\ntwo", "fünf, 日本語", "", "last"]
    write(tmp_path / name, texts)
    assert read(tmp_path)[0] == texts
    with pytest.raises(DataError, match=f"{name} cannot be read: it has no column 'body'; columns: .*other"):
        read(tmp_path, text_field="body")


BROKEN = {
    "binary.txt": (b"\x7fELF\0\0", "binary file"), "latin1.txt": (b"caf\xe9", "can't decode byte 0xe9"),
    "cut.txt": ("日".encode()[:2], "can't decode"),
    "bad.jsonl": (b'{"text": "good"}\n{"text": \n', "line 2 is not JSON"),
    "long.jsonl": (b'{"text": "x", "n": ' + b"1" * 5000 + b"}", "line 1 is not JSON"),
    "deep.jsonl": (b"[" * 100_000, "line 1 is not JSON"),
    "list.jsonl": (b'{"text": "x"}\n[]\n', "line 2 is not a JSON object"),
    "number.jsonl": (b'{"text": 3}\n', "'text' holds a value of type int; supported: text"),
    "bad.parquet": (b"PAR1 is not enough", "Parquet"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_name(name, tmp_path):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} .*{message}"):
        read(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_file_is_refused_by_name(name, damage, tmp_path):
    path = tmp_path / name
    write(path, [f"number {i * i} of many" for i in range(20_000)])
    content = bytearray(path.read_bytes())
    middle = len(content) - 40 if name == "a.parquet" else len(content) // 2
    content[middle : middle + 30] = b"\xff" * 30
    path.write_bytes(content if damage == "overwritten" else content[:middle])
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        read(path)


def test_text_that_no_tokenizer_takes_is_none(tmp_path):
    """JSON can write unpaired surrogates, and leave a field out."""
    lines = [r'{"text": "\ud800"}', r'{"text": "\ud83d\ude42 paired"}', '{"text": null}', "{}"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read(tmp_path)[0] == ["", "🙂 paired", "", ""]


def test_tokenizer_is_lossless_and_reproducible(bpe, tmp_path):
    text = "Any text: naïve café, 日本語 🙂\n\ttabs  and   spaces \x01"
    assert bpe.decode(bpe(text, add_special_tokens=False)["input_ids"]) == text
    assert bpe.eos_token_id == 0 and bpe.pad_token_id == 1 and len(bpe) <= 300
    again = tokenizer.train(["The quick brown fox jumps over the lazy dog. äöü 日本語 " * 20], 300)
    assert again.backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()
    bpe.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = tokenizer.load(str(name))
        assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 1)
        assert loaded(text)["input_ids"] == bpe(text)["input_ids"]
    with pytest.raises(ValueError, match="vocab_size is 100; a byte-level tokenizer needs at least 258"):
        tokenizer.train(["x"], 100)


@pytest.mark.parametrize(
    "text", ["ab" * 500_000, " " * 1_000_000, "x" * 300 + " y " + "z" * 300], ids=["word", "spaces", "two words"]
)
def test_long_words_do_not_stop_tokenizer_training(text):
    """Its time is quadratic in a word's length: 100 kB took seconds, 1 MB minutes."""
    start = time.process_time()
    trained = tokenizer.train([text], 300)
    assert time.process_time() - start < 5
    assert trained.decode(trained(text[:700])["input_ids"]) == text[:700]


def test_packing_joins_documents_with_end_of_text(bpe, tmp_path):
    records = [{"text": text} for text in ("alpha beta", " ", None, "gamma")]
    texts = data.Documents(records, "texts", documents.LeftOut())
    report, tokens = data.store(tmp_path, texts, bpe, 10**6), data.load(tmp_path)
    expected = [*bpe("alpha beta")["input_ids"], 0, *bpe("gamma")["input_ids"], 0]
    assert tokens[:].tolist() == expected and tokens.dtype == "uint16"
    assert report == f"texts; left out: 2 documents without text; using all {len(expected)} tokens"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "tokens.bin"]
    (tmp_path / "empty.txt").touch()
    empty = data.local([tmp_path / "empty.txt"], "text", 0, tmp_path / "cache")
    left_out = "left out: 1 documents without text"
    with pytest.raises(DataError, match=f"no text is left to train on: read 1 files, 1 documents.*; {left_out}"):
        data.store(tmp_path, empty, bpe, 100)


@pytest.mark.parametrize("text", ["word word word\n" * 2000, "日本" * 5000])
def test_a_long_document_is_cut_into_pieces_and_ends_once(text, bpe, monkeypatch):
    whole = bpe(text)["input_ids"]
    monkeypatch.setattr(data, "PIECE", 3000)
    monkeypatch.setattr(data, "GROUP", 2)
    assert "".join(data.pieces(text)) == text and max(map(len, data.pieces(text))) <= 3000
    ids = np.concatenate(list(data.encode([text], bpe)))
    assert (ids == 0).sum() == 1 and ids[-1] == 0 and bpe.decode(ids[:-1]) == text
    assert " " not in text or ids[:-1].tolist() == whole


def test_documents_are_drawn_from_all_files(tmp_path, tmp_path_factory):
    """A part of the documents is a random part, and the seed fixes it."""
    for letter in "abc":
        write(tmp_path / f"{letter}.jsonl", [f"{letter}{i}" for i in range(100)])
    orders = [list(data.local([tmp_path], "text", seed, tmp_path_factory.mktemp("cache"))) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2]) == sorted(read(tmp_path)[0])
    assert {text[0] for text in orders[0][:20]} == {"a", "b", "c"}


@pytest.mark.parametrize(("sizes", "blocks", "length", "expected"), [
    ([10] * 10, 4, 5, 80),  # on a document
    ([10] * 10, 5, 5, 80),  # the next one
    ([70, 10, 17, 3], 4, 5, 80),
    ([70, 27, 3], 2, 10, 70),  # the one before, since 3 tokens are not a block
    ([50, 50], 4, 5, 80),  # none near: inside one
    ([95, 5], 2, 4, 95),
])  # fmt: skip
def test_held_out_tokens_begin_with_a_document(sizes, blocks, length, expected):
    values = np.ones(sum(sizes), np.uint16)
    values[np.cumsum(sizes) - 1] = 0
    train, held_out = data.split(values, blocks / (100 // length), length, 0)
    assert (len(train), len(held_out)) == (expected, 100 - expected)
    assert held_out[:].tolist() == values[expected:].tolist()
    whole, nothing = data.split(values, 0.0, length, 0)
    assert whole is values and nothing is None
    with pytest.raises(DataError, match="too few to hold 99% of the blocks"):
        data.split(values, 0.99, length, 0)


def test_blocks_cover_every_token_once_a_pass():
    tokens = np.arange(105, dtype=np.uint16)
    blocks = data.Blocks(tokens, 10, samples=25, seed=3)
    assert len(blocks) == 25
    order = [blocks.block(i) for i in range(20)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    sample = blocks[4]
    assert sample["input_ids"].tolist() == list(range(order[4] * 10, order[4] * 10 + 10))
    assert sample["input_ids"].dtype == torch.int64
    # any sample, in any order, from a fresh object
    assert all(torch.equal(data.Blocks(tokens, 10, 25, 3)[i]["input_ids"], blocks[i]["input_ids"]) for i in (17, 3, 24))
    assert [data.Blocks(tokens, 10, 25, 4).block(i) for i in range(10)] != order[:10]
    assert [data.Blocks(tokens, 10).block(i) for i in range(10)] == list(range(10))
    with pytest.raises(DataError, match="105 tokens, less than one block of 200"):
        data.Blocks(tokens, 200)


def test_what_files_hold_as_text(tmp_path, tmp_path_factory):
    """Impala and old versions of Spark write text without a mark that says so; what is no text is refused by name."""

    def read_all(values, field: str = "text") -> list[str]:
        parquet.write_table(pyarrow.table({"text": values}), tmp_path / "impala.parquet")
        return list(data.local([tmp_path], field, 0, tmp_path_factory.mktemp("cache")))

    for kind in (pyarrow.string(), pyarrow.large_binary()):
        values = pyarrow.array(["fünf".encode(), b"two", None], pyarrow.binary()).cast(kind)
        assert sorted(read_all(values)) == ["fünf", "two"]
    for values, field, message in (
        ([["a"], []], "text", "'text' holds a value of type list; supported: text"),
        ([b"caf\xe9"], "text", "'utf-8' codec can't decode byte 0xe9"),
        (["a"], "body", "it has no column 'body'; columns: text"),
    ):
        with pytest.raises(DataError, match=f"cannot be read.*: {message}"):
            read_all(values, field)


def test_paths_of_text(tmp_path):
    """A text file is one document, linked directories are read once; what is not read is counted."""
    used = ("all/b.TXT", "given/a.md", "given/inner/c.text.gz")
    for name in (*used, "given/x.json", "given/README", "given/sub/z.csv", "given/w.parquet.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        content = f"{name}\r\n\n".encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("text.gz") else content)
    os.symlink(tmp_path / "all", tmp_path / "given" / "part2")
    os.symlink(tmp_path / "given", tmp_path / "given" / "inner" / "up")
    os.symlink(tmp_path / "nothing.txt", tmp_path / "given" / "link.txt")
    texts, left_out = read(tmp_path / "given", tmp_path / "given" / "." / "a.md")
    assert sorted(texts) == [f"{name}\r\n\n" for name in used]
    kinds = [f"files ending in '.{end}'" for end in ("gz", "json", "csv")]
    assert left_out == dict.fromkeys([*kinds, "files without a suffix", "links to nothing, pipes and devices"], 1)
    hidden = tmp_path / ".hidden"
    for name in (".git/notes.txt", ".ipynb_checkpoints/a-checkpoint.txt", "_temporary/0/b.txt", "._a.txt", "_x.md"):
        (hidden / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).write_text(name)
    with pytest.raises(DataError, match="has no files that can be read; .*; left out: 5 hidden files and folders"):
        documents.find_files([hidden])
    os.mkfifo(hidden / "pipe.txt")
    (hidden / "a.txt").write_text("a")
    left_out = {"hidden files and folders": 5, "links to nothing, pipes and devices": 1}
    assert read(hidden) == (["a"], left_out)  # named by its user, it is read
    assert read(hidden / "_x.md", hidden / ".git") == (["_x.md", ".git/notes.txt"], {})
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty").mkdir()
    for name, message in (("no.txt", "does not exist"), ("empty", "has no files"), ("a.pdf", "ends in '.pdf'")):
        with pytest.raises(DataError, match=message):
            documents.find_files([tmp_path / name])
