"""FlashMHF in a transformer of one's own: initialisation for its depth, parameter groups, warm-up.

    pip install .
    python examples/own_transformer.py

Three things differ from a SwiGLU network:
- `num_layers` tells each FlashMHF how deep the model is, so that its output starts at the right size for the residual
stream.
- `flashmhf.param_groups` gives in_proj and out_proj a lower learning rate.
- the learning rate warms up, as the router is learnt together with the networks that it weighs.
"""

import torch
from torch import nn

import flashmhf

VOCABULARY, D_MODEL, HEADS, LAYERS, LENGTH = 256, 128, 2, 4, 64


class Block(nn.Module):
    """Causal attention and FlashMHF, each behind a norm and in the residual stream:

    x [batch, length, d_model] -> the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D_MODEL), nn.RMSNorm(D_MODEL)
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False), nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.ffn = flashmhf.FlashMHF(D_MODEL, num_heads=HEADS, num_subnets=3, subnet_dim=128)
        self.ffn.reset_parameters("balanced", num_layers=LAYERS)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.ffn(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = (
            nn.Embedding(VOCABULARY, D_MODEL),
            nn.Sequential(*(Block() for _ in range(LAYERS))),
        )
        self.norm, self.head = nn.RMSNorm(D_MODEL), nn.Linear(D_MODEL, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embedding(ids))))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Model().to(device)
text = torch.tensor(list(open(__file__, "rb").read()), device=device)  # this file's bytes

optimizer = torch.optim.AdamW(flashmhf.param_groups(model, lr=2e-3, weight_decay=0.1), betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=20)
for step in range(60):
    starts = torch.randint(len(text) - LENGTH - 1, (8, 1), device=device)
    batch = text[starts + torch.arange(LENGTH + 1, device=device)]
    with torch.autocast(device, torch.bfloat16):
        logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 59:
        print(f"step {step}: loss {loss.item():.3f}")
