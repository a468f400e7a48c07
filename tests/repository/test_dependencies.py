"""The core needs torch alone: what ``import flashmhf`` imports and how long it takes, and what a missing extra says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import flashmhf

PARENT = Path(flashmhf.__file__).resolve().parents[1]
OPTIONAL = ("numpy", "tqdm", "matplotlib", "triton", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "lm_eval")
SECONDS = 0.5  # CPU time of `import flashmhf` after torch; 0.03 s where it was measured
ABSENT = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # importing it fails, as where it is not installed
"""


def python(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    paths = [str(PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    quiet = "-Wignore:Failed to initialize NumPy"  # torch's own remark where numpy is absent
    return subprocess.run([sys.executable, quiet, "-c", code], capture_output=True, text=True, timeout=300, env=environment, cwd=cwd)


def test_import_brings_in_torch_and_the_standard_library_only():
    done = python("""
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import flashmhf
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
""")
    assert done.returncode == 0, done.stderr
    seconds, brought = json.loads(done.stdout)
    assert set(brought) - set(sys.stdlib_module_names) <= {"flashmhf", "torch"}
    assert seconds < SECONDS


def test_the_core_works_without_any_optional_package():
    done = python(f"""{ABSENT}
import torch
import flashmhf
ffn = flashmhf.FlashMHF(32, 2, 2, 16)
x = torch.randn(2, 3, 32, requires_grad=True)
ffn(x).square().sum().backward()
assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in ffn.parameters())
print(flashmhf.info())
""")
    assert done.returncode == 0, done.stderr
    assert "eager   usable" in done.stdout


def test_check_runs_without_the_extras(tmp_path):
    arguments = ["check", "--device", "cpu", "--backend", "eager"]
    done = python(f"{ABSENT}\nfrom flashmhf_recipes.cli import main\nsys.exit(main({arguments!r}))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ok") == 18 and not done.stderr


EXTRA_OF = {
    "train --output run --data text.txt": "lm",
    "eval --model run --tasks paper": "lm",
    "generate --model run": "lm",
}


def test_a_missing_extra_is_one_line(tmp_path):
    """One process runs all commands."""
    done = python(
        f"""{ABSENT}
import contextlib, io, json
from flashmhf_recipes.cli import main
results = {{}}
for line in {list(EXTRA_OF)!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(line.split())
    results[line] = (status, out.getvalue(), err.getvalue())
print(json.dumps(results))
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for line, (status, out, err) in json.loads(done.stdout).items():
        assert status == 2 and not out and len(err.splitlines()) == 1, (line, err)
        assert f"pip install 'flashmhf[{EXTRA_OF[line]}]'" in err


def test_the_language_models_name_their_extra():
    done = python(f"{ABSENT}\nimport flashmhf.models")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: flashmhf.models needs transformers: pip install 'flashmhf[lm]'"
