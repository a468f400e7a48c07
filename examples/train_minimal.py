"""Train a small transformer with FlashMHF in a loop of your own; copy what you need.

    pip install . && python examples/train_minimal.py

Three lines differ from a SwiGLU model: `num_layers`, `param_groups` and `lr_share`.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import flashmhf

VOCABULARY, D_MODEL, HEADS, LAYERS, LENGTH, STEPS, WARMUP, RATE = 256, 128, 2, 4, 64, 60, 20, 2e-3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D_MODEL), nn.RMSNorm(D_MODEL)
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False), nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.ffn = flashmhf.FlashMHF(D_MODEL, num_heads=HEADS, num_subnets=3, subnet_dim=128)
        self.ffn.reset_parameters(num_layers=LAYERS)  # the output's size for a model of this depth

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.ffn(self.norm2(x))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
blocks = [Block() for _ in range(LAYERS)]
model = nn.Sequential(
    nn.Embedding(VOCABULARY, D_MODEL), *blocks, nn.RMSNorm(D_MODEL), nn.Linear(D_MODEL, VOCABULARY, bias=False)
).to(device)
groups = flashmhf.param_groups(model, lr=RATE, weight_decay=0.1)
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

with open(__file__, "rb") as file:
    text = torch.tensor(list(file.read()), device=device)  # this file's bytes
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = RATE * min(1, (step + 1) / WARMUP) * group["lr_share"]  # the projections have a rate of their own
    starts = torch.randint(len(text) - LENGTH - 1, (8, 1), device=device)
    batch = text[starts + torch.arange(LENGTH + 1, device=device)]
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(batch[:, :-1])
    loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step}: loss {loss.item():.3f}")
