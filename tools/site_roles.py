"""Hooks of mkdocs: the home page shows README's offer; Sphinx's roles in docstrings become code."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def on_page_markdown(markdown: str, **_: object) -> str:
    begin, end = r"<!-- offer: begin .*?-->", "<!-- offer: end -->"
    offer = re.search(f"{begin}(.*?){end}", README.read_text(encoding="utf-8"), re.DOTALL)
    assert offer, "README.md has no offer"
    return markdown.replace("<!-- offer of README.md -->", offer[1].strip().replace("](docs/", "]("))


def on_page_content(html: str, **_: object) -> str:
    return re.sub(r":(?:func|class|meth|mod|data|attr|exc):(?=<code>)", "", html)
