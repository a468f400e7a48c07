"""What replace_ffn and FP8 put into a model: recorded by save_pretrained, built by from_pretrained, and nothing else.
Without the import of flashmhf.models transformers refuses such a directory. What is damaged is refused, too."""

import copy
import json
import types
from functools import partial

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from processes import run_python  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from small_models import foreign, tiny  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import flashmhf  # noqa: E402
from flashmhf import quantize  # noqa: E402
from flashmhf.models import FlashMHFForCausalLM, FlashMHFFp8Config, load  # noqa: E402
from flashmhf.models.quantization import FlashMHFQuantizer, quantise  # noqa: E402
from flashmhf.testing import relative_l2  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(9)[None]
RECORDS = {"flashmhf_networks", "flashmhf_layers", "quantization_config", "fusion_config"}


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def replaced(*args, **settings) -> nn.Module:
    model = foreign(*args)
    flashmhf.replace_ffn(model, num_heads=2, **settings)
    return model


def same_bits(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8)), name


def reloaded(model: nn.Module, directory, **settings) -> nn.Module:
    """What from_pretrained makes of the model's files, complete and of the same function."""
    model.save_pretrained(directory)
    kind = type(model)
    again, report = kind.from_pretrained(directory, output_loading_info=True, **settings)
    assert type(again) is kind and not again.training and not any(report.values())
    if not settings:
        same_bits(again, model)
        assert torch.equal(again(IDS)[0], model(IDS)[0])
    return again


def mlp(model: nn.Module) -> nn.Module:
    return model.model.layers[1].mlp


# Replaced networks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_replaced_networks_are_recorded_and_loaded(kind, dtype, tmp_path):
    model = foreign(kind).to(dtype)
    # transformers' own .to() rounds the frequencies, loading does not
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    flashmhf.replace_ffn(model, num_heads=2, q_norm=True, router_eps=1e-6, backend="eager")
    nn.init.uniform_(mlp(model).q_norm.weight)
    again = reloaded(model, tmp_path)
    network = mlp(again)
    assert (network.num_heads, network.router_eps, network.backend, network.k.dtype) == (2, 1e-6, "eager", dtype)
    assert network.q_norm.eps == mlp(model).q_norm.eps and network.k.requires_grad
    assert not any(hasattr(again, name) for name in ("hf_quantizer", "quantization_method"))
    again.save_pretrained(tmp_path / "again", max_shard_size="50KB")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()
    same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)
    # transformers reads ``quantization_config`` of a configuration that it is given as a dict
    for settings in ({"device_map": "auto"}, {"config": model.config}):
        same_bits(AutoModelForCausalLM.from_pretrained(tmp_path, **settings), model)
    assert mlp(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)).k.dtype == torch.half
    assert mlp(again.half()).k.dtype == torch.half and again.float().dtype == torch.float32


def put(model: nn.Module, network: nn.Module) -> None:
    model.model.layers[1].mlp = network


CHANGES = {
    # each network has its own sizes, and those that stayed SwiGLU stay
    "by layer": lambda model: flashmhf.replace_ffn(model.model.layers[0], num_heads=1),
    "by list": lambda model: flashmhf.replace_ffn(model.model.layers, num_heads=2),
    "shared weights": lambda model: flashmhf.replace_ffn(model, num_kv_heads=1, activation="relu", skip_linear=True),
    "checkpointed": lambda model: (flashmhf.replace_ffn(model), put(model, checkpoint_wrapper(mlp(model)))),
    "one to fp8": lambda model: put(model, quantize.to_fp8(mlp(model))),
    "list to fp8": lambda model: quantize.quantize_(model.model.layers),
    "some to fp8": lambda model: (CHANGES["by layer"](model), quantize.quantize_(model.model.layers)),
}


@pytest.mark.parametrize(
    ("make", "change"),
    [(foreign, change) for change in CHANGES if change not in ("one to fp8", "list to fp8")]
    + [(make, change) for make in (replaced, tiny) for change in ("one to fp8", "list to fp8")],
)
def test_what_changed_a_model_is_recorded(make, change, tmp_path):
    model = make()
    CHANGES[change](model)
    again = reloaded(model.eval(), tmp_path)
    same_bits(load(tmp_path), model)
    inner = type(model.model).from_pretrained(tmp_path)
    same_bits(inner, model.model)
    inner.save_pretrained(tmp_path / "inner")
    same_bits(type(model).from_pretrained(tmp_path / "inner").model, model.model)
    torch.save(again, tmp_path / "pickle")
    for copied in (copy.deepcopy(again), torch.load(tmp_path / "pickle", weights_only=False)):
        reloaded(copied, tmp_path / "copied")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("part", [None, "language_model"])
def test_a_model_whose_weights_transformers_renames_in_its_files(part, fp8, tmp_path):
    """Also if only its language model, which has a configuration of its own, was given to replace_ffn."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**sizes, vocab_size=64)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    flashmhf.replace_ffn(model if part is None else model.model.language_model)
    if fp8:
        quantize.quantize_(model)
    reloaded(model, tmp_path)
    reloaded(model.model.language_model, tmp_path / "language")
    reloaded(model, tmp_path)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path).text_config, "quantization_config")


@pytest.mark.parametrize("fp8", [False, True])
def test_models_within_another_module(fp8, tmp_path):
    whole = nn.ModuleDict({"actor": foreign(), "critic": foreign("Qwen3").model, "gelu": foreign(hidden_act="gelu")})
    flashmhf.replace_ffn(whole, num_heads=2)
    assert len(whole["actor"].config.flashmhf_networks) == 2  # before it is saved
    if fp8:
        quantize.quantize_(whole)
    for name in whole:
        reloaded(whole[name], tmp_path / name)
    assert not RECORDS & whole["gelu"].config.to_diff_dict().keys()
    whole["actor"].model.layers = foreign().model.layers
    whole["actor"].save_pretrained(tmp_path / "back")
    assert not RECORDS & json.loads((tmp_path / "back" / "config.json").read_text()).keys()


@pytest.mark.parametrize("make", [replaced, partial(tiny, tie_word_embeddings=False)])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_model_of_its_configuration_alone(fp8, make, tmp_path):
    """By from_config, with which scripts train from scratch and fill a model on the meta device, or by its class."""
    model = make()
    if fp8:
        quantize.quantize_(model)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for drawn in (AutoModelForCausalLM.from_config(config), type(model)(config), type(model)(model.config)):
        assert str(drawn) == str(model)
        if not fp8:
            weights = (mlp(each).out_proj.weight.std() for each in (drawn, model))
            torch.testing.assert_close(*weights, rtol=0.05, atol=0)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    empty.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True, strict=True)
    same_bits(empty, model)


def test_a_configuration_of_fewer_networks_or_layers(tmp_path):
    """One that lost its record is that of a SwiGLU model again, also where it is loaded once more."""
    model = foreign(num_hidden_layers=8)
    flashmhf.replace_ffn(model.model.layers[1], num_heads=2)
    model.save_pretrained(tmp_path)
    drawn = (mlp(each).out_proj.weight.std() for each in (model, AutoModelForCausalLM.from_config(model.config)))
    torch.testing.assert_close(*drawn, rtol=0.05, atol=0)  # a part for each of eight layers
    config = AutoConfig.from_pretrained(tmp_path)
    del config.flashmhf_networks
    reloaded(AutoModelForCausalLM.from_config(config).eval(), tmp_path / "swiglu")
    replaced().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no model.layers.1.mlp, which its configuration records"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, num_hidden_layers=1))
    with pytest.raises(ValueError, match="num_hidden_layers is 3, of which flashmhf_networks has networks for 2; supp"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3))
    flashmhf.replace_ffn((partly := foreign()).model.layers[0], num_heads=2)
    partly.config.num_hidden_layers = 3
    assert not isinstance(AutoModelForCausalLM.from_config(partly.config).model.layers[2].mlp, flashmhf.FlashMHF)


def test_weights_without_their_record_are_reported(tmp_path):
    """By transformers, which draws the networks of the configuration that it is given."""
    replaced().save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, config=foreign().config, output_loading_info=True)
    assert not isinstance(mlp(again), flashmhf.FlashMHF)
    assert "model.layers.1.mlp.up_proj.weight" in report["missing_keys"]
    assert "model.layers.1.mlp.k" in report["unexpected_keys"]


class OwnConfig(transformers.PreTrainedConfig):
    model_type = "own"

    def __init__(self, subnets: int = 3, **settings):
        super().__init__(**settings)
        self.subnets = subnets


class Own(transformers.PreTrainedModel):
    """A user's class that builds its networks itself."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.ffn = flashmhf.FlashMHF(32, 2, config.subnets, 16)
        self.others = nn.ModuleList((flashmhf.MHFFN(32, 2, 16), flashmhf.ParametricKV(32, 2, 8)))
        self.moe, self.swiglu = flashmhf.DenseMoE(32, 2, 16), flashmhf.SwiGLU(32, 64)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


@pytest.mark.parametrize("how", ["a class of its own", "a part of it", "by hand", "in our class"])
def test_what_was_put_there_otherwise_is_not_recorded(how, tmp_path):
    if how in ("by hand", "in our class"):
        model = foreign() if how == "by hand" else tiny()
        put(model, flashmhf.FlashMHF(model.config.hidden_size, 2, 3, 48))
    else:
        model = Own(OwnConfig())
        if how == "a part of it":
            model.ffn = nn.Sequential(Own(OwnConfig()), torch.compile(nn.Linear(2, 2), backend="eager"))
    before = model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert not RECORDS & json.loads((tmp_path / "config.json").read_text()).keys()
    changed = {name for name, value in model.config.to_dict().items() if value != before.get(name)}
    assert changed <= {"architectures", "dtype", "auto_map"}
    if how == "a class of its own":
        same_bits(Own.from_pretrained(tmp_path), model)
        config = OwnConfig.from_pretrained(tmp_path)
        model.config.subnets = config.subnets = 6
        for given in (config, OwnConfig.from_pretrained(tmp_path, subnets=6), model.config):
            assert Own(given).ffn.num_subnets == 6
        model.config.subnets = 3
        quantize.quantize_(model)
        model.save_pretrained(tmp_path / "fp8")
        same_bits(Own.from_pretrained(tmp_path / "fp8"), model)
        assert Own(OwnConfig.from_pretrained(tmp_path / "fp8", subnets=6)).ffn.num_subnets == 6


def test_checkpoints_of_other_models_load_as_without_the_import(tmp_path):
    """With keys that end as ours."""
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    strays = {f"encoder.layer.0.attention.{key}" for key in ("k", "u", "v", "router", "k8", "layout")}
    save_file(state | {name: torch.zeros(3) for name in strays}, tmp_path / "model.safetensors", {"format": "pt"})
    again, report = transformers.BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert report["unexpected_keys"] == strays and not report["missing_keys"]
    same_bits(again, model)


REFUSED = """
import itertools, sys, transformers
other, *replaced = sys.argv[1:]
kinds = transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, transformers.AutoModel
for kind, model in itertools.product(kinds, replaced):
    try:
        kind.from_pretrained(model)
    except ValueError as error:
        assert "Unknown fusion type: flashmhf" in str(error), error
    else:
        raise SystemExit(f"{kind.__name__} loads {model}")
before = dict(vars(transformers.PreTrainedModel))
import flashmhf.models
after = vars(transformers.PreTrainedModel)
assert {name for name in after if after[name] is not before.get(name)} == {"post_init", "save_pretrained"}
assert "flashmhf" not in str(transformers.PreTrainedConfig.from_pretrained(other))
for model in replaced:
    kind.from_pretrained(model)
"""


def test_transformers_by_itself_refuses(tmp_path):
    """It would draw SwiGLU networks. The import changes two methods of transformers."""
    models = {"other": foreign(), "replaced": replaced(), "fp8": replaced()}
    quantize.quantize_(models["fp8"])
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    run_python("-c", REFUSED, *(tmp_path / name for name in models))


RENAMED = """
import pytest, sys, transformers
from transformers import PreTrainedModel, fusion_mapping
owner = fusion_mapping if sys.argv[1] == "_FUSION_REGISTRY" else PreTrainedModel
setattr(owner, f"{sys.argv[1]}_", getattr(owner, sys.argv[1]))
delattr(owner, sys.argv[1])
before = dict(vars(PreTrainedModel))
with pytest.warns(UserWarning, match=f"refuses to load models with replaced networks: .*{sys.argv[1]}"):
    import flashmhf.models
assert dict(vars(PreTrainedModel)) == before
setattr(owner, sys.argv[1], getattr(owner, f"{sys.argv[1]}_"))
with pytest.raises(ValueError, match="Unknown fusion type: flashmhf"):
    transformers.LlamaForCausalLM.from_pretrained(sys.argv[2])
"""


@pytest.mark.parametrize("name", ["_FUSION_REGISTRY", "post_init", "save_pretrained"])
def test_what_transformers_has_renamed_costs_one_feature(name, tmp_path):
    """Models with replaced networks are then refused, as they are without the import."""
    replaced().save_pretrained(tmp_path)
    run_python("-c", RENAMED, name, tmp_path)


@pytest.mark.parametrize("part", [None, "layers"])
def test_init_weights_draws_all_of_the_replaced_networks(part):
    """On the meta device and then on the CPU, where memory holds anything: as replace_ffn draws."""
    settings = dict(q_norm=True, num_heads=2, num_subnets=2, subnet_dim=48)
    expected = foreign()
    flashmhf.replace_ffn(expected, **settings)
    with torch.device("meta"):
        model = foreign()
        flashmhf.replace_ffn(model if part is None else model.model.layers, **settings)
    torch.use_deterministic_algorithms(True)  # empty memory is then filled with NaN
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    model.init_weights()
    for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value.std(), other.std(), rtol=0.2, atol=1e-9, msg=name)


def quantised_by_torchao(model: nn.Module) -> None:
    model.config.quantization_config = {"quant_method": "torchao"}


UNRECORDED = {  # what is done to a model, and the error
    "pruned": (lambda model: prune.l1_unstructured(mlp(model), "v", 0.5),
     "model.layers.1.mlp has parametrised weights; .*prune.remove"),
    "another projection": (lambda model: setattr(mlp(model), "in_proj", nn.Sequential(mlp(model).in_proj, nn.Tanh())),
     "model.layers.1.mlp has in_proj.0.weight, which is not recorded"),
    "one bias": (lambda model: setattr(mlp(model), "out_proj", nn.Linear(128, 128)),
     "model.layers.1.mlp has out_proj.bias, which is not recorded"),
    "compiled": (lambda model: put(model, torch.compile(mlp(model), backend="eager")),
     "model.layers.1.mlp._orig_mod is compiled.*supported: compiled by .compile()"),
    "a method of its own": (lambda model: setattr(mlp(model), "_run_networks", lambda q: q / 2),
     "model.layers.1.mlp is a FlashMHF with a _run_networks of its own, which is not recorded"),
    "quantised otherwise": (lambda model: (quantize.quantize_(model), quantised_by_torchao(model)),
     "LlamaForCausalLM is quantised by 'torchao'; supported: no other method"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNRECORDED)
def test_what_cannot_be_recorded_is_not_saved(what, tmp_path):
    model, (change, message) = replaced(), UNRECORDED[what]
    change(model)
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Wrapper(transformers.PreTrainedModel):
    """A user's class: a model as a part, and post_init at the end, which draws what is not drawn."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, model: nn.Module):
        super().__init__(transformers.LlamaConfig())
        self.model, self.score = model, nn.Linear(4, 4)
        self.post_init()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("made", ["replaced", "from_config", "ours", "loaded"])
def test_a_model_within_another_keeps_its_weights(made, fp8, tmp_path):
    model = tiny() if made == "ours" else replaced()
    if made == "from_config":
        model = AutoModelForCausalLM.from_config(model.config)
    elif made == "loaded":
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    if fp8:
        quantize.quantize_(model)
    before = {name: tensor.float().clone() for name, tensor in model.state_dict().items()}
    Wrapper(model)
    assert not [name for name, tensor in model.state_dict().items() if not torch.equal(tensor.float(), before[name])]


def test_the_trainer_and_adapters_take_a_reloaded_model(tmp_path):
    peft = pytest.importorskip("peft")
    replaced().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = mlp(model).k.clone()
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=1, report_to="none", use_cpu=True, save_strategy="steps", save_steps=1
    )
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    with torch.enable_grad():
        transformers.Trainer(model, arguments, train_dataset=data).train()
    assert not torch.equal(mlp(model).k, before)
    same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1"), model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapters = dict(target_modules=["in_proj", "q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, **adapters))
    expected = tuned(IDS).logits
    tuned.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, expected)
    merged = again.merge_and_unload().eval()
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    quantize.quantize_(reloaded(merged, tmp_path / "merged"))
    tiny().save_pretrained(tmp_path / "ours")  # as docs/lora.md says of adapters without a task
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "untold")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "untold", import_allowlist=["flashmhf"])
    assert torch.equal(again(IDS).logits, tuned(IDS).logits)


# FP8
@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A directory with a model as it is trained in "plain", and that model in FP8 in "packed"."""
    folder = tmp_path_factory.mktemp("stored")
    tiny().save_pretrained(folder / "plain")
    model = FlashMHFForCausalLM.from_pretrained(folder / "plain", quantization_config=FlashMHFFp8Config())
    model.save_pretrained(folder / "packed")
    return folder


@pytest.mark.parametrize(
    "settings", [{}, {"tie_word_embeddings": False, "mlp_bias": True}, {"ffn_q_norm": True, "ffn_num_kv_heads": 1}]
)
def test_quantised_while_loading_stored_and_restored(settings, tmp_path):
    model = tiny(**settings)
    model.save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=FlashMHFFp8Config())
    quantise(expected := tiny(**settings))
    quantise(expected)  # it is already
    same_bits(loaded, expected)
    assert not any(p.requires_grad for p in loaded.parameters())
    some = FlashMHFFp8Config(fp8=["model.layers.1.mlp"])
    partly = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=some)
    same_bits(mlp(reloaded(partly, tmp_path / "partly")), mlp(expected))
    assert isinstance(partly.model.layers[0].mlp, flashmhf.FlashMHF)
    for saved in (loaded, expected):  # from_pretrained and quantize_ store the same
        again = reloaded(saved, tmp_path / "packed")
        config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
        assert config == {"quant_method": "flashmhf", "fp8": True, "layout": quantize.LAYOUT}
        tied = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
        assert tied == model.config.tie_word_embeddings
    with pytest.raises(ValueError, match="You cannot perform fine-tuning on purely quantized models"):
        transformers.Trainer(again)
    assert torch.equal(*(each.generate(IDS, max_new_tokens=4, do_sample=False) for each in (loaded, again)))
    assert relative_l2(loaded(IDS).logits, model(IDS).logits.double()) < 0.2


@pytest.mark.parametrize(
    "settings", [{"dtype": torch.bfloat16}, {"dtype": "auto"}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}]
)
def test_dtype_and_device_map(stored, settings):
    for name, config in (("packed", {}), ("plain", {"quantization_config": FlashMHFFp8Config()})):
        model = AutoModelForCausalLM.from_pretrained(stored / name, **settings, **config)
        wanted, network = torch.bfloat16 if settings.get("dtype") == torch.bfloat16 else torch.float32, mlp(model)
        assert model.dtype == network.router.dtype == network.in_proj.weight.dtype == wanted
        assert network.k8.dtype == torch.float8_e4m3fn and network.scales.dtype == torch.float32
        assert model(IDS.to(model.device)).logits.isfinite().all()


K8, SCALES, LAYOUT = (f"model.layers.1.mlp.{name}" for name in ("k8", "scales", "layout"))


@pytest.mark.parametrize(("change", "message"), [
    (lambda state: state.pop(SCALES), f"lacks 1 weights of its model: {SCALES}"),
    (lambda state: state.pop("model.layers.0.mlp.in_proj.weight"), "model: model.layers.0.mlp.in_proj.weight"),
    (lambda state: state.pop(LAYOUT), f"lacks 1 weights of its model: {LAYOUT}"),
    (lambda state: state.update({LAYOUT: torch.tensor([7], dtype=torch.uint8)}), r"layout is \[7\]; supported: \[1\]"),
    (lambda state: state.update({K8: state[K8].view(torch.uint8)}), f"{K8} has dtype U8 .*; supported: F8_E4M3"),
    (lambda state: state.update({K8: state[K8].bfloat16()}), f"{K8} has dtype BF16 .*; supported: F8_E4M3"),
    (lambda state: state.update({SCALES: state[SCALES][:2].clone()}), "mismatch|scales has shape"),
    ({"layout": 2}, "layout of the packed weights is 2; supported: 1"),  # of the configuration
    ({"experts": 3}, r"has \['experts'\], which this version does not know"),
    *(({"fp8": value}, r"fp8 is .*; supported: True, False, or a list of names") for value in ("some", [1])),
    ({"fp8": ["model.layers.7.mlp"]}, "FlashMHFForCausalLM has no model.layers.7.mlp"),
])  # fmt: skip
def test_damaged_checkpoints(stored, tmp_path, change, message):
    packed = stored / "packed"
    config, state = json.loads((packed / "config.json").read_text()), load_file(packed / "model.safetensors")
    config["quantization_config"].update(change) if isinstance(change, dict) else change(state)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_refusals(stored, tmp_path):
    tiny("swiglu").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no FlashMHF"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FlashMHFFp8Config())
    for names, message in ((["model.layers.7.mlp"], "has no model.layers.7.mlp"), ([], "holds no FlashMHF")):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(stored / "plain", quantization_config=FlashMHFFp8Config(fp8=names))
    with pytest.raises(ValueError, match="quant_method is 'fp8'; supported: 'flashmhf'"):
        FlashMHFFp8Config(quant_method="fp8")
    parts = "model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"
    offloaded = {"device_map": dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}, "offload_folder": tmp_path}
    with pytest.raises(ValueError, match="model.layers.1.mlp is offloaded"):
        AutoModelForCausalLM.from_pretrained(stored / "plain", quantization_config=FlashMHFFp8Config(), **offloaded)
    shared = types.SimpleNamespace(config=types.SimpleNamespace(distributed_config=object()))
    with pytest.raises(NotImplementedError, match="several processes"):
        FlashMHFQuantizer(FlashMHFFp8Config())._process_model_before_weight_loading(shared)
