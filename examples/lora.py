"""Adapt a model with FlashMHF by LoRA: the projections, and K, U and V with an update for each sub-network.

    pip install '.[lm]' peft
    python examples/lora.py

PEFT adapts parameters of two or three dimensions. K, U and V have four, which `stack_weights` stores as three over the
same memory.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import flashmhf
from flashmhf.integrations.peft import stack_weights

torch.manual_seed(0)
config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
flashmhf.replace_ffn(model, num_heads=2, num_subnets=3, subnet_dim=64)

networks = [module for module in model.modules() if isinstance(module, flashmhf.FlashMHF)]
for network in networks:
    stack_weights(network)  # before an optimizer takes the parameters
projections, weights = ["in_proj", "out_proj"], ["mlp.k", "mlp.u", "mlp.v"]
adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=projections, target_parameters=weights))
adapted.print_trainable_parameters()

optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=5e-3)
ids = torch.randint(512, (4, 32))
for step in range(20):
    loss = adapted(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == 19:
        print(f"step {step}: loss {loss.item():.3f}")

with torch.no_grad():
    expected = adapted.eval()(ids).logits
    adapted.merge_and_unload()  # merges K, U and V
    merged = adapted.merge_and_unload()  # and the projections
    for network in networks:
        stack_weights(network, False)
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-3, atol=1e-3)
print("merged: the same logits without adapters")
