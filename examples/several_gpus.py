"""A language model in one's own training loop on several GPUs: FSDP2, compiled blocks and Muon, in the order in which
they fit together.

    pip install ".[lm]"
    torchrun --nproc-per-node 8 examples/several_gpus.py flashmhf-1.3b     # eight GPUs
    torchrun --nproc-per-node 2 examples/several_gpus.py flashmhf-tiny     # two CPU processes, within a minute

The order: the same weights everywhere, then compile, then shard, then make the optimizer. fully_shard puts DTensors in
the place of the parameters, so an optimizer that was made before would step tensors that the model no longer uses.
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashmhf
from flashmhf.distributed import shard_placement
from flashmhf.models import FlashMHFForCausalLM
from flashmhf.models.presets import preset


def sequences(count: int, length: int, vocabulary: int) -> torch.Tensor:
    """[count, length] of counting numbers: put your own data here. Every process must draw other sequences."""
    return (torch.randint(vocabulary, (count, 1)) + torch.arange(length)) % vocabulary


def train(
    name: str, steps: int, warmup: int, rate: float, micro_batch: int, accumulate: int, length: int
) -> list[float]:
    """Train the preset ``name``; return the mean loss of each step over all processes."""
    device, size = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    mesh = init_device_mesh(device, (size,))

    torch.manual_seed(0)  # the same weights on every process: fully_shard sends none
    with torch.device(device):
        model = FlashMHFForCausalLM(preset(name).config(use_cache=False)).float().train()
    torch.manual_seed(1 + dist.get_rank())  # other data on each

    for block in model.model.layers:
        if device == "cuda":
            block.compile()
        fully_shard(block, mesh=mesh, shard_placement_fn=shard_placement(size))
    fully_shard(model, mesh=mesh, shard_placement_fn=shard_placement(size))

    optimizer = flashmhf.Muon(flashmhf.param_groups(model, lr=rate, weight_decay=0.1, muon=True))

    def factor(step: int) -> float:
        """Rise to 1 within the warm-up, then fall to 0 along a cosine."""
        after = (step - warmup) / max(1, steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * after))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    losses = []
    for step in range(steps):
        total = torch.zeros((), device=device)
        for _ in range(accumulate):
            ids = sequences(micro_batch, length, model.config.vocab_size).to(device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(input_ids=ids, labels=ids).loss / accumulate
            loss.backward()
            total += loss.detach() / size
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        losses.append(total.item())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    chosen = sys.argv[1] if len(sys.argv) > 1 else "flashmhf-tiny"
    if chosen.endswith("-tiny"):
        train(chosen, steps=60, warmup=10, rate=1e-2, micro_batch=4, accumulate=1, length=64)
    else:  # the paper's 64 sequences of 4,096 tokens per step on eight GPUs
        train(
            chosen,
            steps=1000,
            warmup=100,
            rate=1e-3,
            micro_batch=4,
            accumulate=max(1, 16 // dist.get_world_size()),
            length=4096,
        )
    dist.destroy_process_group()
