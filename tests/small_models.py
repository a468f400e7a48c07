"""Small language models of ours and of transformers, and official checkpoints as the authors' code would write them."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from flashmhf import convert
from flashmhf.models import FlashMHFForCausalLM
from flashmhf.models.presets import preset

SIZES = dict(vocab_size=64, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4)
_SETTINGS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps pad_token_id bos_token_id eos_token_id tie_word_embeddings"
)


def tiny(ffn: str = "flashmhf", **settings: object) -> FlashMHFForCausalLM:
    torch.manual_seed(0)
    return FlashMHFForCausalLM(preset(f"{ffn}-tiny").config(**settings)).eval()


def foreign(kind: str = "Llama", **settings: object) -> transformers.PreTrainedModel:
    """Models of other families, with SwiGLU networks."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "num_key_value_heads": 2, "head_dim": 32, **settings})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def write_official(model: FlashMHFForCausalLM, directory: Path) -> None:
    """Write a model whose networks are FlashMHF without scalings of its initialisation."""
    config, state = model.config, {}
    for name, tensor in model.state_dict().items():
        if ".mlp." not in name and not (name == "lm_head.weight" and config.tie_word_embeddings):
            state[name] = tensor
    for name, network in model.named_modules():
        if name.endswith(".mlp"):
            official = convert.to_official(network.state_dict())
            official.setdefault("q_norm.weight", network.k.new_ones(network.num_heads, network.head_dim))
            state |= {f"{name}.{part}": tensor for part, tensor in official.items()}
    settings = {"num_heads": config.ffn_num_heads, "num_experts": config.ffn_num_subnets}
    settings["apply_rmsnorm"] = config.ffn_q_norm
    official = {"architectures": ["MHFFNMoEForCausalLM"], "model_type": "mhffnmoe", "torch_dtype": "float32"}
    official |= {name: getattr(config, name) for name in _SETTINGS.split()}
    official |= {"rope_theta": config.rope_parameters["rope_theta"], "rope_scaling": None}
    official |= {f"mhffnmoe_{name}": value for name, value in settings.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(official))
    save_file({name: w.detach().contiguous() for name, w in state.items()}, directory / "model.safetensors")
