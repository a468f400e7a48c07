"""flashmhf.Muon: what one update does, its states, and its groups."""

import copy
import pickle

import pytest
import torch
from torch import nn

import flashmhf
from flashmhf.nn.muon import RMS, orthogonalise


@pytest.mark.parametrize("rows, columns", [(24, 8), (8, 24)])
def test_orthogonalised_matrices_have_singular_values_near_one(rows, columns):
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, rows, columns, generator=generator) * torch.tensor([1e-3, 1.0, 30.0])[:, None, None]
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert (values > 0.5).all() and (values < 1.5).all()
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert nn.functional.cosine_similarity(orthogonalise(matrices).float().flatten(1), (u @ vh).flatten(1)).min() > 0.95


def test_a_step_moves_each_matrix_of_a_stack_by_the_rate():
    stack = nn.Parameter(torch.full((2, 3, 16, 8), 2.0))
    optimizer = flashmhf.Muon([{"params": [stack], "muon": True}], lr=0.1, weight_decay=0.5)
    stack.grad = torch.randn(stack.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    moved = (stack.detach() - 2 * (1 - 0.1 * 0.5)) / (0.1 * RMS * 4)  # 4: the root of the longer side
    values = torch.linalg.svdvals(moved)
    assert (values > 0.5).all() and (values < 1.5).all()
    assert ((moved * stack.grad).sum((-2, -1)) < 0).all()


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


def test_two_dimensional_parameters_move_as_in_torch():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no torch.optim.Muon")
    ours = nn.Parameter(torch.randn(32, 20))
    theirs = nn.Parameter(ours.detach().clone())
    optimizers = [
        flashmhf.Muon([{"params": [ours], "muon": True}], lr=0.02, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    start = ours.detach().clone()
    for _ in range(4):
        gradient = torch.randn_like(ours)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert (ours - theirs).norm() < 0.03 * (theirs - start).norm()  # torch rounds momentum to bf16 elsewhere


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


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.ffn, self.head = (
            nn.Embedding(50, 64),
            flashmhf.FlashMHF(64, 2, 2, 16, q_norm=True, backend="eager"),
            nn.Linear(64, 50),
        )

    def forward(self, ids):
        return self.head(self.ffn(self.embedding(ids)))


def test_groups_of_a_model():
    model = Model()
    model.ffn.u.requires_grad_(False)
    rule = {id(p): (group["muon"], group["lr"]) for group in flashmhf.param_groups(model, 1.0, 0.1, muon=True) for p in group["params"]}
    assert rule[id(model.embedding.weight)] == rule[id(model.head.weight)] == rule[id(model.head.bias)] == (False, 1.0)
    assert rule[id(model.ffn.k)] == rule[id(model.ffn.router)] == (True, 1.0) and id(model.ffn.u) not in rule
    assert rule[id(model.ffn.in_proj.weight)] == (True, 0.3)
    assert rule[id(model.ffn.q_norm.weight)] == (False, 1.0)  # [H, d_h] gains, no matrix
    assert all("muon" not in group for group in flashmhf.param_groups(model, 1.0, 0.1))


def test_training_continues_from_a_state_dict_with_equal_bits():
    model, ids = Model(), torch.randint(50, (3, 40))

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
    for name, value in (("lr", -1.0), ("weight_decay", float("nan")), ("momentum", 1.0)):
        with pytest.raises(ValueError, match=f"{name} is"):
            flashmhf.Muon([{"params": [nn.Parameter(torch.zeros(4))], "muon": False}], **{name: value})
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="a group has no key 'muon'; supported: .* muon=True"):  # AdamW for everything, without a word
        flashmhf.Muon(layer.parameters())
    optimizer = flashmhf.Muon(flashmhf.param_groups(layer, 1e-3, 0.1, muon=True))
    with pytest.raises(ValueError, match=r"state_dict has groups with muon = \[None\]; this optimizer's have \[True, False\]"):
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
    model = Model()
    there = copy.deepcopy(model).cuda()
    ids = torch.randint(50, (40,))
    for each, chosen in ((model, ids), (there, ids.cuda())):
        optimizer = flashmhf.Muon(flashmhf.param_groups(each, 1e-2, 0.1, muon=True))
        assert all(group["fused"] == (each is there) for group in optimizer.param_groups)
        nn.functional.cross_entropy(each(chosen), chosen).backward()
        optimizer.step()
    for (name, a), b in zip(model.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), atol=1e-3, rtol=2e-2, msg=name)
