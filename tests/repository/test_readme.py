"""The documents are what the records, the scripts and the tree say: tables, commands, links, paths."""

import importlib
import json
import re
import shutil

import pytest
from processes import ROOT

from benchmarks import write_readme
from flashmhf.models.presets import SCALES
from flashmhf.nn import optim
from flashmhf_recipes import cli

RECORDS = ROOT / "benchmarks" / "results"
SKIPPED = {".venv", "build", "node_modules"}
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in SKIPPED or part.startswith((".", "build")) for part in path.relative_to(ROOT).parts)
    and RECORDS not in path.parents
)
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def test_tables_agree_with_the_records(monkeypatch):
    assert write_readme.main(["--check"]) == 0
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    assert importlib.import_module("report").document(ROOT, check=True) == 0


NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])"  # not 26M, H100, fp8


def numbers(text: str) -> list[str]:
    return [found.rstrip(",").replace(",", "") for found in re.findall(NUMBER, text)]


def quoted(source: str) -> set[float]:
    """The numbers of a record, or of the blocks of a document, "PATH: NAME, NAME"."""
    path, _, blocks = source.partition(":")
    text = (ROOT / path.strip()).read_text(encoding="utf-8")
    if not blocks:
        return {float(number) for number in numbers(text)}
    found = set()
    for name in blocks.split(","):
        block = re.search(rf"<!-- {name.strip()}: begin .*?-->(.*?)<!-- {name.strip()}: end -->", text, re.DOTALL)
        assert block, f"{path} has no block {name.strip()}"
        found |= {float(number) for number in numbers(block[1])}
    return found


def agrees(number: str, is_percent: bool, there: set[float]) -> bool:
    """Whether a figure is one of ``there`` as rounded, or a ratio of them in percent more or less."""
    digits = len(number.partition(".")[2])
    if any(round(value, digits) == float(number) for value in there):
        return True
    ratios = {ratio for value in there if value for ratio in (value, 1 / value)}
    return is_percent and any(round(100 * abs(ratio - 1), digits) == float(number) for ratio in ratios)


QUOTING = [
    (path, sources, sentences)
    for path in DOCUMENTS
    for sources, sentences in re.findall(
        r"^<!-- figures from (.*?) -->\n(.*?)\n(?:\n|\Z)", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
]


@pytest.mark.parametrize(("path", "sources", "sentences"), QUOTING, ids=[f"{q[0].name} {q[1]}" for q in QUOTING])
def test_sentences_quote_the_tables_that_they_name(path, sources, sentences):
    there = set().union(*map(quoted, sources.split(";")))
    prose = re.sub(r"\]\([^)]*\)", "]", sentences)
    for match in re.finditer(NUMBER, prose):
        is_percent = bool(re.match(r"( to [\d.]+)?\s%", prose[match.end() :]))
        assert agrees(numbers(match[0])[0], is_percent, there), f"{path.name}: {match[0]} is not in {sources}"


@pytest.mark.parametrize("path", sorted(RECORDS.rglob("*.json")), ids=lambda path: str(path.relative_to(RECORDS)))
def test_every_record_says_how_it_was_made(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    where = record.get("environment", record)
    # the other has rows of CPUs
    needed = ("command",) if path.name == "compatibility.json" else ("command", "commit", "date", "device")
    assert all(where[name] for name in needed)


@each_document
def test_links_lead_somewhere(path):
    prose = re.sub(
        r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )  # without fenced code
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" not in target and re.search("[./#]", target):  # [M|N](i+1) is a formula
            name, _, anchor = target.partition("#")
            found = path.parent / name if name else path
            assert found.exists(), f"{path.name} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, (
                    target
                )


@each_document
def test_named_files_exist(path):
    written_by_a_tool = {"benchmarks/results/compatibility.json"}
    folders = "benchmarks|csrc|docs|experiments|flashmhf|tests|thunderkittens"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*\w)`", path.read_text(encoding="utf-8")):
        assert name in written_by_a_tool or (ROOT / name).exists() or (path.parent / name).exists(), (
            f"{path.name} names {name}"
        )


@each_document
def test_no_document_has_an_absolute_path(path):
    found = re.findall(
        r"(?<![\w.$}/-])/(?:home|root|work|tmp|mnt|Users|usr|opt|var)/[\w./-]+", path.read_text(encoding="utf-8")
    )
    assert not found


@each_document
def test_commands_exist(path):
    """Programs that a document tells its reader to run."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"python3? -m ((?:benchmarks|flashmhf_recipes|flashmhf)(?:\.\w+)*)", text):
        module = ROOT.joinpath(*name.split("."))
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), f"{path.name}: python -m {name}"
    fenced = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
    for command in re.findall(r"`flashmhf ([a-z]+)\b", text) + re.findall(
        r"^flashmhf ([a-z]+)\b", fenced, re.MULTILINE
    ):
        assert command in cli.COMMANDS, f"{path.name}: flashmhf {command}"
    assert not re.findall(r"python3? benchmarks/", text), f"{path.name}: benchmarks run as modules"


SETTINGS = re.findall(
    r"^\| (Muon|AdamW) \| ([\w.]+) \| (\w+) \| ([\d.]+) \| ([\d.]+) \|",
    (ROOT / "docs" / "guides" / "own-transformer.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize("setting", SETTINGS, ids=" ".join)
def test_the_settings_are_those_of_the_best_runs_and_of_the_presets(setting, monkeypatch):
    optimizer, size, tokens, rate, projections = setting
    if tokens.endswith("B"):  # the paper's
        scale = SCALES[size.lower()]
        seen = scale.steps * scale.batch * scale.context
        found = (scale.learning_rate, f"{seen / 1e9:.0f}B", optim.ADAMW_PROJECTION_RATE)
        assert found == (float(rate), tokens, float(projections))
        return
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    report = importlib.import_module("report")
    rows = [row for row in report.rows([ROOT / report.RESULTS]) if row.title == f"{size}, {tokens} tokens"]
    ours = [row for row in rows if row.configuration["ffn"] == "flashmhf"]
    alike = [row for row in ours if row.configuration["optimizer"] == optimizer.lower()]
    best = min(alike, key=lambda row: (-len(row.losses), row.mean)).configuration
    assert (best["learning_rate"], best["rates"].get("projection", 1.0)) == (float(rate), float(projections))


def test_guides_and_examples_train_with_the_settings():
    """The paper's rate at 1.3B, and the long run's at 57M with Muon, whose defaults are the projections' rates."""
    assert len(SETTINGS) == 10
    table = {setting[:3]: setting[3:] for setting in SETTINGS}
    rate, projections = map(float, table["Muon", "57M", "570M"])
    guide = (ROOT / "docs" / "guides" / "own-transformer.md").read_text(encoding="utf-8")
    shown = re.search(r"param_groups\(model, lr=(\S+), weight_decay=0.1, muon=True\)", guide)
    assert shown and (float(shown[1]), optim.MUON_PROJECTION_RATE) == (rate, projections)
    large = float(table["AdamW", "1.3B", "107B"][0])
    scaling = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "several_gpus.py").read_text(encoding="utf-8")
    rates = re.findall(r"param_groups\(model, lr=(\S+),", scaling) + re.findall(r"rate=(1e-3)", example)
    assert [float(each) for each in rates] == [large] * 3


def test_a_figure_that_no_table_has_is_noticed():
    assert QUOTING and agrees("1.1", False, {1.09}) and agrees("22", True, {0.82}) and agrees("0.3", True, {1.003})
    assert not agrees("1.1", False, {1.16}) and not agrees("22", False, {0.82}) and not agrees("21", True, {0.82})


def test_a_figure_that_the_records_do_not_have_is_noticed_and_written_over(tmp_path):
    for name in write_readme.BLOCKS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(RECORDS, tmp_path / "benchmarks" / "results")
    page, root = tmp_path / "benchmarks" / "README.md", ["--root", str(tmp_path)]
    before = page.read_text(encoding="utf-8")
    page.write_text(re.sub(r"(begin .*?-->.*?\d\.)\d", r"\g<1>77", before, count=1, flags=re.DOTALL), encoding="utf-8")
    assert write_readme.main([*root, "--check"]) == 1
    assert write_readme.main(root) == 0 and page.read_text(encoding="utf-8") == before
