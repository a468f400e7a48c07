"""Layers for inference engines, without an engine: values, heads over ranks, compilation, CUDA graphs."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import flashmhf
from flashmhf import integrations as serving
from flashmhf import quantize
from flashmhf.graphs import capturing
from flashmhf.integrations import Rank
from flashmhf.integrations.shards import check_loaded

D_MODEL, HEADS, SUBNETS, WIDTH = 256, 4, 3, 32
TOKENS = (1, 7, 16, 64, 65, 300)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def networks(device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, tuple[torch.nn.Module, type, dict]]:
    """The whole network, its class of shards and the shard's arguments."""
    settings = {"device": device, "dtype": dtype}
    sizes = (D_MODEL, HEADS, SUBNETS, WIDTH)
    made = {
        "flashmhf": (flashmhf.FlashMHF(*sizes, **settings), serving.FlashMHFShard, sizes, {}),
        "q_norm": (flashmhf.FlashMHF(*sizes, q_norm=True, **settings), serving.FlashMHFShard, sizes, {"q_norm": True}),
        "bias": (flashmhf.FlashMHF(*sizes, bias=True, **settings), serving.FlashMHFShard, sizes, {"bias": True}),
        "mh_ffn": (flashmhf.MHFFN(D_MODEL, HEADS, 96, **settings), serving.MHFFNShard, (D_MODEL, HEADS, 96), {}),
        "grouped": (flashmhf.FlashMHF(*sizes, num_kv_heads=2, **settings), serving.FlashMHFShard, sizes, {"num_kv_heads": 2}),
        "gelu": (
            flashmhf.MHFFN(D_MODEL, HEADS, 96, activation="gelu", q_norm=True, **settings),
            serving.MHFFNShard,
            (D_MODEL, HEADS, 96),
            {"activation": "gelu", "q_norm": True},
        ),
        "pkv": (flashmhf.ParametricKV(D_MODEL, HEADS, 96, **settings), serving.ParametricKVShard, (D_MODEL, HEADS, 96), {}),
    }
    for name in ("bias", "q_norm"):
        for parameter in made[name][0].parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def shards(name: str, size: int, device: str = "cpu", dtype: torch.dtype = torch.float32):
    """The whole network, and its shards for ``size`` ranks whose sum the caller takes."""
    whole, kind, sizes, settings = networks(device, dtype)[name]
    parts = []
    for index in range(size):
        rank = Rank(index, size, (lambda y: y) if size > 1 else None)
        part = kind(*sizes, **settings, rank=rank, device=device, dtype=dtype)
        part.load(copy.deepcopy(whole.state_dict()))
        parts.append(part)
    return whole, parts


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["flashmhf", "q_norm", "bias", "grouped", "mh_ffn", "gelu", "pkv"])
def test_shards_sum_to_the_network(name, size):
    whole, parts = shards(name, size)
    for tokens in TOKENS:
        x = torch.randn(tokens, D_MODEL)
        with torch.no_grad():
            torch.testing.assert_close(sum(part(x) for part in parts), whole(x), rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in parts[0].parameters()) < sum(p.numel() for p in whole.parameters()) / size * 1.01 + 2 * D_MODEL


def test_loader_takes_this_ranks_heads_and_refuses_other_shapes():
    whole, (first, second) = shards("flashmhf", 2)
    assert torch.equal(first.k, whole.k[:2]) and torch.equal(second.k, whole.k[2:])
    assert torch.equal(second.in_proj.weight, whole.in_proj.weight[D_MODEL // 2 :])
    assert torch.equal(second.out_proj.weight, whole.out_proj.weight[:, D_MODEL // 2 :])
    with pytest.raises(ValueError, match=r"expected \[4, 3, 32, 64\]"):
        first.k.weight_loader(first.k, whole.k[:2])
    with pytest.raises(ValueError, match="state dict has"):
        first.load({"k": whole.k})


def test_refusals():
    with pytest.raises(ValueError, match="num_heads is 4; supported: multiples of the tensor-parallel size 3"):
        serving.FlashMHFShard(D_MODEL, HEADS, SUBNETS, WIDTH, rank=Rank(0, 3, lambda y: y))
    with pytest.raises(ValueError, match="all_reduce is None"):
        Rank(0, 2)
    with pytest.raises(ValueError, match="index is 2"):
        Rank(2, 2, lambda y: y)
    _, (part,) = shards("flashmhf", 1)
    with pytest.raises(ValueError, match="x has shape"):
        part(torch.randn(3, D_MODEL + 1))
    with pytest.raises(NotImplementedError, match="no gradient"):
        part(torch.randn(3, D_MODEL, requires_grad=True))
    in_proj, out_proj = (part.in_proj.weight[1:], None), (part.out_proj.weight, None)
    with pytest.raises(ValueError, match="in_w has shape"):
        serving.layer(torch.randn(3, D_MODEL), in_proj, part.k, part.u, part.v, None, 0.0, out_proj)


REFUSED = {  # argument, what it becomes, and the error
    "x": (lambda x: x.long(), TypeError, "x has dtype int64; supported: bfloat16"),
    "in_w": (lambda w: w.double(), TypeError, r"in_w has dtype float64; supported: float32 \(x's dtype\)"),
    "in_bias": (lambda b: b[:1], ValueError, r"in_bias has shape \[1\]; expected \[256\]"),
    "k": (lambda k: k[:0], ValueError, "k has shape .*; H_kv must be at least 1"),
    "u": (lambda u: u[:, :, :-1], ValueError, "u has shape"),
    "w": (lambda w: "abc", TypeError, "w must be a torch.Tensor, got str"),
    "eps": (lambda eps: None, TypeError, "eps must be a float, got NoneType"),
    "out_w": (lambda w: w.bfloat16(), TypeError, "out_w has dtype bfloat16; supported: float32"),
    "out_bias": (lambda b: torch.tensor(1.0), ValueError, r"out_bias has shape \[\]; expected \[256\]"),
    "q_norm": (lambda w: w[:1], ValueError, r"q_norm has shape \[1, 64\]; expected \[4, 64\] \(\[H, d_h\]\)"),
    "q_norm_eps": (lambda eps: float("nan"), ValueError, "q_norm_eps is nan; supported: finite numbers from 0"),
}


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_every_argument_of_the_operator_is_checked(name, tokens):
    _, (part,) = shards("bias", 1)
    given = {
        "x": torch.randn(tokens, D_MODEL),
        "in_w": part.in_proj.weight,
        "in_bias": part.in_proj.bias,
        **{"k": part.k, "u": part.u, "v": part.v, "w": part.router, "eps": 1e-20},
        "out_w": part.out_proj.weight,
        "out_bias": part.out_proj.bias,
        **{"q_norm": torch.ones(HEADS, D_MODEL // HEADS), "q_norm_eps": 1e-5},
    }

    def call(arguments: dict, device: str):
        placed = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
        in_proj, out_proj = ((placed.pop(f"{end}_w"), placed.pop(f"{end}_bias")) for end in ("in", "out"))
        return serving.layer(in_proj=in_proj, out_proj=out_proj, **placed)

    broken, error, message = REFUSED[name]
    for device in ("cpu", "meta"):
        assert call(given, device).shape == (tokens, D_MODEL)
        with pytest.raises(error, match=message):
            call(given | {name: broken(given[name])}, device)


def test_more_tokens_than_a_chunk(monkeypatch):
    monkeypatch.setattr(serving.operator, "CHUNK_TOKENS", 100)
    for name in ("flashmhf", "bias"):
        whole, (part,) = shards(name, 1)
        x = torch.randn(2, 151, D_MODEL)
        with torch.no_grad():
            torch.testing.assert_close(part(x), whole(x), rtol=1e-5, atol=1e-6)


def test_no_tokens():
    _, (part,) = shards("flashmhf", 1)
    assert part(torch.randn(0, D_MODEL)).shape == (0, D_MODEL)


def test_autocast():
    whole, (part,) = shards("bias", 1)
    x = torch.randn(5, D_MODEL)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for given in (x, x.bfloat16()):
            torch.testing.assert_close(part(given), whole(given), rtol=0.05, atol=0.05)


def test_opcheck():
    _, (part,) = shards("bias", 1)
    x = torch.randn(5, D_MODEL)
    weights = (part.in_proj.weight, part.in_proj.bias, part.k, part.u, part.v, part.router, 1e-20, part.out_proj.weight, part.out_proj.bias)
    torch.library.opcheck(torch.ops.flashmhf.layer, (x, *weights))
    torch.library.opcheck(torch.ops.flashmhf.layer, (x, *weights), {"q_norm": torch.rand(HEADS, D_MODEL // HEADS), "q_norm_eps": 1e-5})


@pytest.mark.parametrize("name", ["flashmhf", "q_norm", "mh_ffn"])
def test_one_node_for_every_number_of_tokens(name):
    """A compiled layer is one operator, and another number of tokens compiles nothing."""
    _, (part,) = shards(name, 1)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(part, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for tokens in (2, 7, 64, 65, 300):
            x = torch.randn(tokens, D_MODEL)
            torch.testing.assert_close(compiled(x), part(x))
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function" and "unsqueeze" not in str(node.target)]
    assert called == ["flashmhf.layer"]


@pytest.fixture
def big():
    """The layer of the paper's efficiency table with random bf16 weights, and the module."""
    settings = {"device": "cuda", "dtype": torch.bfloat16}
    module = flashmhf.FlashMHF(2048, 16, 22, 384, **settings)
    part = serving.FlashMHFShard(2048, 16, 22, 384, **settings)
    part.load(module.state_dict())
    return module, part


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024])
def test_equals_the_module_on_a_gpu(big, tokens):
    module, part = big
    x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(part(x), module(x))
        assert torch.equal(torch.compile(part, fullgraph=True, dynamic=True)(x), module(x))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_captures_in_a_cuda_graph(big, compiled):
    module, part = big
    function = torch.compile(part, fullgraph=True, dynamic=True) if compiled else part
    for tokens in (1, 16, 64, 256):
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            function(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                y = function(x)
            for _ in range(3):
                x.normal_()
                graph.replay()
                assert torch.equal(y, module(x))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_shards_sum_to_the_network_on_a_gpu(size):
    module = flashmhf.FlashMHF(2048, 16, 22, 384, device="cuda", dtype=torch.bfloat16)
    double = copy.deepcopy(module).to(torch.float64)
    parts = []
    for index in range(size):
        part = serving.FlashMHFShard(2048, 16, 22, 384, rank=Rank(index, size, lambda y: y), device="cuda", dtype=torch.bfloat16)
        part.load(module.state_dict())
        parts.append(part)
    for tokens in (1, 16, 64, 256, 1024):
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            exact = double(x.double())
            error = (sum(part(x).float() for part in parts) - exact).norm() / exact.norm()
            assert error <= 1.1 * (module(x).double() - exact).norm() / exact.norm()


def stand_in_for_vllms_quantisation(monkeypatch) -> dict[str, type]:
    """Modules with the names that the plug-in takes from vLLM 0.32; the methods that it registers."""
    methods: dict[str, type] = {}
    layers = "vllm.model_executor.layers"
    base = types.SimpleNamespace(QuantizationConfig=object, QuantizeMethodBase=object)
    linear = types.SimpleNamespace(LinearBase=torch.nn.Linear, UnquantizedLinearMethod=type("UnquantizedLinearMethod", (), {}))
    register = types.SimpleNamespace(register_quantization_config=lambda name: lambda method: methods.setdefault(name, method))
    for name, module in ((f"{layers}.quantization", register), (f"{layers}.quantization.base_config", base), (f"{layers}.linear", linear)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flashmhf.integrations.vllm_fp8", raising=False)
    return methods


def test_plugins(monkeypatch):
    """What the entry points name, with an engine in place of vLLM; transformers' own lookup finds the model class."""
    pytest.importorskip("transformers")
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    monkeypatch.setattr("flashmhf.models.FlashMHFConfig.plans_networks", True)  # the plug-in for SGLang clears it
    registered = {}

    class ModelRegistry:
        @staticmethod
        def register_model(name, where):
            registered[name] = where

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(ModelRegistry=ModelRegistry))
    methods = stand_in_for_vllms_quantisation(monkeypatch)
    sources = Path(__file__).parents[2] / "pyproject.toml"
    if not sources.exists():
        pytest.skip("the sources are not here")
    project = tomllib.loads(sources.read_text())["project"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        for _ in range(2):  # an engine may load its plug-ins twice
            EntryPoint("flashmhf", project["entry-points"][group]["flashmhf"], group).load()()
    assert registered == {"FlashMHFForCausalLM": "flashmhf.integrations.vllm:FlashMHFForCausalLM"}
    stored = {"quant_method": "flashmhf_fp8", "projections": True, "layout": quantize.LAYOUT}
    method = methods.pop("flashmhf_fp8").from_config(stored)
    assert not methods and method.get_name() == "flashmhf_fp8" and method.get_supported_act_dtypes()[0] == torch.bfloat16
    assert method.get_quant_method(torch.nn.Embedding(2, 2), "x") is None
    assert type(method.get_quant_method(torch.nn.Linear(2, 2), "x")).__name__ == "UnquantizedLinearMethod"
    with pytest.raises(ValueError, match="layout of the packed weights is 7"):
        method.from_config({**stored, "layout": 7})
    assert importlib.util.find_spec("flashmhf.integrations.vllm")
    assert sys.modules["transformers"].FlashMHFForCausalLM.__module__ == "flashmhf.models.modeling"


def test_sglang_knows_every_style_of_the_plan(monkeypatch):
    """SGLang's transformers back end raises for a style that is not one of these, on one rank too (0.5.23)."""
    pytest.importorskip("transformers")
    from transformers import AutoModel

    from flashmhf.integrations import plugins
    from flashmhf.models import FFN_TYPES, FlashMHFConfig
    from flashmhf.models.presets import preset

    monkeypatch.setattr(FlashMHFConfig, "plans_networks", True)
    plugins.sglang()
    for ffn in FFN_TYPES:
        model = AutoModel.from_config(preset(f"{ffn}-tiny").config())
        assert set(model.tp_plan.values()) <= {"colwise", "colwise_rep", "rowwise", "rowwise_rep", "replicate", "embedding_rowwise"}, ffn
        assert any("self_attn" in name for name in model.tp_plan)


@pytest.mark.parametrize("projections", [True, False])
@pytest.mark.parametrize("settings", [{}, {"q_norm": True, "bias": True}, {"num_kv_heads": HEADS // 2}])
def test_fp8_shards(settings, projections):
    """One rank has the bits of the packed network. Ranks quantise their parts of S apart, as exactly as the whole network does."""
    network = flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, WIDTH, **settings)
    packed, x = quantize.to_fp8(network, projections=projections), torch.randn(9, D_MODEL)
    results = []
    for size in (1, 2):
        parts = []
        for index in range(size):
            part = serving.Fp8FlashMHFShard(
                D_MODEL, HEADS, SUBNETS, WIDTH, rank=Rank(index, size, lambda y: y), projections=projections, **settings
            )
            part.load(packed.state_dict())
            parts.append(part)
        with torch.no_grad():
            results.append(sum(part(x) for part in parts))
    with torch.no_grad():
        assert torch.equal(results[0], packed(x))
        exact = network(x)
        errors = [(result - exact).norm() / exact.norm() for result in (*results, packed(x))]
    assert errors[1] <= 1.1 * errors[2] and errors[2] < 0.1
    assert len(parts[1].k8) == len(packed.k8) // 2
    with pytest.raises(ValueError, match="layout is"):
        parts[0].load({**packed.state_dict(), "layout": torch.tensor([7], dtype=torch.uint8)})


def test_fp8_is_one_node():
    part = serving.Fp8FlashMHFShard(D_MODEL, HEADS, SUBNETS, WIDTH)
    part.load(quantize.to_fp8(flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, WIDTH)).state_dict())
    graphs = []
    compiled = torch.compile(part, fullgraph=True, dynamic=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
    with torch.no_grad():
        for tokens in (2, 7, 65):
            x = torch.randn(tokens, D_MODEL)
            assert torch.equal(compiled(x), part(x))
    assert [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"] == ["flashmhf.fp8_layer"] and len(graphs) == 1


def test_the_network_of_a_configuration():
    """Every multi-head ffn_type with the settings it has: the served network loads the model's and gives its values."""
    pytest.importorskip("transformers")
    from flashmhf.models.modeling import feed_forward
    from flashmhf.models.presets import preset

    for ffn, settings in (
        ("flashmhf", {"ffn_q_norm": True, "ffn_num_kv_heads": 1, "hidden_act": "relu"}),
        ("mh_ffn", {"ffn_q_norm": True, "hidden_act": "gelu", "mlp_bias": True}),
        ("pkv", {}),
    ):
        config = preset(f"{ffn}-tiny").config(**settings)
        network, served, x = feed_forward(config), serving.served_feed_forward(config), torch.randn(5, 64)
        served.load(network.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(served(x), network(x), rtol=1e-5, atol=1e-6)
    for config in (preset("flashmhf-tiny").config(ffn_skip_linear=True), preset("swiglu-tiny").config()):
        with pytest.raises(NotImplementedError, match="supported"):
            serving.served_feed_forward(config)


@pytest.mark.parametrize("projections", [True, False])
def test_the_network_of_an_fp8_checkpoint(projections):
    pytest.importorskip("transformers")
    from flashmhf.models import FlashMHFForCausalLM
    from flashmhf.models.presets import preset

    model = FlashMHFForCausalLM(preset("flashmhf-tiny").config(ffn_q_norm=True, ffn_num_kv_heads=1, mlp_bias=True)).eval()
    names = quantize.quantize_(model, projections=projections)
    served, x = torch.nn.ModuleDict({"mlp": serving.served_feed_forward(model.config)}), torch.randn(5, 64)
    network = model.get_submodule(names[0])
    served["mlp"].load(network.state_dict())
    with torch.no_grad():
        assert torch.equal(served["mlp"](x), network(x))
    loaded = {f"mlp.{name}" for name in network.state_dict()}
    check_loaded(served, loaded)
    with pytest.raises(ValueError, match="the checkpoint lacks 1 weights of its networks: mlp.scales"):
        check_loaded(served, loaded - {"mlp.scales"})


def two_ranks(rank: int, folder: str, device: str) -> None:
    """One process of two: its shard of FlashMHF with a real all-reduce, on a GPU compiled and in a CUDA graph, against the module."""
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    compare_shard(rank, place)
    # NCCL waits here for the other rank, which may have failed (hence no finally), and for the end of every graph with its operations.
    torch.distributed.destroy_process_group()


def compare_shard(rank: int, place: torch.device) -> None:
    on_gpu = place.type == "cuda"
    torch.manual_seed(0)
    sizes = (2048, 16, 22, 384) if on_gpu else (D_MODEL, HEADS, SUBNETS, WIDTH)
    settings = {"device": place, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    module = flashmhf.FlashMHF(*sizes, q_norm=True, bias=True, **settings)
    torch.nn.init.normal_(module.out_proj.bias)

    def all_reduce(y: torch.Tensor) -> torch.Tensor:
        collectives = torch.distributed._functional_collectives
        # A capture fails that ends before the stream of the all-reduce has joined it.
        return collectives.wait_tensor(collectives.all_reduce(y, "sum", torch.distributed.group.WORLD))

    layer = serving.FlashMHFShard(*sizes, q_norm=True, bias=True, rank=Rank(rank, 2, all_reduce), **settings)
    layer.load(module.state_dict())
    assert len(layer.k) == sizes[1] // 2
    functions = [layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="inductor" if on_gpu else "eager")]
    with torch.no_grad():
        for tokens, function in ((tokens, function) for tokens in (1, 16, 64, 256) for function in functions):
            x = torch.randn(tokens, sizes[0], **settings)
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if on_gpu else {}
            torch.testing.assert_close(function(x), module(x), **tolerance)
            if on_gpu:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with capturing(graph):
                    y = function(x)
                x.copy_(torch.randn(tokens, sizes[0], **settings))
                graph.replay()
                torch.testing.assert_close(y, module(x), **tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    torch.multiprocessing.spawn(two_ranks, (str(tmp_path), device), nprocs=2)
