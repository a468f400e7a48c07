"""Peak memory: the T x d_ff intermediate never exists. The CPU's tensor bytes; on a GPU the allocator's."""

import pytest
import torch

import flashmhf
from benchmarks.harness import timing
from flashmhf import reference

CUDA = {"device": "cuda", "dtype": torch.bfloat16}


def training_peak(function, inputs):
    """Bytes beyond the inputs' while ``function`` and its gradients run."""
    upstream = torch.ones_like(function())
    # an engine thread might still hold the first run's gradients when the second begins
    with torch.autograd.set_multithreading_enabled(False):
        return timing.peak_memory(lambda: torch.autograd.grad(function(), inputs, upstream), upstream.device)


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
    tokens, heads, head_dim, subnets, subnet_dim = 16384, 8, 128, 7, 384
    q, *kuv = (
        torch.randn(shape, **CUDA)
        for shape in ((tokens, heads, head_dim), *3 * [(heads, subnets, subnet_dim, head_dim)])
    )
    inputs = [x.requires_grad_() for x in (q, *kuv, torch.randn(heads, head_dim, subnets, device="cuda"))]

    def run():
        return torch.ops.flashmhf.gated_forward(*inputs, 1e-20, backend=gpu_backend)

    of_tokens, weights = 2 * q.numel(), 3 * 2 * kuv[0].numel()
    intermediate = 2 * tokens * heads * subnets * subnet_dim
    with torch.no_grad():
        assert timing.peak_memory(run, q.device) <= 2.5 * of_tokens < intermediate / 4
    assert training_peak(run, inputs) <= 6 * of_tokens + 4 * weights < intermediate


def test_training_memory_of_the_paper_module(needs_hopper):
    """Forward and backward at 8 x 4032 tokens beyond weights and input, as csrc/backward/README.md counts."""
    modules = flashmhf.FlashMHF(2048, 16, 22, 384, backend="hopper", **CUDA), flashmhf.SwiGLU(2048, 8192, **CUDA)
    x = torch.randn(8, 4032, 2048, **CUDA).requires_grad_()
    ours, swiglu = (training_peak(lambda m=module: m(x), [x, *module.parameters()]) for module in modules)
    tokens = 2 * 8 * 4032 * 2048  # output, q, gradient of S, dq
    weights = 2 * (3 * 16 * 22 * 384 * 128 + 2048 * 2048)  # dk, du, dv, and out_proj's
    workspace = 134 * 2**20  # dW and rounding included
    assert ours <= 4 * tokens + weights + workspace, f"{ours / 2**20:.0f} MiB"
    assert swiglu >= 4.2 * ours, f"{swiglu / ours:.2f}"
