"""Text to packed tokens: bad data is counted and reported or refused, and the order of samples is a function of the seed."""

from __future__ import annotations

import gzip
import json
import re
import time

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from flashmhf_recipes import data, documents, tokenizer
from flashmhf_recipes.documents import DataError, Report


def read(*paths, **kwargs) -> tuple[list[str], Report]:
    """The documents' texts, put together again."""
    report, texts, parts = Report(), [], []
    for piece in documents.read_documents(documents.find_files(paths, report), report, **kwargs):
        parts.append(piece.text)
        if piece.last:
            texts.append("".join(parts))
            parts = []
    assert not parts and len(texts) == report.documents
    return texts, report


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
    texts, report = read(tmp_path)
    assert texts == ["one\ntwo\n", "three", "four\nfive", "six", "seven"]
    assert report.files == 4
    assert dict(report.skipped) == {"record without a string in 'text'": 1, "record with empty text": 1, "file ending in '.bin'": 1}


def write_zst(path, text: bytes) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
        out.write(text)


def test_further_formats(tmp_path):
    """Suffixes in capitals, CSV, zstandard and both Arrow formats are read; what is not is counted by suffix."""
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "a.TXT").write_text("capitals")
    (tmp_path / "b.csv").write_bytes(
        '\ufefftext,id\n"one, ""two""\nthree",1\n\n,2\nf\xfcr,3\n'.encode("utf-8-sig")[3:] + b"\xff,4\nlast,5\n"
    )
    write_zst(tmp_path / "c.jsonl.zst", b'{"text": "four"}\n{"text": "five"}\n')
    write_zst(tmp_path / "d.Txt.ZST", b"six\n" * 100_000)
    table = pyarrow.table({"id": [1, 2], "text": ["seven", "eight"]})
    for name, writer in (("e.arrow", pyarrow.ipc.new_stream), ("f.arrow", pyarrow.ipc.new_file)):
        with writer(str(tmp_path / name), table.schema) as out:
            out.write_table(table)
    (tmp_path / "folder").mkdir()
    for name in ("x.json", "y.json", "README", "folder/z.pdf", "w.parquet.gz"):
        (tmp_path / name).write_text("{}")
    texts, report = read(tmp_path)
    assert texts == ["capitals", 'one, "two"\nthree', "für", "last", "four", "five", "six\n" * 100_000, "seven", "eight", "seven", "eight"]
    assert report.files == 6
    assert dict(report.skipped) == {
        "record with empty text": 1,
        "record not UTF-8": 1,
        "file ending in '.json'": 2,
        "file without a suffix": 1,
        "file ending in '.pdf'": 1,
        "file ending in '.gz'": 1,
    }
    assert f"1 × record not UTF-8: {tmp_path / 'b.csv'}:7" in report.lines()


def test_records_that_no_tokenizer_takes(tmp_path, bpe):
    """JSON can write unpaired surrogates and endless integers; such a record is left out, and its file and line are named."""
    lines = [r'{"text": "good"}', r'{"text": "\ud800"}', '{"text": "x", "n": ' + "1" * 5000 + "}", r'{"text": "\ud83d\ude42 paired"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, report = read(tmp_path / "a.jsonl")
    assert texts == ["good", "🙂 paired"] and report.skipped == {"record not UTF-8": 1, "record not JSON": 1}
    assert report.lines()[2] == f"1 × record not UTF-8: {tmp_path / 'a.jsonl'}:2"
    assert len(bpe(texts)["input_ids"]) == 2


def test_table_with_text_that_is_not_utf8(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array([b"one", b"\xff", b"two"]).view(pyarrow.string())
    table = pyarrow.table({"text": column})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as out:
        out.write_table(table)
    texts, report = read(tmp_path / "a.arrow")
    assert texts == ["one", "two"] and report.places == {"record not UTF-8": [f"{tmp_path / 'a.arrow'}:2"]}


def test_a_megabyte_of_spaces_is_no_document(tmp_path):
    (tmp_path / "a.txt").write_text(" \n" * documents.PIECE)
    (tmp_path / "b.txt").write_text("text")
    texts, report = read(tmp_path)
    assert texts == ["text"] and report.skipped == {"file without text": 1}


def test_a_file_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert read(tmp_path, tmp_path / "a.txt", tmp_path / "." / "a.txt")[0] == ["one"]


def test_text_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "yes", "text": "no"}\n')
    assert read(tmp_path / "a.jsonl", text_field="content")[0] == ["yes"]


def test_bad_files_are_counted_and_named(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\0\0\0")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin1.txt").write_bytes("first\ncaf\xe9\nlast\n".encode("latin1"))
    (tmp_path / "records.jsonl").write_bytes(b'{"text": "good"}\n{"text": \n["list"]\n{"text": 3}\n{"text": "\xff"}\n{"text": ""}\n')
    (tmp_path / "link.txt").symlink_to(tmp_path / "nothing.txt")
    texts, report = read(tmp_path)
    assert texts == ["first\nlast\n", "good"]
    assert dict(report.skipped) == {
        "binary file": 1,
        "file without text": 1,
        "empty file": 1,
        "line not UTF-8": 1,
        "link to nothing": 1,
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
    text = "x" + character * (5 * documents.PIECE // 2 // len(character.encode())) + "\nend\n"
    (tmp_path / "giant.txt").write_text(text)
    report = Report()
    pieces = list(documents.read_documents([tmp_path / "giant.txt"], report))
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text.encode()) for piece in pieces) <= 2 * documents.PIECE
    assert report.skipped == {f"line cut, over {documents.PIECE:,} bytes": 2} and report.documents == 1


def test_a_giant_record_is_skipped_without_reading_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LONGEST_RECORD", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 5000}) + '\n{"text": "after"}\n')
    texts, report = read(tmp_path / "a.jsonl")
    assert texts == ["after"] and report.skipped == {"record over 1,000 bytes": 1}


def test_truncated_utf8_at_the_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n" + "日".encode()[:2])
    texts, report = read(tmp_path / "a.txt")
    assert texts == ["good\n"] and report.skipped == {"line not UTF-8": 1}


def test_refusals(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        documents.find_files([tmp_path / "nothing.txt"])
    with pytest.raises(DataError, match="has no files ending in"):
        documents.find_files([tmp_path])
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match="ends in '.pdf'; supported: .txt"):
        documents.find_files([tmp_path / "a.pdf"])
    (tmp_path / "a.csv").write_text("body\nx\n")
    with pytest.raises(DataError, match="a.csv has no column 'text'; columns: body"):
        read(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(tmp_path / "a.parquet")
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no column 'text'; columns: body"):
        read(tmp_path / "b.parquet")


@pytest.mark.parametrize("damage", ["cut", "overwritten", "first bytes"])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_damaged_files_are_refused_by_name(name, damage, tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path = tmp_path / name
    lines = "".join(json.dumps({"text": f"number {i * i} of many"}) + "\n" for i in range(20_000))
    table = pyarrow.table({"text": lines.splitlines()})
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith(".zst"):
        write_zst(path, lines.encode())
    elif name.endswith(".parquet"):
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "overwritten":
        middle = len(content) // 2 if name.endswith(("gz", "zst")) else len(content) - 40
        content[middle : middle + 30] = b"\xff" * 30
    else:
        content[:8] = b"\xffnothing"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name} (cannot be read|is not a readable)"):
        read(path)


def test_datasets_library(tmp_path):
    """A local data set, streamed; and one that is not there."""
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    report = Report()
    assert [piece.text for piece in documents.read_dataset(str(folder), None, "train", report)] == ["one", "two"]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(100)))
    orders = [list(data.dataset(str(folder), seed=seed).texts(1000)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(map(int, orders[2])) == list(range(100))
    with pytest.raises(DataError, match="cannot be read"):
        list(documents.read_dataset(str(tmp_path / "missing"), None, "train", report))


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
    bpe.model_max_length = 64
    bpe.save_pretrained(tmp_path)
    assert tokenizer.load(str(tmp_path)).model_max_length == 64
    with pytest.raises(ValueError, match="vocab_size is 100; a byte-level tokenizer needs at least 258"):
        tokenizer.train(["x"], 100)
    with pytest.raises(DataError, match="no tokenizer could be loaded"):
        tokenizer.load(str(tmp_path / "missing"))


@pytest.mark.parametrize("text", ["ab" * 500_000, " " * 1_000_000, "x" * 300 + " y " + "z" * 300], ids=["word", "spaces", "two words"])
def test_long_words_do_not_stop_tokenizer_training(text):
    """Its time is quadratic in a word's length: 100 kB took seconds, 1 MB minutes."""
    parts = tokenizer._parts(text)
    assert "".join(parts) == text and max(map(len, parts)) <= tokenizer.LONGEST_WORD
    start = time.process_time()
    trained = tokenizer.train([text], 300)
    assert time.process_time() - start < 5
    assert trained.decode(trained(text[:700])["input_ids"]) == text[:700]


def test_ordinary_text_is_not_cut():
    assert tokenizer._parts("Any words\n\nof " + "x" * 255 + " letters") == ["Any words\n\nof " + "x" * 255 + " letters"]


# Tokens on disk


def stored(directory, bpe, texts=("alpha beta", "gamma"), max_tokens=None):
    def read(report):
        report.documents += len(texts)
        return [documents.Piece(text, True) for text in texts]

    manifest = data.store(directory, data.Stream(read), bpe, max_tokens)
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
    ids = np.concatenate(list(data.encode(documents.read_documents([tmp_path / "a.txt"], report), bpe)))
    assert (ids == 0).sum() == 1 and ids[-1] == 0
    assert bpe.decode(ids[:-1]) == "word word word\n" * 200_000


def test_groups_are_bounded(bpe, monkeypatch):
    """By characters and by number, whatever the documents' sizes; the tokens do not depend on them."""
    pieces = [documents.Piece("alpha beta " * size, last=size % 2 == 0) for size in (1, 2, 30, 4, 5, 6, 70, 8)]
    whole = np.concatenate(list(data.encode(pieces, bpe)))
    monkeypatch.setattr(data, "GROUP", 100)
    monkeypatch.setattr(data, "GROUP_PIECES", 2)
    groups = list(data._groups(iter(pieces)))
    assert [len(group) for group in groups] == [2, 1, 2, 2, 1] and sum(groups, []) == pieces
    assert np.array_equal(np.concatenate(list(data.encode(pieces, bpe))), whole)


def test_store_is_limited_and_reused(bpe, tmp_path):
    tokens, manifest = stored(tmp_path, bpe, max_tokens=5)
    assert len(tokens) == 5 and manifest["report"][-1] == "using 5 tokens; what follows was not read"
    again, _ = stored(tmp_path, bpe, texts=["not read"])
    assert again.tolist() == tokens.tolist()


def test_interrupted_store_starts_over(bpe, tmp_path):
    def failing(report):
        yield documents.Piece("alpha", True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.store(tmp_path, data.Stream(failing), bpe, None)
    assert not (tmp_path / "manifest.json").exists()
    tokens, _ = stored(tmp_path, bpe)
    assert tokens[-1] == 0 and len(tokens) > 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """300 documents in three files whose names sort as their contents, and a long one; the words say which is which."""
    folder = tmp_path_factory.mktemp("corpus")
    for letter in "abc":
        rows = [json.dumps({"text": f"{letter}{i} " + f"{letter} word {i} " * (1 + i % 7)}) for i in range(100)]
        (folder / f"{letter}.jsonl").write_text("\n".join(rows))
    (folder / "d.txt").write_text("long document\n" * 200)
    return folder


def texts_of(tokens, bpe) -> list[str]:
    """The documents of stored tokens."""
    ends = np.flatnonzero(tokens == 0)
    return [bpe.decode(part[part != 0]) for part in np.split(tokens, ends + 1) if len(part)]


def test_documents_are_drawn_from_all_files(corpus, bpe, tmp_path):
    """A part of the tokens is a random part of the documents; the seed fixes it, and a line says what it is a part of."""
    kept = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        manifest = data.store(tmp_path / name, data.Files([corpus], seed=seed), bpe, 2000)
        kept[name] = data.load(tmp_path / name)
        assert len(kept[name]) == manifest["tokens"] == 2000
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["manifest.json", "tokens.bin"]
    assert kept["a"].tolist() == kept["b"].tolist() != kept["c"].tolist()
    first_letters = {text[0] for text in texts_of(kept["a"], bpe)}
    assert first_letters >= {"a", "b", "c"}
    whole = data.store(tmp_path / "all", data.Files([corpus]), bpe, None)
    assert whole["report"] == [
        "read 4 files, 301 documents",
        f"using all {whole['tokens']:,} tokens, their documents in an order drawn with seed 0",
    ]
    line = json.loads((tmp_path / "a" / "manifest.json").read_text())["report"][-1]
    part, everything, used = re.fullmatch(
        r"using ([\d,]+) of about ([\d,]+) tokens: (\d+) of 301 documents, drawn with seed 0", line
    ).groups()
    assert part == "2,000" and int(used) == len(texts_of(kept["a"], bpe))
    assert int(everything.replace(",", "")) == pytest.approx(whole["tokens"], rel=0.3)
    tokens = data.load(tmp_path / "all")
    everywhere = texts_of(tokens, bpe)
    assert sorted(everywhere) == sorted(read(corpus)[0]) and everywhere != read(corpus)[0]
    # the part is the beginning of the whole in the same order
    assert tokens[:2000].tolist() == kept["a"].tolist()


def test_one_long_document_is_not_tokenised_whole(bpe, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 1000)
    monkeypatch.setattr(data, "GROUP", 2000)
    (tmp_path / "a.txt").write_text("word word word\n" * 20_000)
    counted = []
    source = data.Files([tmp_path / "a.txt"])
    count, line = source.write(tmp_path / "tokens", bpe, np.dtype(np.uint16), 500, counted.append)
    assert count == 500 and sum(counted) < 5000 and line.startswith("using 500 of about ")


def test_estimates_that_are_too_low_are_made_up_for(corpus, bpe, tmp_path):
    """Characters a token of the sampled beginnings may mislead; tokens asked for are delivered while there are documents."""
    source = data.Files([corpus])
    source._sample = ["x"] * 5  # an end-of-text token each: half a character a token
    count, _ = source.write(tmp_path / "few", bpe, np.dtype(np.uint16), 3000, lambda _: None)
    assert count == 3000


def test_files_that_change_while_they_are_read_are_noticed(bpe, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    source = data.Files([path])
    path.write_text('{"text": "one"}\n')
    with pytest.raises(DataError, match="have changed while they were read: 1 documents instead of 2"):
        data.store(tmp_path / "data", source, bpe, None)


def test_the_tokenizer_sees_documents_of_all_files(corpus):
    assert {text[0] for text in data.Files([corpus]).texts(1000)} >= {"a", "b", "c"}
    assert len(list(data.Files([corpus]).texts(10**9))) == 301


def test_nothing_to_read(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="no text is left to train on: read 1 files, 0 documents; 1 × empty file"):
        data.Files([tmp_path])


@pytest.mark.parametrize(
    ("sizes", "held_out", "length", "expected"),
    [
        ([10] * 10, 20, 5, 80),  # on a document
        ([10] * 10, 25, 5, 80),  # the next one
        ([70, 10, 17, 3], 20, 5, 80),
        ([70, 27, 3], 20, 10, 70),  # the one before, since 3 tokens are no block
        ([50, 50], 20, 5, 80),  # none near: inside one
        ([100], 20, 5, 80),
        ([95, 5], 8, 4, 95),
    ],
)
def test_held_out_tokens_begin_with_a_document(sizes, held_out, length, expected):
    tokens = np.ones(sum(sizes), np.uint16)
    tokens[np.cumsum(sizes) - 1] = 0
    assert data.held_out_start(tokens, held_out, length, 0) == expected


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
