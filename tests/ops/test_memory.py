"""Peak memory: the T x d_ff intermediate never exists. The CPU's tensor bytes; on a GPU the allocator's, in fresh
processes."""

import json

import pytest
import torch
from processes import run_python

import flashmhf
from benchmarks.harness import timing
from flashmhf import reference

# os._exit: at a regular shutdown the autograd thread may wait for the interpreter, which then ends it in the middle of
# C++ code and aborts.
CUDA = """
import json, os, sys, torch
import flashmhf
backend = sys.argv[1]
T, H, D, E, J = 16384, 8, 128, 7, 384
q, *kuv = (torch.randn(shape, device="cuda").bfloat16() for shape in ((T, H, D), *3 * [(H, E, J, D)]))
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
# an engine thread may still hold the first round's gradients when `before` is read
torch.autograd.set_multithreading_enabled(False)
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
    return json.loads(run_python("-c", program, *arguments).splitlines()[-1])


@pytest.mark.parametrize(("backward", "most"), [(False, 1 / 20), (True, 1 / 12)])
def test_eager_memory_is_a_small_part_of_the_materialising_code(backward, most):
    # The gradients themselves, which both return, are 1/30 of the materialising peak at this size.
    q, *kuv = torch.randn(2048, 8, 64), *(torch.randn(8, 7, 192, 64) / 8 for _ in range(3))
    inputs = [x.requires_grad_(backward) for x in (q, *kuv, torch.rand(2048, 8, 7))]

    def run(function):
        out = function(*inputs)
        if backward:
            torch.autograd.grad(out.sum(), inputs)

    ours, theirs = (timing.peak_tensor_bytes(lambda f=f: run(f)) for f in (flashmhf.flash_mhf, reference.forward))
    assert 0 < ours <= most * theirs, f"{ours / 2**20:.1f} MiB against {theirs / 2**20:.1f} MiB"


def test_gpu_memory_has_no_intermediate(gpu_backend):
    forward, training = measure(CUDA, gpu_backend)
    tokens = 16384 * 8 * 128 * 2  # bytes of q
    weights = 3 * 8 * 7 * 384 * 128 * 2
    intermediate = 16384 * 8 * 7 * 384 * 2
    assert forward <= 2.5 * tokens < intermediate / 4
    assert training <= 6 * tokens + 4 * weights < intermediate


def test_training_memory_of_the_paper_module(needs_hopper):
    """Forward and backward at 8 x 4032 tokens beyond weights and input: as csrc/backward/README.md counts, 4.2 times
    less than SwiGLU's."""
    ours, swiglu = measure(TRAINING)
    tokens = 2 * 8 * 4032 * 2048  # output, q, gradient of S, dq
    weights = 2 * (3 * 16 * 22 * 384 * 128 + 2048 * 2048)  # dk, du, dv, and out_proj's
    workspace = 134 * 2**20  # dW and rounding included
    assert ours <= 4 * tokens + weights + workspace, f"{ours / 2**20:.0f} MiB"
    assert swiglu >= 4.2 * ours, f"{swiglu / ours:.2f}"
