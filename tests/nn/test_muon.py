"""flashmhf.Muon: what one update does, its states, and its groups."""

import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import flashmhf


def gradients(model: nn.Module, seed: int) -> None:
    """Random ones, in the memory of those that are there."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.grad = drawn if parameter.grad is None else parameter.grad.copy_(drawn)


def optimizer_of(model: nn.Module, **settings) -> flashmhf.Muon:
    return flashmhf.Muon(flashmhf.param_groups(model, 1e-2, 0.1, muon=True), **settings)


def matrices_of(model: nn.Module, **settings) -> set[str]:
    """The parameters that Muon moves."""
    groups = flashmhf.param_groups(model, 1.0, 0.1, muon=True, **settings)
    found = {id(parameter) for group in groups if group["muon"] for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in found}


def assert_equal(left: nn.Module, right: nn.Module, **tolerance: float) -> None:
    for (name, a), b in zip(left.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} | tolerance), msg=name)


@pytest.mark.parametrize("shape", [(32, 20), (20, 32), (2, 3, 32, 16), (50, 16, 40)])
def test_matrices_move_as_in_torch(shape):
    """Each matrix of a stack by itself, whatever the others' gradients are; torch.optim.Muon takes single matrices."""
    start = torch.randn(shape)
    matrices = start.reshape(-1, *shape[-2:])
    ours, theirs = nn.Parameter(start.clone()), [nn.Parameter(matrix.clone()) for matrix in matrices]
    optimizers = [
        flashmhf.Muon([{"params": [ours], "muon": True}], lr=0.02, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(4):
        ours.grad = torch.randn(shape) * torch.logspace(-3, 1, len(theirs)).reshape(*shape[:-2], 1, 1)
        for parameter, gradient in zip(theirs, ours.grad.reshape(-1, *shape[-2:]), strict=True):
            parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for after, before, expected in zip(ours.reshape(matrices.shape), matrices, theirs, strict=True):
        assert (after - expected).norm() < 0.03 * (expected - before).norm()  # torch rounds momentum to bf16 elsewhere


def make_model() -> nn.Sequential:
    ffn = flashmhf.FlashMHF(64, 2, 2, 16, q_norm=True, backend="eager")
    return nn.Sequential(OrderedDict(embedding=nn.Embedding(100, 64), ffn=ffn, head=nn.Linear(64, 100)))


def test_groups_of_a_model():
    model = make_model()
    model.ffn.u.requires_grad_(False)
    groups = flashmhf.param_groups(model, 1.0, 0.1, muon=True)
    assert all(group["lr"] == 1.0 for group in groups)
    expected = {f"ffn.{name}" for name in ("k", "v", "router", "in_proj.weight", "out_proj.weight")}
    assert matrices_of(model) == expected  # q_norm's [H, d_h] gains are no matrix
    assert all("muon" not in group for group in flashmhf.param_groups(model, 1.0, 0.1))
    model.positions = nn.Embedding(64, 64)  # as many as the model is wide: its projections have as many outputs
    assert matrices_of(model) == expected
    model.second = nn.Linear(64, model.head.out_features, bias=False)  # as for the token after the next
    with pytest.raises(ValueError, match="outputs is None, and head, second may be an output layer"):
        matrices_of(model)
    assert matrices_of(model, outputs=[model.head, model.second]) == expected
    assert not matrices_of(nn.EmbeddingBag(100, 64))


def holding(**parts: nn.Module | nn.Parameter) -> nn.Module:
    """A model of these parts, a network of width 32 among them, in this order."""
    model = nn.Module()
    for name, part in {"ffn": flashmhf.FlashMHF(32, 2, 2, 16), **parts}.items():
        setattr(model, name, part)
    return model


def weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def tied(first: str, **parts: nn.Module) -> nn.Module:
    model = holding(**parts)
    model.head.weight = getattr(model, first).weight
    return model


def named(said: nn.Module | None, **parts: nn.Module | nn.Parameter) -> nn.Module:
    model = holding(**parts)
    model.get_output_embeddings = lambda: said
    return model


def deep(layers: int, make: Callable = holding, **parts: nn.Module) -> nn.Module:
    """With a projection that has as many outputs as there are learned positions."""
    parts = {"positions": nn.Embedding(96, 32), "head": nn.Linear(32, 1000), **parts}
    return make(wte=nn.Embedding(1000, 32), qkv=nn.ModuleList(nn.Linear(32, 96) for _ in range(layers)), **parts)


def of_bytes() -> nn.Module:
    """As wide as its vocabulary: every square projection has as many outputs as the embedding has rows."""
    return holding(wte=nn.Embedding(32, 32), inner=nn.Linear(32, 32), head=nn.Linear(32, 32))


HEAD, MLP = nn.Linear(32, 10), {"c_fc": nn.Linear(32, 128), "c_proj": nn.Linear(128, 32)}
LONG = nn.Linear(32, 1000)


@pytest.mark.parametrize(("model", "unsure"), [
    (lambda: holding(patches=nn.Conv2d(3, 32, 4, 4), positions=weight(1, 17, 32), head=nn.Linear(32, 10)), "head"),
    (lambda: holding(wte=nn.Embedding(500, 32), head=nn.Linear(32, 512)), "head"),  # padded
    (lambda: holding(wte=nn.Embedding(500, 32), head=nn.Linear(32, 1000), **MLP, end=nn.Linear(32, 128)), "head, end"),
    (lambda: holding(wte=nn.Embedding(500, 32), classifier=nn.Linear(32, 5)), "classifier"),
    (lambda: named(None, wte=nn.Embedding(500, 32), score=nn.Linear(32, 5)), "score"),
    (lambda: holding(wte=weight(500, 32), head=nn.Linear(32, 500)), "head, wte"),
    (lambda: holding(wte=weight(500, 32)), "wte"),  # a function multiplies by it again
    (lambda: holding(wte=nn.Embedding(500, 32), wpe=weight(64, 32), head=nn.Linear(32, 500)), "wpe"),
    (lambda: holding(lm=named(HEAD, head=HEAD), classifier=nn.Linear(32, 5)), "classifier"),
    (lambda: holding(wte=nn.Embedding(128, 32), **MLP, head=nn.Linear(32, 128)), "c_fc, head"),
    (lambda: tied("wte", wte=nn.Embedding(500, 32), head=nn.Linear(32, 500), second=nn.Linear(32, 500)), "second"),
    (lambda: nn.ModuleList([deep(1)]), ".*0.qkv.0.*"), (lambda: deep(1), ".*qkv.0.*"), (lambda: deep(2), ".*qkv.0.*"),
    (of_bytes, ".*inner.* head"),
])  # fmt: skip
def test_output_layers_and_embeddings_that_a_model_does_not_tell_are_asked_for(model, unsure):
    with pytest.raises(ValueError, match=f"outputs is None, and {unsure} may be an output layer or embedding"):
        matrices_of(model())


@pytest.mark.parametrize(("model", "outputs", "adamw"), [
    (lambda: holding(positions=weight(1, 17, 32), token=weight(1, 1, 32), patches=nn.Conv2d(3, 32, 4, 4)), None,
     {"positions", "token", "patches.weight"}),
    (lambda: tied("wte", wte=nn.Embedding(128, 32), **MLP, head=nn.Linear(32, 128)), None, {"wte.weight"}),
    (lambda: holding(inner=nn.Linear(32, 32), norm=nn.LayerNorm((32, 32))), None, {"norm.weight", "norm.bias"}),
    (lambda: named(HEAD, head=HEAD, qkv=nn.Linear(32, 10), experts=weight(4, 8, 8)), None, {"head.weight"}),
    (lambda: holding(wte=weight(500, 32), head=nn.Linear(32, 512)), ["wte", "head"], {"wte", "head.weight"}),
    (of_bytes, ["head"], {"wte.weight", "head.weight"}),
    *((lambda layers=layers, given=given: deep(layers, **given), outputs, {f"{name}.weight" for name in adamw.split()})
      for layers in (1, 2) for given, outputs, adamw in (
          ({"make": partial(named, LONG), "head": LONG}, None, "wte positions head"),
          ({"make": partial(tied, "wte"), "positions": nn.Embedding(100, 32)}, None, "wte positions"),
          ({}, ["head"], "wte positions head"), ({}, [], "wte positions"))),
])  # fmt: skip
def test_matrices_that_are_adamws(model, outputs, adamw):
    """Whatever the model's depth is, and in a part of another."""
    model = model()
    outputs = outputs if outputs is None else [getattr(model, name) for name in outputs]
    found = {name for name, each in model.named_parameters() if each.dim() > 1} - matrices_of(model, outputs=outputs)
    assert found == adamw
    inside = matrices_of(nn.ModuleList([model]), outputs=outputs)
    assert inside == {f"0.{name}" for name in matrices_of(model, outputs=outputs)}


def test_vision_transformers_of_timm_say_what_their_head_is():
    model = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", num_classes=192)  # as many as it is wide
    found = matrices_of(model)
    assert found == {name for name, each in model.named_parameters() if "blocks" in name and each.dim() == 2}


@pytest.mark.parametrize("change", [
    nn.utils.parametrizations.weight_norm, lambda part: prune.l1_unstructured(part, "weight", 0.2), "LoRA",
], ids=["parametrised", "pruned", "adapted"])  # fmt: skip
def test_what_makes_up_an_embedding_or_an_output_layer_is_adamws(change):
    model = make_model()
    if change == "LoRA":
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["embedding", "head"]), model)
    else:
        change(model.embedding), change(model.head)
    assert matrices_of(model) <= {f"ffn.{name}" for name, _ in model.ffn.named_parameters()}


def from_state_dict(pair: tuple[nn.Module, flashmhf.Muon]) -> tuple[nn.Module, flashmhf.Muon]:
    model = copy.deepcopy(pair[0])
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(pickle.loads(pickle.dumps(pair[1])).state_dict())
    return model, optimizer


COPIES = {"state dict": from_state_dict, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("rate", [float, torch.tensor])  # the second as a captured graph needs it
def test_a_copy_of_model_and_optimizer_moves_as_they_do(copied, rate):
    model = make_model()
    pair = model, optimizer_of(model)
    gradients(model, 0)
    pair[1].step()
    other = copied(pair)
    for group in other[1].param_groups:
        group["lr"] = rate(group["lr"])
    for (each, own), seed in itertools.product((pair, other), (1, 2, 3)):
        gradients(each, seed)
        own.step()
    assert_equal(model, other[0], **({} if rate is float else {"rtol": 1e-5, "atol": 1e-8}))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_is_the_eager_one(backend, fresh_dynamo):
    compiled = make_model()
    eager = copy.deepcopy(compiled)
    optimizers = [optimizer_of(each) for each in (compiled, eager)]
    steps = torch.compile(optimizers[0].step, backend=backend), optimizers[1].step
    for seed in range(4):
        for each, step in zip((compiled, eager), steps, strict=True):
            gradients(each, seed)
            step()
    assert_equal(compiled, eager)
    for a, b in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert optimizers[0].state[a].keys() == optimizers[1].state[b].keys()
    assert {len(optimizers[0].state[parameter]) for parameter in compiled.parameters()} == {1, 3}


@pytest.mark.gpu
def test_steps_on_a_gpu_are_those_of_the_cpu():
    model = make_model()
    start, there = copy.deepcopy(model), copy.deepcopy(model).cuda()
    for each in (model, there):
        optimizer = optimizer_of(each)
        assert all(group["fused"] == (each is there) for group in optimizer.param_groups)
        for seed in range(3):
            gradients(each, seed)
            optimizer.step()
    for (name, a), b, before in zip(model.named_parameters(), there.parameters(), start.parameters(), strict=True):
        assert (b.cpu() - a).norm() < 0.06 * (a - before).norm(), name  # bf16 on the GPU, float32 on the CPU


@pytest.mark.gpu
def test_a_captured_step_is_the_eager_one():
    captured = make_model().cuda()
    eager = copy.deepcopy(captured)
    optimizers = optimizer_of(captured, capturable=True), optimizer_of(eager)
    for group in optimizers[0].param_groups:
        group["lr"] = torch.tensor(group["lr"], device="cuda")
    graph = torch.cuda.CUDAGraph()
    for seed in range(4):
        for each, optimizer in zip((captured, eager), optimizers, strict=True):
            gradients(each, seed)
            for group in optimizer.param_groups:  # what a schedule does
                group["lr"] *= 0.9
        optimizers[1].step()
        if seed == 0:  # makes the states
            optimizers[0].step()
        elif seed == 1:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                optimizers[0].step()
        if seed:
            graph.replay()
    assert_equal(captured, eager, rtol=1e-3, atol=1e-5)


def half_momentum_by_hand(optimizer):
    for group in optimizer.param_groups:
        group["momentum"] = 0.5


def half_momentum_by_a_schedule(optimizer):
    torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=10, base_momentum=0.1, max_momentum=0.5, div_factor=100
    )


@pytest.mark.parametrize("half", [half_momentum_by_hand, half_momentum_by_a_schedule])
def test_whoever_sets_the_momentum_sets_that_of_both_kinds_of_groups(half):
    """PyTorch's schedules write betas, loops with Muon write "momentum"."""
    expected = make_model()
    model = copy.deepcopy(expected)
    optimizers = optimizer_of(expected, momentum=0.5, betas=(0.5, 0.95)), optimizer_of(model)
    half(optimizers[1])
    for seed, each in itertools.product(range(2), (0, 1)):
        gradients((expected, model)[each], seed)
        optimizers[each].step()
    assert_equal(model, expected)
    for group in optimizers[1].param_groups:
        assert group["momentum"] == group["betas"][0] == 0.5
    group["momentum"], group["betas"] = 0.6, (0.7, 0.95)
    with pytest.raises(ValueError, match=r"momentum = 0.6 and betas\[0\] = 0.7; supported: one of them"):
        optimizers[1].step()
    assert_equal(model, expected)


def test_a_group_of_its_own_momentum_and_a_state_of_an_earlier_version():
    own = ({"momentum": 0.1}, True), ({"betas": (0.2, 0.3)}, True), ({}, True), ({"momentum": 0.4}, False)
    groups = [{"params": [nn.Parameter(torch.ones(4, 4))], "muon": muon, **settings} for settings, muon in own]
    optimizer = flashmhf.Muon(groups, momentum=0.8)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.1, 0.95), (0.2, 0.3), (0.8, 0.95), (0.4, 0.95)]
    assert optimizer.param_groups[0] is groups[0]
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["last_momentum"]
        group |= {"momentum": 0.7, "betas": (0.9, 0.95)}
    optimizer.load_state_dict(state)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.7, 0.7, 0.7, 0.9]


def test_hooks_of_the_caller_see_a_state_before_it_is_checked():
    model = make_model()
    optimizer = optimizer_of(model)
    gradients(model, 0)
    optimizer.step()
    older = copy.deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        group["use_muon"] = group.pop("muon")

    def translate(_, state):
        state = copy.deepcopy(state)
        for group in state["param_groups"]:
            group["muon"] = group.pop("use_muon")
        return state

    def spoil(_, state):
        return state | {"state": {index: {} for index in state["state"]}}

    optimizer.register_load_state_dict_pre_hook(translate)
    optimizer.load_state_dict(older)
    optimizer.register_load_state_dict_pre_hook(spoil)
    with pytest.raises(ValueError, match="state_dict lacks exp_avg, exp_avg_sq, step of parameter 0"):
        optimizer.load_state_dict(older)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 2


@pytest.mark.parametrize("kept", [lambda each: each, copy.deepcopy], ids=["made", "copied"])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_cannot_be_stepped_is_refused_before_any_group_is(stage, order, kept):
    """Flat partitions, which DeepSpeed's ZeRO puts in the place of a group's parameters. It steps group by group: the
    others are gone meanwhile, or have no parameters.
    """
    model, optimizer = kept((model := make_model(), optimizer_of(model)))
    gradients(model, 0)
    groups = optimizer.param_groups[::order]
    flat = [nn.Parameter(torch.cat([each.detach().flatten() for each in group["params"]])) for group in groups]
    before = copy.deepcopy(flat)
    for group, parameter in zip(groups, flat, strict=True):
        parameter.grad = torch.ones_like(parameter)
        group["params"] = [parameter] if stage == 1 else []
    for group, parameter in zip(groups, flat, strict=True):
        if stage == 1:
            optimizer.param_groups = [group]
        group["params"] = [parameter]
        with pytest.raises(RuntimeError, match="matri.*, as under .* DeepSpeed's ZeRO; supported: fully_shard, DDP"):
            optimizer.step()
        group["params"] = [parameter] if stage == 1 else []
    assert all(map(torch.equal, flat, before))


@pytest.mark.parametrize("removed", [False, True])
def test_an_emptied_group_is_frozen(removed):
    model = make_model()
    optimizer, moved = optimizer_of(model), {*model.parameters()}
    for group in optimizer.param_groups:
        if group["muon"]:
            moved.difference_update(group["params"])
            group["params"] = []
    if removed:
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    before = copy.deepcopy(model)
    gradients(model, 0)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, old) == (parameter not in moved)


def test_refusals():
    def group(*shape: int, dtype: torch.dtype | None = None, muon: object = True, **settings: bool) -> list[dict]:
        return [{"params": [weight(*shape, dtype=dtype)], "muon": muon, **settings}]

    model, layer, table = make_model(), nn.Linear(4, 4), nn.Embedding(4, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    layer(torch.ones(1, 4)).sum().backward()
    groups = flashmhf.param_groups(layer, 1e-3, 0.1, muon=True, outputs=[])
    optimizer, other, elsewhere = flashmhf.Muon(groups), torch.optim.AdamW(groups), [copy.deepcopy(model.head)]
    other.step()
    maximised = optimizer.state_dict()
    maximised["param_groups"] = [each | {"maximize": True} for each in maximised["param_groups"]]  # AdamW's have it
    groups_of, load = partial(flashmhf.param_groups, model, 1.0, 0.1), optimizer.load_state_dict
    for error, message, call, *given in (
        (TypeError, "outputs must be torch.nn.Modules, got str", partial(groups_of, muon=True, outputs=["head"])),
        (TypeError, "outputs must be a list of .* got Linear", partial(groups_of, muon=True, outputs=model.head)),
        (ValueError, "outputs has weights that model has not; ", partial(groups_of, muon=True, outputs=elsewhere)),
        (TypeError, "muon must be a bool, got str", partial(groups_of, muon="no")),
        (ValueError, r"muon=True holds a parameter of shape \[4\]", flashmhf.Muon, group(4)),
        (TypeError, "a parameter in a group with muon=True has dtype complex64; supported: bfloat16", flashmhf.Muon,
         group(4, 4, dtype=torch.complex64)),
        *((ValueError, f"muon={muon} has {name}=True; supported: False", flashmhf.Muon,
           group(4, 4, muon=muon, **{name: True}))
          for name, muon in (("maximize", True), ("amsgrad", False), ("differentiable", False))),
        (TypeError, "a group's muon must be a bool, got str", flashmhf.Muon, group(4, 4, muon="false")),
        (RuntimeError, "does not support sparse gradients",
         flashmhf.Muon([{"params": table.parameters(), "muon": False}]).step),
        *((ValueError, f"{name} is", partial(flashmhf.Muon, **{name: value}), group(4, muon=False))
          for name, value in (("lr", -1.0), ("weight_decay", float("nan")), ("momentum", 1.0), ("betas", (0.9,)),
                              ("betas", 0.9), ("betas", (0.9, 0.95, 0.99)))),
        # AdamW for everything, without a word
        (ValueError, "a group has no key 'muon'; supported: .* muon=True", flashmhf.Muon, layer.parameters()),
        (ValueError, "muon=True has maximize=True; supported: False", load, maximised),
        (ValueError, r"groups with muon = \[None\]; this optimizer's have \[True, False\]", load,
         torch.optim.AdamW(layer.parameters()).state_dict()),
        (ValueError, "state_dict lacks momentum of parameter 0: another optimizer's", load, other.state_dict()),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call(*given)
