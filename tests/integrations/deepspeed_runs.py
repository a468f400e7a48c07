"""Models under DeepSpeed's ZeRO over gloo: ``python deepspeed_runs.py FOLDER``, two processes."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS / "distributed")]

import deepspeed  # noqa: E402
import distributed_runs  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as whole_state  # noqa: E402
from small_models import foreign, tiny  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402

import flashmhf  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute; gloo does it, too
BATCHES = [torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step)) for step in range(4)]


def swapped() -> nn.Module:
    model = foreign()
    flashmhf.replace_ffn(model, num_heads=2)
    return model


def own() -> nn.Module:
    return tiny(num_hidden_layers=2)


def config_of(stage: int) -> dict:
    # no parameter is so small that stage 3 leaves it whole, and none stays after its use
    sizes = "param_persistence_threshold max_live_parameters max_reuse_distance prefetch_bucket_size".split()
    zero = {"stage": stage} | ({f"stage3_{size}": 0 for size in sizes} if stage == 3 else {})
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    return given | {"zero_optimization": zero}


def engine_of(model: nn.Module, stage: int, muon: bool = False) -> deepspeed.DeepSpeedEngine:
    groups = flashmhf.param_groups(model, 1e-3, 0.1, muon=muon)
    optimizer = flashmhf.Muon(groups) if muon else torch.optim.AdamW(groups, eps=1e-4)
    return deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config_of(stage))[0]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def backward(engine: deepspeed.DeepSpeedEngine, batch: torch.Tensor) -> float:
    """Return the loss of the whole batch, half of it this rank's."""
    mine = batch.chunk(2)[dist.get_rank()]
    loss = engine(input_ids=mine, labels=mine).loss
    engine.backward(loss)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / 2


def trains_saves_and_loads(make: Callable[[], nn.Module], stage: int, folder: str) -> None:
    reference, engine = make().train(), engine_of(make(), stage)
    optimizer = torch.optim.AdamW(flashmhf.param_groups(reference, 1e-3, 0.1), eps=1e-4)
    for batch in BATCHES:
        expected = reference(input_ids=batch, labels=batch).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = backward(engine, batch)
        engine.step()
        assert abs(found - expected.item()) < 1e-5, (stage, found, expected.item())
    engine.save_checkpoint(folder, tag=f"{stage}")
    dist.barrier()
    other = make()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other = engine_of(other, stage)
    other.load_checkpoint(folder, tag=f"{stage}")
    trained, stored = weights(engine.module), whole_state(folder, tag=f"{stage}")
    for name, loaded in weights(other.module).items():
        assert torch.equal(loaded, trained[name]) and torch.equal(stored[name], loaded), (stage, name)
    for each in (engine, reference):
        each.eval()
    with torch.no_grad():  # where a network alone would be one operator
        found, expected = (each(input_ids=BATCHES[0]).logits for each in (engine, reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def muon_is_refused(stage: int) -> None:
    engine = engine_of(swapped(), stage, muon=True)
    before = weights(engine.module)
    backward(engine, BATCHES[0])
    with pytest.raises(RuntimeError, match="as under .* DeepSpeed's ZeRO; supported: fully_shard"):
        engine.step()
    assert all(map(torch.equal, before.values(), weights(engine.module).values())), stage


def built_in_parts(make: Callable[[], nn.Module], folder: str) -> None:
    """By transformers, which has ZeRO's stage 3 take each part's weights away when it is made."""
    plain, folder = make(), f"{folder}/{make.__name__} whole"
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    setting = HfDeepSpeedConfig(config_of(3))  # holds while it lives
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    built = [AutoModelForCausalLM.from_config(plain.config, dtype=torch.float32)]
    del setting
    if make is own:
        with deepspeed.zero.Init(config_dict_or_path=config_of(3), dtype=torch.float32):
            built.append(type(plain)(plain.config))
    for name, parameter in weights(loaded).items():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    for model in built:
        assert not any(parameter.numel() for parameter in model.parameters())
        ours = {name: parameter for name, parameter in weights(model).items() if ".mlp." in name}
        for name, parameter in ours.items():  # what transformers draws itself under zero.Init is its own affair
            expected, found = plain.get_parameter(name).std().item(), parameter.std().item()
            assert abs(found - expected) <= 0.2 * expected, (name, found, expected)
    decayed, expected = (
        [(group["weight_decay"], len(group["params"])) for group in flashmhf.param_groups(model, 1.0, 0.1)]
        for model in (loaded, plain)
    )
    assert decayed == expected
    with pytest.raises(ValueError, match="muon is True and model has partitioned parameters"):
        flashmhf.param_groups(loaded, 1.0, 0.1, muon=True)


def case(folder: str) -> None:
    deepspeed.init_distributed("gloo")
    for make, stage in ((swapped, 2), (swapped, 3), (own, 3)):
        trains_saves_and_loads(make, stage, f"{folder}/{make.__name__}")
    for stage in (1, 3):
        muon_is_refused(stage)
    for make in (swapped, own):
        built_in_parts(make, folder)


if __name__ == "__main__":
    distributed_runs.run(case, 2, sys.argv[1], start="fork")
