"""The examples run to their end, on the CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(not EXAMPLES.exists(), reason="the sources are not here")]


@pytest.mark.parametrize(
    ("name", "needs"), [("own_transformer", ()), ("swap_llama", ("transformers",)), ("lora", ("transformers", "peft"))]
)
def test_an_example_runs(name, needs, monkeypatch, capsys):
    for package in needs:
        pytest.importorskip(package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] - 0.5
