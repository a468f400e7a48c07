"""FP8 checkpoints:

quantised while loading, stored, restored to the same bits; what is damaged is refused. And the commands with --fp8.
"""

import json
import resource
import types

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import flashmhf
from flashmhf import quantize
from flashmhf.models import FlashMHFForCausalLM, FlashMHFFp8Config, load_replaced
from flashmhf.models.presets import preset
from flashmhf.models.quantization import FlashMHFFp8Quantizer
from flashmhf.testing import relative_l2
from flashmhf_recipes import cli, pretrained, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(9)[None]


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def tiny(ffn: str = "flashmhf", **settings) -> FlashMHFForCausalLM:
    torch.manual_seed(0)
    return FlashMHFForCausalLM(preset(f"{ffn}-tiny").config(**settings)).eval()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The directory of a model as it is trained, and its tokenizer."""
    directory = tmp_path_factory.mktemp("plain")
    tiny(vocab_size=300).save_pretrained(directory)
    tokenizer.train(["the head mixes what each sub network finds"], 300).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def packed(plain, tmp_path_factory):
    """The directory of that model in FP8."""
    directory = tmp_path_factory.mktemp("packed")
    FlashMHFForCausalLM.from_pretrained(plain, quantization_config=FlashMHFFp8Config()).save_pretrained(directory)
    return directory


def same_bits(model, other) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8)), name


@pytest.mark.parametrize(
    "settings", [{}, {"tie_word_embeddings": False, "mlp_bias": True}, {"ffn_q_norm": True, "ffn_num_kv_heads": 1}]
)
def test_quantised_while_loading_stored_and_restored(settings, tmp_path):
    model = tiny(**settings)
    model.save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=FlashMHFFp8Config())
    expected = tiny(**settings)
    assert quantize.quantize_(expected) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    same_bits(loaded, expected)
    assert not any(p.requires_grad for p in loaded.parameters())
    for saved in (loaded, expected):  # from_pretrained and quantize_ store the same
        saved.save_pretrained(tmp_path / "packed")
        config = json.loads((tmp_path / "packed" / "config.json").read_text())
        assert config["quantization_config"] == {"quant_method": "flashmhf_fp8", "layout": quantize.LAYOUT}
        again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
        assert not any(report.values())
        same_bits(again, expected)
        assert torch.equal(again(IDS).logits, expected(IDS).logits)
        tied = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
        assert tied == model.config.tie_word_embeddings
    assert torch.equal(
        loaded.generate(IDS, max_new_tokens=4, do_sample=False), again.generate(IDS, max_new_tokens=4, do_sample=False)
    )
    assert relative_l2(loaded(IDS).logits, model(IDS).logits.double()) < 0.2


@pytest.mark.parametrize(
    "settings", [{"dtype": torch.bfloat16}, {"dtype": "auto"}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}]
)
def test_dtype_and_device_map(packed, plain, settings):
    for directory, config in ((packed, {}), (plain, {"quantization_config": FlashMHFFp8Config()})):
        model = AutoModelForCausalLM.from_pretrained(directory, **settings, **config)
        mlp = model.model.layers[1].mlp
        wanted = torch.bfloat16 if settings.get("dtype") == torch.bfloat16 else torch.float32
        assert (
            model.dtype == mlp.router.dtype == mlp.in_proj.weight.dtype == wanted and mlp.scales.dtype == torch.float32
        )
        assert mlp.k8.dtype == torch.float8_e4m3fn
        assert model(IDS.to(model.device)).logits.isfinite().all()


def test_shards_and_the_inner_model(packed, tmp_path):
    """Weights in several files; the headless class, whose names lack a prefix, of the same directory."""
    model = FlashMHFForCausalLM.from_pretrained(packed)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    same_bits(FlashMHFForCausalLM.from_pretrained(tmp_path), model)
    inner = transformers.AutoModel.from_pretrained(tmp_path)
    same_bits(inner, model.model)
    inner.save_pretrained(tmp_path / "inner")
    same_bits(FlashMHFForCausalLM.from_pretrained(tmp_path / "inner").model, model.model)


def test_replaced_networks(tmp_path):
    """What is stored and restored of them is in test_loading.py."""
    sizes = dict(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    flashmhf.replace_ffn(model, num_heads=2)
    model.save_pretrained(tmp_path / "plain")
    loaded = load_replaced(tmp_path / "plain", quantization_config=FlashMHFFp8Config())
    quantize.quantize_(model)
    assert type(loaded) is transformers.LlamaForCausalLM
    same_bits(loaded, model)


K8, SCALES, LAYOUT = (f"model.layers.1.mlp.{name}" for name in ("k8", "scales", "layout"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(SCALES), f"the checkpoint lacks {SCALES}"),
        (lambda state: state.pop("model.layers.0.mlp.in_proj.weight"), "lacks model.layers.0.mlp.in_proj.weight"),
        (lambda state: state.pop(LAYOUT), f"the checkpoint lacks {LAYOUT}"),
        (
            lambda state: state.update({LAYOUT: torch.tensor([7], dtype=torch.uint8)}),
            r"layout is \[7\]; supported: \[1\]",
        ),
        (
            lambda state: state.update({K8: state[K8].view(torch.uint8)}),
            f"{K8} has dtype U8 in the checkpoint; supported: F8_E4M3",
        ),
        (
            lambda state: state.update({SCALES: state[SCALES][:2].clone()}),
            f"{SCALES} has shape .* in the checkpoint; expected",
        ),
        ({"layout": 2}, "layout of the packed weights is 2; supported: 1"),  # of the configuration
        ({"projections": True}, "projections .* is True; supported: False"),
    ],
)
def test_damaged_checkpoints(packed, tmp_path, change, message):
    config, state = json.loads((packed / "config.json").read_text()), load_file(packed / "model.safetensors")
    config["quantization_config"].update(change) if isinstance(change, dict) else change(state)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_refusals(plain, tmp_path):
    tiny("swiglu").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no FlashMHF"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FlashMHFFp8Config())
    with pytest.raises(ValueError, match="quant_method is 'fp8'; supported: 'flashmhf_fp8'"):
        FlashMHFFp8Config(quant_method="fp8")
    with pytest.raises(ValueError, match="device_map offloads model.layers.1.mlp"):
        parts = "model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"
        device_map = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
        folder = {"offload_folder": tmp_path / "offload"}
        AutoModelForCausalLM.from_pretrained(
            plain, device_map=device_map, quantization_config=FlashMHFFp8Config(), **folder
        )
    shared = types.SimpleNamespace(config=types.SimpleNamespace(distributed_config=object()))
    with pytest.raises(NotImplementedError, match="several processes"):
        FlashMHFFp8Quantizer(FlashMHFFp8Config())._process_model_before_weight_loading(shared)


def test_the_configuration_by_itself(packed):
    config = AutoConfig.from_pretrained(packed)
    assert config.quantization_config["quant_method"] == "flashmhf_fp8"
    for kept in ({}, {"projections": False}):  # as development versions stored it
        assert FlashMHFFp8Config.from_dict(config.quantization_config | kept).to_dict() == config.quantization_config


@pytest.fixture(scope="module")
def quantised(plain, tmp_path_factory):
    """What ``flashmhf quantize`` writes."""
    directory = tmp_path_factory.mktemp("quantised") / "new"
    assert cli.main(["quantize", "--model", str(plain), "--output", str(directory), "--device", "cpu"]) == 0
    return directory


def test_quantize_command(plain, quantised):
    loaded, words = pretrained.load(str(quantised), device="cpu", dtype="bfloat16")
    expected = FlashMHFForCausalLM.from_pretrained(plain)
    quantize.quantize_(expected)  # packed from float32
    expected.to(torch.bfloat16)
    same_bits(loaded, expected)
    assert words.eos_token_id == 0 and AutoConfig.from_pretrained(quantised).dtype == torch.bfloat16


def test_eval_and_generate_commands(plain, quantised, tmp_path, capsys):
    """--fp8 on a model gives what the quantised model gives, and another loss than the model itself."""
    (tmp_path / "text.txt").write_text("the head mixes what each sub network finds. " * 20)
    losses = {}
    for name, arguments in {"bf16": [plain], "fp8": [plain, "--fp8"], "stored": [quantised]}.items():
        command = [*map(str, arguments), "--dtype", "bfloat16", "--device", "cpu"]
        figures = tmp_path / "figures.json"
        assert (
            cli.main(["eval", "--model", *command, "--data", str(tmp_path / "text.txt"), "--json", str(figures)]) == 0
        )
        found = json.loads(figures.read_text())
        assert found["fp8"] == (name != "bf16")
        losses[name] = found["held_out"]["loss"]
        capsys.readouterr()
        assert (
            cli.main(["generate", "--model", *command, "--temperature", "0", "--max-new-tokens", "4", "the head"]) == 0
        )
        assert capsys.readouterr().out.startswith("the head")
    assert losses["fp8"] != losses["bf16"] and losses["stored"] == pytest.approx(losses["fp8"], rel=2e-3)
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=2e-2)


def test_command_errors_are_one_line(plain, quantised, tmp_path, capsys):
    tiny("swiglu", vocab_size=300).save_pretrained(tmp_path / "swiglu")
    tokenizer.load(str(plain)).save_pretrained(tmp_path / "swiglu")
    text = tmp_path / "text.txt"
    text.write_text("the head")
    for arguments, message in (
        (["generate", "--model", tmp_path / "swiglu", "--fp8", "x"], "model holds no FlashMHF"),
        (["quantize", "--model", tmp_path / "swiglu", "--output", tmp_path / "new"], "model holds no FlashMHF"),
        (["quantize", "--model", plain, "--output", plain], "is not empty"),
        (["quantize", "--model", "./nothing", "--output", tmp_path / "new"], "nothing does not exist"),
        (
            [
                "train",
                "--output",
                tmp_path / "run",
                "--init-from",
                quantised,
                "--data",
                text,
                "--steps",
                "1",
                "--learning-rate",
                "1e-4",
            ],
            "a quantised model; supported: a model as it was trained",
        ),
    ):
        assert cli.main([*map(str, arguments), "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error and error.count("\n") == 1, (arguments, error)
    assert not (tmp_path / "new").exists()


def test_a_disk_without_room_gets_no_half_of_a_model(plain, tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        status = cli.main(["quantize", "--model", str(plain), "--output", str(tmp_path / "new"), "--device", "cpu"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2 and "new could not be written: " in capsys.readouterr().err and not (tmp_path / "new").exists()
