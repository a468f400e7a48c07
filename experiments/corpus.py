"""Source code and English prose as token files for the comparisons of compare.py. corpus.json has their recipe and
hashes, no text.

corpus.py fetch SOURCES            downloads the packages of corpus.json into SOURCES (apt-get, pip, npm) and checks their sha256
                                   Debian's mirrors keep the current versions; older ones are at snapshot.debian.org
corpus.py build SOURCES TEXT       cleans and deduplicates them, trains the tokenizer and writes the pieces TEXT/00, TEXT/01, ...
corpus.py tokenise TEXT OUT        writes OUT/train-NN.bin of the pieces that TEXT has and OUT lacks (uint16), using every core
corpus.py files PATH... OUT        the same token files from The Pile (.jsonl, .jsonl.gz, .jsonl.zst), PG19 (.txt) or any such files

A document is a file of a package. A hash of its name decides whether it is validation text (only files of at most
200,000 characters are), so the split does not change when sources are added. Paragraphs of prose and large blocks of
code are kept once, so none is in both parts.

Every piece is a fair sample of the training text: sections of prose and folders of code are spread over the pieces by a
hash. A prefix of the pieces is a smaller corpus of the same kind. Piece 00 also holds the tokenizer and the validation
text, prose and code apart.
"""

from __future__ import annotations

import argparse
import bz2
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
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import IO

import numpy as np

MANIFEST = Path(__file__).with_name("corpus.json")
VOCABULARY, EOS = 16384, "<eos>"
SECTION = 200_000  # characters of a document at most
ARCHIVE = 32 << 20  # bytes of text in one compressed file: the files of a piece unpack side by side
GROUP = 1 << 20  # characters that one process tokenises at a time
VALIDATION = {"prose": 50, "code": 250}  # one document of this many
SAMPLE = 32  # one document of this many trains the tokenizer
BLOCK = 160  # characters of a block of code that is kept once; shorter ones repeat as idioms do
PROSE = (".html", ".htm", ".txt", ".text", ".rst", ".md", ".pod", ".dict.dz")
CODE = tuple(
    ".c .h .cc .cpp .cxx .hh .hpp .hxx .inl .ipp .cu .m .mm .S .java .go .rs .py .pyx .pxd .js .mjs .jsx .ts .tsx .php .pas .pp .inc "
    ".el .lisp .scm .ml .mli .erl .hrl .pl .pm .sh .adb .ads .vim .lua .rb .hs .y .awk".split()
)
# _sources: Sphinx' text beside its pages
SKIPPED = ("/testsuite/", "/_sources/", ".min.js", "/locale/", "/locales/", "/i18n/")

_UNREAD = re.compile(r"(?is)<(script|style|nav|head|pre|footer)\b.*?</\1\s*>|<!--.*?-->")
_TAGS_OF_BLOCKS = re.compile(
    r"(?i)</?(p|div|li|ul|ol|dl|dt|dd|td|th|tr|table|h[1-6]|br|section|article|blockquote|hr)\b[^>]*>"
)
_TAG = re.compile(r"<[^>]*>")
_BLANKS, _LINES, _PARAGRAPH = re.compile(r"[ \t\r\f\v\xa0]+"), re.compile(r"\s*\n\s*"), re.compile(r"\n\s*\n")
_LONG = re.compile(r"(?s).{1,2000}.*?(?:\n(?=\S)|\Z)")
_NOT_WORD = re.compile(r"[\W_]+")
_FREQUENT = re.compile(
    r"(?i)\b(?:the|of|and|to|a|in|is|for|that|it|be|as|with|or|are|this|on|by|not|an|you|if|his|was|from|can|we)\b"
)
_GENERATED = re.compile(
    rb"(?i)do not (?:edit|modify)|auto-?(?:matically)?[ -]?generated|@generated|generated (?:by|from)"
)
_LETTERS, _DIGITS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", b"0123456789"
_SOURCES = re.compile(r"usr/src/([^/]+/)?[^/]+\.tar\.[gx]z$|/lib/src\.zip$")
_EMPTY = re.compile(r"\n{3,}")

Part = tuple[bytes | None, str]  # a paragraph or block and the hash by which it is kept once


def paragraphs(text: str, is_html: bool) -> Iterator[str]:
    """English prose of a file:

    paragraphs of at least 80 characters, three quarters letters, with the frequent words of English.
    """
    if is_html:
        text = _UNREAD.sub(" ", text).replace("\r", "")
        text = _LINES.sub(" ", text)
        text = html.unescape(_TAG.sub("", _TAGS_OF_BLOCKS.sub("\n\n", text)))
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


def blocks(raw: bytes) -> list[str]:
    """The blocks of a source file between empty lines;

    none for minified, generated, binary and very long files and for tables.
    """
    lines = raw.count(b"\n") + 1
    if not 200 <= len(raw) <= 1_000_000 or len(raw) > 120 * lines or b"\0" in raw or _GENERATED.search(raw, 0, 2000):
        return []
    marks = raw.translate(None, b" \t\r\n")
    letters, digits = (len(marks) - len(marks.translate(None, kind)) for kind in (_LETTERS, _DIGITS))
    if (
        letters < 0.55 * len(marks)
        or digits > 0.15 * len(marks)
        or lines > 100
        and raw.count(b"\n#define ") > 0.6 * lines
    ):
        return []
    text = "\n".join(map(str.rstrip, _decoded(raw).split("\n")))
    return _EMPTY.sub("\n\n", text).strip("\n").split("\n\n")


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()


def kind_of(name: str) -> str | None:
    """ "prose" or "code" by the suffix of a file; None for what is not read."""
    if any(part in name for part in SKIPPED):
        return None
    bare = name.removesuffix(".gz")
    if bare.lower().endswith(PROSE) or "share/games/fortunes/" in name and "." not in Path(name).name:
        return "prose"
    return "code" if bare.endswith(CODE) else None


def members(name: str, stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """(path, content) of the readable files of an archive and of the source archive that a Debian package holds."""
    if name.endswith((".zip", ".whl")):
        with zipfile.ZipFile(io.BytesIO(stream.read())) as archive:
            yield from ((entry, archive.read(entry)) for entry in archive.namelist() if kind_of(entry))
        return
    archive = tarfile.open(fileobj=stream, mode="r|*")
    for member in archive:
        if member.isreg() and _SOURCES.search(member.name):
            yield from members(member.name, archive.extractfile(member))
        elif member.isreg() and kind_of(member.name):
            yield member.name.removeprefix("./"), archive.extractfile(member).read()


def _clean(package: tuple[str, Path]) -> list[tuple[str, str, list[Part]]]:
    """(name, kind, parts) of the readable files of a package, sorted by name."""
    prefix, path = package
    if path.suffix == ".deb":
        unpacked = subprocess.Popen(["dpkg", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE)
        stream = unpacked.stdout
    else:
        stream = path.open("rb")
    found = []
    with stream:
        for name, raw in members("data.tar" if path.suffix == ".deb" else path.name, stream):
            kind = kind_of(name)
            if name.endswith((".gz", ".dz")):
                raw = gzip.decompress(raw)
            if kind == "prose":
                kept = [
                    (_digest(_NOT_WORD.sub("", each).lower()), each)
                    for each in paragraphs(_decoded(raw), ".htm" in name.lower())
                ]
            else:
                kept = [(_digest(each) if len(each) >= BLOCK else None, each) for each in blocks(raw)]
            if kept:
                found.append((f"{prefix}/{name}", kind, kept))
    return sorted(found, key=lambda item: item[0])


def documents(packages: list[tuple[str, Path]], processes: int) -> Iterator[tuple[str, str, str]]:
    """(name, kind, text) of every document in the order of the packages, without paragraphs (by their letters) and
    blocks of earlier ones.

    A source file most of which was there before is a copy, and what is left of it says nothing: it goes whole.
    """
    seen = set()
    with get_context("spawn").Pool(processes) as pool:
        for files in pool.imap(_clean, packages):
            for name, kind, found in files:
                kept = []
                for key, part in found:
                    if key is None or key not in seen:
                        kept.append(part)
                    if key is not None:
                        seen.add(key)
                if kind == "prose":
                    yield from ((section, kind, text) for section, text in _sections(name, kept))
                elif 2 * sum(map(len, kept)) > sum(len(part) for _, part in found):
                    yield name, kind, "\n\n".join(kept) + "\n"


def _sections(name: str, kept: list[str]) -> Iterator[tuple[str, str]]:
    """The name is the file's where it is one section, otherwise NAME#0, NAME#1, ..."""
    sections, size = [[]], 0
    for paragraph in kept:
        if size and size + len(paragraph) > SECTION:
            sections.append([])
            size = 0
        sections[-1].append(paragraph)
        size += len(paragraph) + 2
    for count, section in enumerate(sections if kept else []):
        yield name if len(sections) == 1 else f"{name}#{count}", "\n\n".join(section)


def _hash(name: str, salt: bytes = b"") -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8, salt=salt).digest(), "big")


def is_validation(name: str, kind: str) -> bool:
    return "#" not in name and _hash(name) % VALIDATION[kind] == 0


def piece_of(name: str, kind: str, pieces: int) -> int:
    """Folders of code stay together, since files of one folder compress best side by side."""
    return _hash(name if kind == "prose" else name.rpartition("/")[0], b"piece") % pieces


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# What a client's download command is called with, and the name of the file that it leaves.
_WHEELS = "--only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --platform any".split()
_WHEELS += [f"--platform=manylinux{version}_x86_64" for version in ("2014", "_2_17", "_2_24", "_2_27", "_2_28")]
_PIP = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]


def _download(name: str, source: str, version: str | None) -> list[str]:
    match source:
        case "debian":
            return ["apt-get", "download", "-qq", name if version is None else f"{name}={version}"]
        case "npm":
            return ["npm", "pack", "--silent", name if version is None else f"{name}@{version}"]
        case "pypi" | "sdist":
            options = _WHEELS if source == "pypi" else ["--no-binary", ":all:"]
            return [*_PIP, *options, name if version is None else f"{name}=={version}"]
    raise ValueError(f"{name} is from {source!r}; supported: debian, npm, pypi, sdist")


def _package_file(sources: Path, name: str, source: str) -> Path | None:
    bare = {"npm": name.removeprefix("@").replace("/", "-"), "pypi": name.replace("-", "_")}.get(source, name)
    pattern = {
        "debian": f"{bare}_*.deb",
        "npm": f"{bare}-[0-9]*.tgz",
        "pypi": f"{bare}-*.whl",
        "sdist": f"{bare}-*.tar.gz",
    }[source]
    return next(iter(sorted(sources.glob(pattern))), None)


def fetch(sources: Path, record: bool) -> None:
    """Downloads the packages of corpus.json; ``record`` takes the newest versions and writes theirs into it."""
    manifest = json.loads(MANIFEST.read_text())
    sources.mkdir(parents=True, exist_ok=True)
    for package in manifest["packages"]:
        name, source = package["name"], package["from"]
        there = _package_file(sources, name, source)
        if there is None:
            command = _download(name, source, None if record else package["version"])
            subprocess.run(command, cwd=sources, check=True, stdout=subprocess.DEVNULL)
            there = _package_file(sources, name, source)
        if record:
            package |= {
                "version": _version(there, source),
                "sha256": sha256(there),
                "licences": _licences(there, source),
            }
        elif sha256(there) != package["sha256"]:
            raise SystemExit(f"{there}: the sha256 is not that of corpus.json; another version would be another corpus")
    if record:
        write_manifest(manifest)


def write_manifest(manifest: dict) -> None:
    """A line a package."""
    lines = ",\n".join("  " + json.dumps(package, ensure_ascii=False) for package in manifest["packages"])
    rest = "".join(f',\n "{key}": {json.dumps(value)}' for key, value in manifest.items() if key != "packages")
    MANIFEST.write_text(f'{{\n "packages": [\n{lines}\n ]{rest}\n}}\n')


def _version(package: Path, source: str) -> str:
    match source:
        case "debian":
            return subprocess.run(
                ["dpkg-deb", "-f", str(package), "Version"], capture_output=True, text=True, check=True
            ).stdout.strip()
        case "pypi":
            return package.name.split("-")[1]
    return re.search(r"-(\d[^-]*(?:-[\w.]+)?)\.(?:tgz|tar\.gz)$", package.name)[1]


def _licences(package: Path, source: str) -> list[str]:
    """Return the licences that debian/copyright, METADATA, PKG-INFO or package.json names; where there are none, the
    common-licenses that the text refers to."""
    by_source = {"debian": ("/copyright",), "npm": ("/package.json",), "pypi": (".dist-info/METADATA",)}
    ends = by_source.get(source, ("/PKG-INFO", "/COPYING", "/LICENSE.txt"))
    if source == "pypi":
        with zipfile.ZipFile(package) as archive:
            texts = [archive.read(name) for name in archive.namelist() if name.endswith(ends)]
    else:
        unpack = ["dpkg", "--fsys-tarfile", str(package)]
        raw = (
            io.BytesIO(subprocess.run(unpack, capture_output=True, check=True).stdout)
            if source == "debian"
            else package.open("rb")
        )
        with raw, tarfile.open(fileobj=raw) as archive:
            found = [member for member in archive if member.isreg() and member.name.endswith(ends)]
            texts = [
                archive.extractfile(member).read()
                for member in sorted(found, key=lambda member: member.name.count("/"))
            ]
    text = "\n".join(raw.decode("utf-8", "replace") for raw in texts)
    if source == "npm":
        return [str(json.loads(texts[0]).get("license", "see package.json"))]
    lines = re.findall(r"(?mi)^License(?:-Expression)?: *([\w][^\n:]{,49})$", text)
    named = {line.strip() for line in lines}
    named = named or set(re.findall(r"(?m)^Classifier: License :: OSI Approved :: ([^\n]+)", text))
    return sorted(
        named or set(re.findall(r"common-licenses/([\w.+-]+\w)", text)) or {"see the package's licence files"}
    )


def build(sources: Path, text: Path, processes: int, record: bool) -> None:
    """Writes the pieces; ``record`` writes their hash into corpus.json, otherwise it must be the one that is there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    manifest = json.loads(MANIFEST.read_text())
    packages = [
        (package["name"], _package_file(sources, package["name"], package["from"])) for package in manifest["packages"]
    ]
    by_name = {package["name"]: package for package in manifest["packages"]}
    characters = {name: dict.fromkeys(VALIDATION, 0) for name in by_name}
    found = []
    for name, kind, document in documents(packages, processes):
        found.append((name, kind, document))
        characters[next(owner for owner in _owners(name) if owner in by_name)][kind] += len(document)
    print(f"{len(found)} documents", flush=True)
    found.sort(key=lambda item: (item[1], Path(item[0]).suffix, item[0]))  # what is alike stands together
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = (
        document
        for name, kind, document in found
        if _hash(name, b"sample") % SAMPLE == 0 and not is_validation(name, kind)
    )
    tokenizer.train_from_iterator(sample, trainer)
    (text / "00").mkdir(parents=True)
    tokenizer.save(str(text / "00" / "tokenizer.json"))
    print("tokenizer trained", flush=True)
    parts: dict[str, list[bytes]] = {}
    for name, kind, document in found:
        where = (
            f"00/val-{kind}" if is_validation(name, kind) else f"{piece_of(name, kind, manifest['pieces']):02}/train"
        )
        parts.setdefault(where, []).append(document.encode("utf-8", "replace").replace(b"\0", b""))
    del found
    digest = hashlib.sha256()

    def chunks() -> Iterator[tuple[Path, bytes]]:
        for where, texts in sorted(parts.items()):
            (text / where).parent.mkdir(exist_ok=True)
            for index, raw in enumerate(_filled(texts)):
                digest.update(raw)
                yield text / f"{where}-{index:02}.bz2", raw

    with ThreadPoolExecutor(processes) as pool:  # bz2 releases the interpreter lock
        for _ in pool.map(lambda item: item[0].write_bytes(bz2.compress(item[1])), chunks()):
            pass
    result = {
        "documents": sum(map(len, parts.values())),
        "characters": {kind: sum(each[kind] for each in characters.values()) for kind in VALIDATION},
        "sha256": digest.hexdigest(),
        "tokenizer_sha256": sha256(text / "00" / "tokenizer.json"),
    }
    if record:
        for name, count in characters.items():
            by_name[name]["characters"] = count
        write_manifest(manifest | {"text": result})
    elif result != manifest.get("text"):
        raise SystemExit(f"{text} is another corpus than that of corpus.json: {result}")


def _owners(name: str) -> Iterator[str]:
    """The packages whose file this can be: names from npm hold a slash."""
    parts = name.split("/", 2)
    yield parts[0]
    yield "/".join(parts[:2])


def _filled(texts: list[bytes]) -> Iterator[bytes]:
    """Documents joined by a zero byte, ARCHIVE bytes or a little more at a time."""
    part, size = [], 0
    for each in texts:
        part.append(each)
        size += len(each)
        if size >= ARCHIVE:
            yield b"\0".join(part)
            part, size = [], 0
    if part:
        yield b"\0".join(part)


def read_piece(paths: list[Path]) -> Iterator[str]:
    """The documents of compressed files, which are unpacked side by side."""
    with ThreadPoolExecutor() as pool:
        for raw in pool.map(lambda path: bz2.decompress(path.read_bytes()), paths):
            yield from raw.decode("utf-8").split("\0")


def read_files(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Documents of .txt files (one each) and of the field "text" of .jsonl, .jsonl.gz, .jsonl.zst, .jsonl.xz lines, in
    sections.
    """
    for path in sorted(
        below for given in paths for below in ([given] if given.is_file() else given.rglob("*")) if below.is_file()
    ):
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


def _encode(group: list[str]) -> bytes:
    return b"".join(
        np.array([*each.ids, _eos], dtype=np.uint16).tobytes() for each in _tokenizer.encode_batch_fast(group)
    )


def _groups(found: Iterable[str]) -> Iterator[list[str]]:
    group, size = [], 0
    for document in found:
        group.append(document)
        size += len(document)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def tokenise(parts: dict[str, Iterable[str]], tokenizer: Path, out: Path, processes: int) -> dict[str, object]:
    """Writes OUT/PART.bin of each part's documents;

    returns the sizes in tokens and hashes of all parts of OUT, as in tokens.json.
    """
    out.mkdir(parents=True, exist_ok=True)
    stored = out / "tokens.json"
    result = json.loads(stored.read_text()) if stored.exists() else {"tokenizer_sha256": sha256(tokenizer), "parts": {}}
    if result["tokenizer_sha256"] != sha256(tokenizer):
        raise SystemExit(f"{out} holds tokens of another tokenizer than {tokenizer}")
    result["vocabulary"] = len(json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"])
    with get_context("spawn").Pool(processes, _start, (str(tokenizer),)) as pool:
        for name, found in parts.items():
            partial = out / f"{name}.partial"
            with partial.open("wb") as stream:
                for ids in pool.imap(_encode, _groups(found)):
                    stream.write(ids)
            result["parts"][name] = {"tokens": partial.stat().st_size // 2, "sha256": sha256(partial)}
            stored.with_suffix(".partial").write_text(json.dumps(result, indent=1) + "\n")
            stored.with_suffix(".partial").replace(stored)
            partial.replace(out / f"{name}.bin")  # a training may wait for it
    return result


def tokenise_pieces(text: Path, out: Path, processes: int, record: bool) -> dict[str, object]:
    """Tokenises the pieces that OUT lacks, with piece 00's tokenizer, which OUT keeps. ``record`` writes their sizes
    and hashes into corpus.json, otherwise they must be those that are recorded there."""
    tokenizer, parts = out / "tokenizer.json", {}
    if not tokenizer.exists():
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.write_bytes((text / "00" / "tokenizer.json").read_bytes())
    for piece in sorted(each for each in text.iterdir() if each.is_dir()):
        # a training needs val first
        for kind in sorted({path.name.rpartition("-")[0] for path in piece.glob("*.bz2")}, reverse=True):
            name = f"train-{piece.name}" if kind == "train" else kind
            if not (out / f"{name}.bin").exists():
                parts[name] = read_piece(sorted(piece.glob(f"{kind}-*.bz2")))
    result = tokenise(parts, tokenizer, out, processes)
    manifest = json.loads(MANIFEST.read_text())
    if record:
        write_manifest(manifest | {"tokens": result["parts"]})
    elif wrong := sorted(
        name for name, part in result["parts"].items() if part != manifest.get("tokens", {}).get(name, part)
    ):
        raise SystemExit(f"{out}: not the tokens of corpus.json: {', '.join(wrong)}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("fetch")
    add.add_argument("sources", type=Path)
    add = commands.add_parser("build")
    add.add_argument("sources", type=Path)
    add.add_argument("text", type=Path)
    add = commands.add_parser("tokenise")
    add.add_argument("text", type=Path)
    add.add_argument("out", type=Path)
    for add in commands.choices.values():
        add.add_argument(
            "--record", action="store_true", help="write versions or hashes into corpus.json instead of comparing"
        )
    add = commands.add_parser("files")
    add.add_argument("paths", type=Path, nargs="+")
    add.add_argument("out", type=Path)
    add.add_argument(
        "--tokenizer", type=Path, required=True, help="a tokenizer.json of at most 65,536 tokens, with <eos>"
    )
    for add in commands.choices.values():
        add.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    match options.command:
        case "fetch":
            fetch(options.sources, options.record)
        case "build":
            build(options.sources, options.text, options.processes, options.record)
        case "tokenise":
            print(json.dumps(tokenise_pieces(options.text, options.out, options.processes, options.record)))
        case "files":
            found = list(read_files(options.paths))
            parts = {
                name: [text for each, text in found if is_validation(each, "prose") == validation]
                for name, validation in (("val-prose", True), ("train-00", False))
            }
            print(json.dumps(tokenise(parts, options.tokenizer, options.out, options.processes)))


if __name__ == "__main__":
    main()
