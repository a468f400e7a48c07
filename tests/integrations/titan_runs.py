"""torchtitan's Llama 3 with FlashMHF over gloo: ``python titan_runs.py PROCESSES case FOLDER DP TP [compile]``. With DP
and TP 1 it saves a checkpoint, a loss and gradients in FOLDER; otherwise it loads the checkpoint and compares."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

BACKEND = "partial_dtensor"
KEYWORDS = {"num_heads": 4, "num_subnets": 2, "subnet_dim": 32, "q_norm": True, "num_layers": 6}


def model_of(dp: int, tp: int, compiled: bool = False):
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(spec.model, enable_sp=tp > 1)
    replaced = apply_overrides(
        OverrideConfig(imports=[("flashmhf.integrations.torchtitan.feed_forward", KEYWORDS)]), spec
    )
    assert len(replaced) == len(spec.model.layers)
    set_spmd_backend(BACKEND)
    dims = ParallelDims(1, dp, 1, tp, 1, 1, world_size=dp * tp, spmd_backend=BACKEND)
    with torch.device("meta"):
        model = spec.model.build()
    parallelism = ParallelismConfig(spmd_backend=BACKEND, data_parallel_shard_degree=dp, tensor_parallel_degree=tp)
    training = TrainingConfig(mixed_precision_param="float32")
    compile_config = CompileConfig(enable=compiled, backend="aot_eager")
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=FullAC.Config(),
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model, dims


def case(folder: str, dp: str, tp: str, *compiled: str) -> None:
    from torchtitan.distributed.utils import get_spmd_context

    dp, tp = int(dp), int(tp)
    torch.manual_seed(0)
    model, dims = model_of(dp, tp, bool(compiled))
    checkpoint, file = os.path.join(folder, "checkpoint"), os.path.join(folder, "expected.pt")
    state = {"model": model.state_dict()}
    if dp * tp == 1:
        dcp.save(state, checkpoint_id=checkpoint)
    else:
        dcp.load(state, checkpoint_id=checkpoint)
        model.load_state_dict(state["model"])
    tokens = torch.randint(2048, (4, 32), generator=torch.Generator().manual_seed(1))
    rows = 4 // dp
    first = rows * (dist.get_rank() // tp)
    positions = torch.arange(32).expand(rows, -1)
    with get_spmd_context(parallel_dims=dims)():
        logits = model(tokens[first : first + rows], positions=positions)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        elif tp > 1:  # the vocabulary's part of this rank
            parts = torch.distributed.nn.functional.all_gather(logits.contiguous())
            logits = torch.cat(parts, -1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[first : first + rows].flatten())
        (loss / dp).backward()  # torchtitan's FSDP sums
    total = loss.detach().clone()
    dist.all_reduce(total)
    found = {"loss": total / (dp * tp)}
    gradients = {name: p.grad for name, p in model.named_parameters() if "feed_forward" in name}
    found |= {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
    found = {
        name.replace("._checkpoint_wrapped_module", "").replace("._orig_mod", ""): value
        for name, value in found.items()
    }
    if dp * tp == 1:
        torch.save(found, file)
        return
    expected = torch.load(file)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=1e-4 * value.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}"
        )


if __name__ == "__main__":
    sys.path.append(os.path.join(os.path.dirname(__file__), "..", "distributed"))
    import distributed_runs
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type = "cpu"  # "cuda" where there is no accelerator
    import torchtitan.models.llama3  # noqa: F401  imported once, before the fork

    distributed_runs.main({"case": case})
