"""The core as a kernel for Hugging Face's ``kernels``: relative imports, torch and the standard library only, loadable
under any name."""

import json

import pytest
from processes import ROOT, run_python, script

pytestmark = pytest.mark.skipif(not (ROOT / "tools").is_dir(), reason="the sources are not here")

LOAD = """
import importlib.util, sys
for name in ("flashmhf", "numpy", "tqdm", "matplotlib", "transformers", "triton"):
    sys.modules[name] = None
import torch
spec = importlib.util.spec_from_file_location({name!r}, {path!r})
kernel = sys.modules[{name!r}] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
ffn = kernel.FlashMHF(32, 2, 2, 16)
x = torch.randn(3, 32, requires_grad=True)
ffn(x).sum().backward()
assert x.grad.isfinite().all()
q, w = torch.randn(3, 2, 16), ffn.k.detach()
assert torch.allclose(kernel.flash_mhf(q, w, w, w), kernel.reference.forward(q, w, w, w), atol=1e-5)
print(kernel.info(q, w).chosen, sorted(name for name in kernel.__all__ if not hasattr(kernel, name)))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub")
    library = out / "libflashmhf_hopper.so"
    library.write_bytes(b"a library")
    assert script("tools/hub_kernel.py").main([str(out), "--library", str(library), "--cuda", "12.9"]) == 0
    return out


@pytest.mark.parametrize("variant", ["torch-cpu", "torch-cuda", "torch-stable-abi210-cu129-x86_64-linux"])
def test_a_variant_has_its_metadata(hub, variant):
    folder = hub / "build" / variant
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["backend"]["type"] == ("cpu" if variant.endswith("cpu") else "cuda")
    assert (folder / "libflashmhf_hopper.so").exists() == ("stable" in variant)
    assert (hub / "torch-ext" / "flashmhf" / "__init__.py").exists()


def test_the_kernel_works_under_another_name(hub):
    folder = hub / "build" / "torch-cpu"
    name = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["id"]
    code = LOAD.format(name=name, path=str(folder / "__init__.py"))
    assert run_python("-I", "-Wignore:Failed to initialize NumPy", "-c", code, cwd=hub).split() == ["eager", "[]"]
