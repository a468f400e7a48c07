"""English prose as token files for the comparisons of compare.py. No text is committed, only its recipe and hashes (corpus.json).

corpus.py fetch SOURCES       downloads the packages of corpus.json into SOURCES (apt-get, pip) and checks their sha256
                              Debian's mirrors keep the current versions; older ones are at snapshot.debian.org
corpus.py build SOURCES TEXT  cleans and deduplicates them into TEXT/text-NN.jsonl.xz, trains TEXT/tokenizer.json
corpus.py tokenise TEXT OUT   writes OUT/train.bin and OUT/val.bin (uint16), using every core
corpus.py files PATH... OUT   the same token files from The Pile (.jsonl, .jsonl.gz, .jsonl.zst), PG19 (.txt) or any such files

A document is a file of a package, or 200,000 characters of a longer one. A hash of its name decides whether it is validation text, so
the split does not change when sources are added, and no paragraph is in both: paragraphs are kept once.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

MANIFEST = Path(__file__).with_name("corpus.json")
VOCABULARY, EOS = 16384, "<eos>"
SECTION = 200_000  # characters of a document at most
ARCHIVE = 48 << 20  # bytes of text in one archive file: few enough files for xz's window, enough of them to decompress side by side
GROUP = 1 << 20  # characters that one process tokenises at a time
VALIDATION = 50  # one document of this many
SUFFIXES = (".html", ".htm", ".txt", ".text", ".rst", ".md", ".dict.dz")

_UNREAD = re.compile(r"(?is)<(script|style|nav|head|pre|footer)\b.*?</\1\s*>|<!--.*?-->")
_BLOCK = re.compile(r"(?i)</?(p|div|li|ul|ol|dl|dt|dd|td|th|tr|table|h[1-6]|br|section|article|blockquote|hr)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")
_BLANKS, _LINES, _PARAGRAPH = re.compile(r"[ \t\r\f\v\xa0]+"), re.compile(r"\s*\n\s*"), re.compile(r"\n\s*\n")
_LONG = re.compile(r"(?s).{1,2000}.*?(?:\n(?=\S)|\Z)")
_NOT_WORD = re.compile(r"[\W_]+")
_FREQUENT = re.compile(r"(?i)\b(?:the|of|and|to|a|in|is|for|that|it|be|as|with|or|are|this|on|by|not|an|you|if|his|was|from|can|we)\b")


def paragraphs(text: str, is_html: bool) -> Iterator[str]:
    """English prose of a file: paragraphs of at least 80 characters, three quarters letters, with the frequent words of English."""
    if is_html:
        text = _UNREAD.sub(" ", text).replace("\r", "")
        text = _LINES.sub(" ", text)
        text = html.unescape(_TAG.sub("", _BLOCK.sub("\n\n", text)))
    for paragraph in (part for block in _PARAGRAPH.split(text) for part in _cut(block)):
        paragraph = _BLANKS.sub(" ", paragraph).strip()
        if len(paragraph) < 80:
            continue
        letters = sum(map(str.isalpha, paragraph)) + paragraph.count(" ")
        frequent = sum(1 for _ in _FREQUENT.finditer(paragraph))
        if letters > 0.75 * len(paragraph) and frequent > 0.12 * (paragraph.count(" ") + 1):
            yield paragraph


def _cut(block: str) -> list[str]:
    """Dictionaries are one block: theirs are cut before the first unindented line after every 2000 characters."""
    return [block] if len(block) < 4000 else _LONG.findall(block)


def _decoded(name: str, raw: bytes) -> str:
    if name.endswith((".gz", ".dz")):
        raw = gzip.decompress(raw)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _wanted(name: str) -> bool:
    if "/_sources/" in name:  # Sphinx' sources beside its pages: the same text with other marks
        return False
    return name.lower().removesuffix(".gz").endswith(SUFFIXES) or "share/games/fortunes/" in name and "." not in Path(name).name


def _clean(package: Path) -> list[tuple[str, list[str]]]:
    """(name, paragraphs) of the readable files of a package, sorted by name."""
    if package.suffix == ".deb":
        unpacked = subprocess.Popen(["dpkg", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE)
        stream = tarfile.open(fileobj=unpacked.stdout, mode="r|")
        prefix = package.name.split("_")[0]
    else:
        stream, prefix = tarfile.open(package, mode="r|*"), package.name.rpartition("-")[0]
    found = []
    for member in stream:
        if not member.isreg() or not _wanted(member.name):
            continue
        kept = list(paragraphs(_decoded(member.name, stream.extractfile(member).read()), ".htm" in member.name.lower()))
        if kept:
            found.append((f"{prefix}/{member.name.removeprefix('./')}", kept))
    return sorted(found)


def documents(packages: list[Path], processes: int) -> Iterator[tuple[str, str]]:
    """(name, text) of every document, without paragraphs (by their letters) of earlier ones, in the order of the packages."""
    seen = set()
    with get_context("spawn").Pool(processes) as pool:
        for files in pool.imap(_clean, packages):
            for name, found in files:
                kept = []
                for paragraph in found:
                    key = hashlib.blake2b(_NOT_WORD.sub("", paragraph).lower().encode("utf-8", "replace"), digest_size=8).digest()
                    if key not in seen:
                        seen.add(key)
                        kept.append(paragraph)
                yield from _sections(name, kept)


def _sections(name: str, kept: list[str]) -> Iterator[tuple[str, str]]:
    section, size, count = [], 0, 0
    for paragraph in kept:
        if size and size + len(paragraph) > SECTION:
            yield f"{name}#{count}", "\n\n".join(section)
            section, size, count = [], 0, count + 1
        section.append(paragraph)
        size += len(paragraph) + 2
    if section:
        yield f"{name}#{count}", "\n\n".join(section)


def _hash(name: str, salt: bytes = b"") -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8, salt=salt).digest(), "big")


def is_validation(name: str) -> bool:
    return _hash(name) % VALIDATION == 0


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def fetch(sources: Path, record: bool) -> None:
    """Downloads the packages of corpus.json; ``record`` takes the newest versions and writes theirs into it."""
    manifest = json.loads(MANIFEST.read_text())
    sources.mkdir(parents=True, exist_ok=True)
    for package in manifest["packages"]:
        name, debian = package["name"], package["from"] == "debian"
        version = None if record else package["version"]
        if debian:
            command = ["apt-get", "download", "-qq", name if version is None else f"{name}={version}"]
        else:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
            command.append(name if version is None else f"{name}=={version}")
        there = _package_file(sources, name, debian)
        if there is None:
            subprocess.run(command, cwd=sources, check=True)
            there = _package_file(sources, name, debian)
        if record:
            package |= {"version": _version(there, debian), "sha256": sha256(there), "licences": _licences(there, debian)}
        elif sha256(there) != package["sha256"]:
            raise SystemExit(f"{there}: the sha256 is not that of corpus.json; another version would be another corpus")
    if record:
        MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n")


def _package_file(sources: Path, name: str, debian: bool) -> Path | None:
    return next(iter(sorted(sources.glob(f"{name}_*.deb" if debian else f"{name}-*.tar.gz"))), None)


def _version(package: Path, debian: bool) -> str:
    if debian:
        return subprocess.run(["dpkg-deb", "-f", str(package), "Version"], capture_output=True, text=True, check=True).stdout.strip()
    return package.name.removesuffix(".tar.gz").rpartition("-")[2]


def _licences(package: Path, debian: bool) -> list[str]:
    """The names after ``License:`` in debian/copyright or PKG-INFO; where there are none, what common-licenses the text refers to."""
    if debian:
        tar = subprocess.run(["dpkg", "--fsys-tarfile", str(package)], capture_output=True, check=True).stdout
        stream, ends = tarfile.open(fileobj=io.BytesIO(tar)), ("/copyright",)
    else:
        stream, ends = tarfile.open(package), ("/PKG-INFO", "/COPYING", "/LICENSE.txt")
    text = "".join(
        stream.extractfile(member).read().decode("utf-8", "replace") for member in stream if member.isreg() and member.name.endswith(ends)
    )
    named = {name.strip() for name in re.findall(r"(?mi)^License: *([\w][^\n]*)", text) if len(name) <= 40}
    return sorted(named or set(re.findall(r"common-licenses/([\w.+-]+\w)", text)) or {"see debian/copyright" if debian else "see COPYING"})


def build(sources: Path, text: Path, processes: int, limit: int, record: bool) -> None:
    """Writes the archive; ``record`` writes its hashes into corpus.json, otherwise they must be those that are there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    manifest = json.loads(MANIFEST.read_text())
    packages = [_package_file(sources, package["name"], package["from"] == "debian") for package in manifest["packages"]]
    by_name = {package["name"]: package for package in manifest["packages"]}
    text.mkdir(parents=True, exist_ok=True)
    characters = dict.fromkeys(by_name, 0)
    found, size = [], 0
    for name, document in documents(packages, processes):
        found.append((name, document))
        characters[name.partition("/")[0]] += len(document)
        size += len(document.encode("utf-8", "replace"))
    if size > limit:  # the archive travels in a parcel of limited size: whole documents go, chosen by a hash of their names
        keep = limit / size
        found = [item for item in found if _hash(item[0], b"trim") < keep * 2**64]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((document for _, document in found[::4]), trainer)
    tokenizer.save(str(text / "tokenizer.json"))
    digest, parts, part, filled = hashlib.sha256(), [], [], 0
    for name, document in found:
        line = json.dumps({"name": name, "text": document}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        digest.update(line)
        part.append(line)
        filled += len(line)
        if filled >= ARCHIVE:
            parts.append(b"".join(part))
            part, filled = [], 0
    parts.append(b"".join(part))
    with ThreadPoolExecutor(processes) as pool:
        for index, packed in enumerate(pool.map(lambda raw: lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME), parts)):
            (text / f"text-{index:02}.jsonl.xz").write_bytes(packed)
    result = {
        "documents": len(found),
        "characters": sum(len(document) for _, document in found),
        "sha256": digest.hexdigest(),
        "tokenizer_sha256": sha256(text / "tokenizer.json"),
    }
    if record:
        for name, count in characters.items():
            by_name[name]["characters"] = count
        MANIFEST.write_text(json.dumps(manifest | {"text": result}, indent=1) + "\n")
    elif result != manifest.get("text"):
        raise SystemExit(f"{text} is another corpus than that of corpus.json: {result}")


def read_archive(text: Path) -> Iterator[tuple[str, str]]:
    with ThreadPoolExecutor() as pool:  # lzma releases the interpreter lock
        for raw in pool.map(lambda path: lzma.decompress(path.read_bytes()), sorted(text.glob("text-*.jsonl.xz"))):
            for line in io.BytesIO(raw):
                record = json.loads(line)
                yield record["name"], record["text"]


def read_files(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Documents of .txt files (one each) and of the field "text" of .jsonl, .jsonl.gz, .jsonl.zst, .jsonl.xz lines, in sections."""
    for path in sorted(below for given in paths for below in ([given] if given.is_file() else given.rglob("*")) if below.is_file()):
        if path.suffix == ".txt":
            texts = [path.read_text(encoding="utf-8", errors="replace")]
        elif ".jsonl" in path.suffixes:
            texts = (json.loads(line)["text"] for line in _opened(path))
        else:
            continue
        for index, document in enumerate(texts):
            yield from _sections(f"{path.name}:{index}", document.split("\n\n"))


def _opened(path: Path):
    if path.suffix == ".zst":
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb")))
    return {".gz": gzip.open, ".xz": lzma.open, ".jsonl": open}[path.suffix](path, "rb")


def _start(tokenizer: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is faster than threads
    from tokenizers import Tokenizer

    global _tokenizer, _eos
    _tokenizer = Tokenizer.from_file(tokenizer)
    _eos = _tokenizer.token_to_id(EOS)


def _encode(group: list[tuple[str, str]]) -> list[tuple[bool, bytes]]:
    encoded = _tokenizer.encode_batch_fast([document for _, document in group])
    return [
        (is_validation(name), np.array([*ids.ids, _eos], dtype=np.uint16).tobytes()) for (name, _), ids in zip(group, encoded, strict=True)
    ]


def _groups(found: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    group, size = [], 0
    for name, document in found:
        group.append((name, document))
        size += len(document)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def tokenise(found: Iterable[tuple[str, str]], tokenizer: Path, out: Path, processes: int) -> dict[str, object]:
    """Writes train.bin and val.bin; returns their sizes in tokens and hashes, which tokens.json holds too."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "train.bin").open("wb") as train, (out / "val.bin").open("wb") as val:
        with get_context("spawn").Pool(processes, _start, (str(tokenizer),)) as pool:
            for group in pool.imap(_encode, _groups(found)):
                for validation, ids in group:
                    (val if validation else train).write(ids)
    result = {
        name: {"tokens": (out / f"{name}.bin").stat().st_size // 2, "sha256": sha256(out / f"{name}.bin")} for name in ("train", "val")
    } | {"vocabulary": len(json.loads(tokenizer.read_text())["model"]["vocab"]), "tokenizer_sha256": sha256(tokenizer)}
    (out / "tokens.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("fetch")
    add.add_argument("sources", type=Path)
    add.add_argument("--record", action="store_true", help="take the newest versions and write them into corpus.json")
    add = commands.add_parser("build")
    add.add_argument("sources", type=Path)
    add.add_argument("text", type=Path)
    add.add_argument("--record", action="store_true", help="write the hashes into corpus.json instead of comparing")
    add.add_argument("--limit", type=int, default=1 << 40, help="bytes of text at most")
    add = commands.add_parser("tokenise")
    add.add_argument("text", type=Path)
    add.add_argument("out", type=Path)
    add = commands.add_parser("files")
    add.add_argument("paths", type=Path, nargs="+")
    add.add_argument("out", type=Path)
    add.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json of at most 65,536 tokens, with <eos>")
    for add in commands.choices.values():
        add.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    match options.command:
        case "fetch":
            fetch(options.sources, options.record)
        case "build":
            build(options.sources, options.text, options.processes, options.limit, options.record)
        case "tokenise":
            print(json.dumps(tokenise(read_archive(options.text), options.text / "tokenizer.json", options.out, options.processes)))
        case "files":
            print(json.dumps(tokenise(read_files(options.paths), options.tokenizer, options.out, options.processes)))


if __name__ == "__main__":
    main()
