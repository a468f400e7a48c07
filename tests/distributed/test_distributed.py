"""Several processes over gloo against one: rules, plans, steps, checkpoints; cases in distributed_runs.py."""

import copy

import pytest
import torch
from processes import run_python
from torch import nn

import flashmhf
from flashmhf import quantize

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")


def run(case: str, *arguments: object, **settings: object) -> None:
    import distributed_runs

    distributed_runs.run(getattr(distributed_runs, case), *arguments, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("case", "rules module_cases served_shard muon".split())
def test_two_gpus(case):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    run(case, 2, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "processes"), [
    ("rules", 2), ("rules_on_two_dimensions", 4), ("muon", 4), ("muon", 2),
    *((case, 2) for case in "module_cases served_shard mixed_precision recomputed_q initialisation refusals".split()),
])  # fmt: skip
def test_operators_modules_and_muon(case, processes):
    run(case, processes)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "processes"), [
    ("training", [4]), ("example", [2]), ("plans", [2]), ("transformers_plans", [2]), ("checkpoint", [4, 2, 1]),
])  # fmt: skip
def test_language_models_train_as_in_one_process(case, processes, tmp_path):
    pytest.importorskip("transformers")
    folder = [str(tmp_path)] if case in ("checkpoint", "transformers_plans") else []
    for count in processes:
        run(case, count, *folder)


@pytest.mark.parametrize(("kind", "found"), [
    # subtracts heads of its upper half from those of the lower
    ("DiffLlama", "DiffLlamaAttention with lambda_q1, lambda_k1"),
    ("Olmo2", "Olmo2Attention with q_norm.weight, k_norm.weight"),  # normalises all heads together
    ("OlmoHybrid", "OlmoHybridGatedDeltaNet with A_log"),
])  # fmt: skip
def test_attention_whose_heads_ranks_cannot_divide_is_refused(kind, found):
    transformers = pytest.importorskip("transformers")
    from small_models import foreign

    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"this transformers has no {kind}")
    model = foreign(kind, num_attention_heads=8, num_key_value_heads=4, head_dim=16, pad_token_id=0)
    flashmhf.replace_ffn(model, num_heads=2)
    with pytest.raises(ValueError, match=f"is a {found}.*; supported: Llama's attention, q_proj"):
        flashmhf.distributed.plan(model, 2)


MET = """
import importlib.util, sys, torch
def probe(now):
    if now == {when!r}:
        assert importlib.util.find_spec("torch.distributed.tensor")
        assert importlib.util.find_spec("torch.utils.flop_counter")
probe("before")
import flashmhf
probe("after")
assert not {{"torch.distributed.tensor", "torch.utils.flop_counter"}} & sys.modules.keys()
import torch.distributed.fsdp
torch.distributed.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode
mesh, q, k = init_device_mesh("cpu", (1,)), torch.randn(3, 2, 16), torch.randn(2, 3, 16, 16)
sharded = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x, dim in ((q, 1), (k, 0), (k, 0), (k, 0))]
with torch.inference_mode():
    assert torch.ops.flashmhf.forward(*sharded).placements == (Shard(1),)
flashmhf.flash_mhf(*sharded).sum().backward()
assert sharded[1].grad.placements == (Shard(0),)
with torch.inference_mode(), FlopCounterMode(display=False) as counter:
    torch.ops.flashmhf.forward(q, k, k, k)
assert counter.get_total_flops() == 6 * 3 * 2 * 16 * 3 * 16
"""


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_operators_know_dtensor_and_the_flop_counter_whoever_has_looked_for_them(when, tmp_path):
    """``import flashmhf`` imports neither, and a probe for them, as other packages make, disarms nothing."""
    code = MET.format(when=when, store=tmp_path / "store")
    run_python("-W", "error::UserWarning:flashmhf", "-c", code)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.norm, self.ffn = nn.Embedding(20, 32), nn.LayerNorm(32), flashmhf.FlashMHF(32, 2, 2, 16)


class TiedByAFunction(Own):
    def forward(self, ids):
        x = self.wte(ids).to(self.norm.weight.dtype)
        return nn.functional.linear(self.ffn(self.norm(x)), self.wte.weight)


class TiedByItsTranspose(Own):
    def forward(self, ids):
        return self.ffn(self.norm(self.wte(ids))) @ self.wte.weight.T


class FusedNorm(Own):
    def normalised(self, x):
        return (lambda x: nn.functional.layer_norm(x, (32,), self.norm.weight))(x)

    def forward(self, ids):
        return self.ffn(self.normalised(self.wte(ids)))


class Inherits(FusedNorm):
    def forward(self, ids):
        return super().forward(ids)


@pytest.mark.parametrize(("kind", "found"), [
    (TiedByAFunction, "wte.weight is read by the forward of TiedByAFunction"),
    (TiedByItsTranspose, "wte.weight is read by the forward of TiedByItsTranspose"),
    (FusedNorm, "norm.weight is read by the forward of FusedNorm"),
    (Inherits, "norm.weight is read by the forward of Inherits"),
])  # fmt: skip
def test_a_parameter_that_another_modules_forward_reads_is_refused_by_name(kind, found, mesh):
    model = nn.ModuleDict({"inner": kind()})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"inner.{found}; supported: "):
        flashmhf.distributed.parallelize(model, mesh)
    assert all(type(model.state_dict()[name]) is type(value) for name, value in before.items())


RENAMED = """
import pytest, torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
del OpSchema._recompute_comparison_key
import flashmhf
with pytest.warns(UserWarning, match="flashmhf does without sharding rules"):
    flashmhf.distributed.parallelize
flashmhf.FlashMHF(32, 2, 2, 16)(torch.randn(3, 32)).sum().backward()
"""


def test_without_a_private_name_of_dtensor_all_but_the_sharding_rules_works():
    run_python("-c", RENAMED)


class Quantised(torch.Tensor):
    """What torchao's tensors are: a class of their own around others."""


def test_quantised_weights_are_refused_by_name(mesh):
    fp8 = nn.Sequential(flashmhf.FlashMHF(128, 2, 2, 32), quantize.to_fp8(flashmhf.FlashMHF(128, 2, 2, 32)))
    other = nn.Sequential(flashmhf.FlashMHF(64, 2, 2, 16))
    weight = torch.zeros(64, 64).as_subclass(Quantised)
    other[0].in_proj.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(NotImplementedError, match="1 is a network in FP8; supported: 16 and 32 bits"):
        flashmhf.distributed.parallelize(fp8, mesh)
    with pytest.raises(NotImplementedError, match="0.in_proj.weight is a Quantised; supported: plain tensors"):
        flashmhf.distributed.parallelize(other, mesh)
