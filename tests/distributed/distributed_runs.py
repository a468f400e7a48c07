"""Cases of test_distributed.py: ``python distributed_runs.py PROCESSES CASE[,CASE...] [ARGUMENT...]`` runs them on gloo
processes. Every case compares with the same computation in one process. A failed assertion in any process is the exit
status. With DISTRIBUTED_DEVICE=cuda every process has a GPU and NCCL: for the cases of ``test_two_gpus``."""

import copy
import faulthandler
import functools
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.parallel import parallelize_module  # noqa: E402

import flashmhf  # noqa: E402
from flashmhf.distributed import HeadParallel, Rank, parallelize, shard, shard_placement  # noqa: E402
from flashmhf.integrations.peft import stack_weights  # noqa: E402
from flashmhf.quantize import to_fp8  # noqa: E402
from flashmhf.testing import capturing  # noqa: E402

DEVICE = os.environ.get("DISTRIBUTED_DEVICE", "cpu")
OPS = torch.ops.flashmhf
HEADS, TOKENS, ROWS, WHOLE = "heads", "tokens", "rows", "replicate"
WAYS = {
    HEADS: (Shard(2), Shard(0), Shard(0)),
    TOKENS: (Shard(1), Replicate(), Partial()),
    ROWS: (Shard(0), Replicate(), Partial()),
}
WAYS[WHOLE] = (Replicate(),) * 3
NEEDS = ([True, True], [True, False], [False, True])


def equal(actual: Tensor, expected: Tensor, **tolerance: Any) -> None:
    if isinstance(actual, DTensor):
        actual = actual.full_tensor()
    torch.testing.assert_close(actual, expected, **tolerance)


def raises(kind: type[Exception], fragments: tuple[str, ...], call) -> None:
    with pytest.raises(kind, match=".*".join(fragments)):
        call()


def operands(
    heads: int = 4,
    subnets: int = 2,
    kv_heads: int | None = None,
    tokens: int = 6,
    width: int = 16,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=dtype)  # noqa: E731
    scale = 1.0 if dtype == torch.float64 else width**-0.5
    weights = {name: draw(kv_heads or heads, subnets, width, width) * scale for name in "kuv"}
    return {
        "grad_out": draw(4, tokens, heads, width),
        "q": draw(4, tokens, heads, width),
        **weights,
        "w": draw(heads, width, subnets),
    }


def placed(x: dict[str, Tensor], mesh: DeviceMesh, tokens: list[Placement], weights: list[Placement]) -> dict:
    return {name: distribute_tensor(y, mesh, weights if name in "kuvw" else tokens) for name, y in x.items()}


def gated(x: dict[str, Tensor]) -> Tensor:
    return OPS.gated_forward(*(x[name] for name in "qkuvw"), 1e-20)


def check_rules(mesh: DeviceMesh, *ways: str, near: float = 0.0, **options: Any) -> None:
    """Every operator with operands placed as ``ways`` name for each mesh dimension; ``near`` is a part of a result's
    largest value."""
    x = operands(**options)
    x["r"] = flashmhf.gate(x["q"], x["w"])
    of_tokens, of_weights, of_grads = ([WAYS[way][part] for way in ways] for part in range(3))
    d = placed(x, mesh, of_tokens, of_weights)

    def agreed(operator, names: str, *constants: Any, **settings: Any) -> tuple[DTensor, ...]:
        results = [operator(*(given[name] for name in names.split()), *constants, **settings) for given in (d, x)]
        sharded, whole = (each if isinstance(each, tuple) else (each,) for each in results)
        for one, other in zip(sharded, whole, strict=True):
            limits = {"rtol": near, "atol": near * other.abs().max().item()} if near and other.numel() else {}
            equal(one, other, **limits)
        return sharded

    (out,) = agreed(OPS.gated_forward, "q k u v w", 1e-20)
    assert list(out.placements) == of_tokens, out.placements
    for gate in ("r", ""):
        agreed(OPS.forward, f"q k u v {gate}")
        for needs in NEEDS:
            results = agreed(OPS.backward, f"grad_out q k u v {gate}", *(() if gate else (None,)), needs=needs)
            assert not needs[0] or list(results[0].placements) == of_tokens
            assert not needs[1] or list(results[1].placements) == of_grads
    for needs in NEEDS:
        agreed(OPS.gated_backward, "grad_out q k u v w", 1e-20, needs=needs)


def rules() -> None:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for way in WAYS:
        check_rules(mesh, way)
        check_rules(mesh, way, kv_heads=2)
    grouped = operands(heads=12, kv_heads=3)  # two ranks have no equal numbers of groups, so q is gathered
    equal(gated(placed(grouped, mesh, [Shard(2)], [Replicate()])), gated(grouped))
    x = operands()
    # Tokens and weights sharded each their own way, and dimensions that no way shards, are redistributed.
    for of_tokens, of_weights in ((Shard(1), Shard(0)), (Shard(3), Shard(2))):
        equal(gated(placed(x, mesh, [of_tokens], [of_weights])), gated(x))
    for tokens in (5, 1):  # a token dimension that the mesh does not divide, and one shorter than the mesh
        part = {name: value[:, :tokens] if name in ("q", "grad_out") else value for name, value in x.items()}
        both = placed(part, mesh, [Shard(1)], [Replicate()]), part
        sharded, whole = (OPS.gated_backward(*given.values(), 1e-20) for given in both)
        for one, other in zip(sharded, whole, strict=True):
            equal(one, other)
    uneven = placed(operands(heads=3), mesh, [Shard(2)], [Shard(0)])
    raises(NotImplementedError, ("q is sharded over its heads, H = 3", "size 2"), lambda: gated(uneven))
    odd = placed(operands(subnets=3), mesh, [Shard(1)], [Shard(1)])
    raises(NotImplementedError, ("k is sharded over dimension 1 of size 3",), lambda: gated(odd))


def rules_on_two_dimensions() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    for ways in ((TOKENS, HEADS), (ROWS, TOKENS), (ROWS, HEADS), (WHOLE, HEADS), (HEADS, HEADS)):
        check_rules(mesh, *ways)


def kernels() -> None:
    """The back end that this device has for bf16, by heads and by tokens."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    sizes = {"tokens": 512, "width": 128} if DEVICE == "cuda" else {"tokens": 32}
    for way in (HEADS, TOKENS):
        check_rules(mesh, way, near=2e-2, dtype=torch.bfloat16, **sizes)


def network(**options) -> flashmhf.FlashMHF:
    torch.manual_seed(0)
    module = flashmhf.FlashMHF(32, 4, 3, 16, dtype=torch.float64, **options)
    module.reset_parameters("balanced")
    return module


def compare_module(
    mesh: DeviceMesh, whole: nn.Module, sequence_dim: int | None = None, wrap: Callable | None = None
) -> None:
    """Results and gradients by heads, with input and output sharded over a dimension or not, as in one process."""
    torch.manual_seed(1)
    x, grad = torch.randn(2, 2, 6, 32, dtype=torch.float64, device=whole.k.device)
    layout = Replicate() if sequence_dim is None else Shard(sequence_dim)
    style = HeadParallel(input_layouts=layout, output_layouts=layout)
    sharded = parallelize_module(copy.deepcopy(whole), mesh, style)
    called = wrap(sharded) if wrap else sharded
    mine = slice(None) if sequence_dim is None else slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    x_whole, x_mine = x.clone().requires_grad_(), x[:, mine].clone().requires_grad_()
    out = whole(x_whole)
    out.backward(grad)
    out_mine = called(x_mine)
    out_mine.backward(grad[:, mine])
    equal(out_mine, out[:, mine])
    equal(x_mine.grad, x_whole.grad[:, mine])
    expected = dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        equal(parameter.grad, expected[name].grad)
    with torch.no_grad():
        equal(called(x[:, mine]), out[:, mine])
        equal(called(x=x[:, mine]), out[:, mine])
    if sequence_dim is None and wrap is None:
        with torch.no_grad(), CommDebugMode() as collectives:
            called(x)
        counts = collectives.get_comm_counts()
        assert not counts[torch.ops.c10d_functional.all_reduce], "the sum over the heads copied its operand"


def module_cases() -> None:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    compare_module(mesh, network())
    compare_module(mesh, network(q_norm=True, bias=True), 1)
    compare_module(mesh, network(), 1, checkpoint_wrapper)
    compare_module(mesh, stack_weights(network()))
    compare_module(mesh, flashmhf.MHFFN(32, 4, 16, dtype=torch.float64))
    compare_module(mesh, network(num_kv_heads=2, q_norm=True), 1)
    compare_module(mesh, network(num_kv_heads=2, skip_linear=True))
    compare_module(mesh, flashmhf.MHFFN(32, 4, 16, num_kv_heads=2, q_norm=True, activation="gelu", dtype=torch.float64))
    raises(ValueError, ("H = 3", "size 2"), lambda: parallelize(flashmhf.FlashMHF(48, 3, 2, 16), mesh))
    single = flashmhf.FlashMHF(48, 3, 2, 16, num_kv_heads=1)
    raises(ValueError, ("H = 1 heads of K, U and V",), lambda: parallelize(single, mesh))
    raises(TypeError, ("Linear",), lambda: HeadParallel()._apply(nn.Linear(4, 4), mesh))


def compiled_module() -> None:
    mesh, whole = init_device_mesh(DEVICE, (dist.get_world_size(),)), network(q_norm=True)
    torch.set_default_device(None)  # torch 2.11 compiles no DTensor under one
    compare_module(
        mesh, whole, wrap=lambda module: torch.compile(module, fullgraph=True, dynamic=False, backend="aot_eager")
    )


def served_shard() -> None:
    """The shard of a rank that an engine serves with a real all-reduce, compiled, too, and on a GPU in a CUDA graph,
    against the module."""
    torch.set_default_device(None)  # an engine sets none
    torch.manual_seed(0)
    on_gpu = DEVICE == "cuda"
    sizes = (2048, 16, 22, 384) if on_gpu else (256, 4, 3, 32)
    settings = {"device": DEVICE, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    module = flashmhf.FlashMHF(*sizes, q_norm=True, bias=True, **settings)
    nn.init.normal_(module.out_proj.bias)

    def all_reduce(y: Tensor) -> Tensor:
        collectives = torch.distributed._functional_collectives
        # A capture fails that ends before the stream of the all-reduce has joined it.
        return collectives.wait_tensor(collectives.all_reduce(y, "sum", dist.group.WORLD))

    layer = shard(copy.deepcopy(module), Rank(dist.get_rank(), dist.get_world_size(), all_reduce))
    assert len(layer.k) == sizes[1] // dist.get_world_size()
    functions = [layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="inductor" if on_gpu else "eager")]
    with torch.no_grad():
        for tokens, function in ((tokens, function) for tokens in (1, 16, 64, 256) for function in functions):
            x = torch.randn(tokens, sizes[0], **settings)
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if on_gpu else {}
            equal(function(x), module(x), **tolerance)
            if on_gpu:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with capturing(graph):
                    y = function(x)
                x.copy_(torch.randn(tokens, sizes[0], **settings))
                graph.replay()
                equal(y, module(x), **tolerance)


def mixed_precision() -> None:
    """FSDP2 hands out 16-bit weights whose DTensor says float32: by heads, eager and compiled, as without FSDP2."""
    mesh = init_device_mesh(DEVICE, (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for compiled in (False, True):
        whole = network(q_norm=True).bfloat16()
        sharded = parallelize(network(q_norm=True).float(), mesh["tp"])
        if compiled:
            sharded.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(sharded, mesh=mesh["dp"], mp_policy=policy)
        out, expected = sharded(x), whole(x)
        assert out.dtype == torch.bfloat16
        equal(out, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
        out.square().sum().backward()
        whole(x).square().sum().backward()
        assert sharded.k.grad.dtype == torch.float32
        equal(sharded.k.grad, whole.k.grad.float(), rtol=5e-2, atol=5e-2 * whole.k.grad.abs().max().item())


def initialisation() -> None:
    """Weights that are first sharded, on the meta device, and then drawn, as large models are made; d_e sharded,
    too."""
    torch.manual_seed(0)  # the deviations of a few hundred values differ by more than a fifth in some draws
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for heads, subnets, options in ((4, 2, {}), (4, 2, {"q_norm": True}), (3, 3, {"bias": True})):
        with torch.device("meta"):
            module = flashmhf.FlashMHF(heads * 32, heads, subnets, 24, **options)
        fully_shard(module, mesh=mesh, shard_placement_fn=shard_placement(mesh.size()))
        module.to_empty(device=DEVICE)
        for child in module.modules():
            child.reset_parameters()
        expected = flashmhf.FlashMHF(heads * 32, heads, subnets, 24, **options)
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            drawn, other = parameter.full_tensor().detach(), expected.get_parameter(name).detach()
            equal(drawn.std(), other.std(), rtol=0.2, atol=1e-6)


def language_model(kind: str = "flashmhf", **options):
    from flashmhf.models import FlashMHFConfig, FlashMHFForCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    if kind != "swiglu":
        options["ffn_num_heads"] = 4
    if kind == "flashmhf":
        options |= {"ffn_num_subnets": 2, "ffn_q_norm": True}
    torch.manual_seed(0)
    config = FlashMHFConfig(**sizes, num_key_value_heads=4, ffn_type=kind, **options)
    return FlashMHFForCausalLM(config).to(torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(flashmhf.param_groups(model, 1e-2, 0.1))


def train(
    model: nn.Module, steps: range, share: slice = slice(None), optimizer: torch.optim.Optimizer | None = None
) -> Tensor:
    """Return the losses on this rank's ``share`` of every batch."""
    losses, optimizer = [], optimizer or optimizer_of(model)
    for step in steps:
        batch = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))[share]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def sharded_model(dp: int, tp: int, kind: str = "flashmhf"):
    """(model, this rank's part of a batch) on a mesh (dp, tp)."""
    mesh = init_device_mesh(DEVICE, (dp, tp), mesh_dim_names=("dp", "tp"))
    model = language_model(kind)
    if tp > 1:
        parallelize(model, mesh["tp"])
    if dp > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=shard_placement(dp))
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=shard_placement(dp))
    rows = 4 // dp
    first = rows * mesh["dp"].get_local_rank()
    return model, slice(first, first + rows)


def training() -> None:
    for kind in ("flashmhf", "swiglu"):
        whole = language_model(kind)
        expected = train(whole, range(3))
        for dp, tp in ((1, 4), (4, 1), (2, 2)) if kind == "flashmhf" else ((1, 4),):
            model, share = sharded_model(dp, tp, kind)
            losses = train(model, range(3), share)
            dist.all_reduce(losses)
            # Llama's norms compute in float32.
            equal(losses / dist.get_world_size(), expected, rtol=1e-5, atol=1e-5)
            for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
                assert isinstance(parameter, DTensor), name
                equal(parameter.detach(), other.detach(), rtol=1e-3, atol=1e-4)


def muon() -> None:
    """FSDP2, tensor parallelism and both: one process's weights and momenta; matrices sharded by rows, columns and
    heads, evenly or not."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        networks = [flashmhf.FlashMHF(24, heads, 3, 10, q_norm=True) for heads in (4, 4, 3)]
        return nn.Sequential(nn.Linear(7, 24), *networks, nn.Linear(24, 5))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # given gradients: orthogonalisation amplifies the rounding of computed ones
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, device="cpu").to(DEVICE)
            if isinstance(parameter, DTensor):
                parameter.grad = distribute_tensor(
                    parameter.grad, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
        optimizer.step()

    def of(model: nn.Module) -> torch.optim.Optimizer:
        return flashmhf.Muon(flashmhf.param_groups(model, 0.02, 0.1, muon=True), fused=True)  # as on a GPU

    size = dist.get_world_size()
    whole = build()
    expected = of(whole)
    for seed in range(3):
        step(whole, expected, seed)
    for dp, tp in ((size, 1), (1, size), (2, size // 2)):
        mesh = init_device_mesh(DEVICE, (dp, tp), mesh_dim_names=("dp", "tp"))
        model = build()
        for part in model[1:3] if tp > 1 else ():
            parallelize(part, mesh["tp"])
        for part in model if dp > 1 else ():
            fully_shard(part, mesh=mesh["dp"])
        optimizer = of(model)
        step(model, optimizer, 0)
        state = get_optimizer_state_dict(model, optimizer)
        optimizer = of(model)
        set_state_dict(model, optimizer, model_state_dict=get_model_state_dict(model), optim_state_dict=state)
        for seed in range(1, 3):
            step(model, optimizer, seed)
        for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            equal(parameter.detach(), other.detach(), rtol=1e-2, atol=1e-4, msg=f"{name} on {dp} x {tp}")
            for key, value in expected.state[other].items():
                equal(optimizer.state[parameter][key], value, msg=f"{key} of {name} on {dp} x {tp}")


def example() -> None:
    """examples/several_gpus.py learns; the mean loss is the same on every process."""
    train = runpy.run_path(os.path.join(os.path.dirname(__file__), "..", "..", "examples", "several_gpus.py"))["train"]
    losses = train("flashmhf-tiny", steps=12, warmup=2, rate=1e-2, micro_batch=2, accumulate=2, length=32)
    assert losses[-1] < losses[0] - 0.5, losses
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, losses)
    assert all(other == losses for other in found)


def uneven_sizes() -> None:
    """A vocabulary that the ranks do not divide, and every block compiled as large trainings do: as in one process.
    Refusals."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    whole, sharded = language_model(), language_model()
    for model in (whole, sharded):
        torch.manual_seed(0)
        model.resize_token_embeddings(65, mean_resizing=False)
    for layer in parallelize(sharded, mesh).model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    equal(train(sharded, range(2)), train(whole, range(2)), rtol=1e-5, atol=1e-5)
    network = nn.Sequential(flashmhf.SwiGLU(32, 33))
    raises(ValueError, ("0 has a width of 33", "size 2"), lambda: parallelize(network, mesh))
    raises(ValueError, ("module has a width of 33", "size 2"), lambda: parallelize(network[0], mesh))
    sharded = parallelize(flashmhf.FlashMHF(32, 2, 2, 16), mesh)
    raises(NotImplementedError, ("network has DTensor",), lambda: to_fp8(sharded))
    whole = flashmhf.SwiGLU(32, 64)
    sharded = parallelize(copy.deepcopy(whole), mesh)  # the network itself, not a model that holds one
    assert [parameter.placements for parameter in sharded.parameters()] == [(Shard(0),), (Shard(0),), (Shard(1),)]
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    mixed = nn.Sequential(flashmhf.FlashMHF(32, 2, 2, 16), flashmhf.DenseMoE(32, 2, 16))  # the second is replicated
    equal(parallelize(copy.deepcopy(mixed), mesh)(x), mixed(x), rtol=1e-5, atol=1e-5)
    for module in (mixed, flashmhf.SwiGLU(32, 64)):
        module.register_parameter("scale", nn.Parameter(torch.ones(32)))
        refusal = ("module has parts to divide and parameters of its own, scale", "in a child")
        raises(ValueError, refusal, lambda module=module: parallelize(module, mesh))
    equal(sharded(x), whole(x), rtol=1e-5, atol=1e-5)
    tied = nn.Sequential(nn.Embedding(20, 32), flashmhf.FlashMHF(32, 2, 2, 16), nn.Linear(32, 20, bias=False))
    tied[2].weight = tied[0].weight  # two parameters would each take AdamW's step
    assert parallelize(tied, mesh)[2].weight is tied[0].weight
    torn = nn.Sequential(flashmhf.SwiGLU(32, 32), nn.Linear(32, 32))
    torn[1].weight = torn[0].gate_proj.weight
    raises(ValueError, ("0.gate_proj.weight and 1.weight are one parameter", "untie"), lambda: parallelize(torn, mesh))


def norms_of_heads() -> None:
    """Qwen3's q_norm and k_norm, which all heads share: their gradients are sums over every process's heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    whole = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)).double()
    flashmhf.replace_ffn(whole, num_heads=2)
    sharded = parallelize(copy.deepcopy(whole), init_device_mesh(DEVICE, (dist.get_world_size(),)))
    tokens = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(3))
    for model in (whole, sharded):
        model(input_ids=tokens, labels=tokens).loss.backward()
    for (name, parameter), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        equal(parameter.grad, other.grad, msg=name)


def _states(model: nn.Module, optimizer) -> dict:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def save_checkpoint(folder: str) -> None:
    model, share = sharded_model(2, 2)
    optimizer = optimizer_of(model)
    train(model, range(2), share, optimizer)
    dcp.save(_states(model, optimizer), checkpoint_id=os.path.join(folder, "checkpoint"))
    weights = copy.deepcopy(_whole_weights(model))
    losses = train(model, range(2, 4), share, optimizer)
    dist.all_reduce(losses)
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "losses": losses / dist.get_world_size()}, os.path.join(folder, "expected.pt"))


def load_checkpoint(folder: str) -> None:
    """On however many processes: tensor parallelism on 2, one process alone on 1."""
    torch.manual_seed(5)
    model, share = sharded_model(1, dist.get_world_size())
    optimizer = optimizer_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=os.path.join(folder, "checkpoint"))
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    expected = torch.load(os.path.join(folder, "expected.pt"))
    equal(_whole_weights(model), expected["weights"], rtol=0, atol=0)
    equal(train(model, range(2, 4), share, optimizer), expected["losses"], rtol=1e-5, atol=1e-5)


def transformers_plans(folder: str) -> None:
    """tp_plan="auto", which replicates the networks, and pp_size: logits, generation, gradients, as one process."""
    from transformers.distributed import DistributedConfig

    from flashmhf.models import FlashMHFForCausalLM

    tokens = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(3))
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    load = functools.partial(FlashMHFForCausalLM.from_pretrained, dtype=torch.float64)
    for kind in ("flashmhf", "mh_ffn"):
        saved = os.path.join(folder, kind)
        if dist.get_rank() == 0:
            language_model(kind, mlp_bias=True).save_pretrained(saved)
        dist.barrier()
        whole = load(saved)
        sharded = load(saved, distributed_config=DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size()))
        losses = [model(input_ids=tokens, labels=tokens).loss for model in (sharded, whole)]
        for loss in losses:
            loss.backward()
        equal(losses[0].detach(), losses[1].detach(), rtol=1e-5, atol=1e-6)
        for parameter, other in zip(sharded.parameters(), whole.parameters(), strict=True):
            equal(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(sharded.generate(tokens, **settings), whole.generate(tokens, **settings))
        with torch.no_grad():
            staged = load(saved, distributed_config=DistributedConfig(pp_size=dist.get_world_size()))
            equal(staged(tokens).logits, whole(tokens).logits)


def _process(rank: int, processes: int, store: str, case, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=processes)
    faulthandler.dump_traceback_later(100, exit=True)  # a process that waits for ever says where
    try:
        case(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others wait in a collective for this one, and so would its own end
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def main(cases: dict[str, Any]) -> None:
    """Run the cases that the command line names, each in new processes."""
    processes, names, arguments = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    if set(names) & set("training example uneven_sizes norms_of_heads save_checkpoint load_checkpoint".split()):
        import flashmhf.models  # noqa: F401  once, and not in each process; transformers takes seconds
    for name in names:
        # forked: torch is imported once. A process that fails ends the others
        with tempfile.TemporaryDirectory() as folder:
            given = processes, os.path.join(folder, "store"), cases[name], arguments
            torch.multiprocessing.start_processes(_process, given, nprocs=processes, start_method="fork")


if __name__ == "__main__":
    main(globals())
