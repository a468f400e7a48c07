"""csrc/compare_machine_code.py: which kernels of two builds count as equal, and its refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "csrc" / "compare_machine_code.py"


@pytest.fixture(scope="module")
def script():
    if not PATH.exists():
        pytest.skip("the sources are not here")
    spec = importlib.util.spec_from_file_location("compare_machine_code", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_do_not_count_but_code_does(script):
    old = {"kept": "MOV", "renamed": "ADD", "changed": "MUL", "removed": "SUB"}
    new = {"kept": "MOV", "new_name": "ADD", "changed": "FMA", "added": "DIV"}
    equal, different, only_old, only_new = script.compare(old, new)
    assert sorted(equal) == [("kept", "kept"), ("renamed", "new_name")]
    assert different == [("changed", "changed")]
    assert only_old == ["removed"] and only_new == ["added"]


def test_exit_status(script, monkeypatch, capsys):
    builds = {"a.so": {"k": "MOV"}, "b.so": {"k": "ADD"}, "none.so": {}}
    monkeypatch.setattr(script, "kernels", builds.__getitem__)
    assert script.main(["a.so", "a.so"]) == 0
    assert script.main(["a.so", "b.so"]) == 1 and "1 different" in capsys.readouterr().out
    assert script.main(["none.so", "none.so"]) == 1  # nothing was compared

    def no_tool(library: str):
        raise FileNotFoundError("no cuobjdump")

    monkeypatch.setattr(script, "kernels", no_tool)
    assert script.main(["a.so", "b.so"]) == 2 and capsys.readouterr().err.count("\n") == 1
