"""The language model on transformers: construction, loss, generation, storage, compilation, presets, heads."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from huggingface_hub.errors import StrictDataclassError
from processes import run_python
from small_models import tiny
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from flashmhf import backends, quantize
from flashmhf import models as lm
from flashmhf.backends import hopper
from flashmhf.models import FFN_TYPES, FlashMHFConfig, FlashMHFForCausalLM
from flashmhf.models.presets import MIB, PRESETS, preset
from flashmhf_recipes import tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(512, (batch, length), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("ffn", FFN_TYPES)
def test_loss_and_every_gradient(ffn, fresh_dynamo):
    """Eagerly, compiled without a graph break (the AOT trace is what breaks, so the cheap back end suffices), and with
    checkpointing."""
    model = tiny(ffn).train()
    loss, gradients = loss_and_gradients(model)
    assert abs(loss.item() - torch.tensor(512.0).log().item()) < 0.3  # nearly uniform before training
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.isfinite().all() and gradient.abs().sum() > 0, name
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(compiled), (loss, gradients), atol=1e-5, rtol=1e-4)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    torch.testing.assert_close(loss_and_gradients(model), (loss, gradients), atol=0, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ffn", FFN_TYPES)
def test_save_and_load_bit_equal(ffn, tied, tmp_path):
    model = tiny(ffn, tie_word_embeddings=tied, **({"ffn_q_norm": True} if ffn == "flashmhf" else {})).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, FlashMHFForCausalLM) and not again.training
    stored, original = AutoConfig.from_pretrained(tmp_path).to_dict(), model.config.to_dict()
    allowed = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    assert {name for name in original if stored[name] != original[name]} <= allowed
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert torch.equal(model(tokens()).logits, again(tokens()).logits)
    assert (again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()) == tied
    # a saved configuration names its initialisation, so that another default changes nothing about it
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["ffn_init"] == model.config.ffn_init == "balanced"


LOADED_ELSEWHERE = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
for directory in sys.argv[1:]:
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    assert config.model_type == "flashmhf"
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    torch.save(model(torch.arange(9)[None]).logits.detach(), directory + "/logits.pt")
    assert AutoModel.from_pretrained(directory, trust_remote_code=True).config.auto_map
    assert AutoTokenizer.from_pretrained(directory).pad_token_id == 1
    model.save_pretrained(directory + "/again")
"""


def test_a_saved_model_loads_where_flashmhf_is_not_imported(tmp_path):
    """With trust_remote_code=True, by the module that auto_map names; saved again, the files are the same."""
    models = {"plain": tiny(), "fp8": tiny()}
    quantize.quantize_(models["fp8"])
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.train(["text"], 300).save_pretrained(tmp_path / name)
    saved = [tmp_path / name for name in models]
    run_python("-c", LOADED_ELSEWHERE, *saved, cwd=tmp_path, HF_MODULES_CACHE=str(tmp_path / "modules"))
    for directory, model in zip(saved, models.values(), strict=True):
        again = directory / "again"
        with torch.no_grad():
            logits = model(torch.arange(9)[None]).logits
            torch.testing.assert_close(torch.load(directory / "logits.pt"), logits, atol=1e-5, rtol=1e-5)
            assert torch.equal(AutoModelForCausalLM.from_pretrained(again)(tokens()).logits, model(tokens()).logits)
        for name in ("config.json", "modeling_flashmhf.py"):
            assert (again / name).read_text() == (directory / name).read_text()
        names = "config.json generation_config.json model.safetensors modeling_flashmhf.py"
        assert {path.name for path in again.iterdir()} == set(names.split())


def test_an_uploaded_configuration_has_the_module_that_it_names(monkeypatch, tmp_path):
    class Hub:
        def create_repo(self, repo_id, **settings):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **settings):
            self.files = {operation.path_in_repo for operation in operations}

    hub, config = Hub(), preset("flashmhf-tiny").config()
    for module in (transformers.utils.hub, transformers.configuration_utils):
        monkeypatch.setattr(module, "hf_api", lambda: hub)
    card = SimpleNamespace(save=lambda path: None)
    monkeypatch.setattr(transformers.utils.hub, "create_and_tag_model_card", lambda *args, **settings: card)
    for push in (
        partial(config.save_pretrained, tmp_path, push_to_hub=True, repo_id="me/x", commit_message="first"),
        partial(config.save_pretrained, tmp_path, True),  # once more, as a name that the directory gives
        partial(config.push_to_hub, "me/x"),
    ):
        hub.files = set()
        push()
        assert hub.files == {"config.json", "modeling_flashmhf.py"}
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "modeling_flashmhf.py"}


def test_rotary_frequencies_keep_float32(tmp_path):
    """Whatever converts the model: bf16 has 8 bits, positions have 12."""
    model = tiny()
    model.save_pretrained(tmp_path)
    converted = {
        "to(dtype)": tiny().to(torch.bfloat16), "to(tensor)": tiny().to(torch.zeros(1, dtype=torch.float16)),
        "half": tiny().half(), "from_config": AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16),
        "from_pretrained": AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        "load": lm.load(tmp_path, torch.bfloat16), "inner model": tiny().model.to(torch.bfloat16),
    }  # fmt: skip
    for how, other in converted.items():
        assert other.dtype != torch.float32, how
        found = dict(getattr(other, "model", other).rotary_emb.named_buffers())
        for name, buffer in model.model.rotary_emb.named_buffers():
            assert found[name].dtype == buffer.dtype == torch.float32 and torch.equal(found[name], buffer), (how, name)
    assert {buffer.device.type for buffer in tiny().to("meta", torch.bfloat16).buffers()} == {"meta"}


@pytest.mark.parametrize(
    ("init", "deviations"),  # of K, W_in and W_out
    [
        ("normal", [0.03, 0.03, 0.03]),
        ("official", [0.02, 0.707 * (2 / 512) ** 0.5, 0.707 * (2 / 512) ** 0.5]),
        ("balanced", [128**-0.5, 256**-0.5, (2 * 2 * 256) ** -0.5]),  # of d_h, d_model and the two layers
    ],
)
def test_initialisation(init, deviations):
    """Standard deviations of the chosen scheme; layers differ; the seed decides."""
    sizes = dict(hidden_size=256, intermediate_size=512)
    model, again = (tiny(**sizes, ffn_init=init, initializer_range=0.03).model.layers for _ in range(2))
    mlp, attention = model[0].mlp, model[0].self_attn
    found = [each.std().item() for each in (mlp.k, mlp.in_proj.weight, mlp.out_proj.weight, attention.q_proj.weight)]
    assert found == pytest.approx([*deviations, 0.03], rel=0.05)
    assert not torch.equal(mlp.k, model[1].mlp.k) and torch.equal(mlp.k, again[0].mlp.k)


@pytest.mark.parametrize("ffn", FFN_TYPES)
def test_no_mode_changes_the_arithmetic(ffn, device):
    """bf16 logits, bit for bit, of whole texts and by pieces with a cache; the baseline's are transformers' own. Up to
    256 tokens on Hopper are the exception: there inference takes a projection kernel of the library's, which adds in
    another order than cuBLAS, and a few results round to the other neighbour."""
    model = tiny(ffn, **({"ffn_q_norm": True} if ffn == "flashmhf" else {})).bfloat16()
    with torch.no_grad():  # the norms' weights are not 1, as training leaves them
        for name, weight in model.named_parameters():
            weight.copy_(0.5 + torch.rand_like(weight) if "norm" in name else torch.randn_like(weight) * 0.2)
    model.to(device)
    ids = tokens(2, 300).to(device)  # more tokens than small batches have on any back end

    def logits() -> dict[str, torch.Tensor]:
        found = {"whole": model(ids, use_cache=False).logits, "short": model(ids[:, :9]).logits}
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
            pieces = [model(piece, past_key_values=cache).logits for piece in ids[:, :12].split([9, 1, 2], 1)]
            found[type(cache).__name__] = torch.cat(pieces, 1)
        return {name: each.detach() for name, each in found.items()}

    expected = logits()
    assert expected["whole"].float().std() > 0.1
    model.train()
    modes = {"training": logits()}
    model.eval()
    for name, mode in {"no_grad": torch.no_grad, "inference": torch.inference_mode}.items():
        with mode():
            modes[name] = logits()
    model.requires_grad_(False)
    modes["frozen"] = logits()
    for mode, found in modes.items():
        for name, each in found.items():
            if device == "cpu" or name == "whole":
                assert torch.equal(each, expected[name]), (mode, name)
            else:
                assert (each - expected[name]).float().norm() <= 0.01 * expected[name].float().norm(), (mode, name)
    if ffn == "swiglu":
        config = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).bfloat16().to(device)
        llama.load_state_dict(model.state_dict())
        llama.model.rotary_emb = model.model.rotary_emb  # its frequencies would be bf16
        assert torch.equal(llama(ids, use_cache=False).logits, expected["whole"])


@pytest.mark.parametrize("ffn", FFN_TYPES)
def test_every_cache_gives_the_same_tokens(ffn, device):
    """On a GPU transformers compiles for a static one, but not where positions choose the frequencies."""
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}
    for overrides in ({}, dynamic | {"max_position_embeddings": 12} if ffn == "flashmhf" else {}):
        model, ids = tiny(ffn, tie_word_embeddings=False, **overrides).to(device), tokens(3, 9).to(device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        expected = model.generate(ids, **settings)
        assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected)
        assert len(expected[:, 9:].unique()) > 5
        if device == "cpu" and not overrides:
            assert torch.equal(model.generate(ids, use_cache=False, **settings), expected)
            cache = DynamicCache(config=model.config)
            pieces = [model(piece, past_key_values=cache).logits for piece in expected.split([10, 1, 10], dim=1)]
            torch.testing.assert_close(torch.cat(pieces, 1), model(expected).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ffn", FFN_TYPES)
def test_parallel_plans_name_existing_modules(ffn):
    """Llama's plan; all networks but SwiGLU are replicated."""
    model = tiny(ffn)
    modules = {name.replace(".0.", ".*.").replace(".1.", ".*.") for name, _ in model.named_modules()}
    assert set(model._tp_plan) <= modules
    assert any(".mlp." in name for name in model._tp_plan) == (ffn == "swiglu")
    assert "base_model_tp_plan" not in model.config.to_dict()
    stages = model.config.base_model_pp_plan
    assert set(stages) == {"embed_tokens", "layers", "norm"} and all(hasattr(model.model, name) for name in stages)


@pytest.mark.parametrize(("settings", "message"), [
    ({"ffn_type": "moe"}, "ffn_type is 'moe'"),
    ({"ffn_num_heads": 5}, "ffn_num_heads is 5; it must divide hidden_size = 128"),
    ({"ffn_num_subnets": 3}, "ffn_num_subnets is 3; it must divide intermediate_size = 256"),
    ({"ffn_type": "swiglu"}, "ffn_num_heads is 2; ffn_type='swiglu' has none"),
    ({"ffn_type": "mh_ffn"}, "ffn_num_subnets is 2; ffn_type='mh_ffn' has none"),
    ({"ffn_type": "pkv"}, "ffn_type is 'pkv', which flashmhf 0.1 had; supported: swiglu, mh_ffn, flashmhf"),
    ({"ffn_type": "dense_moe", "ffn_num_heads": None}, "ffn_type is 'dense_moe', which flashmhf 0.1 had; supported"),
    *(({"ffn_type": "swiglu", "ffn_num_heads": None, "ffn_num_subnets": None} | lacking, "; ffn_type='swiglu' has none")
      for lacking in ({"ffn_q_norm": True}, {"ffn_skip_linear": True}, {"ffn_num_kv_heads": 1}, {"ffn_num_heads": 0},
                      {"ffn_recompute_q": True})),
    ({"ffn_type": "mh_ffn", "ffn_num_subnets": None, "ffn_recompute_q": True}, "ffn_recompute_q is True; ffn_type='mh"),
    ({"ffn_skip_linear": True, "ffn_recompute_q": True}, "ffn_recompute_q=True is not supported with ffn_skip_linear"),
    ({"ffn_init": "zeros"}, "ffn_init is 'zeros'"),
    ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; ffn_type='flashmhf' supports: 'silu', 'gelu', 'relu', 'relu2'"),
    ({"ffn_num_kv_heads": 3}, "ffn_num_kv_heads is 3; it must divide ffn_num_heads = 2"),
    ({"ffn_skip_linear": True, "mlp_bias": True}, "mlp_bias=True is not supported with ffn_skip_linear=True"),
    ({"ffn_official_init": {"gate": 2.0}}, r"ffn_official_init has \['gate'\]; supported: in_proj"),
    ({"ffn_num_subnet": 4}, r"unknown settings: \['ffn_num_subnet'\]; supported: ffn_type, ffn_num_heads, ffn_n"),
    ({"ffn_num_heads": "2"}, "ffn_num_heads.* expected int, got str"),
    ({"ffn_num_heads": 0, "ffn_num_subnets": None}, "ffn_num_heads is 0; it must be at least 1"),
    ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0; it must be at least 1"),
    *(({name: 0}, f"{name} is 0; it must be at least 1")
      for name in ("num_hidden_layers", "vocab_size", "max_position_embeddings")),
    ({"head_dim": -2}, "head_dim is -2; it must be at least 1"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; supported: finite numbers from 0"),
    ({"ffn_router_eps": float("nan")}, "ffn_router_eps is nan; supported: finite numbers from 0"),
    ({"attention_dropout": 2.0}, "attention_dropout is 2.0; supported: numbers from 0 to 1"),
    ({"ffn_norm": "False"}, "ffn_norm.* expected bool, got str"),  # true as a condition
    ({"ffn_deterministic": "yes"}, "ffn_deterministic.* expected bool, got str"),
    ({"intermediate_size": 0, "ffn_num_subnets": None}, "intermediate_size is 0; it must be at least 1"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3},
     "num_key_value_heads is 3; it must divide num_attention_heads = 4"),
])  # fmt: skip
def test_configuration_refusals(settings, message, tmp_path):
    with pytest.raises(StrictDataclassError, match=message):
        preset("flashmhf-tiny").config(**settings)
    config = preset("flashmhf-tiny").config()
    config.save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match=message):
        FlashMHFForCausalLM(FlashMHFConfig.from_pretrained(tmp_path, **settings))
    with pytest.raises(StrictDataclassError, match=message):  # of settings that are changed later, too
        for name, value in settings.items():
            setattr(config, name, value)
        FlashMHFForCausalLM(config)


def test_recompute_q_changes_no_bit_of_a_gradient(tmp_path):
    ids, found = torch.arange(24).view(2, 12), []
    torch.manual_seed(0)
    model = FlashMHFForCausalLM(preset("flashmhf-tiny").config(ffn_recompute_q=True))
    model.save_pretrained(tmp_path)
    for settings in ({}, {"ffn_recompute_q": False}):
        loaded = FlashMHFForCausalLM.from_pretrained(tmp_path, **settings)
        assert all(layer.mlp.recompute_q is not bool(settings) for layer in loaded.model.layers)
        loaded(input_ids=ids, labels=ids).loss.backward()
        found.append([each.grad for each in loaded.parameters()])
    assert all(map(torch.equal, *found))


def test_configuration_defaults():
    config = FlashMHFConfig(hidden_size=768, intermediate_size=1536, num_attention_heads=12)
    assert (config.ffn_num_heads, config.ffn_num_subnets, config.ffn_subnet_dim) == (6, 4, 384)
    assert config.ffn_type == "flashmhf"
    assert FlashMHFConfig().ffn_subnet_dim == 256  # transformers builds one to tell what differs from the defaults
    # of 64, 64, 64, 96 and 128: sizes that the kernels have
    for width, heads in ((64, 1), (576, 9), (960, 15), (1056, 11), (1152, 9)):
        assert FlashMHFConfig(hidden_size=width, num_attention_heads=1, intermediate_size=64).ffn_num_heads == heads
    assert FlashMHFConfig(ffn_router_eps=0).ffn_router_eps == 0  # a whole number
    assert FlashMHFConfig(attention_dropout=None).attention_dropout is None  # as in a LlamaConfig


# of common Llamas and of the paper's SwiGLU: hidden_size, intermediate_size
LLAMAS = [(4096, 11008), (5120, 13824), (4096, 14336), (2048, 5504), (3584, 18944), (1536, 8960), (2560, 6912)]
LLAMAS += [(1024, 2752), (768, 2048), (3072, 8192), (3200, 8640), (576, 1536), (960, 2560), (1056, 2800), (896, 4864)]


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_every_default_and_preset_is_a_network_that_the_kernels_take(monkeypatch, backend):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "library", lambda: None)
    llamas = {f"{d_model}/{width}": FlashMHFConfig(hidden_size=d_model, intermediate_size=width, num_attention_heads=1)
              for d_model, width in LLAMAS}  # fmt: skip
    configs = {"the default": FlashMHFConfig()} | llamas | {name: preset(name).config() for name in PRESETS}
    for name, config in configs.items():
        if config.ffn_type not in ("flashmhf", "mh_ffn"):
            continue  # not the operator's
        sizes = {"d_h": config.hidden_size // config.ffn_num_heads}
        sizes["d_e"] = config.ffn_subnet_dim or config.intermediate_size
        for modules in (backends.BACKENDS, backends.FP8_BACKENDS):
            assert modules[backend].why_not(torch.device("cuda"), torch.bfloat16, **sizes) is None, name
        assert sizes["d_e"] % 64 == 0 or config.intermediate_size % 64, name  # of full tiles


# Presets
def parameters(config: FlashMHFConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    """The paper's to the printed digits, in units of 2**20 and 2**30, and not of 10**6 and 10**9; FlashMHF's include
    q_norm. Without a printed one a model is within 3 % of its scale's baseline."""
    entry, scale = preset(name), name.split("-")[1]
    if entry.printed_parameters is None:
        baseline = parameters(preset(f"swiglu-{scale}").config())
        assert parameters(entry.config()) == pytest.approx(baseline, rel=0.03)
        return
    count = parameters(entry.config(**({"ffn_q_norm": True} if entry.ffn == "flashmhf" else {})))
    half_a_digit = 0.005 * MIB if entry.printed_parameters < 1000 * MIB else 0.0005 * 2**30
    assert abs(count - entry.printed_parameters) <= half_a_digit
    assert abs(count / (entry.printed_parameters / MIB * 1e6) - 1) > 0.02


# Heads of transformers: sequence and token classification, question answering
HEADS = {  # labels for two sequences of 7 tokens, the shape of what is scored
    "SequenceClassification": ({"labels": torch.tensor([0, 2])}, (2, 3)),
    "TokenClassification": ({"labels": torch.randint(3, (2, 7))}, (2, 7, 3)),
    "QuestionAnswering": ({"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])}, (2, 7)),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("ffn", ["flashmhf", "mh_ffn"])
def test_trains_saves_and_loads(head, ffn, tmp_path):
    kind, auto, (labels, shape) = f"FlashMHFFor{head}", getattr(transformers, f"AutoModelFor{head}"), HEADS[head]
    config = preset(f"{ffn}-tiny").config(num_labels=3, pad_token_id=1, ffn_num_kv_heads=1)
    model, ids = auto.from_config(config), torch.randint(2, 500, (2, 7))
    assert type(model) is getattr(lm, kind)
    out = model(input_ids=ids, **labels)
    out.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval().save_pretrained(tmp_path)
    for name in ("modeling_flashmhf.py", "config.json"):  # name every class, for where flashmhf is not imported
        assert all(f"FlashMHFFor{each}" in (tmp_path / name).read_text() for each in HEADS)
    scores = ("start_logits", "end_logits") if head == "QuestionAnswering" else ("logits",)
    expected = model(input_ids=ids)
    for remote in (False, True):
        loaded = auto.from_pretrained(tmp_path, trust_remote_code=remote)
        assert type(loaded).__name__ == kind
        again = loaded(input_ids=ids)
        assert all(again[name].shape == shape and torch.equal(again[name], expected[name]) for name in scores)


def test_padding_that_is_end_of_text_is_learnt():
    ids = torch.tensor([[0, 5, 0, 7]])
    for pad, end in ((0, 0), (1, 0), (None, 0), (0, [3, 0])):
        model = tiny("flashmhf", pad_token_id=pad, eos_token_id=end, tie_word_embeddings=False)
        model(ids, labels=ids).loss.backward()
        assert bool(model.model.embed_tokens.weight.grad[0].any()), (pad, end)
