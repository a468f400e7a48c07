"""README's table of the kernels is what the committed records say."""

from __future__ import annotations

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def script():
    spec = importlib.util.spec_from_file_location("kernel_table", ROOT / "benchmarks" / "kernel_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernel_table_agrees_with_the_records():
    assert script().main(["--check"]) == 0


def test_a_changed_figure_is_noticed():
    kernel_table, text = script(), (ROOT / "README.md").read_text()
    changed = text.replace("| forward | 32,256 | 128, 22, 384 | ", "| forward | 32,256 | 128, 22, 384 | 1", 1)
    assert changed != text
    assert kernel_table.with_table(changed) == text
