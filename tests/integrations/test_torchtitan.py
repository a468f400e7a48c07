"""The override for torchtitan, where it is installed: sizes, initialisation, FSDP2, tensor parallelism, AC, compile,
checkpoints."""

from pathlib import Path

import pytest
import torch
from processes import run_python

pytest.importorskip("torchtitan", reason='torchtitan is not installed: pip install "flashmhf[titan]" (Python 3.11)')

from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import llama3_configs

import flashmhf
from flashmhf.integrations.torchtitan import feed_forward


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """The checkpoint, loss and gradients of one process."""
    folder = tmp_path_factory.mktemp("titan")
    run(folder, 1, 1)
    return folder


def run(folder: Path, dp: int, tp: int, *compiled: str) -> None:
    runs = Path(__file__).with_name("titan_runs.py")
    run_python(runs, dp * tp, "case", folder, dp, tp, *compiled, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("arguments", [(1, 2), (2, 1, "compile"), (2, 2)], ids=str)
def test_processes_compute_what_one_does(one_process, arguments):
    """(FSDP2, tensor parallelism) with full activation checkpointing, from one process's checkpoint: loss and
    gradients."""
    run(one_process, *arguments)


def test_default_sizes_and_refusal():
    stock = llama3_configs["8B"](attn_backend="flex").layers[0].feed_forward
    network = feed_forward(stock)
    assert (network.num_heads, network.subnet_dim, network.num_subnets) == (32, 384, round(stock.w1.out_features / 384))
    with pytest.raises(ValueError, match="num_heads is 7; it must divide the model's dimension = 4096"):
        feed_forward(stock, num_heads=7)
    for name in ("num_heads", "num_subnets", "subnet_dim"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            feed_forward(stock, **{name: 0})


def test_heads_that_the_ranks_do_not_divide():
    module = feed_forward(llama3_configs["debugmodel"](attn_backend="flex").layers[0].feed_forward, num_heads=2).build()
    with pytest.raises(
        ValueError, match="feed_forward has H = 2 heads and the mesh has size 4; supported: sizes that divide H"
    ):
        module.parallelize(ParallelDims(1, 1, 1, 4, 1, 1, world_size=4))


def test_initialisation_is_the_networks_own():
    stock = llama3_configs["debugmodel"](attn_backend="flex").layers[0].feed_forward
    module = feed_forward(stock, num_heads=4, num_subnets=2, subnet_dim=32, num_layers=6, q_norm=True).build()
    torch.manual_seed(0)
    with torch.no_grad():
        module.init_states()
    reference = flashmhf.FlashMHF(256, 4, 2, 32, q_norm=True)
    for name, parameter in reference.named_parameters():
        assert module.get_parameter(name).shape == parameter.shape
    reference.reset_parameters("balanced", num_layers=6)
    for name, parameter in reference.named_parameters():
        assert module.get_parameter(name).std().item() == pytest.approx(parameter.std().item(), rel=0.1, abs=1e-6), name
    module.load_state_dict(reference.state_dict())
    x = torch.randn(2, 5, 256)
    torch.testing.assert_close(module(x), reference(x))
