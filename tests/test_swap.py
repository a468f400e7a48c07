"""FlashMHF in place of the SwiGLU networks of a model:

replacement, storage of the changed model, exact warm starts, refusals.
"""

import pytest
import torch
from torch import nn

import flashmhf

transformers = pytest.importorskip("transformers")

from huggingface_hub import PyTorchModelHubMixin  # noqa: E402
from transformers.models.bitnet.modeling_bitnet import BitNetMLP  # noqa: E402
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP  # noqa: E402

from flashmhf.models import load_replaced  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(9)[None]


def foreign(kind: str = "Llama", **settings):
    """Models of other families, small."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = getattr(transformers, f"{kind}Config")(**{**sizes, "head_dim": 32, **settings})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_replace_ffn(kind):
    model = foreign(kind, initializer_range=0.01).to(torch.float64)
    before = sum(p.numel() for p in model.parameters())
    names = flashmhf.replace_ffn(model, num_heads=2)
    assert names == ["model.layers.0.mlp", "model.layers.1.mlp"]
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, flashmhf.FlashMHF) and mlp.k.dtype == torch.float64 and mlp.subnet_dim % 16 == 0
    assert mlp.k.std().item() == pytest.approx(mlp.head_dim**-0.5, rel=0.1)  # balanced, whatever initializer_range says
    assert mlp.router.std().item() == pytest.approx(0.01, rel=0.3)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(before, rel=0.03)
    ids = torch.randint(64, (2, 9))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 12)


def test_layers_that_share_a_network_share_its_replacement():
    model = foreign(num_hidden_layers=3)
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    assert flashmhf.replace_ffn(model, num_heads=2) == [f"model.layers.{i}.mlp" for i in range(3)]
    assert all(isinstance(layer.mlp, flashmhf.FlashMHF) for layer in layers)
    assert layers[1].mlp is layers[0].mlp is not layers[2].mlp


def test_sizes_with_equal_parameters():
    """At d_model 768 with d_ff 2048 four sub-networks of 384, the paper's;

    heads that share weights have more of them.
    """
    paper = nn.Sequential(flashmhf.SwiGLU(768, 2048, device="meta"))
    flashmhf.replace_ffn(paper)
    assert (paper[0].num_heads, paper[0].num_subnets, paper[0].subnet_dim) == (6, 4, 384)
    swiglu = flashmhf.SwiGLU(256, 704)
    model = nn.Sequential(swiglu)
    assert flashmhf.replace_ffn(model, num_heads=4, num_kv_heads=1) == ["0"]
    counts = [sum(p.numel() for p in network.parameters()) for network in (swiglu, model[0])]
    assert counts[1] == pytest.approx(counts[0], rel=0.03) and model[0].num_kv_heads == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_a_model_with_replaced_networks_is_loaded_from_its_directory(kind, dtype, tmp_path):
    """The configuration records the replacement:

    load_replaced needs the directory alone, and gives the model of transformers' class.
    """
    model = foreign(kind).to(dtype)
    # transformers' own .to() rounds the frequencies, loading does not
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    flashmhf.replace_ffn(model, num_heads=2, q_norm=True, router_eps=1e-6)
    with torch.no_grad():
        model.model.layers[0].mlp.q_norm.weight.uniform_()
    model.save_pretrained(tmp_path)
    again, report = load_replaced(tmp_path, dtype=dtype, output_loading_info=True)
    assert type(again).__name__ == f"{kind}ForCausalLM" and isinstance(again, type(model)) and not again.training
    assert not report["missing_keys"] and not report["unexpected_keys"]
    mlp = again.model.layers[1].mlp
    assert (mlp.num_heads, mlp.router_eps, mlp.q_norm.eps, mlp.k.dtype) == (
        2,
        1e-6,
        model.model.layers[1].mlp.q_norm.eps,
        dtype,
    )
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()
    assert torch.equal(load_replaced(tmp_path / "again", dtype=dtype)(IDS).logits, model(IDS).logits)


def test_replacement_by_layer_is_loaded_as_it_was(tmp_path):
    """Each network has its own sizes, and those that stayed SwiGLU stay."""
    model = foreign(num_hidden_layers=3)
    flashmhf.replace_ffn(model.model.layers[0], num_heads=1)
    assert not hasattr(model.config, "flashmhf_networks")  # a layer does not know where it is in the model
    flashmhf.replace_ffn(model, num_heads=2)  # the others; what is recorded is all
    model.save_pretrained(tmp_path)
    again = load_replaced(tmp_path)
    assert [layer.mlp.num_heads for layer in again.model.layers] == [1, 2, 2]
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    model = foreign(num_hidden_layers=3)
    kept, model.model.layers[2].mlp = model.model.layers[2].mlp, nn.Identity()
    flashmhf.replace_ffn(model.model, num_heads=2)  # names without "model."
    model.model.layers[2].mlp = kept
    model.save_pretrained(tmp_path)
    again = load_replaced(tmp_path)
    assert [type(layer.mlp).__name__ for layer in again.model.layers] == ["FlashMHF", "FlashMHF", "LlamaMLP"]
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    inner = load_replaced(tmp_path, type(model.model))
    assert torch.equal(inner(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    assert flashmhf.replace_ffn(model, num_heads=2) == ["model.layers.2.mlp"]
    assert list(model.config.flashmhf_networks) == [f"model.layers.{i}.mlp" for i in range(3)]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("part", [None, "language_model"])
def test_a_model_whose_weights_transformers_renames_in_its_files(part, fp8, tmp_path):
    """Also if only its language model, which has a configuration of its own, was given to replace_ffn."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**sizes, vocab_size=64)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision)
    ).eval()
    if part is None:
        assert flashmhf.replace_ffn(model) == ["model.language_model.layers.0.mlp"]
    else:
        flashmhf.replace_ffn(model.model.language_model)
    if fp8:
        flashmhf.quantize.quantize_(model)
    model.save_pretrained(tmp_path)
    again, report = load_replaced(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("fp8", [False, True])
def test_models_within_another_module_record_what_was_replaced(fp8, tmp_path):
    whole = nn.ModuleDict({"actor": foreign(), "critic": foreign("Qwen3").model, "gelu": foreign(hidden_act="gelu")})
    flashmhf.replace_ffn(whole, num_heads=2)
    if fp8:
        flashmhf.quantize.quantize_(whole)
    for name in ("actor", "critic"):
        whole[name].save_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(load_replaced(tmp_path / name)(IDS)[0], whole[name](IDS)[0])
    assert not {"flashmhf_networks", "quantization_config"} & whole["gelu"].config.to_dict().keys()


class OfTheHub(nn.Sequential, PyTorchModelHubMixin):
    def init_weights(self) -> None: ...


def test_a_model_of_the_hubs_mixin_has_no_configuration_that_records():
    model = OfTheHub(flashmhf.SwiGLU(64, 192))
    assert flashmhf.replace_ffn(model) == flashmhf.quantize.quantize_(model) == ["0"]


def test_arguments_of_from_pretrained(tmp_path):
    """Where the files come from holds for the configuration too, and its settings are taken."""
    model = foreign()
    flashmhf.replace_ffn(model, num_heads=2)
    model.save_pretrained(tmp_path / "inside")
    given = dict(subfolder="inside", num_labels=3, pad_token_id=0, dtype="auto")
    again = load_replaced(tmp_path, transformers.LlamaForSequenceClassification, **given)
    assert again.score.out_features == 3 and again.config.pad_token_id == 0 and again.dtype == torch.float32
    assert torch.equal(again.model(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    with pytest.raises(
        TypeError, match="model_class is AutoModel; supported: subclasses of transformers.PreTrainedModel"
    ):
        load_replaced(tmp_path / "inside", transformers.AutoModel)


def test_init_weights_draws_all_of_the_replaced_networks():
    """On the meta device and then on the CPU, where memory holds anything:

    as replace_ffn draws them, each time again.
    """
    settings = dict(num_heads=2, q_norm=True, num_subnets=2, subnet_dim=48)
    expected = foreign()
    flashmhf.replace_ffn(expected, **settings)
    with torch.device("meta"):
        model = foreign()
        flashmhf.replace_ffn(model, **settings)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    for _ in range(2):
        model.init_weights()
        for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(value.std(), other.std(), rtol=0.2, atol=1e-9, msg=name)
        for part in model.modules():
            for marked in (part, *part.parameters()):
                marked.__dict__.pop("_is_hf_initialized", None)


def test_load_replaced_refusals(tmp_path):
    foreign().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="records no networks that replace_ffn put there"):
        load_replaced(tmp_path)
    model = foreign()
    flashmhf.replace_ffn(model, num_heads=2)
    model.config.flashmhf_networks["model.layers.7.mlp"] = model.config.flashmhf_networks["model.layers.1.mlp"]
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no model.layers.7.mlp"):
        load_replaced(tmp_path)


def swiglus(*widths: int) -> nn.Module:
    return nn.Sequential(*(flashmhf.SwiGLU(width, 192) for width in widths))


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (lambda: "meta-llama/Llama-3.2-1B", {}, TypeError, "model must be a torch.nn.Module, got str"),
        (lambda: nn.Linear(4, 4), {}, ValueError, "no SwiGLU network"),
        (lambda: foreign(hidden_act="gelu"), {}, ValueError, "no SwiGLU network"),
        (lambda: foreign("Qwen2Moe", num_experts=2), {}, ValueError, "no SwiGLU network"),  # but in mixtures of experts
        (lambda: foreign("HunYuanMoEV1", num_experts=2), {}, ValueError, "no SwiGLU network"),
        (foreign, {"num_subnets": 2}, ValueError, "give both or neither"),
        (lambda: foreign(intermediate_size=64), {}, ValueError, "too few beside W_in and W_out"),
        (
            lambda: flashmhf.SwiGLU(64, 192),
            {},
            ValueError,
            r"model is itself a SwiGLU network .*FlashMHF.from_swiglu\(model\)",
        ),
        (lambda: swiglus(64), {"num_heads": 0}, ValueError, "num_heads"),
        (lambda: swiglus(64), {"num_heads": 2.0}, TypeError, "num_heads"),
        (
            lambda: swiglus(64, 50),
            {"num_heads": 4},
            ValueError,
            "d_model is 50; it must be a multiple of num_heads = 4",
        ),
    ],
)
def test_replace_ffn_refuses_and_leaves_the_model_as_it_was(model, arguments, error, message):
    model = model()
    before = str(model)
    with pytest.raises(error, match=message):
        flashmhf.replace_ffn(model, **arguments)
    assert str(model) == before


# Warm starts


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_subnets", "eps"), [(1, 1e-20), (4, 1e-20), (4, 0.5)])
def test_warm_start_is_exact(num_subnets, eps, bias):
    """Identity projections and a gate of exactly 1 / (E + 2 eps): the same function, in float64 to its rounding.

    With E = 1 and the default eps the gate is 1 whatever the router: its gradient is zero, and it stays 1 under
    training.
    """
    swiglu = flashmhf.SwiGLU(64, 192, dtype=torch.float64)
    if bias:
        swiglu.down_proj.bias = nn.Parameter(torch.randn(64, dtype=torch.float64))
    nn.init.normal_(swiglu.gate_proj.weight)
    module = flashmhf.FlashMHF.from_swiglu(swiglu, num_subnets, q_norm=False, router_eps=eps)
    x = torch.randn(5, 7, 64, dtype=torch.float64)
    torch.testing.assert_close(module(x), swiglu(x), atol=1e-14, rtol=1e-12)
    assert torch.equal(module.in_proj.weight, torch.eye(64, dtype=torch.float64)) and torch.equal(
        module.split_heads(x).flatten(-2), x
    )
    gate = flashmhf.gate(module.split_heads(x).float(), module.router.float(), eps)
    assert torch.equal(gate, torch.full_like(gate, 1 / (num_subnets + 2 * eps)))
    module(x).square().sum().backward()
    assert (module.router.grad == 0).all() == (num_subnets == 1)


def test_warm_start_in_another_dtype_rounds_nothing():
    swiglu, x = flashmhf.SwiGLU(64, 192, dtype=torch.bfloat16), torch.randn(5, 64, dtype=torch.float64)
    module = flashmhf.FlashMHF.from_swiglu(swiglu, 3, dtype=torch.float64)
    torch.testing.assert_close(module(x), swiglu.double()(x), atol=1e-14, rtol=1e-12)


def test_warm_started_model_equals_the_original():
    model = foreign()
    expected = model(IDS).logits
    for layer in model.model.layers:
        layer.mlp = flashmhf.FlashMHF.from_swiglu(layer.mlp)
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def adapted() -> nn.Module:
    swiglu = flashmhf.SwiGLU(64, 192)
    swiglu.up_proj = type("Adapter", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x) + 1})(
        64, 192, bias=False
    )
    return swiglu


def biased() -> nn.Module:
    swiglu = flashmhf.SwiGLU(64, 192)
    swiglu.down_proj.bias = nn.Parameter(torch.randn(64))
    return swiglu


def hooked(name: str) -> nn.Module:
    swiglu = flashmhf.SwiGLU(64, 192)
    swiglu.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out)
    return swiglu


def holding(**given: object) -> nn.Module:
    swiglu = flashmhf.SwiGLU(64, 192)
    for name, value in given.items():
        setattr(swiglu, name, value)
    return swiglu


def test_a_network_with_a_parameter_of_its_own_stays():
    """And so does one of another activation, under whatever name it has it, and one whose result is not as wide as its
    input.
    """
    scaled = holding(global_scale=nn.Parameter(torch.ones(1)))  # as Inkling has it
    narrow = holding(down_proj=nn.Linear(192, 48, bias=False))  # as Idefics2 has one between its images and its text
    swiglu = holding(act=nn.SiLU(), drop=nn.Dropout())
    swiglu.compile()  # which it keeps as a function of its own
    swiglu._get_name = lambda: "LigerSwiGLUMLP"  # as Liger names a network that it patches
    others = [
        holding(act=nn.GELU()),
        holding(_act=nn.GELU()),
        holding(activation=torch.relu),
        holding(_activation=torch.relu),
    ]
    model = nn.Sequential(swiglu, scaled, narrow, *others)
    assert list(flashmhf.replace_ffn(model)) == ["0"]


def test_a_limit_that_cuts_nothing_off_is_none_and_a_forward_that_accelerate_wraps_is_the_networks_own():
    hooks = pytest.importorskip("accelerate.hooks")
    x, swiglu = torch.randn(5, 64), hooks.add_hook_to_module(holding(limit=float("inf")), hooks.AlignDevicesHook("cpu"))
    torch.testing.assert_close(flashmhf.FlashMHF.from_swiglu(swiglu)(x), swiglu(x))


def scaled() -> nn.Module:
    config = transformers.FalconH1Config(hidden_size=64, intermediate_size=192, mlp_multipliers=[0.5, 2.0])
    return FalconH1MLP(config)


@pytest.mark.parametrize(
    ("swiglu", "arguments", "error", "message"),
    [
        (lambda: flashmhf.SwiGLU(8, 16, bias=True), {}, ValueError, "gate_proj has a bias"),
        (
            lambda: flashmhf.SwiGLU(8, 16),
            {"num_subnets": 3},
            ValueError,
            "num_subnets is 3; it must divide the width 16",
        ),
        (lambda: flashmhf.SwiGLU(8, 16), {"q_norm": True}, ValueError, "q_norm is True; .*supports q_norm=False"),
        (
            lambda: flashmhf.SwiGLU(8, 16),
            {"activation": "relu"},
            ValueError,
            "activation is 'relu'; .*supports activation='silu'",
        ),
        (biased, {"bias": False}, ValueError, "bias is False; .*supports bias=True"),
        (lambda: holding(act=nn.GELU()), {}, ValueError, "swiglu.act is GELU.*; supported: SiLU and dropout"),
        (lambda: holding(_activation=torch.relu), {}, ValueError, "swiglu._activation is <built-in method relu"),
        (
            lambda: holding(down_proj=nn.Linear(192, 48, bias=False)),
            {},
            ValueError,
            r"swiglu.down_proj.weight has shape \[48, 192\]; exp",
        ),
        # as Step-3.7 has it
        (lambda: holding(limit=2), {}, ValueError, "swiglu.limit is 2; supported: networks without factors"),
        (
            lambda: BitNetMLP(transformers.BitNetConfig(hidden_size=64, intermediate_size=96, hidden_act="silu")),
            {},
            ValueError,
            "swiglu has weights in ffn_sub_norm",
        ),
        (scaled, {}, ValueError, "swiglu.gate_multiplier is 0.5; supported: networks without factors"),
        (lambda: foreign(hidden_act="gelu").model.layers[0].mlp, {}, ValueError, "act_fn is"),
        (lambda: nn.Linear(64, 64), {}, TypeError, "swiglu.gate_proj must be a torch.nn.Linear, got none"),
        (lambda: None, {}, TypeError, "swiglu.gate_proj must be a torch.nn.Linear, got none"),
        (lambda: hooked(""), {}, ValueError, "swiglu has forward hooks or a forward of its own"),
        (lambda: hooked("up_proj"), {}, ValueError, "swiglu.up_proj has forward hooks"),
        (lambda: holding(forward=torch.sin), {}, ValueError, "swiglu has forward hooks or a forward of its own"),
        (adapted, {}, TypeError, "swiglu.up_proj must be a torch.nn.Linear, got Adapter"),
    ],
)
def test_warm_start_refusals(swiglu, arguments, error, message):
    with pytest.raises(error, match=message):
        flashmhf.FlashMHF.from_swiglu(swiglu(), **arguments)
