"""Initialisations by their variances, and flashmhf.param_groups by what an optimizer does with them."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import flashmhf
from flashmhf.nn.init import OfficialInit
from flashmhf.nn.multihead import HeadRMSNorm

D_MODEL, LAYERS, TOKENS = 256, 6, 4096


def networks():
    settings = {"dtype": torch.float64}
    normed = settings | {"q_norm": True}
    return {
        "flashmhf": flashmhf.FlashMHF(D_MODEL, 4, 3, 112, **settings),
        "flashmhf-heads-of-128": flashmhf.FlashMHF(D_MODEL, 2, 5, 64, **settings),
        "mh_ffn": flashmhf.MHFFN(D_MODEL, 4, 352, activation="relu", **settings),
        "swiglu": flashmhf.SwiGLU(D_MODEL, 704, **settings),
        "pkv": flashmhf.ParametricKV(D_MODEL, 4, 528, **settings),
        "dense_moe": flashmhf.DenseMoE(D_MODEL, 4, 176, **settings),
        "options": flashmhf.FlashMHF(D_MODEL, 4, 3, 112, num_kv_heads=2, bias=True, activation="gelu", **normed),
        "no-projections": flashmhf.MHFFN(D_MODEL, 4, 352, skip_linear=True, activation="relu2", **normed),
        "biased-swiglu": flashmhf.SwiGLU(D_MODEL, 704, bias=True, **settings),
    }


DRAWN = networks()
every_network = pytest.mark.parametrize("name", DRAWN)


def fresh(name):
    return copy.deepcopy(DRAWN[name])


@every_network
@pytest.mark.parametrize("num_layers", [1, LAYERS])
@torch.no_grad()
def test_the_output_of_a_balanced_network_adds_its_part_of_the_residual_variance(name, num_layers):
    """The default of all but ParametricKV."""
    module = fresh(name)
    module.reset_parameters("balanced" if name == "pkv" else None, num_layers=num_layers)
    variance = module(torch.randn(TOKENS, D_MODEL, dtype=torch.float64)).var().item()
    assert variance * 2 * num_layers == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize(("init", "gains"), [
    ("normal", OfficialInit()), ("official", OfficialInit()),
    ("official", OfficialInit(in_proj=0.5, k=2.0, u=3.0, v=0.25, router=4.0)),
    ("official", OfficialInit(identity=True)), ("official", OfficialInit(k=0.0, router=0)),
])  # fmt: skip
@every_network
def test_normal_and_official(name, init, gains):
    module = fresh(name)
    is_default = (name, init) == ("pkv", "normal")
    module.reset_parameters(None if is_default else init, initializer_range=0.05, official=gains)
    for full_name, parameter in module.named_parameters():
        part = full_name.removesuffix(".weight")
        if part == "q_norm":
            assert (parameter == 1).all()
        elif part.endswith("bias"):
            assert (parameter == 0).all()
        elif part.endswith("proj") and gains.identity:
            assert torch.equal(parameter, torch.eye(*parameter.shape, dtype=parameter.dtype))
        else:
            role = {"gate_proj": "in_proj", "up_proj": "in_proj", "down_proj": "out_proj"}.get(part, part)
            std = 0.02 * getattr(gains, role)
            if part.endswith("proj"):
                bound = getattr(gains, role) * (6 / sum(parameter.shape)) ** 0.5
                std = bound / 3**0.5
                assert init == "normal" or 0.99 * bound < parameter.abs().max().item() <= bound
            assert parameter.std().item() == pytest.approx(0.05 if init == "normal" else std, rel=0.1), (
                f"{full_name} under {init}"
            )


def assert_drawn_alike(module, expected):
    for (name, drawn), other in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(drawn.std(), other.std(), rtol=0.15, atol=1e-9, msg=name)
        torch.testing.assert_close(drawn.mean(), other.mean(), rtol=0, atol=0.3 * other.std().item() + 1e-9, msg=name)


@pytest.mark.parametrize("order", ["parents first", "children first", "own parameters only"])
@every_network
def test_every_module_draws_its_own_weights_in_any_order(name, order):
    """FSDP and to_empty call reset_parameters of each module that has parameters, in an order of their own."""
    expected = fresh(name)
    expected.reset_parameters(num_layers=LAYERS)
    module = copy.deepcopy(expected).to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    modules = [child for child in module.modules() if order != "own parameters only" or child._parameters]
    for child in reversed(modules) if order == "children first" else modules:
        child.reset_parameters()
    assert_drawn_alike(module, expected)


@every_network
def test_linear_layers_are_pytorchs_own_by_type(name):
    """Which quantisers and counters ask. Copies and pickles draw into themselves."""
    original = fresh(name)
    before = copy.deepcopy(original.state_dict())
    for module in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
        assert all(type(part) is nn.Linear for part in linear) and bool(linear) is (name != "no-projections")
        for part in linear:
            part.weight.data.fill_(torch.nan)
            part.reset_parameters()
        assert_drawn_alike(module, original)
    assert all(torch.equal(value, before[key]) for key, value in original.state_dict().items())


def low_rank() -> nn.Module:
    return nn.Sequential(nn.Linear(D_MODEL, 4, bias=False), nn.Linear(4, D_MODEL, bias=False)).double()


@pytest.mark.parametrize(("name", "change", "message"), [
    ("options", lambda m: setattr(m, "q_norm", nn.RMSNorm(64)), "q_norm is a RMSNorm; supported: a HeadRMSNorm"),
    ("mh_ffn", lambda m: setattr(m, "in_proj", nn.Identity()), "in_proj is a Identity; supported: a Linear"),
    ("flashmhf", lambda m: setattr(m, "out_proj", low_rank()), "out_proj is a Sequential"),
    ("swiglu", lambda m: setattr(m, "down_proj", low_rank()), "down_proj is a Sequential"),
    ("pkv", lambda m: setattr(m, "out_proj", nn.Identity()), "out_proj is a Identity"),
    ("dense_moe", lambda m: setattr(m, "up_proj", low_rank()), "up_proj is a Sequential"),
    ("flashmhf", lambda m: setattr(m.out_proj, "weight", nn.Parameter(m.out_proj.weight.to(torch.int8), False)),
     "out_proj.weight has dtype int8"),
    ("flashmhf", lambda m: nn.utils.parametrizations.spectral_norm(m.in_proj), "in_proj has parametrised weights"),
    ("flashmhf", lambda m: nn.utils.parametrizations.weight_norm(m, "k"), "has parametrised weights"),
    ("options", lambda m: prune.random_unstructured(m.q_norm, "weight", 0.5), "q_norm has parametrised"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused_before_anything_is_drawn(name, change, message):
    module = fresh(name)
    change(module)
    before, scheme = copy.deepcopy(module.state_dict()), module.scheme
    with pytest.raises(ValueError, match=message):
        module.reset_parameters("official", num_layers=LAYERS)
    assert module.scheme is scheme
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_parts_that_were_taken_away_are_not_drawn():
    module = fresh("options")
    module.in_proj = module.out_proj = module.q_norm = None
    module.reset_parameters(num_layers=LAYERS)
    assert module(torch.randn(2, D_MODEL, dtype=torch.float64)).isfinite().all()


def test_groups_hold_every_trainable_parameter_once():
    """Of all networks beside an embedding, whose weight the head shares, and a norm."""
    parts = {"embedding": nn.Embedding(100, D_MODEL), "norm": nn.RMSNorm(D_MODEL)}
    parts |= {"head": nn.Linear(D_MODEL, 100, bias=False), "networks": nn.ModuleDict(networks())}
    model = nn.ModuleDict(parts)
    model.head.weight = model.embedding.weight
    model.networks["swiglu"].requires_grad_(False)
    groups = flashmhf.param_groups(model, 1e-3, 0.1)
    grouped = [parameter for group in groups for parameter in group["params"]]
    trained = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(grouped) == trained.keys() and len(grouped) == len(trained)
    expected = [module for name, module in model.networks.items() if name.startswith(("flash", "options"))]
    assert set(groups[1]["params"]) == {end.weight for each in expected for end in (each.in_proj, each.out_proj)}
    undecayed = {parameter for group in groups if group["weight_decay"] == 0 for parameter in group["params"]}
    assert undecayed == {p for p, name in trained.items() if p.dim() < 2 or name.endswith("q_norm.weight")}
    torch.optim.AdamW(groups)

    def ids(groups: list[dict]) -> list[list[int]]:
        return [[*map(id, group["params"])] for group in groups]

    for parameter in model.parameters():  # as deepspeed.zero.Init leaves it
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert ids(flashmhf.param_groups(model, 1e-3, 0.1)) == ids(groups)
    with pytest.raises(ValueError, match="muon is True and model has partitioned parameters .*; supported: muon=False"):
        flashmhf.param_groups(model, 1e-3, 0.1, muon=True)


def test_a_step_decays_all_matrices_equally_and_moves_projections_less():
    lr, decay = 1e-2, 0.5
    for gradient in (0.0, 1.0):
        module = flashmhf.FlashMHF(64, 2, 2, 16)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        torch.optim.AdamW(flashmhf.param_groups(module, lr, decay)).step()
        for name, parameter in module.named_parameters():
            moved = gradient * lr * (0.3 if "proj" in name else 1)  # Adam's first step is the rate
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - lr * decay) - moved, msg=name)


def timm_schedule(optimizer):
    pytest.importorskip("timm.scheduler").CosineLRScheduler(optimizer, t_initial=10)


@pytest.mark.parametrize("schedule", [
    timm_schedule,
    lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5),
    lambda optimizer: [group.update(lr=1e-4 * group["lr_share"]) for group in optimizer.param_groups],
], ids=["timm", "torch", "by hand"])  # fmt: skip
def test_projections_learn_at_their_share_under_any_schedule(schedule):
    module = flashmhf.FlashMHF(64, 2, 2, 16)
    optimizer = torch.optim.AdamW(flashmhf.param_groups(module, 1e-3, 0.1))
    schedule(optimizer)
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert rates[module.in_proj.weight] == pytest.approx(0.3 * rates[module.k])


@every_network
def test_a_tool_may_take_each_modules_weights_when_its_constructor_ends(name, monkeypatch):
    """As deepspeed.zero.Init does: what a parent draws into its children afterwards is lost."""
    taken = {}
    for kind in (nn.Linear, HeadRMSNorm):

        def taking(self, *args, construct=kind.__init__, **kwargs):
            construct(self, *args, **kwargs)
            for parameter in self.parameters(recurse=False):
                taken[parameter], parameter.data = parameter.data, torch.empty(0)

        monkeypatch.setattr(kind, "__init__", taking)
    module = networks()[name]
    for parameter, value in taken.items():
        parameter.data = value
    monkeypatch.undo()
    assert_drawn_alike(module, DRAWN[name])
