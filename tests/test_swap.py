"""FlashMHF in place of the SwiGLU networks of a model: which, of what sizes, drawn how, and refusals. How such a model
is stored and loaded is in tests/models/test_quantization.py."""

import operator

import pytest
import torch
from torch import nn

import flashmhf

transformers = pytest.importorskip("transformers")

from small_models import foreign  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_replace_ffn(kind):
    model = foreign(kind, initializer_range=0.01).to(torch.float64)
    before = sum(p.numel() for p in model.parameters())
    assert flashmhf.replace_ffn(model, num_heads=2) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, flashmhf.FlashMHF) and mlp.k.dtype == torch.float64 and mlp.subnet_dim % 16 == 0
    assert not mlp.training and mlp.k.requires_grad
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
    """At d_model 768 with d_ff 2048 four sub-networks of 384, the paper's; heads that share weights have more."""
    paper = nn.Sequential(flashmhf.SwiGLU(768, 2048, device="meta"))
    flashmhf.replace_ffn(paper)
    assert (paper[0].num_heads, paper[0].num_subnets, paper[0].subnet_dim) == (6, 4, 384)
    swiglu = flashmhf.SwiGLU(256, 704)
    model = nn.Sequential(swiglu)
    assert flashmhf.replace_ffn(model, num_heads=4, num_kv_heads=1) == ["0"]
    counts = [sum(p.numel() for p in network.parameters()) for network in (swiglu, model[0])]
    assert counts[1] == pytest.approx(counts[0], rel=0.03) and model[0].num_kv_heads == 1


def test_a_part_is_drawn_for_the_whole_model():
    """As many layers as its configuration says, or as it is told."""
    whole, parts, told = foreign(num_hidden_layers=8), foreign(num_hidden_layers=8), nn.Sequential(*swiglus(128))
    flashmhf.replace_ffn(whole, num_heads=2)
    for layer in parts.model.layers:
        flashmhf.replace_ffn(layer, num_heads=2)
    flashmhf.replace_ffn(told, num_heads=2, num_layers=8)
    expected = whole.model.layers[0].mlp.out_proj.weight.std()
    for mlp in (parts.model.layers[0].mlp, told[0]):
        torch.testing.assert_close(mlp.out_proj.weight.std(), expected, rtol=0.05, atol=0)


def swiglus(*widths: int) -> nn.Module:
    return nn.Sequential(*(flashmhf.SwiGLU(width, 192) for width in widths))


def changed(module: nn.Module, part: str = "", **given: object) -> nn.Module:
    """Set attributes of a module, or of a part of it."""
    for name, value in given.items():
        setattr(operator.attrgetter(part)(module) if part else module, name, value)
    return module


def holding(**given: object) -> nn.Module:
    return changed(flashmhf.SwiGLU(64, 192), **given)


def block(**parts: nn.Module) -> nn.Module:
    return changed(nn.Module(), **parts)


def test_a_network_with_a_parameter_of_its_own_stays():
    """And so does one of another activation, under whatever name it has it, and one not as wide as its input."""
    scaled = holding(global_scale=nn.Parameter(torch.ones(1)))  # as Inkling has it
    narrow = holding(down_proj=nn.Linear(192, 48, bias=False))  # as Idefics2 has one between its images and its text
    swiglu = holding(act=nn.SiLU(), drop=nn.Dropout())
    swiglu.compile()  # which it keeps as a function of its own
    swiglu._get_name = lambda: "LigerSwiGLUMLP"  # as Liger names a network that it patches
    others = [holding(**{name: kind}) for name in ("act", "_act") for kind in (nn.GELU(), torch.relu)]
    assert list(flashmhf.replace_ffn(nn.Sequential(swiglu, scaled, narrow, *others))) == ["0"]


class Fused(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


ROUTER = nn.Linear(64, 2, bias=False)
MIXTURES = {  # of two experts, by what they are made of and not by names
    "a list": lambda: block(router=ROUTER, them=nn.ModuleList(swiglus(64, 64))),
    "attributes, and one that every token takes": lambda: block(
        a=ROUTER, b=swiglus(64)[0], c=swiglus(64)[0], d=swiglus(64)[0]
    ),
    "one tensor for all": lambda: block(chooser=Fused(2, 64), them=Fused(2, 384, 64), always=swiglus(64)[0]),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_left_alone(kind):
    with pytest.raises(ValueError, match="no SwiGLU network"):
        flashmhf.replace_ffn(MIXTURES[kind]())
    model = block(dense=swiglus(64)[0], mixture=MIXTURES[kind]())
    assert flashmhf.replace_ffn(model) == ["dense"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_changed_model_has_not_the_name_under_which_the_unchanged_one_lies(whole, tmp_path):
    """TRL's reference model and an adapter's base are loaded by it."""
    foreign().save_pretrained(tmp_path / "original")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    flashmhf.replace_ffn(model if whole else model.model.layers)
    assert model.config.name_or_path == "" and (model.name_or_path == "" or not whole)
    model.save_pretrained(tmp_path / "changed")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "changed")
    assert again.name_or_path == str(tmp_path / "changed")


def adapted() -> nn.Module:
    """The adapter's file would not have the FlashMHF networks, and names the model that had SwiGLU."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(foreign(), peft.LoraConfig(r=2, target_modules=["q_proj"]))


OTHER = {"quant_method": "torchao"}


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (lambda: "meta-llama/Llama-3.2-1B", {}, TypeError, "model must be a torch.nn.Module, got str"),
        (lambda: nn.Linear(4, 4), {}, ValueError, "no SwiGLU network"),
        (lambda: foreign(hidden_act="gelu"), {}, ValueError, "no SwiGLU network"),
        (lambda: foreign("Qwen2Moe", num_experts=2), {}, ValueError, "no SwiGLU network"),  # but in mixtures of experts
        (lambda: foreign("HunYuanMoEV1", num_experts=2), {}, ValueError, "no SwiGLU network"),
        (foreign, {"num_subnets": 2}, ValueError, "give both or neither"),
        (foreign, {"num_layers": 0}, ValueError, "num_layers"),
        (lambda: foreign(intermediate_size=64), {}, ValueError, "too few beside W_in and W_out"),
        (lambda: flashmhf.SwiGLU(64, 192), {}, ValueError, "model is itself a SwiGLU network .*module that holds it"),
        (lambda: swiglus(64), {"num_heads": 0}, ValueError, "num_heads"),
        (lambda: swiglus(64), {"num_heads": 2.0}, TypeError, "num_heads"),
        (lambda: swiglus(64, 50), {"num_heads": 4}, ValueError, "d_model is 50; it must be a multiple of num_heads"),
        (adapted, {}, ValueError, "self_attn.q_proj is held by an adapter; .*before get_peft_model"),
        (lambda: changed(foreign(), "model.layers.1.mlp.up_proj", _forward_hooks={0: print}), {}, ValueError,
         "model.layers.1.mlp has forward hooks, which would be lost; supported: hooks set afterwards"),
        (lambda: changed(foreign(), "config", quantization_config=OTHER), {}, ValueError,
         "LlamaForCausalLM is quantised by 'torchao'; supported: no other method"),
        (lambda: changed(foreign(), "model.layers.1", mlp=flashmhf.MHFFN(128, 2, 16)), {}, ValueError,
         "model.layers.1.mlp is a MHFFN, which is not recorded; supported: FlashMHF"),
    ],
)  # fmt: skip
def test_replace_ffn_refuses_and_leaves_the_model_as_it_was(model, arguments, error, message):
    model = model()
    before = str(model)
    with pytest.raises(error, match=message):
        flashmhf.replace_ffn(model, **arguments)
    assert str(model) == before


def test_layers_of_a_classifier_are_no_experts():
    """Two layers and two classes; a convolution with as many channels as a matrix has rows."""
    layers = nn.ModuleList(block(norm=nn.LayerNorm(64), mlp=swiglus(64)[0]) for _ in range(2))
    mixed = block(conv=Fused(64, 1, 4), project=nn.Linear(64, 128), mlp=swiglus(64)[0])
    model = block(layers=layers, mixed=mixed, score=ROUTER)
    assert flashmhf.replace_ffn(model) == ["layers.0.mlp", "layers.1.mlp", "mixed.mlp"]
