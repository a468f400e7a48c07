"""The model that compare.py trains: that of flashmhf.models without transformers around it, so that one compiled block
serves all layers."""

from __future__ import annotations

import torch
from runs import Run
from torch import Tensor, nn

import flashmhf
from flashmhf.nn.network import Network

TOLERANCE = 0.01  # of the number of parameters


def feed_forward(run: Run) -> Network:
    networks = {
        "swiglu": lambda: flashmhf.SwiGLU(run.d_model, run.width),
        "flashmhf": lambda: flashmhf.FlashMHF(run.d_model, run.heads, run.subnets, run.width // run.subnets),
    }
    if run.ffn not in networks:
        raise ValueError(f"{run.name}: ffn is {run.ffn!r}; supported: {', '.join(networks)}")
    network = networks[run.ffn]()
    network.reset_parameters(num_layers=run.layers)
    return network


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    """A Llama block with rotary attention, as flashmhf.models builds it; its q, k and v projections are one product."""

    def __init__(self, run: Run):
        super().__init__()
        self.heads = run.attention_heads
        self.norm1, self.norm2 = (nn.RMSNorm(run.d_model, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(run.d_model, 3 * run.d_model, bias=False)
        self.out = nn.Linear(run.d_model, run.d_model, bias=False)
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=0.02)
        self.ffn = feed_forward(run)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, d_model], cos and sin [L, head_dim / 2] -> [B, L, d_model]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class Head(nn.Module):
    """Last norm, tied embedding and cross entropy."""

    def __init__(self, run: Run):
        super().__init__()
        self.norm = nn.RMSNorm(run.d_model, eps=1e-5)

    def forward(self, x: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        logits = nn.functional.linear(self.norm(x), embedding)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model(nn.Module):
    def __init__(self, run: Run, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, run.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.layers))
        self.head = Head(run)
        half = run.d_model // run.attention_heads // 2
        angles = torch.arange(run.context)[:, None] / 10_000 ** (torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, L + 1] -> mean loss of predicting each from those before it."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x, self.embedding.weight, tokens[:, 1:])

    @property
    def non_embedding(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters()) - self.embedding.weight.numel()


def make_model(run: Run, vocabulary: int, device: str) -> Model:
    """The model from the run's seed. Raises ValueError for another number of parameters than that of its size."""
    torch.manual_seed(run.seed)
    with torch.device(device):
        model = Model(run, vocabulary)
    if abs(model.non_embedding - run.non_embedding) > TOLERANCE * run.non_embedding:
        found = f"{run.name} has {model.non_embedding:,} non-embedding parameters"
        raise ValueError(f"{found}; {run.size} is {run.non_embedding:,} within {TOLERANCE:.0%}")
    return model
