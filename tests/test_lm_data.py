"""Text to packed tokens: bad data is counted and reported or refused, and the order of samples is a function of the seed."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from flashmhf.lm import data, tokenizer
from flashmhf.lm.data import DataError, Report


def read(*paths, **kwargs) -> tuple[list[str], Report]:
    """The documents' texts, put together again."""
    report, documents, parts = Report(), [], []
    for piece in data.read_documents(data.find_files(paths), report, **kwargs):
        parts.append(piece.text)
        if piece.last:
            documents.append("".join(parts))
            parts = []
    assert not parts and len(documents) == report.documents
    return documents, report


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train(["The quick brown fox jumps over the lazy dog. äöü 日本語 " * 20], 300)


def test_formats(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four\\nfive", "meta": 1}\n')
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as out:
        out.write('{"text": "six"}')
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    pyarrow = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    pyarrow.write_table(pa.table({"text": ["seven", None, " "], "other": [1, 2, 3]}), tmp_path / "d.parquet")
    documents, report = read(tmp_path)
    assert documents == ["one\ntwo\n", "three", "four\nfive", "six", "seven"]
    assert report.files == 4 and dict(report.skipped) == {"record without a string in 'text'": 1, "record with empty text": 1}


def test_text_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "yes", "text": "no"}\n')
    assert read(tmp_path / "a.jsonl", text_field="content")[0] == ["yes"]


def test_bad_files_are_counted_and_named(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\0\0\0")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin1.txt").write_bytes("first\ncaf\xe9\nlast\n".encode("latin1"))
    (tmp_path / "records.jsonl").write_bytes(b'{"text": "good"}\n{"text": \n["list"]\n{"text": 3}\n{"text": "\xff"}\n{"text": ""}\n')
    documents, report = read(tmp_path)
    assert documents == ["first\nlast\n", "good"]
    assert dict(report.skipped) == {
        "binary file": 1,
        "file without text": 1,
        "empty file": 1,
        "line not UTF-8": 1,
        "record not JSON": 1,
        "record without a string in 'text'": 2,
        "record not UTF-8": 1,
        "record with empty text": 1,
    }
    lines = report.lines()
    assert lines[0] == "read 5 files, 2 documents"
    assert f"1 × line not UTF-8: {tmp_path / 'latin1.txt'}:2" in lines
    assert f"2 × record without a string in 'text': {tmp_path / 'records.jsonl'}:3, {tmp_path / 'records.jsonl'}:4" in lines


def test_many_skips_are_not_all_named():
    report = Report()
    for number in range(9):
        report.skip("bad", f"f:{number}")
    assert report.lines()[1] == "9 × bad: f:0, f:1, f:2, f:3, f:4, …"


@pytest.mark.parametrize("character", ["a", "é", "日", "🙂"])
def test_a_giant_line_is_cut_between_characters(character, tmp_path):
    """No line is held whole; no character is lost where a cut falls inside it."""
    text = "x" + character * (5 * data.PIECE // 2 // len(character.encode())) + "\nend\n"
    (tmp_path / "giant.txt").write_text(text)
    report = Report()
    pieces = list(data.read_documents([tmp_path / "giant.txt"], report))
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text.encode()) for piece in pieces) <= 2 * data.PIECE
    assert report.skipped == {f"line cut, over {data.PIECE:,} bytes": 2} and report.documents == 1


def test_a_giant_record_is_skipped_without_reading_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LONGEST_RECORD", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 5000}) + '\n{"text": "after"}\n')
    documents, report = read(tmp_path / "a.jsonl")
    assert documents == ["after"] and report.skipped == {"record over 1,000 bytes": 1}


def test_truncated_utf8_at_the_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n" + "日".encode()[:2])
    documents, report = read(tmp_path / "a.txt")
    assert documents == ["good\n"] and report.skipped == {"line not UTF-8": 1}


def test_refusals(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        data.find_files([tmp_path / "nothing.txt"])
    with pytest.raises(DataError, match="has no files ending in"):
        data.find_files([tmp_path])
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match="ends in '.pdf'; supported: .txt"):
        data.find_files([tmp_path / "a.pdf"])
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"hello" * 100)[:-9])
    with pytest.raises(DataError, match="a.txt.gz cannot be read"):
        read(tmp_path / "a.txt.gz")
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(tmp_path / "a.parquet")
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no column 'text'; columns: body"):
        read(tmp_path / "b.parquet")


def test_datasets_library(tmp_path):
    """A local data set, streamed; and one that is not there."""
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    report = Report()
    assert [piece.text for piece in data.read_dataset(str(folder), None, "train", report)] == ["one", "two"]
    with pytest.raises(DataError, match="cannot be opened"):
        list(data.read_dataset(str(tmp_path / "missing"), None, "train", report))


# Tokenizers


def test_tokenizer_is_lossless_and_reproducible(bpe, tmp_path):
    text = "Any text: naïve café, 日本語 🙂\n\ttabs  and   spaces \x01"
    assert bpe.decode(bpe(text, add_special_tokens=False)["input_ids"]) == text
    assert bpe.eos_token_id == 0 and bpe.pad_token_id == 1 and len(bpe) <= 300
    again = tokenizer.train(["The quick brown fox jumps over the lazy dog. äöü 日本語 " * 20], 300)
    assert again.backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()
    bpe.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = tokenizer.load(str(name))
        assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 1) and loaded(text)["input_ids"] == bpe(text)["input_ids"]
    with pytest.raises(DataError, match="vocab_size is 100; a byte-level tokenizer needs at least 258"):
        tokenizer.train(["x"], 100)
    with pytest.raises(DataError, match="no tokenizer could be loaded"):
        tokenizer.load(str(tmp_path / "missing"))


# Tokens on disk


def stored(directory, bpe, texts=("alpha beta", "gamma"), key="k", max_tokens=None):
    def pieces(report):
        report.documents += len(texts)
        return [data.Piece(text, True) for text in texts]

    manifest = data.store(directory, key, pieces, bpe, max_tokens)
    return data.load(directory), manifest


def test_packing_joins_documents_with_end_of_text(bpe, tmp_path):
    tokens, manifest = stored(tmp_path, bpe)
    expected = [*bpe("alpha beta")["input_ids"], 0, *bpe("gamma")["input_ids"], 0]
    assert tokens.tolist() == expected and tokens.dtype == np.uint16 and manifest["tokens"] == len(expected)
    assert not list(tmp_path.glob("*.partial"))


def test_a_long_document_ends_once(bpe, tmp_path):
    """Pieces of one document are joined without an end-of-text token between them."""
    (tmp_path / "a.txt").write_text("word word word\n" * 200_000)
    report = Report()
    ids = np.concatenate(list(data.encode(data.read_documents([tmp_path / "a.txt"], report), bpe)))
    assert (ids == 0).sum() == 1 and ids[-1] == 0
    assert bpe.decode(ids[:-1]) == "word word word\n" * 200_000


def test_groups_are_bounded(bpe, monkeypatch):
    """By characters and by number, whatever the documents' sizes; the tokens do not depend on them."""
    pieces = [data.Piece("alpha beta " * size, last=size % 2 == 0) for size in (1, 2, 30, 4, 5, 6, 70, 8)]
    whole = np.concatenate(list(data.encode(pieces, bpe)))
    monkeypatch.setattr(data, "GROUP", 100)
    monkeypatch.setattr(data, "GROUP_PIECES", 2)
    groups = list(data._groups(iter(pieces)))
    assert [len(group) for group in groups] == [2, 1, 2, 2, 1] and sum(groups, []) == pieces
    assert np.array_equal(np.concatenate(list(data.encode(pieces, bpe))), whole)


def test_store_is_limited_reused_and_guarded(bpe, tmp_path):
    tokens, _ = stored(tmp_path, bpe, max_tokens=5)
    assert len(tokens) == 5
    again, _ = stored(tmp_path, bpe, texts=["not read"])
    assert again.tolist() == tokens.tolist()
    with pytest.raises(DataError, match="holds the tokens of other data"):
        stored(tmp_path, bpe, key="other")


def test_interrupted_store_starts_over(bpe, tmp_path):
    def failing(report):
        yield data.Piece("alpha", True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.store(tmp_path, "k", failing, bpe, None)
    assert not (tmp_path / "manifest.json").exists()
    tokens, _ = stored(tmp_path, bpe)
    assert tokens[-1] == 0 and len(tokens) > 3


def test_key_follows_files_settings_and_tokenizer(bpe, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    first = data.source_key(["s"], [file], bpe)
    assert first == data.source_key(["s"], [file], bpe)
    assert first != data.source_key(["t"], [file], bpe)
    assert first != data.source_key(["s"], [file], tokenizer.train(["other"], 270))
    file.write_text("three")
    assert first != data.source_key(["s"], [file], bpe)


def test_blocks_cover_every_token_once_a_pass():
    tokens = np.arange(105, dtype=np.uint16)
    blocks = data.Blocks(tokens, 10, samples=25, seed=3)
    assert len(blocks) == 25
    order = [blocks.block(i) for i in range(20)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    sample = blocks[4]
    assert sample["input_ids"].tolist() == list(range(order[4] * 10, order[4] * 10 + 10)) and sample["input_ids"].dtype == torch.int64
    # any sample, in any order, from a fresh object
    assert all(torch.equal(data.Blocks(tokens, 10, 25, 3)[i]["input_ids"], blocks[i]["input_ids"]) for i in (17, 3, 24))
    assert [data.Blocks(tokens, 10, 25, 4).block(i) for i in range(10)] != order[:10]
    assert [data.Blocks(tokens, 10).block(i) for i in range(10)] == list(range(10))
    with pytest.raises(DataError, match="105 tokens, less than one block of 200"):
        data.Blocks(tokens, 200)
