"""The core needs torch alone: what ``import flashmhf`` imports and how long it takes, and what a missing extra says."""

import json
import sys

import pytest
from processes import run_python

OPTIONAL = (
    "numpy", "tqdm", "matplotlib", "triton", "transformers", "accelerate", "datasets", "tokenizers", "safetensors",
    "lm_eval",
)  # fmt: skip
SECONDS = 0.5  # CPU time of `import flashmhf` after torch; 0.03 s where it was measured
ABSENT = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # importing it fails, as where it is not installed
"""


def python(code: str, cwd: object = None) -> str:
    # torch's own remark where numpy is absent
    return run_python("-Wignore:Failed to initialize NumPy", "-c", code, cwd=cwd)


def test_import_brings_in_torch_and_the_standard_library_only():
    code = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import flashmhf
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""
    seconds, brought = json.loads(python(code))
    assert set(brought) - set(sys.stdlib_module_names) <= {"flashmhf", "torch"}
    assert seconds < SECONDS


COMMANDS = {  # the command, and the extra that it needs
    "check --device cpu --backend eager": None,
    "train --output run --data text.txt": "lm",
    "eval --model run --tasks paper": "lm",
    "generate --model run": "lm",
}


def test_a_missing_extra_is_one_line(tmp_path):
    """One process runs all commands. ``check`` needs none: the core computes, with gradients, without any optional
    package."""
    code = f"""{ABSENT}
import contextlib, io, json
from flashmhf_recipes.cli import main
results = {{}}
for line in {list(COMMANDS)!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(line.split())
    results[line] = (status, out.getvalue(), err.getvalue())
try:
    import flashmhf.models
except ModuleNotFoundError as error:
    assert str(error) == "flashmhf.models needs transformers: pip install 'flashmhf[lm]'", error
else:
    raise AssertionError("flashmhf.models was imported")
print(json.dumps(results))
"""
    for line, (status, out, err) in json.loads(python(code, tmp_path)).items():
        if COMMANDS[line] is None:
            # torch 2.10 and 2.11 say so where nvcc is, but no GPU.
            complaints = [text for text in err.splitlines() if "No CUDA runtime is found" not in text]
            rows = [line.split() for line in out.splitlines()[1:]]
            tensors = ["out", "dq", "dk", "du", "dv", "dr"] * 3
            assert status == 0 and [(row[2], row[-1]) for row in rows] == [(name, "ok") for name in tensors]
            assert not complaints
        else:
            assert status == 2 and not out and len(err.splitlines()) == 1, (line, err)
            assert f"pip install 'flashmhf[{COMMANDS[line]}]'" in err


@pytest.mark.parametrize("command", ["", "info"])
def test_a_missing_torch_is_one_line(command, tmp_path):
    code = f"""
import sys
sys.modules["torch"] = None
from flashmhf_recipes.cli import main
sys.stderr = sys.stdout
assert main({command.split()!r}) == 2
"""
    assert python(code, tmp_path) == "flashmhf: error: torch is not installed: pip install torch\n"
