"""What a model is made of: recorded by save_pretrained, built by from_pretrained, for replaced networks and for FP8.
Without the import of flashmhf.models transformers refuses such a directory. What is damaged is refused, too."""

import copy
import json
import pickle
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
from flashmhf.models import FlashMHFForCausalLM, FlashMHFFp8Config, FlashMHFRecord, load  # noqa: E402
from flashmhf.models.quantization import FlashMHFQuantizer, quantise  # noqa: E402
from flashmhf.testing import relative_l2  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(9)[None]


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
    "by hand": lambda model: put(
        model, flashmhf.FlashMHF(model.config.hidden_size, 2, 3, 48, num_kv_heads=1, activation="relu")
    ),
    "checkpointed": lambda model: (flashmhf.replace_ffn(model), put(model, checkpoint_wrapper(mlp(model)))),
    "one to fp8": lambda model: put(model, quantize.to_fp8(mlp(model))),
    "list to fp8": lambda model: quantize.quantize_(model.model.layers),
    "some to fp8": lambda model: (CHANGES["by layer"](model), quantize.quantize_(model.model.layers)),
}


@pytest.mark.parametrize(
    ("make", "change"),
    [(foreign, change) for change in CHANGES if change not in ("one to fp8", "list to fp8")]
    + [(make, change) for make in (replaced, tiny) for change in ("by hand", "one to fp8", "list to fp8")],
)
def test_whatever_changed_a_model_is_recorded(make, change, tmp_path):
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
    assert len(whole["actor"].config.quantization_config.networks) == 2  # before it is saved
    if fp8:
        quantize.quantize_(whole)
    for name in whole:
        reloaded(whole[name], tmp_path / name)
    assert not {"quantization_config", "fusion_config"} & whole["gelu"].config.to_diff_dict().keys()
    whole["actor"].model.layers = foreign().model.layers
    whole["actor"].save_pretrained(tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


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
    del config.quantization_config
    reloaded(AutoModelForCausalLM.from_config(config).eval(), tmp_path / "swiglu")
    replaced().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no model.layers.1.mlp, which its configuration records"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, num_hidden_layers=1))


def test_weights_without_their_record_are_refused(tmp_path):
    """transformers would draw other networks in their place, and only warn: for a directory, a name of the hub, an
    adapter's base and a state dict."""
    model, bare, own = replaced(), foreign().config, tiny()
    ours = copy.deepcopy(own.config)
    quantize.quantize_(own)
    hub = tmp_path / "models--me--mine"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    for saved, name in ((bare, "bare"), (model, "whole"), (model, hub / "snapshots" / ("0" * 40)),
                        (model.model, "inner"), (own, "fp8"), (tiny("mh_ffn"), "other")):  # fmt: skip
        saved.save_pretrained(tmp_path / name)
    llama = transformers.LlamaForCausalLM
    for given, where, settings in (
        (AutoModelForCausalLM, tmp_path / "whole", {"config": bare}),
        (llama, tmp_path / "whole", {"config": tmp_path / "bare"}),
        (AutoModelForCausalLM, "me/mine", {"config": bare, "cache_dir": tmp_path}),
        (transformers.AutoModel, tmp_path / "whole", {"config": bare}),
        (llama, tmp_path / "inner", {"config": bare}),
        (llama, None, {"config": bare, "state_dict": model.state_dict()}),
        (AutoModelForCausalLM, tmp_path / "fp8", {"config": ours}),
        (AutoModelForCausalLM, tmp_path / "other", {"ffn_type": "swiglu", "ffn_num_heads": None}),
    ):
        with pytest.raises(ValueError, match=r"has (model\.)?layers.0.mlp.k8?, and .* no network that takes it"):
            given.from_pretrained(where, **settings)
    same_bits(llama.from_pretrained("me/mine", config=str(tmp_path / "whole"), cache_dir=tmp_path), model)


REFUSED = """
import sys, transformers
for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, transformers.AutoModel):
    try:
        kind.from_pretrained(sys.argv[1])
    except ValueError as error:
        assert "load this model with its quantization_config after `import flashmhf.models`" in str(error), error
    else:
        raise SystemExit(f"{kind.__name__} loads it")
"""


def test_transformers_by_itself_refuses(tmp_path):
    """It warns about a method that it does not know, and would draw SwiGLU networks."""
    replaced().save_pretrained(tmp_path)
    run_python("-c", REFUSED, tmp_path)


@pytest.mark.parametrize("pickled", [False, True])
def test_init_weights_draws_all_of_the_replaced_networks(pickled):
    """On the meta device and then on the CPU, where memory holds anything: as replace_ffn draws, each time again."""
    settings = dict(q_norm=True, num_subnets=2, subnet_dim=48)
    expected = replaced(**settings)
    with torch.device("meta"):
        model = replaced(**settings)
    model.to_empty(device="cpu")
    model = pickle.loads(pickle.dumps(model)) if pickled else model
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    for _ in range(2):
        model.init_weights()
        for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(value.std(), other.std(), rtol=0.2, atol=1e-9, msg=name)
        for part in model.modules():
            for marked in (part, *part.parameters()):
                marked.__dict__.pop("_is_hf_initialized", None)


HALVED = type("Halved", (flashmhf.FlashMHF,), {"_mix": lambda self, q: flashmhf.FlashMHF._mix(self, q) / 2})
UNRECORDED = {  # what is done to a model, and the error
    "pruned": (lambda model: prune.l1_unstructured(mlp(model), "v", 0.5),
     "model.layers.1.mlp has parametrised weights; .*prune.remove"),
    "another projection": (lambda model: setattr(mlp(model), "in_proj", nn.Sequential(mlp(model).in_proj, nn.Tanh())),
     "model.layers.1.mlp has in_proj.0.weight, which is not recorded"),
    "one bias": (lambda model: setattr(mlp(model), "out_proj", nn.Linear(128, 128)),
     "model.layers.1.mlp has out_proj.bias, which is not recorded"),
    "compiled": (lambda model: put(model, torch.compile(mlp(model), backend="eager")),
     "model.layers.1.mlp._orig_mod is compiled.*supported: compiled by .compile()"),
    "of another kind in our class": (lambda model: put(model, nn.Identity()),
     "model.layers.1.mlp is a Identity, which is not recorded; supported: FlashMHF"),
    "a subclass": (lambda model: put(model, HALVED(128, 2, 3, 16)),
     "model.layers.1.mlp is a Halved with a _mix of its own, which is not recorded"),
    "another kind": (lambda model: put(model, flashmhf.MHFFN(128, 2, 16)),
     "model.layers.1.mlp is a MHFFN, which is not recorded; supported: FlashMHF"),
    "quantised otherwise": (lambda model: setattr(model.config, "quantization_config", {"quant_method": "torchao"}),
     "LlamaForCausalLM is quantised by 'torchao'"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNRECORDED)
def test_what_cannot_be_recorded_is_not_saved(what, tmp_path):
    model, (change, message) = (tiny if "our class" in what else replaced)(), UNRECORDED[what]
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
    for saved in (loaded, expected):  # from_pretrained and quantize_ store the same
        again = reloaded(saved, tmp_path / "packed")
        config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
        assert config == {"quant_method": "flashmhf", "fp8": True, "networks": {}, "layout": quantize.LAYOUT}
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
    (lambda state: state.update({SCALES: state[SCALES][:2].clone()}), "mismatch"),
    ({"layout": 2}, "layout of the packed weights is 2; supported: 1"),  # of the configuration
    ({"experts": 3}, r"has \['experts'\], which this version does not know"),
    ({"networks": {"model.layers.7.mlp": {}}}, "FlashMHFForCausalLM has no model.layers.7.mlp"),
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
    replaced().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantized with FlashMHFRecord but you are passing a FlashMHFFp8Config"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FlashMHFFp8Config())
    for given in (FlashMHFRecord(), FlashMHFRecord(fp8=["model.layers.0.mlp"]), replaced().config.quantization_config):
        with pytest.raises(ValueError, match="the checkpoint's configuration has none; supported: FlashMHFFp8Config()"):
            AutoModelForCausalLM.from_pretrained(stored / "plain", quantization_config=given)
    with pytest.raises(ValueError, match="quant_method is 'fp8'; supported: 'flashmhf'"):
        FlashMHFRecord(quant_method="fp8")
    parts = "model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"
    offloaded = {"device_map": dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}, "offload_folder": tmp_path}
    with pytest.raises(ValueError, match="model.layers.1.mlp is offloaded"):
        AutoModelForCausalLM.from_pretrained(stored / "plain", quantization_config=FlashMHFFp8Config(), **offloaded)
    shared = types.SimpleNamespace(config=types.SimpleNamespace(distributed_config=object()))
    with pytest.raises(NotImplementedError, match="several processes"):
        FlashMHFQuantizer(FlashMHFRecord(fp8=True))._process_model_before_weight_loading(shared)
