"""The language models that are measured, and steps of their training with the recipe's layout and optimizer groups."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashmhf.models import FlashMHFConfig, FlashMHFForCausalLM
from flashmhf.models.presets import preset
from flashmhf.nn import param_groups
from flashmhf_recipes.fused_loss import apply as apply_fused_loss
from flashmhf_recipes.layout import Layout
from flashmhf_recipes.metrics import peak_flops, training_flops_per_token

from . import timing

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
RATE, WARM_UP_RATE = 1e-3, 1000  # reached linearly within so many steps
WARM_UP = 2  # steps that hold the compilation
ALONE = Layout(1, 1, 1)


RUNS = Path(__file__).resolve().parents[2] / "experiments/results/runs.jsonl"
VOCABULARY = 16_384  # of the models of RUNS
LARGER = {  # the scale "7b": what differs from the 1.3B presets
    "flashmhf": {"hidden_size": 4096, "num_hidden_layers": 27, "ffn_num_heads": 32, "ffn_num_subnets": 29}
    | {"intermediate_size": 29 * 384},
    "swiglu": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11_008},
}
TRAINED = {  # (subject, scale): a model of RUNS
    ("flashmhf", "26m"): "long-flash128-8L-zero-lr5",
    ("swiglu", "26m"): "long-swiglu-9L-zero-lr5",
    ("flashmhf", "57m"): "long-57m-flash128-8L-lr2",
    ("swiglu", "57m"): "long-57m-swiglu",
    ("flashmhf", "58m"): "depth-flash128-10L",
    ("flashmhf 11 layers", "58m"): "depth-flash128-11L",
    ("swiglu", "58m"): "depth-swiglu-12L",
}


def configuration(subject: str, scale: str, **sizes: object) -> FlashMHFConfig:
    """Return the configuration of a preset, or of a model that experiments/compare.py trained. "flashmhf 21 layers" of
    a preset has as many sub-networks as bring its parameters nearest to the preset's.
    """
    if (subject, scale) in TRAINED:
        lines = map(json.loads, RUNS.read_text().splitlines())
        run = next(line for line in lines if line["run"] == TRAINED[subject, scale])["configuration"]
        return FlashMHFConfig(**{
            "ffn_type": run["ffn"], "vocab_size": VOCABULARY, "hidden_size": run["d_model"],
            "intermediate_size": run["width"], "num_hidden_layers": run["layers"],
            "num_attention_heads": run["attention_heads"], "ffn_num_heads": run["heads"],
            "ffn_num_subnets": run["subnets"], "tie_word_embeddings": True,
        } | sizes)  # fmt: skip
    ffn, *words = subject.split()
    scale, larger = ("1.3b", LARGER[ffn]) if scale == "7b" else (scale, {})
    model = functools.partial(preset(f"{ffn}-{scale}").config, **larger)
    layers = next((int(word) for word in words if word.isdigit()), None)
    if layers is not None:
        config = model()
        subnet = config.hidden_size * (3 * config.ffn_subnet_dim + 1)  # in all heads, with its column of the router
        rest = 6 * config.hidden_size**2  # attention, W_in and W_out
        parameters = config.num_hidden_layers * (rest + config.ffn_num_subnets * subnet)
        subnets = round((parameters / layers - rest) / subnet)
        width = subnets * config.ffn_subnet_dim
        sizes = {"num_hidden_layers": layers, "ffn_num_subnets": subnets, "intermediate_size": width} | sizes
    return model(**sizes)


def trainable(subject: str, scale: str, length: int, **sizes: object) -> FlashMHFConfig:
    """Return the configuration for trainings of ``length`` tokens; presets have an output layer of their own."""
    own = {} if (subject, scale) in TRAINED else {"tie_word_embeddings": False}
    return configuration(subject, scale, max_position_embeddings=max(length, 4096), use_cache=False, **own, **sizes)


class Recomputed(nn.Module):
    """``network``, of which backward keeps the input alone."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.network, x, use_reentrant=False)


class Training:
    """The training of a model on this process's device alone or over all processes.

    checkpointing: True for whole blocks, "networks" for their feed-forward networks alone, "q" for Q of FlashMHF alone.
    fused_loss: liger-kernel's, which never holds all logits.
    """

    def __init__(
        self, config: FlashMHFConfig, device: torch.device, layout: Layout = ALONE, *, length: int,
        compiled: bool = False, checkpointing: bool | str = False, fused_loss: bool = False,
    ):  # fmt: skip
        self.device, self.layout, self.length = device, layout, length
        self.processes = layout.data_processes * layout.tp
        torch.manual_seed(0)
        with device:
            self.model = FlashMHFForCausalLM(config).float().train()
        if checkpointing == "networks":
            for block in self.model.model.layers:
                block.mlp = Recomputed(block.mlp)
        elif checkpointing == "q":
            for block in self.model.model.layers:
                block.mlp.recompute_q = True
        elif checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.flops = training_flops_per_token(self.model, length)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        if fused_loss:
            apply_fused_loss(self.model)
        if layout.sharded:
            layout.shard(self.model, device.type, compiled)
        elif compiled:
            for block in self.model.model.layers:
                block.compile()
        groups = param_groups(self.model, RATE, WEIGHT_DECAY)
        self.optimizer = torch.optim.AdamW(groups, RATE, BETAS, fused=device.type == "cuda")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_RATE)
        )

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of ``batch`` [sequences, length], of which each process computes its share; the same on all."""
        rank = dist.get_rank() if self.processes > 1 else 0
        mine = batch.chunk(self.layout.data_processes)[self.layout.data_index(rank)].to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=mine, labels=mine).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        total = loss.detach()
        if self.processes > 1:  # the processes that share heads have the same loss
            dist.all_reduce(total)
            total /= self.processes
        return total

    def measure(self, sequences: int, steps: int) -> dict[str, object]:
        """Time, speed and memory of steps on batches of ``sequences``; the first WARM_UP do not count."""
        gpu = self.device.type == "cuda"
        losses, seconds = [], []
        for batch in batches(self.model.config.vocab_size, sequences, self.length, WARM_UP + steps):
            start = time.perf_counter()
            losses.append(self.step(batch).item())
            seconds.append(time.perf_counter() - start)
            if gpu and len(losses) == WARM_UP:
                torch.cuda.reset_peak_memory_stats(self.device)
        ms = timing.percentiles([1e3 * step for step in seconds[WARM_UP:]])
        speed, peak = 1e3 * sequences * self.length / ms["p50"], peak_flops(self.device)
        return {
            "parameters": self.parameters,
            "ms": ms,
            "tokens_per_s": speed,
            "mfu": None if peak is None else speed * self.flops / (peak * self.processes),
            "memory_mib": torch.cuda.max_memory_allocated(self.device) / 2**20 if gpu else None,
            "losses": losses,
        } | (open_communication(self, batch) if gpu and self.processes > 1 else {})


def batches(vocabulary: int, sequences: int, length: int, steps: int) -> Iterator[torch.Tensor]:
    """The same on every process: Zipf words, each sequence half of them said twice, so that there is much to learn."""
    generator = torch.Generator().manual_seed(1)
    frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    for _ in range(steps):
        words = torch.multinomial(frequencies, sequences * length // 2, replacement=True, generator=generator)
        yield words.view(sequences, -1).repeat(1, 2)


def open_communication(training: Training, batch: torch.Tensor) -> dict[str, float]:
    """Milliseconds of a further step in which collectives run, and in which no other kernel does."""
    found = timing.kernels(functools.partial(training.step, batch))
    return {"communication_ms": found.collectives / 1e6, "open_communication_ms": (found.all - found.others) / 1e6}
