"""Every kind of directory through every door: the model that was saved, or a refusal in the same words."""

import json
import shutil

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
SAVED = ("own", "swapped", "official", "quantised", "quantised and swapped")


def made(kind: str) -> torch.nn.Module:
    """A model with random weights, of which no two are alike."""
    if "swapped" in kind:
        model = foreign(vocab_size=512)
        flashmhf.replace_ffn(model, num_heads=2)
    else:
        model = tiny()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if "quantised" in kind:
        quantize.quantize_(model.requires_grad_(False))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories by kind, each with a tokenizer, and the logits of their models."""
    torch.manual_seed(0)
    folder, logits = tmp_path_factory.mktemp("saved"), {}
    words = tokenizer.train(["the quick brown fox"], 300)
    for kind in SAVED:
        model = made(kind)
        if kind == "official":
            write_official(model, folder / kind)
        else:
            model.save_pretrained(folder / kind)
        words.save_pretrained(folder / kind)
        with torch.no_grad():
            logits[kind] = model(IDS).logits
    return folder, logits


DOORS = {  # the ways to a model with all of its weights
    "load": load,
    "the commands": lambda directory: pretrained.load(str(directory), device="cpu")[0],
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", SAVED)
def test_loads_what_was_saved(door, kind, saved):
    folder, logits = saved
    model = DOORS[door](folder / kind)
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits[kind])


def without(directory, name: str) -> None:
    weights = directory / "model.safetensors"
    state = load_file(weights)
    del state[next(key for key in state if key.endswith(name))]
    save_file(state, weights, {"format": "pt"})


def extended(directory, name: str) -> None:
    weights = directory / "model.safetensors"
    save_file({**load_file(weights), name: torch.ones(2)}, weights, {"format": "pt"})


def truncated(directory, share: float) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * share)])


def unpickled(directory) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def configured(directory, **settings) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))


DAMAGED = {  # kind, what is done to its directory, and the error
    "own without a weight": ("own", lambda path: without(path, "0.mlp.router"), ValueError,
     "lacks 1 weights of its model: .*router"),
    "swapped with one too many": ("swapped", lambda path: extended(path, "model.norm.scale"), ValueError,
     "does not fit .* unexpected .*model.norm.scale"),
    "official without a weight": ("official", lambda path: without(path, "0.mlp.router"), ValueError,
     "lacks weights of its model.*router"),
    "truncated": ("own", lambda path: truncated(path, 0.5), ValueError, "weights in .* do not load"),
    "truncated, official": ("official", lambda path: truncated(path, 0.5), ValueError, "weights in .* do not load"),
    "empty": ("quantised", lambda path: truncated(path, 0), ValueError, "weights in .* do not load"),
    "another size": ("own", lambda path: configured(path, intermediate_size=64), ValueError,
     "weights in .* do not load"),
    "fewer layers": ("own", lambda path: configured(path, num_hidden_layers=1), ValueError,
     "does not fit .* unexpected .*layers.1"),
    "official, no pickle": ("official", unpickled, ValueError, "not load"),
    "no model's sizes": ("own", lambda path: configured(path, ffn_num_heads=5), ValueError,
     "configuration in .* ffn_num_heads is 5"),
    "no JSON": ("own", lambda path: (path / "config.json").write_text("{"), ValueError,
     "configuration in .* is not that of a model"),
    "no weights": ("own", lambda path: (path / "model.safetensors").unlink(), OSError, "model.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("damage", DAMAGED)
def test_refuses_what_is_damaged(door, damage, saved, tmp_path):
    kind, spoil, error, message = DAMAGED[damage]
    directory = shutil.copytree(saved[0] / kind, tmp_path / "damaged")
    spoil(directory)
    with pytest.raises(error, match=message):
        DOORS[door](directory)


@pytest.mark.parametrize("missing", ["k", "router", "q_norm.weight", "in_proj.weight", "out_proj.weight"])
def test_from_pretrained_draws_what_the_checkpoint_lacks_as_documented(missing, tmp_path):
    """It reports the weight; what the checkpoint has stays."""
    sizes = dict(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.01)
    settings = dict(intermediate_size=96, ffn_num_heads=2, ffn_num_subnets=2, ffn_q_norm=True)
    model = FlashMHFForCausalLM(FlashMHFConfig(**sizes, **settings))
    model.save_pretrained(tmp_path)
    without(tmp_path, f"0.mlp.{missing}")
    for _ in range(20):  # memory that a process has used before
        torch.full((2, 2, 48, 64), 1e30)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    name = f"model.layers.0.mlp.{missing}"
    assert report["missing_keys"] == {name}
    drawn, other = again.get_parameter(name), model.get_parameter(name)
    torch.testing.assert_close(drawn.std(), other.std(), rtol=0.1, atol=1e-9)
    torch.testing.assert_close(drawn.mean(), other.mean(), rtol=0, atol=0.2 * other.std().item() + 1e-9)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_directory_without_a_tokenizer(saved, tmp_path):
    """It has a model; the commands, which need words, refuse it."""
    directory = shutil.copytree(saved[0] / "own", tmp_path / "own")
    for path in directory.glob("token*"):
        path.unlink()
    load(directory)
    with pytest.raises(ValueError, match="no tokenizer could be loaded from"):
        DOORS["the commands"](directory)


def test_a_directory_of_an_older_version(saved, tmp_path):
    """The module beside the configuration names classes where they lay then, or both lack it: the installed package's
    are taken. Replaced networks had a record of their own."""
    directory = shutil.copytree(saved[0] / "own", tmp_path / "own")
    (directory / "modeling_flashmhf.py").write_text("from flashmhf.lm import FlashMHFConfig, FlashMHFForCausalLM\n")
    with torch.no_grad():
        assert torch.equal(load(directory)(IDS).logits, saved[1]["own"])
    (directory / "modeling_flashmhf.py").unlink()
    config = json.loads((directory / "config.json").read_text())
    del config["auto_map"]  # 0.1 wrote neither
    (directory / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(load(directory)(IDS).logits, saved[1]["own"])
    directory = shutil.copytree(saved[0] / "swapped", tmp_path / "swapped")
    config = json.loads((directory / "config.json").read_text())
    del config["fusion_config"]
    networks = config.pop("quantization_config")["networks"]
    config["flashmhf_networks"] = {
        name: network | {"accumulate_main_grad": False} for name, network in networks.items()
    }
    (directory / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(load(directory)(IDS).logits, saved[1]["swapped"])
