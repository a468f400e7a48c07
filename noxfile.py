"""The CPU tests with several versions of torch, transformers and Python: ``pip install nox``, then

nox                                              every set; the results go to docs/compatibility.md, for this commit
nox -s "tests(2.10/5.17/3.10)" -- tests/nn       some tests of one set, unrecorded
WHEEL=dist/flashmhf-... nox                      with the wheel of a release, its CUDA library included
"""

import json
import os
import re
from pathlib import Path

import nox

# Oldest and newest of all three (Python 3.10 has no torch 2.15 and no transformers 5.21), and torch 2.14, which serving
# engines pin.
SETS = ("2.10/5.17/3.10", "2.10/5.24/3.11", "2.13/5.24/3.12", "2.14/5.17/3.13", "2.15/5.24/3.14")
RECORD, PAGE = Path("benchmarks/results/compatibility.json"), Path("docs/compatibility.md")
MARK = "<!-- compatibility: {} -->"
FACTS = """
import json, platform, torch, transformers
from flashmhf.backends import hopper
library = "loads" if hopper.LIBRARY.exists() else "not installed"
if library == "loads" and torch.version.cuda is None:
    library = "not loaded: torch is a CPU build"
elif library == "loads":
    torch.ops.load_library(str(hopper.LIBRARY))
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__,
                  "transformers": transformers.__version__, "library": library}))
"""


def page(rows: list[dict]) -> str:
    """Return the text of docs/compatibility.md with a table of the sets and what their rows say."""
    lines = ["| torch | Python | transformers | CPU tests | CUDA library |", "| --- | --- | --- | --- | --- |"]
    found = {row["set"]: row for row in rows}
    for name in SETS:
        if row := found.get(name):
            failed = f"{len(row['failed'])} failed: {', '.join(row['failed'])}"
            outcome = f"{failed if row['failed'] else 'passed'}, at {row['commit']}"
            cells = [row["torch"], row["python"], row["transformers"], outcome, row["library"]]
        else:
            torch, transformers, python = name.split("/")
            cells = [torch, python, transformers, "not run since the last changes", ""]
        lines.append(f"| {' | '.join(cells)} |")
    begin, end = MARK.format("begin (noxfile.py)"), MARK.format("end")
    block = "\n".join([begin, "", *lines, "", end])
    return re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: block, PAGE.read_text("utf-8"), flags=re.DOTALL)


def commit(session: nox.Session) -> str:
    """Return the commit, with "+" for changes other than those that the sets before this one made."""
    short, changes = ("rev-parse", "--short", "HEAD"), ("diff", "HEAD", "--", ".", f":!{RECORD}", f":!{PAGE}")
    head, changed = (session.run("git", *command, external=True, silent=True) for command in (short, changes))
    return f"{head.strip()}{'+' if changed else ''}"


@nox.session(reuse_venv=False)
@nox.parametrize(("python", "versions"), [(name.split("/")[2], name) for name in SETS], ids=SETS)
def tests(session: nox.Session, versions: str) -> None:
    torch, transformers, _ = versions.split("/")
    kept = Path("constraints.txt").read_text("utf-8").splitlines()
    kept = [line for line in kept if not line.startswith(("torch>", "transformers<", "triton<"))]  # torch says which
    constraints = Path(session.create_tmp(), "constraints.txt")
    constraints.write_text("\n".join([*kept, f"torch=={torch}.*", f"transformers=={transformers}.*", ""]), "utf-8")
    session.env.update({"FLASHMHF_SKIP_CUDA_BUILD": "1", "FLASHMHF_COMMIT": commit(session)})
    session.install("-c", constraints, "torch", f"{os.environ.get('WHEEL', '.')}[test]")
    report = constraints.with_name("report.json")
    session.run("pytest", f"--record={report}", *session.posargs, success_codes=[0, 1])
    result = json.loads(report.read_text("utf-8"))
    facts = json.loads(session.run("python", "-I", "-c", FACTS, silent=True))
    if not session.posargs:
        row = {
            "set": versions,
            **facts,
            "failed": result["failures"],
            "passed": result["passed"],
            "commit": result["commit"],
            "date": result["date"],
        }
        rows = [old for old in json.loads(RECORD.read_text("utf-8"))["rows"] if old["set"] in SETS]
        rows = [old for old in rows if old["set"] != versions] + [row]
        rows.sort(key=lambda row: row["set"])
        RECORD.write_text(json.dumps({"command": "nox", "rows": rows}, indent=1) + "\n", "utf-8")
        PAGE.write_text(page(rows), "utf-8")
    if result["failures"] or not result["passed"]:
        session.error(f"{len(result['failures'])} of the tests failed")
