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


def test_networks_without_projections_have_none_of_their_biases():
    model = block(mlp=Gated())
    assert flashmhf.replace_ffn(model, skip_linear=True) == ["mlp"] and model.mlp.skip_linear


@pytest.mark.parametrize("kind", [flashmhf.FlashMHF, flashmhf.MHFFN])
def test_the_forward_of_a_swiglu_network_is_refused_at_its_first_call(kind):
    """Liger's patch of a Llama gives it to whatever stands in its layers."""
    network = kind(64, 2, 32)
    vars(network)["forward"] = Gated.forward.__get__(network)
    network.hidden_size, network.factors = 64, (1.0, 1.0)
    with pytest.raises(NotImplementedError, match="was given the forward of a SwiGLU network; .*'swiglu': False"):
        network(torch.randn(3, 64))


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


class Gated(nn.Module):
    """A gated network as transformers writes them, with factors (FalconH1) and limits (DeepSeek-V4)."""

    def __init__(
        self, act: object = nn.functional.silu, factors: tuple = (1.0, 1.0), limit: float | None = None
    ) -> None:
        super().__init__()
        self.hidden_size, self.act_fn, self.factors, self.limit = 64, act, factors, limit
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 192), nn.Linear(64, 192), nn.Linear(192, 64)
        self.drop = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(*x.shape[:-1], self.hidden_size)
        gate = self.gate_proj(x) * self.factors[0]
        gate = gate if self.limit is None else gate.clamp(max=self.limit)
        return self.drop(self.down_proj(self.act_fn(gate) * self.up_proj(x)) * self.factors[1])


def test_networks_that_compute_something_else_stay():
    """Whatever the names are, and whatever else a network holds; one that is not as wide as its input stays, too."""
    scaled = holding(global_scale=nn.Parameter(torch.ones(1)))  # as Inkling has it
    narrow = holding(down_proj=nn.Linear(192, 48, bias=False))  # as Idefics2 has one between its images and its text
    swiglu = holding(act=nn.SiLU(), drop=nn.Dropout())
    swiglu.compile()  # which it keeps as a function of its own
    swiglu._get_name = lambda: "LigerSwiGLUMLP"  # as Liger names a network that it patches
    others = [Gated(nn.GELU()), Gated(torch.relu), Gated(factors=(0.9, 1.0)), Gated(factors=(1.0, 2.0)), Gated(limit=9)]
    others.append(holding(gate_proj=nn.LazyLinear(192)))  # whose weight has no shape yet
    model = nn.Sequential(swiglu, Gated(), Gated(nn.SiLU()), scaled, narrow, *others)
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match="no SwiGLU network: 3 has global_scale beside its projections"):
        flashmhf.replace_ffn(model[3:])
    assert torch.equal(torch.get_rng_state(), generator)
    assert flashmhf.replace_ffn(model) == ["0", "1", "2"]


@pytest.mark.parametrize(("kind", "settings"), [
    ("FalconH1", {"mlp_multipliers": [0.8, 1.2], "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32}),
    ("Gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
])  # fmt: skip
def test_the_message_names_what_a_network_computes(kind, settings):
    with pytest.raises(ValueError, match=r"layers.0.\w+ computes something else .*SiLU \((act_fn|gate_mult).* = .*\)"):
        flashmhf.replace_ffn(foreign(kind, **settings))


@pytest.mark.parametrize("compile", [
    lambda model: [model.__setitem__(i, torch.compile(part, backend="eager")) for i, part in enumerate(model)],
    lambda model: [part.compile(backend="eager") for part in model],
    lambda model: model.compile(backend="eager"),
], ids=["blocks wrapped", "blocks", "model"])  # fmt: skip
def test_what_was_compiled_before_runs_the_new_network(compile, fresh_dynamo):
    model = nn.Sequential(nn.Sequential(Gated()), nn.Sequential(Gated())).eval()
    compile(model)
    x = torch.randn(5, 64)
    with torch.no_grad():
        model(x)
        assert len(flashmhf.replace_ffn(model, num_heads=2)) == 2
        expected = x
        for part in model.modules():
            expected = part(expected) if isinstance(part, flashmhf.FlashMHF) else expected
        torch.testing.assert_close(model(x), expected)


def calling(**given: object) -> nn.Module:
    """A model that holds its network in another way, too."""
    model = block(mlp=Gated())
    for name, value in given.items():
        setattr(model, name, value(model.mlp))
    return model


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
    with pytest.raises(ValueError, match="no SwiGLU network but experts of mixtures, [123] of them, which are left al"):
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
        (lambda: foreign(hidden_act="gelu"), {}, ValueError, "no SwiGLU network: .*act_fn = GELUActivation"),
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
        (lambda: changed(foreign(), "model.layers.0.mlp", _backward_pre_hooks={0: print}), {}, ValueError,
         "mlp has backward pre hooks, which would be lost"),
        (lambda: changed(foreign(), "model.layers.0.mlp", forward=print), {}, ValueError,
         "mlp has a forward of its own, which would be lost"),
        (lambda: calling(mlp=torch.compile), {}, ValueError,
         "mlp._orig_mod is within torch.compile's module, which would go on .*; supported: compiled afterwards"),
        (lambda: calling(kept=lambda mlp: [mlp]), {}, ValueError, "kept holds mlp, too, and would go on calling it"),
        (lambda: calling(kept=lambda mlp: mlp.forward), {}, ValueError, "kept holds mlp, too"),
        (lambda: block(mlp=Gated(), other=nn.Linear(4, 4)), {"skip_linear": True, "bias": True}, ValueError, "bias is"),
        (lambda: changed(foreign(), "config", quantization_config=OTHER), {}, ValueError,
         "LlamaForCausalLM is quantised by 'torchao'; supported: no other method"),
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
