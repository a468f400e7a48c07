"""torchtitan's Llama 3 with FlashMHF over gloo: ``python titan_runs.py FOLDER DP TP [compile]``. With DP
and TP 1 it saves a checkpoint, a loss and gradients in FOLDER; otherwise it loads the checkpoint and compares."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.tools.utils
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

torchtitan.tools.utils.device_type = "cpu"  # "cuda" where there is no accelerator

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402

BACKEND = "partial_dtensor"
KEYWORDS = {"num_heads": 4, "num_subnets": 2, "subnet_dim": 32, "q_norm": True, "num_layers": 6}


def model_of(dp: int, tp: int, compiled: bool) -> tuple[nn.Module, ParallelDims]:
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(spec.model, enable_sp=tp > 1)
    override = OverrideConfig(imports=[("flashmhf.integrations.torchtitan.feed_forward", KEYWORDS)])
    assert len(apply_overrides(override, spec)) == len(spec.model.layers)
    set_spmd_backend(BACKEND)
    dims = ParallelDims(1, dp, 1, tp, 1, 1, world_size=dp * tp, spmd_backend=BACKEND)
    with torch.device("meta"):
        model = spec.model.build()
    settings = {
        "training": TrainingConfig(mixed_precision_param="float32"),
        "parallelism": ParallelismConfig(
            spmd_backend=BACKEND, data_parallel_shard_degree=dp, tensor_parallel_degree=tp
        ),
        "compile_config": CompileConfig(enable=compiled, backend="aot_eager"),
        "ac_config": FullAC.Config(),
    }
    spec.parallelize_fn(model, parallel_dims=dims, dump_folder="", **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model, dims


def case(folder: str, dp: str, tp: str, *compiled: str) -> None:
    dp, tp = int(dp), int(tp)
    torch.manual_seed(0)
    model, dims = model_of(dp, tp, bool(compiled))
    checkpoint, file = os.path.join(folder, "checkpoint"), os.path.join(folder, "expected.pt")
    state = {"model": model.state_dict()}
    (dcp.save if dp * tp == 1 else dcp.load)(state, checkpoint_id=checkpoint)
    model.load_state_dict(state["model"])
    rows = 4 // dp
    first = rows * (dist.get_rank() // tp)
    tokens = torch.randint(2048, (4, 32), generator=torch.Generator().manual_seed(1))[first : first + rows]
    with get_spmd_context(parallel_dims=dims)():
        logits = model(tokens, positions=torch.arange(32).expand(rows, -1))
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        elif tp > 1:  # the vocabulary's part of this rank
            logits = torch.cat(torch.distributed.nn.functional.all_gather(logits.contiguous()), -1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        (loss / dp).backward()  # torchtitan's FSDP sums
    total = loss.detach().clone()
    dist.all_reduce(total)
    found = {"loss": total / (dp * tp)}
    for name, parameter in model.named_parameters():
        if "feed_forward" in name:
            name = name.replace("._checkpoint_wrapped_module", "").replace("._orig_mod", "")
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    if dp * tp == 1:
        torch.save(found, file)
        return
    expected = torch.load(file)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        limits = {"rtol": 1e-3, "atol": 1e-4 * value.abs().max().item()}
        torch.testing.assert_close(found[name], value, **limits, msg=lambda text, name=name: f"{name}: {text}")


if __name__ == "__main__":
    sys.path.append(os.path.join(os.path.dirname(__file__), "..", "distributed"))
    import distributed_runs

    distributed_runs.run(case, int(sys.argv[2]) * int(sys.argv[3]), *sys.argv[1:], start="fork")
