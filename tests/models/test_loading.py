"""flashmhf.models.load: the model that was saved, or a refusal in its own words."""

import json
import shutil
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from small_models import foreign, tiny, write_official  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import flashmhf  # noqa: E402
from flashmhf import quantize  # noqa: E402
from flashmhf.models import FlashMHFConfig, FlashMHFForCausalLM, load  # noqa: E402
from flashmhf_recipes import pretrained, tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(2, 11)[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a directory of each kind, whose models have random weights: no two are alike."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    own, replaced = tiny(), foreign()
    flashmhf.replace_ffn(replaced, num_heads=2)
    for parameter in (*own.parameters(), *replaced.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    write_official(own, folder / "official")
    own.save_pretrained(folder / "own")
    replaced.save_pretrained(folder / "replaced")
    quantize.quantize_(own)
    own.save_pretrained(folder / "FP8")
    return folder


def logits(directory) -> torch.Tensor:
    model = load(directory)
    assert not model.training
    with torch.no_grad():
        return model(IDS).logits


def altered(directory, without: str = "", **added: torch.Tensor) -> None:
    file = directory / "model.safetensors"
    kept = {name: weight for name, weight in load_file(file).items() if not (without and name.endswith(without))}
    save_file(kept | added, file, {"format": "pt"})


def truncated(directory, share: float) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * share)])


def configured(directory, *dropped: str, **settings) -> dict:
    """Change the configuration, and return it as it was."""
    config = json.loads((directory / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in dropped}
    (directory / "config.json").write_text(json.dumps(kept | settings))
    return config


def written(directory, text: str) -> None:
    (directory / "config.json").write_text(text)


def networks(recorded: object, directory) -> None:
    configured(directory, flashmhf_networks=recorded)


DAMAGED = {  # kind, what is done to its directory, and the error
    "without a weight": ("own", partial(altered, without="0.mlp.router"), "lacks 1 weights of its model: .*router"),
    "one too many": ("replaced", partial(altered, scale=torch.ones(2)), "does not fit .* unexpected .*scale"),
    "official without a weight": ("official", partial(altered, without="0.mlp.router"), "lacks weights of .*router"),
    "truncated": ("own", partial(truncated, share=0.5), "weights in .* do not load"),
    "truncated, official": ("official", partial(truncated, share=0.5), "weights in .* do not load"),
    "empty": ("FP8", partial(truncated, share=0), "weights in .* do not load"),
    "another size": ("own", partial(configured, intermediate_size=64), "weights in .* do not load"),
    "fewer layers": ("own", partial(configured, num_hidden_layers=1), "does not fit .* unexpected .*layers.1"),
    "no pickle": ("official", lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "not load"),
    "no model's sizes": ("own", partial(configured, ffn_num_heads=5), "configuration in .* ffn_num_heads is 5"),
    "no FlashMHF": ("replaced", partial(networks, {"model.layers.0.mlp": {"experts": 2}}), "no FlashMHF for .*experts"),
    "no sizes": ("replaced", partial(networks, {"model.layers.0.mlp": 3}), "has no FlashMHF for model.layers.0.mlp"),
    "no names": ("replaced", partial(networks, ["model.layers.0.mlp"]), "flashmhf_networks is ..model"),
    "another type": ("replaced", partial(configured, quantization_config=[]), "configuration in .* not that of a mo"),
    "a list of types": ("own", partial(configured, model_type=["flashmhf"]), "configuration in .* not that of a model"),
    "a list": ("own", partial(written, text="[]"), "model_type|configuration in .* is not that of a model"),
    "null": ("own", partial(written, text="null"), "configuration in .* is not that of a model"),
    "a number": ("own", partial(written, text="3"), "configuration in .* is not that of a model"),
    "no JSON": ("own", partial(written, text="{"), "configuration in .* is not that of a model"),
    "no weights": ("own", lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_refuses_what_is_damaged(damage, saved, tmp_path):
    kind, spoil, message = DAMAGED[damage]
    directory = shutil.copytree(saved / kind, tmp_path / "damaged")
    spoil(directory)
    with pytest.raises(OSError if damage == "no weights" else ValueError, match=message):
        load(directory)


def test_nobody_is_asked_whether_to_run_code_of_a_model(tmp_path, monkeypatch):
    """Standard input may be the prompt, which must not answer."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "code.py").write_text("raise SystemError('it ran')")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", None]}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "nosuch", "auto_map": auto_map}))
    for call in (load, tokenizer.load):
        with pytest.raises(ValueError, match="has code of its own, which is never run; supported: classes of"):
            call(str(tmp_path))


def test_refuses_other_types(saved, tmp_path):
    with pytest.raises(TypeError, match="dtype must be a torch.dtype or None, got str"):
        load(saved / "official", "bfloat16")
    directory = shutil.copytree(saved / "official", tmp_path / "nested")
    (directory / "model.safetensors").unlink()
    torch.save({"state_dict": {}}, directory / "pytorch_model.bin")
    with pytest.raises(TypeError, match="state_dict must be a torch.Tensor, got dict"):
        load(directory)


@pytest.mark.parametrize("missing", ["k", "router", "q_norm.weight", "in_proj.weight", "out_proj.weight"])
@pytest.mark.parametrize("swapped", [False, True])
def test_from_pretrained_draws_what_the_checkpoint_lacks_as_documented(missing, swapped, tmp_path):
    """It reports the weight, and one of another size; what the checkpoint has stays."""
    sizes = dict(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.01)
    settings = dict(intermediate_size=96, ffn_num_heads=2, ffn_num_subnets=2, ffn_q_norm=True)
    model = foreign(initializer_range=0.01) if swapped else FlashMHFForCausalLM(FlashMHFConfig(**sizes, **settings))
    if swapped:
        flashmhf.replace_ffn(model, num_heads=2, num_subnets=2, subnet_dim=48, q_norm=True)
    model.save_pretrained(tmp_path)
    drawn, other = (f"model.layers.{name}" for name in (f"0.mlp.{missing}", "1.mlp.u"))
    altered(tmp_path, without=drawn, **{other: torch.zeros(3)})
    for _ in range(20):  # memory that a process has used before
        torch.full((2, 2, 48, 64), 1e30)
    given = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    assert report["missing_keys"] == {drawn} and [each[0] for each in report["mismatched_keys"]] == [other]
    for name, expected in model.state_dict().items():
        found = again.state_dict()[name]
        if name not in (drawn, other):
            assert torch.equal(found, expected), name
            continue
        torch.testing.assert_close(found.std(), expected.std(), rtol=0.2, atol=1e-9)
        torch.testing.assert_close(found.mean(), expected.mean(), rtol=0, atol=0.2 * expected.std().item() + 1e-9)


def test_a_directory_of_an_older_version(saved, tmp_path):
    """The module beside the configuration names classes where they lay then, or both lack it: the installed package's
    are taken. Replaced networks had a record of their own."""
    directory, expected = shutil.copytree(saved / "own", tmp_path / "own"), logits(saved / "own")
    assert torch.equal(logits(saved / "official"), expected)
    (directory / "modeling_flashmhf.py").write_text("from flashmhf.lm import FlashMHFConfig, FlashMHFForCausalLM\n")
    assert torch.equal(logits(directory), expected)
    (directory / "modeling_flashmhf.py").unlink()
    configured(directory, "auto_map")  # 0.1 wrote neither
    assert torch.equal(logits(directory), expected)
    with pytest.raises(ValueError, match="no tokenizer could be loaded from"):  # which the commands need
        pretrained.load(str(directory), device="cpu")
    directory = shutil.copytree(saved / "replaced", tmp_path / "replaced")
    older = configured(directory, "fusion_config")["flashmhf_networks"]
    networks({name: {**each, "accumulate_main_grad": False} for name, each in older.items()}, directory)
    assert torch.equal(logits(directory), logits(saved / "replaced"))
