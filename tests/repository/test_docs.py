"""The documentation site builds without a warning; its tutorials and the examples run."""

import re
import runpy

import pytest
import torch
from processes import ROOT, run_python

DOCS = ROOT / "docs"
PAGES = sorted(
    page
    for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
    if page.exists() and "```python" in page.read_text(encoding="utf-8")
)

pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="the sources are not here")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks that begin with a comment "# needs ..." (a GPU, a server, a download) are left out."""
    text, namespace = page.read_text(encoding="utf-8"), {"__name__": "page"}
    for package in ("transformers", "accelerate", "peft"):
        if package in text:
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for block in re.finditer(r"^```python\n(?!# needs )(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines_before = "\n" * text.count("\n", 0, block.start(1))  # a traceback then points into the page
        exec(compile(lines_before + block[1], str(page), "exec"), namespace)


def test_the_navigation_lists_pages_that_exist():
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == set(listed)


def test_the_reference_has_every_public_name():
    import flashmhf

    reference = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert set(flashmhf.__all__) <= set(re.findall(r"^::: flashmhf\.(?:nn\.)?(\w+)", reference, re.MULTILINE))


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'flashmhf[docs]'")
    command = ("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site")
    run_python(*command, cwd=ROOT, timeout=240, NO_MKDOCS_2_WARNING="1")
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    assert "q_norm_eps" in reference and "concat_H" in reference  # a signature and a docstring
    assert "Should I use it?" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


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
