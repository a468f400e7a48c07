"""The override for torchtitan: sizes, initialisation, FSDP2, tensor parallelism, AC, compile, checkpoints."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import torch
from processes import ROOT, run_python

pytest.importorskip("torchtitan", reason='torchtitan is not installed: pip install "flashmhf[titan]" (Python 3.11)')

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import config_registry, llama3_configs, model_registry

import flashmhf
from flashmhf.integrations.torchtitan import feed_forward, param_groups


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """The checkpoint, loss and gradients of one process."""
    folder = tmp_path_factory.mktemp("titan")
    run(folder, 1, 1)
    return folder


def run(folder: Path, dp: int, tp: int, *compiled: str) -> None:
    runs = Path(__file__).with_name("titan_runs.py")
    run_python(runs, folder, dp, tp, *compiled, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("arguments", [(1, 2), (2, 1, "compile"), (2, 2)], ids=str)
def test_processes_compute_what_one_does(one_process, arguments):
    """(FSDP2, tensor parallelism) with activation checkpointing, from one process's checkpoint."""
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


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"num_layers": "32"}, TypeError, "num_layers must be an int, got str"),
    ({"q_norm": "false"}, TypeError, "q_norm must be a bool, got str"),
    ({"subnet_dim": 64.0}, TypeError, "subnet_dim must be an int, got float"),
    ({"num_subnets": True}, TypeError, "num_subnets must be an int, got bool"),
    ({"num_heads": "4"}, TypeError, "num_heads must be an int, got str"),
    ({"init": "Balanced"}, ValueError, "init is 'Balanced'; supported: 'normal', 'official', 'balanced'"),
    ({"init": False}, TypeError, "init must be a str, got bool"),
])  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_name(options, error, message):
    """As a command line gives it: JSON."""
    with pytest.raises(error, match=message):
        feed_forward(llama3_configs["debugmodel"](attn_backend="flex").layers[0].feed_forward, **options)


def test_projections_have_a_rate_of_their_own():
    trainer = config_registry.llama3_debugmodel()
    imports = [("flashmhf.integrations.torchtitan.feed_forward", {"num_heads": 2, "num_layers": 6})]
    imports.append("flashmhf.integrations.torchtitan.param_groups")
    apply_overrides(OverrideConfig(imports=imports), trainer)
    trainer.optimizer.implementation = "for-loop"
    with torch.device("meta"):
        model = trainer.model_spec.model.build()
    found = {}
    for optimizer in trainer.optimizer.build(model_parts=[model]):
        for group in optimizer.param_groups:
            found |= {
                id(parameter): (group["lr"], group["lr"] * group["weight_decay"]) for parameter in group["params"]
            }
    plain = found[id(model.layers["0"].feed_forward.k)]
    for name, parameter in model.named_parameters():
        share = 0.3 if re.search("feed_forward.(in|out)_proj", name) else 1
        assert found[id(parameter)] == pytest.approx((share * plain[0], plain[1])), name
    for pattern, optimizer, of in ((".*", "DistMuon", "a group of DistMuon"), ("bias", "AdamW", "no group")):
        group = dataclasses.replace(trainer.optimizer.param_groups[-1], pattern=pattern, optimizer_name=optimizer)
        with pytest.raises(ValueError, match=f"in_proj.weight in {of}; supported: AdamW, Adam"):
            param_groups(OptimizersContainer.Config(param_groups=[group]))
    with pytest.raises(ValueError, match="projection_rate is 0; it must be above 0"):
        param_groups(trainer.optimizer, projection_rate=0)


def test_the_recipe_of_the_page_has_the_parameters_of_the_stock_model(tmp_path, monkeypatch):
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    (tmp_path / "recipes.py").write_text(re.search(r"```python\n(# needs torchtitan\n.*?)```", page, re.DOTALL)[1])
    command = re.search(r"```sh\n(torchrun [^`]* torchtitan.train .*?)```", page, re.DOTALL)[1]
    _, arguments = command.replace("\\\n", " ").split("torchtitan.train")
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = ConfigManager().parse_args(shlex.split(arguments))
    apply_overrides(trainer.override, trainer)
    with torch.device("meta"):
        model, stock = trainer.model_spec.model.build(), model_registry("8B").model.build()
    assert len(model.layers) == model.layers["0"].feed_forward.config.num_layers == 27
    sizes = [sum(parameter.numel() for parameter in each.layers.parameters()) for each in (model, stock)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_heads_that_the_ranks_do_not_divide():
    module = feed_forward(llama3_configs["debugmodel"](attn_backend="flex").layers[0].feed_forward, num_heads=2).build()
    with pytest.raises(
        ValueError, match="feed_forward has H = 2 heads on a mesh of size 4; supported: sizes that divide H"
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
