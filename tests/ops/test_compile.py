"""torch.compile, export, AOTInductor, opcheck."""

import pathlib
import shutil
import subprocess

import pytest
import torch
from targets import RESULTS, arguments, assert_near, leaves
from torch._dynamo.utils import counters

import flashmhf
from flashmhf.backends import hopper
from flashmhf.testing import problem

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ops = torch.ops.flashmhf


@pytest.mark.parametrize(("names", "inputs", "settings"), [
    (RESULTS, {"num_kv_heads": 1}, {}), (["forward", "backward"], {"gate": None}, {}),
    (["backward"], {"dtype": torch.bfloat16}, {"needs": [False, True]}),
    (["gated_backward"], {"dtype": torch.bfloat16}, {"needs": [True, False]}),
], ids=["grouped heads", "no gate", "weights alone", "tokens alone"])  # fmt: skip
def test_opcheck(target, names, inputs, settings):
    p = problem((2, 20), 2, 64, 3, 32, **{"dtype": target.dtype, "device": target.device} | inputs)
    for name in names:
        given = (*arguments(name, p), True) if "backward" in name else leaves(name, p)
        torch.library.opcheck(getattr(ops, name), given, {"backend": target.backend} | settings)


def gradients(function, module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = function(x)
    out.float().square().sum().backward()
    return out, x.grad, *(p.grad.clone() for p in module.parameters())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [{}, {"q_norm": True, "bias": True}], ids=["plain", "q_norm and bias"])
def test_compile_module(target, dynamic, options):
    options = options | {"backend": target.backend, "device": target.device, "dtype": target.dtype}
    module = flashmhf.FlashMHF(128, 2, 3, 32, deterministic=True, **options)
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic)
    for length in (20, 33):
        x = torch.randn(2, length, 128, device=target.device, dtype=module.k.dtype)
        expected = gradients(module, module, x)
        assert_near(gradients(compiled, module, x), expected, 1e-5 if target.device == "cpu" else 2e-2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@torch.no_grad()
def test_aot_inductor_without_python(needs_hopper, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not here")
    package, given, taken, program = (str(tmp_path / name) for name in ("layer.pt2", "x.pt", "y.pt", "run_package"))
    folder = pathlib.Path(torch.__file__).parent
    options = [f"-isystem{folder}/include", f"-isystem{folder}/include/torch/csrc/api/include", f"-L{folder}/lib"]
    options += [f"-Wl,-rpath,{folder}/lib,--no-as-needed", *"-ltorch -ltorch_cpu -ltorch_cuda -lc10 -ldl".split()]
    source = pathlib.Path(__file__).with_name("run_package.cpp")
    built = subprocess.run([compiler, "-std=c++20", source, "-o", program, *options], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"a program does not build against this PyTorch: {built.stderr[-2000:]}")
    module = flashmhf.FlashMHF(256, 2, 3, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 20, 256, device="cuda", dtype=torch.bfloat16)
    torch._inductor.aoti_compile_and_package(torch.export.export(module, (x,)), package_path=package)
    torch.save(x, given)
    done = subprocess.run([program, hopper.LIBRARY, package, given, taken], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    torch.testing.assert_close(torch.load(taken), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("training", [False, True])
def test_reduce_overhead_skips_nothing(needs_hopper, training):
    module = flashmhf.FlashMHF(256, 2, 3, q_norm=True, device="cuda", dtype=torch.bfloat16, deterministic=True)
    made = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    for _ in range(4):
        x = torch.randn(3, 50, 256, device="cuda", dtype=torch.bfloat16)
        with torch.set_grad_enabled(training):
            run = gradients if training else lambda function, module, x: function(x).clone()
            assert_near(run(made, module, x), run(module, module, x), 2e-2)
    assert not counters["inductor"]["cudagraph_skips"]
