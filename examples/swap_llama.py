"""Replace every SwiGLU network of a Llama by FlashMHF, train it for some steps, save it and load it again.

    pip install '.[lm]'
    python examples/swap_llama.py

The model is small and has random weights, so this runs on a CPU in seconds. Trained feed-forward
networks cannot be converted: the new ones start fresh, and the model has to be trained.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flashmhf
import flashmhf.models  # noqa: F401  (so that from_pretrained knows the networks)

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
)
model = LlamaForCausalLM(config)

# heads of 128 and equal parameters, unless num_heads, num_subnets and subnet_dim say otherwise
names = flashmhf.replace_ffn(model)
model.to(device)
print(f"replaced {len(names)} networks, now {model.model.layers[0].mlp}")

# in_proj and out_proj learn at a lower rate; norms and biases are not decayed. A warm-up keeps the first steps small.
optimizer = torch.optim.AdamW(flashmhf.param_groups(model, lr=1e-3, weight_decay=0.1))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
ids = torch.randint(512, (4, 64), device=device)
for step in range(30):
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == 29:
        print(f"step {step}: loss {loss.item():.3f}")

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = LlamaForCausalLM.from_pretrained(folder).to(device).eval()
with torch.no_grad():
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)
print("saved and loaded: the same logits")
