"""Networks that hold the heads of one rank, without an engine: values, loading, compilation, CUDA graphs. Two ranks
with an all-reduce are a case of distributed_runs.py."""

import copy
import itertools

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

import flashmhf
from flashmhf import quantize
from flashmhf.distributed import Rank, shard
from flashmhf.testing import capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
D_MODEL, HEADS = 256, 4
SIZES = (D_MODEL, HEADS, 3, 32)  # and E, d_e
KINDS = {
    "flashmhf": lambda: flashmhf.FlashMHF(*SIZES),
    "q_norm and bias": lambda: flashmhf.FlashMHF(*SIZES, q_norm=True, bias=True),
    "grouped": lambda: flashmhf.FlashMHF(*SIZES, num_kv_heads=2, activation="relu"),
    "mh_ffn": lambda: flashmhf.MHFFN(D_MODEL, HEADS, 96, activation="gelu", q_norm=True),
    "fp8": lambda: quantize.to_fp8(flashmhf.FlashMHF(*SIZES, num_kv_heads=2)),
    "fp8, q_norm and bias": lambda: quantize.to_fp8(flashmhf.FlashMHF(*SIZES, q_norm=True, bias=True)),
}


def network(name: str) -> torch.nn.Module:
    """A network with random weights and biases."""
    made = KINDS[name]()
    for key, parameter in made.named_parameters():
        if "bias" in key or "q_norm" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def shards(whole: torch.nn.Module, size: int) -> list[torch.nn.Module]:
    """The network's shards for ``size`` ranks whose sum the caller takes."""
    return [shard(copy.deepcopy(whole), Rank(index, size, lambda y: y)) for index in range(size)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_shards_sum_to_the_network(name, size):
    """One rank has the network's bits, in inference and where x needs a gradient."""
    whole = network(name).requires_grad_(False)
    parts = shards(whole, size)
    for tokens, trained in itertools.product((0, 1, 7, 65, 300, 1024), (False, True)):
        x = torch.randn(tokens, D_MODEL, requires_grad=trained and "fp8" not in name)
        found, expected = sum(part(x) for part in parts), whole(x)
        if size == 1:
            assert torch.equal(found, expected)
        else:
            assert found.shape == expected.shape and (found - expected).norm() <= 1e-5 * expected.norm()
    held, total = (sum(t.numel() for t in each.state_dict().values()) for each in (parts[0], whole))
    assert held < total / size * 1.01 + 3 * D_MODEL


def test_hooks_of_the_network_see_the_sum():
    whole, seen = network("flashmhf"), []
    whole.register_forward_hook(lambda module, args, y: seen.append(y))
    y = shard(whole, Rank(0, 2, torch.zeros_like))(torch.randn(3, D_MODEL))
    assert torch.equal(seen[0], y)


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_of_the_whole_network_loads_into_every_rank(name):
    whole = network(name)
    with torch.device("meta"):
        empty = copy.deepcopy(whole).to("meta")
    for index, expected in enumerate(shards(whole, 2)):
        loaded = shard(copy.deepcopy(empty), Rank(index, 2, lambda y: y), "mlp.")
        parameters = dict(loaded.named_parameters())
        assert parameters.keys() == whole.state_dict().keys()
        for key, tensor in whole.state_dict().items():
            parameters[key].weight_loader(parameters[key], tensor)
            assert torch.equal(parameters[key], expected.get_parameter(key)) and not parameters[key].requires_grad
    key = "k8" if "fp8" in name else "k"
    with pytest.raises(ValueError, match=rf"mlp.{key} has shape .* in the checkpoint; expected \[[24], "):
        parameters[key].weight_loader(parameters[key], whole.state_dict()[key][:1])
    projection = whole.state_dict()["in_proj.weight"]
    with pytest.raises(TypeError, match="mlp.in_proj.weight has dtype torch.int8 in the checkpoint"):
        parameters["in_proj.weight"].weight_loader(parameters["in_proj.weight"], projection.to(torch.int8))
    if key == "k8":
        with pytest.raises(ValueError, match="layout is"):
            loaded.layout.weight_loader(loaded.layout, torch.tensor([7], dtype=torch.uint8))
        with pytest.raises(TypeError, match="mlp.k8 has dtype torch.bfloat16 .*; expected torch.float8_e4m3fn"):
            loaded.k8.weight_loader(loaded.k8, whole.k8.bfloat16())
        assert loaded.half().k8.dtype == whole.k8.dtype and loaded.router.dtype == torch.float16


def test_refusals():
    grouped = network("grouped")
    for rank, name in ((Rank(0, 3, lambda y: y), "num_heads is 4"), (Rank(0, 4, lambda y: y), "num_kv_heads is 2")):
        with pytest.raises(ValueError, match=f"{name}; supported: multiples of the tensor-parallel size {rank.size}"):
            shard(grouped, rank)
        assert grouped.num_heads == 4
    part = shard(grouped, Rank(0, 2, lambda y: y))  # of which half would be summed twice
    for error, message, call, *given in (
        (ValueError, "network is one rank's part already; supported: whole networks", shard, part, rank),
        (NotImplementedError, "skip_linear is True", shard, flashmhf.MHFFN(64, 4, 32, skip_linear=True), rank),
        (TypeError, "network is a SwiGLU; supported: FlashMHF, ", shard, flashmhf.SwiGLU(64, 128), rank),
        (ValueError, "all_reduce is None", Rank, 0, 2),
        (ValueError, "index is 2", Rank, 2, 2, lambda y: y),
    ):
        with pytest.raises(error, match=message):
            call(*given)


@pytest.mark.parametrize("name", ["flashmhf", "q_norm and bias", "fp8"])
def test_one_node_for_every_number_of_tokens(name):
    """A compiled shard is one operator, and another number of tokens compiles nothing."""
    _, part = shards(network(name), 2)
    backend = EagerAndRecordGraphs()
    # an engine compiles the whole model
    compiled = torch.compile(torch.nn.Sequential(part), fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for tokens in (2, 7, 65, 300):
            x = torch.randn(tokens, D_MODEL)
            torch.testing.assert_close(compiled(x), part(x))
    (graph,) = backend.graphs
    called = [str(node.target) for node in graph.graph.nodes if "flashmhf" in str(node.target)]
    assert called == ["flashmhf.fp8_layer" if name == "fp8" else "flashmhf.layer"]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_a_gpu(size, compiled):
    """Against float64, no less exact than the module, and in a CUDA graph the same bits."""
    module = flashmhf.FlashMHF(2048, 16, 22, 384, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    double = copy.deepcopy(module).to(torch.float64)
    parts = shards(module, size)
    functions = [torch.compile(part, fullgraph=True, dynamic=True) if compiled else part for part in parts]
    for tokens in (1, 16, 64, 256, 1024):
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            eager = functions[0](x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                captured = functions[0](x)
            graph.replay()
            assert torch.equal(captured, eager)
            exact = double(x.double())
            error = (sum(function(x).float() for function in functions) - exact).norm() / exact.norm()
            assert error <= 1.1 * (module(x).double() - exact).norm() / exact.norm()
