"""The documents are what the records, the scripts and the tree say: tables, figures, commands, links, paths. Their code
and the examples run; the site is built without a warning."""

import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from processes import ROOT, run_python, script

from benchmarks import write_readme
from flashmhf.models.presets import SCALES
from flashmhf.nn import optim
from flashmhf_recipes import cli

DOCS, RECORDS = ROOT / "docs", ROOT / "benchmarks" / "results"
SKIPPED = {".venv", "build", "node_modules"}
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in SKIPPED or part.startswith((".", "build")) for part in path.relative_to(ROOT).parts)
    and RECORDS not in path.parents
)


def read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.fixture
def report(monkeypatch):
    """The module experiments/report.py."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("report")


def test_tables_agree_with_the_records(report):
    assert write_readme.main(["--check"]) == 0
    assert report.document(ROOT, check=True) == 0


def test_ci_runs_the_lines_of_the_readme_for_the_tests():
    if not (ROOT / ".ci").exists():
        pytest.skip("this is no git checkout")
    blocks = re.findall(r"```sh\n(.*?)```", read("README.md"), re.DOTALL)
    assert read(".ci/run").endswith(next(block for block in blocks if "pytest" in block))


def test_versions_are_called_passed_where_a_set_of_today_ran(monkeypatch):
    monkeypatch.setitem(sys.modules, "nox", MagicMock())
    noxfile = script("noxfile.py")
    monkeypatch.chdir(ROOT)
    assert noxfile.page(json.loads(read(noxfile.RECORD))["rows"]) == read(noxfile.PAGE)
    row = {"torch": "2.99.0", "python": "3.99", "transformers": "5.99", "library": "", "commit": "abc", "failed": []}
    rows = [{**row, "set": noxfile.SETS[0]}, {**row, "set": noxfile.SETS[1], "failed": ["test_x"]}, {**row, "set": "0"}]
    shown = [line for line in noxfile.page(rows).splitlines() if line.startswith("| 2.")]
    assert [line.count("2.99.0") for line in shown] == [1, 1] + [0] * (len(noxfile.SETS) - 2)
    assert "passed, at abc" in shown[0] and "1 failed: test_x, at abc" in shown[1] and "not run" in shown[2]


NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])"  # not 26M, H100, fp8


def numbers(text: str) -> list[str]:
    return [found.rstrip(",").replace(",", "") for found in re.findall(NUMBER, text)]


def quoted(source: str) -> set[float]:
    """The numbers of a record, or of the blocks of a document, "PATH: NAME, NAME"."""
    path, _, blocks = source.partition(":")
    texts = [read(path.strip())]
    if blocks:
        block = r"<!-- {0}: begin .*?-->(.*?)<!-- {0}: end -->"
        texts = [re.findall(block.format(name.strip()), texts[0], re.DOTALL)[0] for name in blocks.split(",")]
    return {float(number) for text in texts for number in numbers(text)}


def agrees(number: str, is_percent: bool, there: set[float]) -> bool:
    """Whether a figure is one of ``there`` as rounded, or a ratio of them in percent more or less."""
    digits = len(number.partition(".")[2])
    if any(round(value, digits) == float(number) for value in there):
        return True
    ratios = {ratio for value in there if value for ratio in (value, 1 / value)}
    return is_percent and any(round(100 * abs(ratio - 1), digits) == float(number) for ratio in ratios)


MARKED = re.compile(r"^<!-- figures from (.*?) -->\n(.*?)\n(?:\n|\Z)", re.MULTILINE | re.DOTALL)
QUOTING = [(path, *found) for path in DOCUMENTS for found in MARKED.findall(read(path))]


@pytest.mark.parametrize(("path", "sources", "sentences"), QUOTING, ids=[f"{q[0].name} {q[1]}" for q in QUOTING])
def test_sentences_quote_the_tables_that_they_name(path, sources, sentences):
    there = set().union(*map(quoted, sources.split(";")))
    prose = re.sub(r"\]\([^)]*\)", "]", sentences)
    for match in re.finditer(NUMBER, prose):
        is_percent = bool(re.match(r"( to [\d.]+)?\s%", prose[match.end() :]))
        assert agrees(numbers(match[0])[0], is_percent, there), f"{path.name}: {match[0]} is not in {sources}"


@pytest.mark.parametrize("path", sorted(RECORDS.rglob("*.json")), ids=lambda path: str(path.relative_to(RECORDS)))
def test_every_record_says_how_it_was_made(path):
    record = json.loads(read(path))
    where = record.get("environment", record)
    # the other has rows of CPUs
    needed = ("command",) if path.name == "compatibility.json" else ("command", "commit", "date", "device")
    assert all(where[name] for name in needed)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(path):
    """Targets of links, files of the tree, and programs that it tells its reader to run. No path is absolute."""
    text = read(path)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^```.*?^```", "", text)):  # without fenced code
        if "://" not in target and re.search("[./#]", target):  # [M|N](i+1) is a formula
            name, _, anchor = target.partition("#")
            found = path.parent / name if name else path
            assert found.exists(), target
            headings = re.findall(r"^#+ (.*)$", read(found), re.MULTILINE) if anchor else ()
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, target
    written_by_a_tool = {"benchmarks/results/compatibility.json"}
    folders = "benchmarks|csrc|docs|experiments|flashmhf|tests|thunderkittens"
    for name in set(re.findall(rf"`((?:{folders})/[\w./-]*\w)`", text)) - written_by_a_tool:
        assert (ROOT / name).exists() or (path.parent / name).exists(), name
    assert not re.findall(r"(?<![\w.$}/-])/(?:home|root|work|tmp|mnt|Users|usr|opt|var)/[\w./-]+", text)
    for name in re.findall(r"python3? -m ((?:benchmarks|flashmhf_recipes|flashmhf)(?:\.\w+)*)", text):
        module = ROOT.joinpath(*name.split("."))
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), f"python -m {name}"
    fenced = "\n".join(re.findall(r"(?ms)^```.*?^```", text))
    commands = re.findall(r"`flashmhf ([a-z]+)\b", text) + re.findall(r"^flashmhf ([a-z]+)\b", fenced, re.MULTILINE)
    assert set(commands) <= cli.COMMANDS.keys()
    assert not re.findall(r"python3? benchmarks/", text), "benchmarks run as modules"


OWN_TRANSFORMER = "docs/guides/own-transformer.md"
SETTINGS = re.findall(
    r"^\| (Muon|AdamW) \| ([\w.]+) \| (\w+) \| ([\d.]+) \| ([\d.]+) \|", read(OWN_TRANSFORMER), re.MULTILINE
)


@pytest.mark.parametrize("setting", SETTINGS, ids=" ".join)
def test_the_settings_are_those_of_the_best_runs_and_of_the_presets(setting, report):
    optimizer, size, tokens, rate, projections = setting
    if tokens.endswith("B"):  # the paper's
        scale = SCALES[size.lower()]
        seen = scale.steps * scale.batch * scale.context
        found = (scale.learning_rate, f"{seen / 1e9:.0f}B", optim.ADAMW_PROJECTION_RATE)
        assert found == (float(rate), tokens, float(projections))
        return
    rows = [row for row in report.rows([ROOT / report.RESULTS]) if row.title == f"{size}, {tokens} tokens"]
    ours = [row for row in rows if row.configuration["ffn"] == "flashmhf"]
    alike = [row for row in ours if row.configuration["optimizer"] == optimizer.lower()]
    best = min(alike, key=lambda row: (-len(row.losses), row.mean)).configuration
    assert (best["learning_rate"], best["rates"].get("projection", 1.0)) == (float(rate), float(projections))


def test_guides_and_examples_train_with_the_settings():
    """The paper's rate at 1.3B, and the long run's at 57M with Muon, whose defaults are the projections' rates."""
    assert len(SETTINGS) == 7
    table = {setting[:3]: setting[3:] for setting in SETTINGS}
    rate, projections = map(float, table["Muon", "57M", "570M"])
    shown = re.search(r"param_groups\(model, lr=(\S+), weight_decay=0.1, muon=True\)", read(OWN_TRANSFORMER))
    assert shown and (float(shown[1]), optim.MUON_PROJECTION_RATE) == (rate, projections)
    rates = re.findall(r"param_groups\(model, lr=(\S+),", read("docs/scaling.md"))
    rates += re.findall(r"rate=(1e-3)", read("examples/several_gpus.py"))
    assert [float(each) for each in rates] == [float(table["AdamW", "1.3B", "107B"][0])] * 2


def test_a_figure_that_no_table_has_is_noticed():
    assert QUOTING and agrees("1.1", False, {1.09}) and agrees("22", True, {0.82}) and agrees("0.3", True, {1.003})
    assert not agrees("1.1", False, {1.16}) and not agrees("22", False, {0.82}) and not agrees("21", True, {0.82})


TUTORIALS = [
    path for path in DOCUMENTS if (path == ROOT / "README.md" or DOCS in path.parents) and "```python" in read(path)
]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks that begin with a comment "# needs ..." (a GPU, a server, a download) are left out."""
    text, namespace = read(page), {"__name__": "page"}
    for package in ("transformers", "accelerate", "peft"):
        if package in text:
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for block in re.finditer(r"^```python\n(?!# needs )(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines_before = "\n" * text.count("\n", 0, block.start(1))  # a traceback then points into the page
        exec(compile(lines_before + block[1], str(page), "exec"), namespace)


def test_the_navigation_lists_pages_that_exist():
    listed = re.findall(r"(\S+\.md)$", read("mkdocs.yml"), re.MULTILINE)
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == set(listed)


def test_the_reference_has_every_public_name():
    reference = read("docs/reference.md")
    listed = set(re.findall(r"^::: flashmhf\.(?:[\w.]+\.)?(\w+)", reference, re.MULTILINE))
    for members in re.findall(r"members: \[(.*)\]", reference):
        listed |= set(members.split(", "))
    for path in (ROOT / "flashmhf").rglob("__init__.py"):
        package = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
        assert set(getattr(package, "__all__", ())) <= listed, package.__name__


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'flashmhf[docs]'")
    command = ("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site")
    run_python(*command, cwd=ROOT, timeout=240, NO_MKDOCS_2_WARNING="1")
    reference = read(tmp_path / "site" / "reference" / "index.html")
    assert "q_norm_eps" in reference and "concat_H" in reference  # a signature and a docstring
    assert "The bargain" in read(tmp_path / "site" / "index.html")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "needs"), [("train_minimal", ()), ("swap_llama", ("transformers",)), ("lora", ("transformers", "peft"))]
)
def test_an_example_runs(name, needs, monkeypatch, capsys):
    for package in needs:
        pytest.importorskip(package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"^step .* (\S+)$", capsys.readouterr().out, re.MULTILINE)]
    assert losses[-1] < losses[0] - 0.5
