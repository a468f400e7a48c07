"""Peak memory in fresh processes: the T x d_ff intermediate never exists."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import flashmhf

CPU = """
import json, resource, sys, torch
import flashmhf
from flashmhf import reference
torch.set_num_threads(2)
what, backward = sys.argv[1], sys.argv[2] == "backward"
T, H, D, E, J = 2048, 8, 64, 7, 192
def inputs(T):
    q, *kuv = torch.randn(T, H, D), *(torch.randn(H, E, J, D) / 8 for _ in range(3))
    return [x.requires_grad_(backward) for x in (q, *kuv, torch.rand(T, H, E))]
function = {"flashmhf": flashmhf.flash_mhf, "materialising": reference.forward}[what]
def run(x):
    out = function(*x)
    if backward:
        out.sum().backward()
run(inputs(64))
x = inputs(T)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(x)
print(json.dumps(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))
"""

# os._exit: at a regular shutdown the autograd thread may be waiting for the interpreter, which ends it in the middle of C++ code and aborts.
CUDA = """
import json, os, sys, torch
import flashmhf
backend = sys.argv[1]
T, H, D, E, J = 16384, 8, 128, 7, 384
q, *kuv = torch.randn(T, H, D, device="cuda").bfloat16(), *(torch.randn(H, E, J, D, device="cuda").bfloat16() for _ in range(3))
w = torch.randn(H, D, E, device="cuda")
x = [t.requires_grad_() for t in (q, *kuv, w)]
torch.ops.flashmhf.gated_forward(*[t[:64] if t is q else t for t in x], 1e-20, backend=backend).sum().backward()
for t in x:
    t.grad = None
torch.cuda.synchronize()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
with torch.no_grad():
    torch.ops.flashmhf.gated_forward(*x, 1e-20, backend=backend)
forward = torch.cuda.max_memory_allocated() - before
torch.cuda.reset_peak_memory_stats()
torch.ops.flashmhf.gated_forward(*x, 1e-20, backend=backend).sum().backward()
print(json.dumps([forward, torch.cuda.max_memory_allocated() - before]), flush=True)
os._exit(0)
"""


TRAINING = """
import json, os, torch
import flashmhf
settings = {"device": "cuda", "dtype": torch.bfloat16}
modules = flashmhf.FlashMHF(2048, 16, 22, 384, backend="hopper", **settings), flashmhf.SwiGLU(2048, 8192, **settings)
x, upstream = (torch.randn(8, 4032, 2048, device="cuda").bfloat16() for _ in range(2))
x.requires_grad_()
peaks = []
for module in modules:
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(module(x), [x, *module.parameters()], upstream)
    peaks.append(torch.cuda.max_memory_allocated() - before)
print(json.dumps(peaks), flush=True)
os._exit(0)
"""


def measure(program: str, *arguments: str):
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("direction", "most"), [("forward", 1 / 20), ("backward", 1 / 12)])
def test_eager_memory_is_a_small_part_of_the_materialising_code(direction, most):
    # The gradients themselves, which both return, are 1/30 of the materialising peak at this size.
    ours, theirs = (measure(CPU, what, direction) for what in ("flashmhf", "materialising"))
    assert ours <= most * theirs, f"{ours / 2**20:.1f} MiB against {theirs / 2**20:.1f} MiB"


def test_gpu_memory_has_no_intermediate(gpu_backend):
    forward, training = measure(CUDA, gpu_backend)
    tokens = 16384 * 8 * 128 * 2  # bytes of q
    weights = 3 * 8 * 7 * 384 * 128 * 2
    intermediate = 16384 * 8 * 7 * 384 * 2
    assert forward <= 2.5 * tokens < intermediate / 4
    assert training <= 6 * tokens + 4 * weights < intermediate


@pytest.mark.gpu
def test_training_memory_of_the_paper_module():
    """Forward and backward at 8 x 4032 tokens beyond weights and input: counted in csrc/README.md, and four times less than SwiGLU's."""
    if flashmhf.info().reasons["hopper"]:
        pytest.skip(flashmhf.info().reasons["hopper"])
    ours, swiglu = measure(TRAINING)
    tokens = 2 * 8 * 4032 * 2048  # output, q, gradient of S, dq
    weights = 2 * (3 * 16 * 22 * 384 * 128 + 2048 * 2048)  # dk, du, dv, and out_proj's
    workspace = 132 * 2**20
    assert ours <= 4 * tokens + weights + workspace, f"{ours / 2**20:.0f} MiB"
    assert swiglu >= 4 * ours, f"{swiglu / ours:.2f}"
