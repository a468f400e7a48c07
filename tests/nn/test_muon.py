"""flashmhf.Muon: what one update does, its states, and its groups."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import flashmhf


@pytest.mark.parametrize("shape", [(32, 20), (20, 32), (2, 3, 32, 16), (50, 16, 40)])
def test_matrices_move_as_in_torch(shape):
    """Each matrix of a stack by itself, whatever the others' gradients are; torch.optim.Muon takes single matrices."""
    start = torch.randn(shape)
    ours, theirs = (
        nn.Parameter(start.clone()),
        [nn.Parameter(matrix.clone()) for matrix in start.reshape(-1, *shape[-2:])],
    )
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
    for after, before, expected in zip(
        ours.reshape(-1, *shape[-2:]), start.reshape(-1, *shape[-2:]), theirs, strict=True
    ):
        assert (after - expected).norm() < 0.03 * (expected - before).norm()  # torch rounds momentum to bf16 elsewhere


def test_a_step_does_not_depend_on_the_memory_layout():
    """A model in channels_last keeps its convolutions so."""
    weight, gradient = torch.randn(6, 4, 3, 5), torch.randn(6, 4, 3, 5)
    moved = []
    for layout in (torch.contiguous_format, torch.channels_last):
        parameter = nn.Parameter(weight.clone(memory_format=layout))
        parameter.grad = gradient.clone(memory_format=layout)
        flashmhf.Muon([{"params": [parameter], "muon": True}]).step()
        moved.append(parameter.detach())
    assert torch.equal(*moved)


def test_parameters_without_elements_stay_as_they_are():
    parameters = [nn.Parameter(torch.empty(shape)) for shape in ((0, 5), (3, 0, 5))]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    flashmhf.Muon([{"params": parameters, "muon": True}]).step()


def test_other_groups_move_as_with_adamw():
    ours = nn.Linear(6, 5)
    theirs = copy.deepcopy(ours)
    settings = {"lr": 0.01, "weight_decay": 0.2, "betas": (0.8, 0.9)}
    optimizers = [
        flashmhf.Muon([{"params": ours.parameters(), "muon": False}], **settings),
        torch.optim.AdamW(theirs.parameters(), **settings),
    ]
    for _ in range(3):
        x = torch.randn(4, 6)
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def make_model() -> nn.Sequential:
    ffn = flashmhf.FlashMHF(64, 2, 2, 16, q_norm=True, backend="eager")
    return nn.Sequential(OrderedDict(embedding=nn.Embedding(100, 64), ffn=ffn, head=nn.Linear(64, 100)))


def test_groups_of_a_model():
    model = make_model()
    model.ffn.u.requires_grad_(False)
    rule = {
        id(p): (group["muon"], group["lr"])
        for group in flashmhf.param_groups(model, 1.0, 0.1, muon=True)
        for p in group["params"]
    }
    assert rule[id(model.embedding.weight)] == rule[id(model.head.weight)] == rule[id(model.head.bias)] == (False, 1.0)
    assert rule[id(model.ffn.k)] == rule[id(model.ffn.router)] == (True, 1.0) and id(model.ffn.u) not in rule
    assert rule[id(model.ffn.in_proj.weight)] == (True, 0.3)
    assert rule[id(model.ffn.q_norm.weight)] == (False, 1.0)  # [H, d_h] gains, no matrix
    assert all("muon" not in group for group in flashmhf.param_groups(model, 1.0, 0.1))
    model.second = nn.Linear(64, model.head.out_features, bias=False)  # as for the token after the next
    model.positions = nn.Embedding(64, 64)  # as many as the model is wide: its projections have as many outputs
    groups = flashmhf.param_groups(model, 1.0, 0.1, muon=True)
    assert {id(p) for group in groups if group["muon"] for p in group["params"]} == {
        key for key, (muon, _) in rule.items() if muon
    }


def test_training_continues_from_a_state_dict_with_equal_bits():
    model, ids = make_model(), torch.randint(50, (3, 40))

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids[step % 3]), ids[(step + 1) % 3]).backward()
            optimizer.step()

    optimizer = flashmhf.Muon(flashmhf.param_groups(model, 1e-2, 0.1, muon=True))
    train(model, optimizer, range(2))
    state = pickle.loads(pickle.dumps(optimizer)).state_dict()
    for group in state["param_groups"]:  # a checkpoint of 0.1 has these alone
        for name in group.keys() - {"params", "lr", "weight_decay", "momentum", "betas", "eps", "fused", "muon"}:
            del group[name]
    again = copy.deepcopy(model)
    other = flashmhf.Muon(flashmhf.param_groups(again, 1e-2, 0.1, muon=True))
    other.load_state_dict(state)
    train(model, optimizer, range(2, 5))
    train(again, other, range(2, 5))
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_refusals():
    with pytest.raises(ValueError, match=r"muon=True holds a parameter of shape \[4\]"):
        flashmhf.Muon([{"params": [nn.Parameter(torch.zeros(4))], "muon": True}])
    with pytest.raises(TypeError, match="muon=True holds a complex64 parameter; supported: bfloat16"):
        flashmhf.Muon([{"params": [nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))], "muon": True}])
    with pytest.raises(ValueError, match="maximize=True; supported: False"):
        flashmhf.Muon([{"params": [nn.Parameter(torch.zeros(4, 4))], "muon": True, "maximize": True}])
    for name, value in (("lr", -1.0), ("weight_decay", float("nan")), ("momentum", 1.0)):
        with pytest.raises(ValueError, match=f"{name} is"):
            flashmhf.Muon([{"params": [nn.Parameter(torch.zeros(4))], "muon": False}], **{name: value})
    layer = nn.Linear(4, 4)
    # AdamW for everything, without a word
    with pytest.raises(ValueError, match="a group has no key 'muon'; supported: .* muon=True"):
        flashmhf.Muon(layer.parameters())
    optimizer = flashmhf.Muon(flashmhf.param_groups(layer, 1e-3, 0.1, muon=True))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["maximize"] = True  # AdamW's have it
    with pytest.raises(ValueError, match="muon=True and maximize=True; supported: False"):
        optimizer.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"state_dict has groups with muon = \[None\]; this optimizer's have \[True, False\]"
    ):
        optimizer.load_state_dict(torch.optim.AdamW(layer.parameters()).state_dict())


def test_a_refused_group_is_not_kept():
    optimizer = flashmhf.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], "muon": True}])
    vector = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="supported: matrices"):
        optimizer.add_param_group({"params": [vector], "muon": True})
    optimizer.add_param_group({"params": [vector], "muon": False})
    assert [group["muon"] for group in optimizer.param_groups] == [True, False]


@pytest.mark.gpu
def test_a_step_on_the_gpu_is_that_of_the_cpu():
    model = make_model()
    there = copy.deepcopy(model).cuda()
    ids = torch.randint(50, (40,))
    for each, chosen in ((model, ids), (there, ids.cuda())):
        optimizer = flashmhf.Muon(flashmhf.param_groups(each, 1e-2, 0.1, muon=True))
        assert all(group["fused"] == (each is there) for group in optimizer.param_groups)
        nn.functional.cross_entropy(each(chosen), chosen).backward()
        optimizer.step()
    for (name, a), b in zip(model.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), atol=1e-3, rtol=2e-2, msg=name)
