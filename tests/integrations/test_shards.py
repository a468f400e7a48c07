"""What engines build: the network of a configuration, and the plug-in for vLLM."""

import importlib.util
import sys
import types
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from flashmhf import quantize
from flashmhf.distributed import Rank


def test_the_network_of_a_configuration():
    """Every multi-head ffn_type with the settings it has: the served network loads the model's and gives its values."""
    pytest.importorskip("transformers")
    from flashmhf.integrations.shards import served_feed_forward
    from flashmhf.models import FlashMHFFp8Config
    from flashmhf.models.modeling import feed_forward
    from flashmhf.models.presets import preset

    for ffn, settings in (
        ("flashmhf", {"ffn_q_norm": True, "ffn_num_kv_heads": 1, "hidden_act": "relu"}),
        ("mh_ffn", {"ffn_q_norm": True, "hidden_act": "gelu", "mlp_bias": True}),
        ("fp8", {"ffn_q_norm": True, "mlp_bias": True, "ffn_num_kv_heads": 1}),
    ):
        config = preset(f"{ffn}-tiny" if ffn != "fp8" else "flashmhf-tiny").config(**settings)
        whole = feed_forward(config)
        if ffn == "fp8":
            whole = quantize.to_fp8(whole)
            config.quantization_config = FlashMHFFp8Config().to_dict()
        served, state, x = served_feed_forward(config), whole.state_dict(), torch.randn(5, config.hidden_size)
        for name, parameter in served.named_parameters():
            parameter.weight_loader(parameter, state.pop(name))
        assert not state
        with torch.no_grad():
            assert torch.equal(served(x), whole(x)), ffn
    tiny, partly = preset("flashmhf-tiny").config, FlashMHFFp8Config().to_dict() | {"fp8": ["model.layers.0.mlp"]}
    for config, error, message in (
        (preset("swiglu-tiny").config(), NotImplementedError, "ffn_type is 'swiglu'; supported: flashmhf, mh_ffn"),
        (tiny(ffn_num_kv_heads=1), ValueError, "num_kv_heads is 1; supported: multiples of the tensor-parallel size 2"),
        (tiny(quantization_config=partly), NotImplementedError, "networks of other sizes or partly in FP8"),
        (tiny(flashmhf_networks={"model.layers.0.mlp": {}}), NotImplementedError, "networks of other sizes or partly"),
    ):
        with pytest.raises(error, match=message):
            served_feed_forward(config, Rank(0, 2, lambda y: y))


def test_the_plugin_for_vllm(monkeypatch):
    """What the entry point names, with an engine in place of vLLM 0.32: the class and the quantisation method."""
    pytest.importorskip("transformers")
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    registered, methods, layers, plain = {}, {}, "vllm.model_executor.layers", "UnquantizedLinearMethod"
    for name, contents in {
        "vllm": {"ModelRegistry": types.SimpleNamespace(register_model=registered.setdefault)},
        f"{layers}.quantization": {"register_quantization_config": lambda name: partial(methods.setdefault, name)},
        f"{layers}.quantization.base_config": {"QuantizationConfig": object, "QuantizeMethodBase": object},
        f"{layers}.linear": {"LinearBase": torch.nn.Linear, plain: type(plain, (), {})},
    }.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**contents))
    monkeypatch.delitem(sys.modules, "flashmhf.integrations.vllm_plugin", raising=False)
    sources = Path(__file__).parents[2] / "pyproject.toml"
    if not sources.exists():
        pytest.skip("the sources are not here")
    points = tomllib.loads(sources.read_text(encoding="utf-8"))["project"]["entry-points"]
    for _ in range(2):  # an engine may load its plug-ins twice
        EntryPoint("flashmhf", points["vllm.general_plugins"]["flashmhf"], "vllm.general_plugins").load()()
    assert registered == {"FlashMHFForCausalLM": "flashmhf.integrations.vllm:FlashMHFForCausalLM"}
    assert importlib.util.find_spec("flashmhf.integrations.vllm")
    kind = methods.pop("flashmhf")
    stored = {"quant_method": "flashmhf", "layout": quantize.LAYOUT}
    method = kind.from_config(stored)
    assert not methods and method.get_name() == "flashmhf" and method.get_supported_act_dtypes()[0] == torch.bfloat16
    assert method.get_quant_method(torch.nn.Embedding(2, 2), "x") is None
    assert type(method.get_quant_method(torch.nn.Linear(2, 2), "x")).__name__ == plain
    with pytest.raises(ValueError, match="layout of the packed weights is 7"):
        kind.from_config({**stored, "layout": 7})
    with pytest.raises(ValueError, match="the checkpoint has no packed weights"):
        kind()  # vLLM's call for --quantization flashmhf on plain weights
