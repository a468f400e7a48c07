"""Cases of test_distributed.py: processes over gloo, or GPUs over NCCL, compute what one process does."""

import copy
import faulthandler
import functools
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))
from targets import RESULTS, call  # noqa: E402

import flashmhf  # noqa: E402
from flashmhf.distributed import HeadParallel, Rank, parallelize, shard, shard_placement  # noqa: E402
from flashmhf.integrations.peft import stack_weights  # noqa: E402
from flashmhf.quantize import to_fp8  # noqa: E402
from flashmhf.testing import Problem, capturing, problem  # noqa: E402

DEVICE = "cpu"  # or "cuda", in the processes of a case
WAYS = {
    # what is sharded: placements of tokens, weights and gradients of weights
    "heads": (Shard(2), Shard(0), Shard(0)), "tokens": (Shard(1), Replicate(), Partial()),
    "rows": (Shard(0), Replicate(), Partial()), "nothing": (Replicate(), Replicate(), Replicate()),
}  # fmt: skip


def mesh_of(*shape: int) -> DeviceMesh:
    """All processes in a row, or (dp, tp)."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def equal(actual: Tensor, expected: Tensor, near: float = 0.0, **tolerance: Any) -> None:
    """``near``: a tolerance as a part of the largest value."""
    if isinstance(actual, DTensor):
        actual = actual.full_tensor()
    if near and expected.numel():
        tolerance |= {"rtol": near, "atol": near * expected.abs().max().item()}
    torch.testing.assert_close(actual, expected, **tolerance)


def gradient(parameter: Tensor) -> Tensor:
    return parameter.grad


def agree(sharded: nn.Module, whole: nn.Module, what: Callable = gradient, **tolerance: Any) -> None:
    """All parameters, or their gradients."""
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        equal(what(one), what(other), msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(DEVICE)


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def inputs(heads: int = 4, *, length: int = 6, width: int = 16, subnets: int = 2, dtype=torch.float64, **options):
    return problem((4, length), heads, width, subnets, width, dtype, DEVICE, gate="same", **options)


def placed(p: Problem, mesh: DeviceMesh, of_tokens: list[Placement], of_weights: list[Placement]) -> Problem:
    put = {name: of_weights if name in "kuvw" else of_tokens for name in ("q", "k", "u", "v", "w", "r", "grad_out")}
    return replace(p, **{name: distribute_tensor(getattr(p, name), mesh, where) for name, where in put.items()})


def check(name: str, sharded: Problem, whole: Problem, near: float = 0.0, **settings: Any) -> dict[str, DTensor]:
    """Return the results of an operator, by name, that agree with those of one process."""
    results = dict(zip(RESULTS[name], call(name, sharded, **settings), strict=True))
    for one, other in zip(results.values(), call(name, whole, **settings), strict=True):
        equal(one, other, near)
    return results


def check_rules(mesh: DeviceMesh, *ways: str, near: float = 0.0, **options: Any) -> None:
    """Every operator with operands placed as ``ways`` name for each mesh dimension."""
    whole = inputs(**options)
    of_tokens, of_weights, of_grads = ([WAYS[way][part] for way in ways] for part in range(3))
    sharded = placed(whole, mesh, of_tokens, of_weights)
    for name, gates in {name: (True, False) if "gated" not in name else (True,) for name in RESULTS}.items():
        for gate, needs in ((gate, needs) for gate in gates for needs in ([True, True], [True, False], [False, True])):
            settings = {"needs": needs} if "backward" in name else {}
            given = (sharded, whole) if gate else (replace(sharded, r=None), replace(whole, r=None))
            for result, found in check(name, *given, near, **settings).items():
                weight = result in ("dk", "du", "dv", "dw")
                if found.numel():
                    assert list(found.placements) == (of_grads if weight else of_tokens), result
                else:
                    assert not needs[weight] or (result, gate) == ("dr", False), result


def rules() -> None:
    mesh = mesh_of()
    for way in WAYS:
        check_rules(mesh, way)
        check_rules(mesh, way, num_kv_heads=2)
    sizes = {"length": 512, "width": 128} if DEVICE == "cuda" else {"length": 32}
    for way in ("heads", "tokens"):  # by the back end that this device has for bf16
        check_rules(mesh, way, near=2e-2, dtype=torch.bfloat16, **sizes)
    for of_tokens, of_weights, options in (
        (Shard(2), Replicate(), {"heads": 12, "num_kv_heads": 3}),  # q is gathered: groups that the ranks do not divide
        (Shard(1), Shard(0), {}),  # each its own way
        (Shard(3), Shard(2), {}),  # as no way shards
        (Shard(1), Replicate(), {"length": 5}),  # not divided by the mesh, and shorter than it
        (Shard(1), Replicate(), {"length": 1}),
    ):
        whole = inputs(**options)
        for name in ("gated_forward", "gated_backward"):
            check(name, placed(whole, mesh, [of_tokens], [of_weights]), whole)
    for of_tokens, of_weights, options, message in (
        (Shard(2), Shard(0), {"heads": 3}, "q is sharded over its heads, H = 3.*size 2"),
        (Shard(1), Shard(1), {"subnets": 3}, "k is sharded over dimension 1 of size 3"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call("gated_forward", placed(inputs(**options), mesh, [of_tokens], [of_weights]))


def rules_on_two_dimensions() -> None:
    for ways in ("tokens heads", "rows tokens", "rows heads", "nothing heads", "heads heads"):
        check_rules(mesh_of(2, 2), *ways.split())


def network(kind: type = flashmhf.FlashMHF, sizes: tuple[int, ...] = (32, 4, 3, 16), **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = kind(*sizes, **{"dtype": torch.float64, **options})
    module.reset_parameters("balanced")
    return module


def compare_module(mesh: DeviceMesh, whole: nn.Module, sequence: bool = False, wrap: Callable | None = None) -> None:
    """Results and gradients by heads, with input and output sharded over the sequence or not, as in one process."""
    x, grad = (draw(seed, 2, 6, 32, dtype=torch.float64) for seed in (1, 2))
    layout, mine = Replicate(), slice(None)
    if sequence:
        layout, mine = Shard(1), slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    sharded = copy.deepcopy(whole)
    parallelize_module(sharded, mesh, HeadParallel(input_layouts=layout, output_layouts=layout))
    called = wrap(sharded) if wrap else sharded
    x_whole, x_mine = x.clone().requires_grad_(), x[:, mine].clone().requires_grad_()
    out, out_mine = whole(x_whole), called(x_mine)
    out.backward(grad)
    out_mine.backward(grad[:, mine])
    equal(out_mine, out[:, mine])
    equal(x_mine.grad, x_whole.grad[:, mine])
    agree(sharded, whole)
    with torch.no_grad():
        equal(called(x[:, mine]), out[:, mine])
        equal(called(x=x[:, mine]), out[:, mine])
    if not sequence and wrap is None:
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            in_place, seen = [], []
            patch.setattr(dist, "all_reduce", lambda x, sum=dist.all_reduce, **how: in_place.append(x) or sum(x, **how))
            called(x)
            assert in_place or sharded.out_proj is None, "the sum over the heads copied its operand"
            for part in filter(None, (sharded, sharded.out_proj)):
                part.register_forward_hook(lambda module, args, y: seen.append(y))
            called(x)
        for y in seen:  # what a hook has kept is not written to
            equal(y, out)


def module_cases() -> None:
    mhffn = functools.partial(network, flashmhf.MHFFN, (32, 4, 16))
    for whole, *how in (
        (network(),),
        (network(q_norm=True, bias=True), True),
        (network(), True, checkpoint_wrapper),
        (stack_weights(network()),),
        (mhffn(),),
        (network(num_kv_heads=2, q_norm=True), True),
        (network(num_kv_heads=2, skip_linear=True),),
        (mhffn(num_kv_heads=2, q_norm=True, activation="gelu"),),
    ):
        compare_module(mesh_of(), whole, *how)
    whole = network(q_norm=True)
    torch.set_default_device(None)  # torch 2.11 compiles no DTensor under one
    compile = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    compare_module(mesh_of(), whole, wrap=compile)


def served_shard() -> None:
    """A rank's shard with a real all-reduce, as engines serve it: eager, compiled, on a GPU in a CUDA graph."""
    torch.set_default_device(None)  # an engine sets none
    on_gpu = DEVICE == "cuda"
    sizes = (2048, 16, 22, 384) if on_gpu else (256, 4, 3, 32)
    settings = {"device": DEVICE, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    near = 2e-2 if on_gpu else 0.0
    module = network(sizes=sizes, q_norm=True, bias=True, **settings)
    nn.init.normal_(module.out_proj.bias)

    def all_reduce(y: Tensor) -> Tensor:
        collectives = torch.distributed._functional_collectives
        # A capture fails that ends before the stream of the all-reduce has joined it.
        return collectives.wait_tensor(collectives.all_reduce(y, "sum", dist.group.WORLD))

    layer = shard(copy.deepcopy(module), Rank(dist.get_rank(), dist.get_world_size(), all_reduce))
    assert len(layer.k) == sizes[1] // dist.get_world_size()
    functions = [layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="inductor" if on_gpu else "eager")]
    with torch.no_grad():
        for length, function in ((length, function) for length in (1, 16, 64, 256) for function in functions):
            x = torch.randn(length, sizes[0], **settings)
            equal(function(x), module(x), near)
            if on_gpu:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with capturing(graph):
                    y = function(x)
                x.copy_(torch.randn(length, sizes[0], **settings))
                graph.replay()
                equal(y, module(x), near)


def mixed_precision() -> None:
    """FSDP2 hands out 16-bit weights whose DTensor says float32: by heads, eager and compiled, as without FSDP2."""
    mesh, x = mesh_of(1, dist.get_world_size()), draw(1, 2, 6, 32).bfloat16()
    for compiled in (False, True):
        whole, sharded = network(q_norm=True).bfloat16(), parallelize(network(q_norm=True).float(), mesh["tp"])
        if compiled:
            sharded.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(sharded, mesh=mesh["dp"], mp_policy=policy)
        out, expected = sharded(x), whole(x)
        assert out.dtype == torch.bfloat16
        equal(out, expected, near=2e-2)
        for y in (out, expected):
            y.square().sum().backward()
        assert sharded.k.grad.dtype == torch.float32
        equal(sharded.k.grad, whole.k.grad.float(), near=5e-2)


def recomputed_q() -> None:
    """Kept for the backward: x whole and S, of a rank's heads under tensor parallelism, in place of Q and S."""
    mesh, sizes = mesh_of(), {}

    def keep(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.shape and local.shape[0] == 50:
            sizes[local.data_ptr()] = local.numel()
        return tensor

    for shard_it in (lambda module: parallelize(module, mesh), lambda module: fully_shard(module, mesh=mesh)):
        whole, sharded = network(q_norm=True), network(q_norm=True)
        sharded.recompute_q = True
        is_divided = isinstance(shard_it(sharded).k, DTensor) and sharded.k.placements[0].is_shard(0)
        for compiled in (False, True):
            call = torch.compile(sharded, backend="aot_eager") if compiled else sharded
            x = draw(1, 50, 32, dtype=torch.float64)
            for module in (sharded, whole):
                module.zero_grad()
            sizes.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                out = call(x.requires_grad_() * 1)
            of_ranks = mesh.size() if is_divided and not hasattr(sharded, "unshard") else 1
            assert sum(sizes.values()) == x.numel() * (1 + 1 / of_ranks), (sizes, of_ranks)
            equal(out, whole(x.detach()), near=1e-5)
            for y in (out, whole(x.detach())):
                y.square().sum().backward()
            agree(sharded, whole, near=1e-4)


def initialisation() -> None:
    """Weights that are sharded on the meta device and then drawn, as large models are made; d_e sharded, too."""
    torch.manual_seed(0)  # the deviations of a few hundred values differ by more than a fifth in some draws
    mesh = mesh_of()
    for heads, subnets, options in ((4, 2, {}), (4, 2, {"q_norm": True}), (3, 3, {"bias": True})):
        make = functools.partial(flashmhf.FlashMHF, heads * 32, heads, subnets, 24, **options)
        module = fully_shard(make(device="meta"), mesh=mesh, shard_placement_fn=shard_placement(mesh.size()))
        module.to_empty(device=DEVICE)
        for child in module.modules():
            child.reset_parameters()
        for (name, drawn), expected in zip(module.named_parameters(), make().parameters(), strict=True):
            equal(drawn.full_tensor().std().detach(), expected.std().detach(), rtol=0.2, atol=1e-6, msg=name)


def language_model(kind: str = "flashmhf", **options: Any) -> nn.Module:
    from flashmhf.models import FlashMHFConfig, FlashMHFForCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    if kind != "swiglu":
        options["ffn_num_heads"] = 4
    if kind == "flashmhf":
        options |= {"ffn_num_subnets": 2, "ffn_q_norm": True}
    torch.manual_seed(0)
    config = FlashMHFConfig(**sizes, num_key_value_heads=4, ffn_type=kind, **options)
    return FlashMHFForCausalLM(config).to(torch.float64)


def sharded_model(dp: int, tp: int, kind: str = "flashmhf") -> tuple[nn.Module, slice]:
    """(model, this rank's rows of a batch) on a mesh (dp, tp)."""
    mesh, model, rows = mesh_of(dp, tp), language_model(kind), 4 // dp
    if tp > 1:
        parallelize(model, mesh["tp"])
    for part in (*model.model.layers, model) if dp > 1 else ():
        fully_shard(part, mesh=mesh["dp"], shard_placement_fn=shard_placement(dp))
    first = rows * mesh["dp"].get_local_rank()
    return model, slice(first, first + rows)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(flashmhf.param_groups(model, 1e-2, 0.1))


def train(model: nn.Module, steps: range, share: slice | None = None, optimizer=None) -> Tensor:
    """Return the losses, with this rank's ``share`` of every batch the means over the ranks."""
    losses, optimizer = [], optimizer or optimizer_of(model)
    for step in steps:
        batch = tokens(step, 4, 8)[share or slice(None)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() / (dist.get_world_size() if share else 1))
    losses = torch.stack(losses)
    if share:
        dist.all_reduce(losses)
    return losses


def check_trained(model: nn.Module, losses: Tensor, whole: nn.Module, expected: Tensor) -> None:
    """To what Llama's norms leave, which compute in float32."""
    equal(losses, expected, rtol=1e-5, atol=1e-5)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()) or dist.get_world_size() == 1
    agree(model, whole, Tensor.detach, rtol=1e-3, atol=1e-4)


def training() -> None:
    """Tensor parallelism, FSDP2 and both."""
    for kind, shapes in (("flashmhf", ((1, 4), (4, 1), (2, 2))), ("swiglu", ((1, 4),))):
        whole = language_model(kind)
        expected = train(whole, range(3))
        for shape in shapes:
            model, share = sharded_model(*shape, kind)
            check_trained(model, train(model, range(3), share), whole, expected)


def checkpoint(folder: str) -> None:
    """What four processes (2, 2) save, two or one with tensor parallelism load: a run goes on as in one process."""
    processes, whole = dist.get_world_size(), language_model()
    expected = train(whole, range(4))
    model, share = sharded_model(*((2, 2) if processes == 4 else (1, processes)))
    optimizer = optimizer_of(model)
    if processes == 4:
        train(model, range(2), share, optimizer)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    (dcp.save if processes == 4 else dcp.load)(states, checkpoint_id=folder)
    if processes < 4:
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    check_trained(model, train(model, range(2, 4), share, optimizer), whole, expected[2:])


def muon() -> None:
    """FSDP2, tensor parallelism and both: one process's weights and momenta; matrices sharded by rows, columns and
    heads, evenly or not; the optimizer's state saved and loaded after one step."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        networks = [flashmhf.FlashMHF(24, heads, 3, 10, q_norm=True) for heads in (4, 4, 3)]
        return nn.Sequential(nn.Linear(7, 24), *networks, nn.Linear(24, 5))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        # given gradients: orthogonalisation amplifies the rounding of computed ones
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = draw(100 * seed + index, *parameter.shape)
            if isinstance(parameter, DTensor):
                where = parameter.device_mesh, parameter.placements
                parameter.grad = distribute_tensor(parameter.grad, *where, src_data_rank=None)
        optimizer.step()

    def of(model: nn.Module) -> flashmhf.Muon:
        groups = flashmhf.param_groups(model, 0.02, 0.1, muon=True, outputs=[model[-1]])
        return flashmhf.Muon(groups, fused=True)  # as on a GPU

    size, whole = dist.get_world_size(), build()
    expected = of(whole)
    for seed in range(3):
        step(whole, expected, seed)
    for dp, tp in ((size, 1), (1, size), (2, size // 2)):
        mesh, model = mesh_of(dp, tp), build()
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
        agree(model, whole, Tensor.detach, rtol=1e-2, atol=1e-4)
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
            for key, value in expected.state[other].items():
                equal(optimizer.state[parameter][key], value, msg=f"{key} of {list(other.shape)} on {dp} x {tp}")


def example() -> None:
    """examples/several_gpus.py learns; the mean loss is the same on every process."""
    train = runpy.run_path(str(TESTS.parent / "examples" / "several_gpus.py"))["train"]
    losses = train("flashmhf-tiny", steps=12, warmup=2, rate=1e-2, micro_batch=2, accumulate=2, length=32)
    assert losses[-1] < losses[0] - 0.5, losses
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, losses)
    assert all(other == losses for other in found)


class AddNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return nn.functional.rms_norm(residual, (32,)) * self.weight, residual


class TwoTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.ffn, self.norm = nn.Embedding(20, 32), flashmhf.FlashMHF(32, 2, 2, 16), AddNorm()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        h, residual = self.norm(x, residual=x)
        return residual + self.ffn(h)


def plans() -> None:
    """Models and networks whose plan is not Llama's by the book, as in one process."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    mesh, whole, sharded = mesh_of(), language_model(), language_model()
    for model in (whole, sharded):  # a vocabulary that the ranks do not divide, and blocks compiled by themselves
        torch.manual_seed(0)
        model.resize_token_embeddings(65, mean_resizing=False)
    for layer in parallelize(sharded, mesh).model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    equal(train(sharded, range(2)), train(whole, range(2)), rtol=1e-5, atol=1e-5)
    x = draw(2, 3, 32)
    swiglu, moe = flashmhf.SwiGLU(32, 64), flashmhf.DenseMoE(32, 2, 16)
    for whole in (swiglu, nn.Sequential(flashmhf.FlashMHF(32, 2, 2, 16), moe)):  # the mixture is replicated
        equal(parallelize(copy.deepcopy(whole), mesh)(x), whole(x), rtol=1e-5, atol=1e-5)
    weights = parallelize(swiglu, mesh).parameters()
    assert [weight.placements for weight in weights] == [(Shard(0),), (Shard(0),), (Shard(1),)]
    tied = nn.Sequential(nn.Embedding(20, 32), flashmhf.FlashMHF(32, 2, 2, 16), nn.Linear(32, 20, bias=False))
    tied[2].weight = tied[0].weight  # two parameters would each take AdamW's step
    assert parallelize(tied, mesh)[2].weight is tied[0].weight
    # a module of several tensors, which returns several
    whole = TwoTensors()
    sharded, ids = parallelize(copy.deepcopy(whole), mesh), tokens(2, 2, 7) % 20
    for model in (whole, sharded):
        model(ids).square().mean().backward()
    agree(sharded, whole, rtol=1e-5, atol=1e-6)
    # Qwen3's q_norm and k_norm, which all heads share: their gradients are sums over every process's heads
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    whole = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)).double()
    flashmhf.replace_ffn(whole, num_heads=2)
    sharded, ids = parallelize(copy.deepcopy(whole), mesh), tokens(3, 2, 7)
    for model in (whole, sharded):
        model(input_ids=ids, labels=ids).loss.backward()
    agree(sharded, whole)


def refusals() -> None:
    """Of two processes."""
    mesh = mesh_of()
    multihead = lambda heads=2, **options: flashmhf.FlashMHF(16 * heads, heads, 2, 16, **options)  # noqa: E731
    torn = nn.Sequential(flashmhf.SwiGLU(32, 32), nn.Linear(32, 32))
    torn[1].weight = torn[0].gate_proj.weight
    owners = nn.Sequential(multihead(), flashmhf.DenseMoE(32, 2, 16)), flashmhf.SwiGLU(32, 64)
    for owner in owners:
        owner.register_parameter("scale", nn.Parameter(torch.ones(32)))
    of_own = "module has parts to divide and parameters of its own, scale.*in a child"
    others = nn.MultiheadAttention(32, 2), nn.LSTM(32, 32), nn.BatchNorm1d(32)
    for module, message in (
        (multihead(3), "H = 3.*size 2"),
        (multihead(num_kv_heads=1), "H = 1 heads of K, U and V"),
        (nn.Sequential(flashmhf.SwiGLU(32, 33)), "0 has a width of 33.*size 2"),
        (flashmhf.SwiGLU(32, 33), "module has a width of 33.*size 2"),
        (owners[0], of_own),
        (owners[1], of_own),
        (torn, "0.gate_proj.weight and 1.weight are one parameter.*untie"),
        *((nn.Sequential(part, multihead()), "0 is a .*; supported: modules that take and ret") for part in others),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(module, mesh)
    with pytest.raises(TypeError, match="Linear"):
        HeadParallel()._apply(nn.Linear(4, 4), mesh)
    with pytest.raises(NotImplementedError, match="network has DTensor"):
        to_fp8(parallelize(multihead(), mesh))
    # FSDP1, which transformers' Trainer and accelerate take by default, has flat parameters
    whole = multihead()
    optimizer = flashmhf.Muon(flashmhf.param_groups(whole, 1e-3, 0.1, muon=True))
    wrapped = FullyShardedDataParallel(whole, use_orig_params=True, device_id=torch.device("cpu"))
    wrapped(torch.ones(2, 32)).sum().backward()
    with pytest.raises(RuntimeError, match="a matrix has become a vector of .*; supported: fully_shard"):
        optimizer.step()
    with pytest.raises(ValueError, match="model has flat parameters .*; supported: fully_shard"):
        flashmhf.param_groups(wrapped, 1e-3, 0.1)


def transformers_plans(folder: str) -> None:
    """tp_plan="auto", which replicates the networks, and pp_size: logits, generation, gradients, as one process."""
    from transformers.distributed import DistributedConfig

    from flashmhf.models import FlashMHFForCausalLM

    ids = tokens(3, 2, 7)
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    load = functools.partial(FlashMHFForCausalLM.from_pretrained, dtype=torch.float64)
    for kind in ("flashmhf", "mh_ffn"):
        saved = os.path.join(folder, kind)
        if dist.get_rank() == 0:
            language_model(kind, mlp_bias=True).save_pretrained(saved)
        dist.barrier()
        whole = load(saved)
        sharded = load(saved, distributed_config=DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size()))
        losses = [model(input_ids=ids, labels=ids).loss for model in (sharded, whole)]
        for loss in losses:
            loss.backward()
        equal(losses[0].detach(), losses[1].detach(), rtol=1e-5, atol=1e-6)
        agree(sharded, whole, rtol=1e-4, atol=1e-5)
        assert torch.equal(sharded.generate(ids, **settings), whole.generate(ids, **settings))
        with torch.no_grad():
            staged = load(saved, distributed_config=DistributedConfig(pp_size=dist.get_world_size()))
            equal(staged(ids).logits, whole(ids).logits)


def _process(rank: int, processes: int, folder: str, case: Callable, arguments: tuple, device: str) -> None:
    global DEVICE
    DEVICE = device
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), NCCL_NVLS_ENABLE="0")
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    with open(os.path.join(folder, f"error of {rank}"), "w", encoding="utf-8") as stream:
        faulthandler.dump_traceback_later(200, exit=True, file=stream)  # a process that waits for ever says where
        try:
            store = f"file://{folder}/store"
            dist.init_process_group("nccl" if device == "cuda" else "gloo", store, rank=rank, world_size=processes)
            case(*arguments)
        except BaseException:
            traceback.print_exc(file=stream)
            stream.flush()
            os._exit(1)  # the others wait in a collective for this one, and so would its own end
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def run(case: Callable, processes: int, *arguments: object, device: str = "cpu", start: str = "forkserver") -> None:
    """Run a case in new processes, whose errors are this one's."""
    # the fork server imports once what takes seconds
    multiprocessing.set_forkserver_preload(["pytest", "torch._dynamo", "torch._inductor", "flashmhf.models", __name__])
    with tempfile.TemporaryDirectory() as folder:
        given = processes, folder, case, arguments, device
        try:
            torch.multiprocessing.start_processes(_process, given, nprocs=processes, start_method=start)
        except torch.multiprocessing.ProcessExitedException as ended:
            texts = [f"{path.name}:\n{path.read_text('utf-8')}" for path in sorted(Path(folder).glob("error of *"))]
            pytest.fail("\n".join([str(ended), *texts]), pytrace=False)
