"""Official whole-model checkpoints: logits of a forward written from the formulae, files, refusals by name."""

import json

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN

from flashmhf import models as lm
from flashmhf.models import FlashMHFConfig, conversion


def of_network(prefix: str = "mhffnmoe", **settings: object) -> dict:
    return {f"{prefix}_{name}": value for name, value in settings.items()}


def settings_of(config: dict) -> dict:
    """The network's settings without the prefix of the model type."""
    prefix = config["model_type"] + "_"
    return {name.removeprefix(prefix): value for name, value in config.items() if name.startswith(prefix)}


SIZES = dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=61)
COMMON = dict(num_heads=3, num_kuv_heads=3, skip_linear=False, custom_init=True, apply_rmsnorm=True, use_flash=True)
OFFICIAL = {
    "model_type": "mhffnmoe", "eos_token_id": 0, "hidden_act": "silu", "intermediate_size": 72, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 5000.0, "tie_word_embeddings": False, **SIZES,
    **of_network(**COMMON, num_experts=4, init_w_self_gain=0.707),
}  # fmt: skip
LLAMA = {name: value for name, value in OFFICIAL.items() if "mhffn" not in name} | {"model_type": "llama"}
IDS = torch.randint(61, (1, 19), generator=torch.Generator().manual_seed(3))


class OfficialNetwork(nn.Module):
    """The official layout's function, head by head and expert by expert: row e d_e + j, column h d_h + i."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        network, d = settings_of(config), config["hidden_size"]
        self.network, self.activation, self.eps = network, ACT2FN[config["hidden_act"]], config["rms_norm_eps"]
        self.heads, self.experts = network["num_heads"], network.get("num_experts", 1)
        kuv = network["num_kuv_heads"] or self.heads
        self.group = self.heads // kuv
        if not network["skip_linear"]:
            self.w_self, self.w_self_2 = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        for name in ("gate", "up", "down"):
            weight = torch.empty(config["intermediate_size"], d // self.heads * kuv)
            self.register_parameter(f"{name}_weight", nn.Parameter(weight))
        if "num_experts" in network:
            self.router = nn.Parameter(torch.empty(self.heads, d // self.heads, self.experts))
        self.q_norm = nn.Module()
        self.q_norm.weight = nn.Parameter(torch.empty(self.heads, d // self.heads))

    def forward(self, x: Tensor) -> Tensor:
        network, d_h, d_e = self.network, x.shape[-1] // self.heads, len(self.gate_weight) // self.experts
        dot = 1.0
        if network.get("apply_dot_scaling"):
            dot = self.heads if network.get("apply_dot_scaling_theory") else self.heads**0.5
        final = (3 / 8) ** 0.5 if network.get("apply_final_scaling") else 1.0
        projected, mixed = x if network["skip_linear"] else self.w_self(x), []
        for h in range(self.heads):
            q = projected[..., h * d_h : (h + 1) * d_h]
            if network["apply_rmsnorm"]:
                q = q * (q.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.q_norm.weight[h]
            gate = torch.ones_like(q[..., :1])
            if "num_experts" in network:
                gate = (q @ self.router[h]).sigmoid()
                gate = gate / gate.sum(-1, keepdim=True).clamp(min=1e-20)
            total = torch.zeros_like(q)
            columns = slice(h // self.group * d_h, (h // self.group + 1) * d_h)
            for e in range(self.experts):
                rows = slice(e * d_e, (e + 1) * d_e)
                k, u, v = (weight[rows, columns] for weight in (self.gate_weight, self.up_weight, self.down_weight))
                total += gate[..., e : e + 1] * (self.activation(q @ k.T * dot) * (q @ u.T * dot) @ v * final)
            mixed.append(total)
        joined = torch.cat(mixed, -1)
        return joined if network["skip_linear"] else self.w_self_2(joined)


def official_model(config: dict, kind: type = LlamaForCausalLM) -> PreTrainedModel:
    """The official model: transformers' Llama with the official network, and random weights in float64."""
    own = {name: config[name] for name in config if name not in ("model_type", "rope_theta", "rope_scaling")}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    model = kind(LlamaConfig(**own, rope_parameters=rope))
    for layer in model.base_model.layers:
        layer.mlp = OfficialNetwork(config)
        if settings_of(config).get("disable_original_mlp_rmsnorm"):
            layer.post_attention_layernorm = nn.Identity()
    model.double().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        std = 1.0 if "norm" in name or "embed" in name else parameter.shape[-1] ** -0.5
        parameter.normal_(std=std, generator=generator)
        if "q_norm" in name and not settings_of(config)["apply_rmsnorm"]:
            parameter.fill_(1.0)
    return model.eval()


def whole(directory, state: dict[str, Tensor], name: str = "model.safetensors") -> None:
    save = save_file if name.endswith("safetensors") else torch.save
    save({name: w.contiguous().clone() for name, w in state.items()}, directory / name)


def write(directory, config: dict, state: dict[str, Tensor]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    whole(directory, state)


def mixture(**settings: object) -> dict:
    return OFFICIAL | of_network(**settings)


def mhffn(**settings: object) -> dict:
    return LLAMA | {"model_type": "mhffn"} | of_network("mhffn", **COMMON | settings)


CONFIGURATIONS = {
    "q_norm": OFFICIAL, "swish": OFFICIAL | {"hidden_act": "swish"}, "unused q_norm": mixture(apply_rmsnorm=False),
    "no norm before the network": mixture(disable_original_mlp_rmsnorm=True),
    "tied, one expert": mixture(num_experts=1) | {"tie_word_embeddings": True},
    "one head": mixture(num_heads=1, num_kuv_heads=None) | {"num_key_value_heads": 4},
    "grouped heads": mixture(num_heads=6, num_kuv_heads=2),
    "no projections, gelu": mixture(skip_linear=True) | {"hidden_act": "gelu"},
    "relu2": mixture(num_kuv_heads=1) | {"hidden_act": "relu2"}, "mhffn": mhffn(init_w_self_gain=0.707),
    "dot": mixture(apply_dot_scaling=True),
    "dot theory": mixture(apply_dot_scaling=True, apply_dot_scaling_theory=True),
    "theory alone": mixture(apply_dot_scaling_theory=True),
    "final and dot": mixture(apply_final_scaling=True, apply_dot_scaling=True) | {"hidden_act": "relu"},
    "mhffn grouped and dot": mhffn(num_kuv_heads=1, apply_dot_scaling=True, apply_rmsnorm=False),
    "mhffn without projections": mhffn(skip_linear=True, apply_final_scaling=True),
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_equal_logits(config, tmp_path):
    """Conversion, then our forward, against the formulae. Scalings are taken into the weights."""
    official = official_model(config)
    write(tmp_path, config, official.state_dict())
    model = conversion.load_official(tmp_path)
    model.init_weights()  # a model that gets this one as a part calls it: what is loaded stays
    assert model.dtype == torch.float64 and not model.training
    # transformers' norms compute in float32 whatever the model's dtype
    torch.testing.assert_close(model(IDS).logits, official(IDS).logits, atol=1e-5, rtol=1e-5)


def from_official(**settings) -> FlashMHFConfig:
    return conversion.config_from_official(OFFICIAL | settings)


def test_settings_outside_the_network_are_carried_over():
    """Also those that this version of transformers does not know; rotary settings under both of transformers' names."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    given = {"head_dim": 10, "attention_bias": True, "pad_token_id": 3, "eos_token_id": [0, 5], "use_cache": False}
    config = from_official(**given, sliding_idea=4, dtype="float16", rope_scaling={"type": "linear", "factor": 2.0})
    assert {name: getattr(config, name) for name in given} == given and config.sliding_idea == 4
    assert config.rope_parameters == rope | {"rope_theta": OFFICIAL["rope_theta"]}
    assert config.model_type == "flashmhf" and config.architectures is None and config.dtype is None
    newer = {name: value for name, value in OFFICIAL.items() if not name.startswith("rope_")}
    assert conversion.config_from_official(newer | {"rope_parameters": rope}).rope_parameters == rope


def test_scales_and_gains_of_the_initialisation():
    """std * gain of the official module, with the scale that the weights take in."""
    given = mixture(
        apply_dot_scaling=True, apply_dot_scaling_theory=True, num_heads=4, num_kuv_heads=4, init_gate_gain=0.5,
        init_w_self_2_gain=0.707,
    )  # fmt: skip
    gains = conversion.config_from_official(given | {"initializer_range": 0.04}).official_init
    # gate: 0.04 * 0.5 / sqrt(4), times the scale 4; the others have the gain 1
    assert (gains.k, gains.u, gains.v, gains.router) == (2.0, 4.0, 2.0, 2.0)
    assert (gains.in_proj, gains.out_proj, gains.identity) == (0.707, 0.707, False)
    assert from_official(mhffnmoe_init_wself_identity=True).official_init.identity
    assert from_official(mhffnmoe_custom_init=False).ffn_init == "normal"


def test_a_16_bit_checkpoint_of_either_format(tmp_path):
    """Rotary frequencies stay float32: rounded ones put the angles of positions 2048-4096 wrong by more than a radian.
    One tensor under two names, as a pickle may have it, becomes two."""
    state = {name: w.bfloat16() for name, w in official_model(OFFICIAL).state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    write(tmp_path, OFFICIAL, state)
    exact, model = conversion.load_official(tmp_path, torch.float32), conversion.load_official(tmp_path)
    assert exact.dtype == torch.float32 and model.dtype == torch.bfloat16
    for name, buffer in exact.named_buffers():
        assert model.get_buffer(name).dtype == torch.float32 and torch.equal(model.get_buffer(name), buffer), name
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "ours")
    for again in (conversion.load_official(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path / "ours")):
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert again.lm_head.weight.data_ptr() != again.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
@pytest.mark.parametrize("tied", [False, True])
def test_models_with_other_heads(head, tied, tmp_path):
    config = OFFICIAL | {"tie_word_embeddings": tied, "architectures": [f"MHFFNMoEFor{head}"]}
    if head != "QuestionAnswering":
        config |= {"id2label": {str(i): f"label {i}" for i in range(3)}, "problem_type": "single_label_classification"}
    official = official_model(config, getattr(transformers, f"LlamaFor{head}"))
    write(tmp_path, config, official.state_dict())
    model = conversion.load_official(tmp_path, model_class=getattr(lm, f"FlashMHFFor{head}"))
    torch.testing.assert_close(
        model(IDS, use_cache=False).to_tuple(), official(IDS, use_cache=False).to_tuple(), atol=1e-5, rtol=1e-5
    )
    assert model.config.id2label == official.config.id2label


STATE = official_model(OFFICIAL).float().state_dict()


def shards(directory, state: dict[str, Tensor], count: int, kind: str) -> None:
    """Write ``count`` files and the index that names them."""
    stem, table = "model" if kind == "safetensors" else "pytorch_model", {}
    for number in range(count):
        part = {name: state[name] for name in sorted(state)[number::count]}
        file = f"{stem}-{number + 1:05d}-of-{count:05d}.{kind}"
        whole(directory, part, file)
        table |= dict.fromkeys(part, file)
    (directory / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


OTHER, FIRST = {name: w + 1 for name, w in STATE.items()}, min(STATE)
DIRECTORIES = {  # what lies in a directory beside the weights that count
    "shards of an older revision": lambda d: (shards(d, OTHER, 3, "safetensors"), shards(d, STATE, 2, "safetensors")),
    "an older copy in another shard": lambda d: (
        shards(d, STATE, 2, "safetensors"),
        whole(d, STATE | {FIRST: OTHER[FIRST]}, "model-00002-of-00002.safetensors"),
    ),  # fmt: skip
    "an average of the weights": lambda d: (whole(d, OTHER, "model_ema.safetensors"), whole(d, STATE)),
    "a whole file goes before an index": lambda d: (shards(d, OTHER, 2, "safetensors"), whole(d, STATE)),
    "safetensors go before .bin": lambda d: (whole(d, OTHER, "pytorch_model.bin"), shards(d, STATE, 2, "safetensors")),
    ".bin shards of an older revision": lambda d: (shards(d, OTHER, 3, "bin"), shards(d, STATE, 2, "bin")),
    "another .bin": lambda d: (whole(d, OTHER, "pytorch_model_old.bin"), whole(d, STATE, "pytorch_model.bin")),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_the_files_that_transformers_takes(case, tmp_path):
    DIRECTORIES[case](tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL))
    model, expected = conversion.load_official(tmp_path), official_model(OFFICIAL).float()
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, atol=1e-3, rtol=1e-3)
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    taken = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, taken.model.embed_tokens.weight)


def test_generation_settings_are_carried_over(tmp_path):
    """From their file, or from the configuration, where transformers 4 had them, too."""
    write(tmp_path, OFFICIAL, STATE)
    assert conversion.load_official(tmp_path).generation_config.repetition_penalty in (None, 1.0)
    write(tmp_path, OFFICIAL | {"repetition_penalty": 1.3, "eos_token_id": 7}, STATE)
    found = lm.load(tmp_path).generation_config
    assert found.repetition_penalty == 1.3 and found.eos_token_id == 7
    transformers.GenerationConfig(eos_token_id=[2, 5], repetition_penalty=1.7).save_pretrained(tmp_path)
    found = lm.load(tmp_path).generation_config
    assert found.eos_token_id == [2, 5] and found.repetition_penalty == 1.7


EMBEDDING = "model.embed_tokens.weight"
FILES = "model.safetensors, model.safetensors.index.json, pytorch_model.bin, pytorch_model.bin.index.json"
TIED, EXTRA = {"tie_word_embeddings": True}, torch.ones(2, 3)


@pytest.mark.parametrize(("settings", "change", "error", "message"), [
    ({"mhffnmoe_num_kuv_heads": 2}, {}, ValueError, "num_kuv_heads is 2; it must divide num_heads = 3"),
    ({"mhffnmoe_num_heads": 3.0}, {}, TypeError, "num_heads must be an int, got float"),
    ({"mhffnmoe_apply_rmsnorm": "false"}, {}, TypeError, "apply_rmsnorm must be a number or a bool, got str"),
    ({"mhffnmoe_new_idea": 1}, {}, NotImplementedError, "new_idea"),
    ({"hidden_act": "tanh"}, {}, StrictDataclassError, "hidden_act is 'tanh'; .* supports: 'silu', 'gelu', "),
    ({"model_type": "mamba"}, {}, ValueError, "model_type is 'mamba'; expected 'mhffnmoe', 'mhffn'"),
    ({"quantization_config": {"quant_method": "x"}}, {}, NotImplementedError, "quantization_config"),
    ({}, {EMBEDDING: None}, ValueError, f"lacks 1 weights of its model: {EMBEDDING}"),
    (TIED, {EMBEDDING: None, "lm_head.weight": None}, ValueError, f"lacks 1 weights of its model: {EMBEDDING}"),
    (TIED, {}, ValueError, "lm_head.weight differs"),
    ({}, {"model.layers.0.self_attn.q_proj.lora_A": EXTRA}, ValueError, "unexpected .*lora_A"),
    ({}, {"model.layers.0.mlp.extra": EXTRA}, ValueError, "extra"),
    ({}, {"model.layers.7.mlp.gate_weight": EXTRA}, ValueError, "missing"),
    (LLAMA, {"model.layers.0.mlp.extra": EXTRA}, ValueError, "unexpected .*extra"),
    ({}, None, FileNotFoundError, f"has no weights; expected one of {FILES}"),
])  # fmt: skip
def test_refusals(settings, change, error, message, tmp_path):
    """By name: of settings, and of checkpoints that are incomplete, contradictory or another model's. What any missing
    weight gives, by every door, is in test_loading.py."""
    config, state = OFFICIAL | settings, STATE
    if settings is LLAMA:
        config, state = LLAMA, lm.FlashMHFForCausalLM(conversion.config_from_official(LLAMA)).state_dict()
    changed = {name: w for name, w in {**state, **(change or {})}.items() if w is not None}
    write(tmp_path, config, changed)
    if change is None:
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(error, match=message):
        conversion.load_official(tmp_path)
