"""Hook of mkdocs: docstrings name code by Sphinx's roles, such as :func:`gate`, which Markdown would print."""

import re


def on_page_content(html: str, **_: object) -> str:
    return re.sub(r":(?:func|class|meth|mod|data|attr|exc):(?=<code>)", "", html)
