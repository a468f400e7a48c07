"""Modules against float64 formulae with every switch, their state dicts, and the official layout both ways."""

import copy
import itertools

import pytest
import torch
from targets import randomised
from torch import nn

import flashmhf
from flashmhf import convert, reference
from flashmhf.integrations.peft import stack_weights

D_MODEL, HEADS, SUBNETS, SUBNET_DIM = 48, 6, 4, 20
HEAD_DIM = D_MODEL // HEADS
SWITCHES = [
    {}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "q_norm": True, "q_norm_eps": 1e-3}, {"skip_linear": True},
    {"skip_linear": True, "num_kv_heads": 3, "q_norm": True, "activation": "relu2"},
    {"activation": "gelu", "bias": True}, {"activation": "relu"}, {"q_norm": True, "q_norm_eps": 1e-3, "bias": True},
]  # fmt: skip
IDS = ["-".join(f"{name}={value}" for name, value in switches.items()) or "none" for switches in SWITCHES]


def formula(x, module):
    """The definition between the projections; weights from the module's state."""
    s = dict(module.named_parameters())

    def linear(name, y):
        return y if module.skip_linear else nn.functional.linear(y, s[f"{name}.weight"], s.get(f"{name}.bias"))

    q = linear("in_proj", x).unflatten(-1, (HEADS, HEAD_DIM))
    if module.q_norm is not None:
        q = q / (q.square().mean(-1, keepdim=True) + module.q_norm.eps).sqrt() * s["q_norm.weight"]
    networks = (s[name].reshape(module.num_kv_heads, -1, s[name].shape[-2], HEAD_DIM) for name in "kuv")
    r = reference.gate(q, s["router"], module.router_eps) if "router" in s else None
    return linear("out_proj", reference.forward(q, *networks, r, activation=module.activation).flatten(-2))


def networks(**switches):
    for backend in ("auto", "reference"):
        yield flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, router_eps=0.1, backend=backend, **switches)
    for backend in ("auto", "reference", "naive"):
        yield flashmhf.MHFFN(D_MODEL, HEADS, 50, backend=backend, **switches)


@pytest.mark.parametrize("leading", [(), (7,), (2, 5), (2, 0)])
@pytest.mark.parametrize("switches", SWITCHES, ids=IDS)
def test_values_and_gradients(switches, leading):
    for module in map(randomised, networks(dtype=torch.float64, **switches)):
        x = torch.randn(*leading, D_MODEL, dtype=torch.float64, requires_grad=True)
        actual, expected = module(x), formula(x, module)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        inputs, grad = [x, *module.parameters()], torch.randn_like(expected)
        gradients = (torch.autograd.grad(out, inputs, grad) for out in (actual, expected))
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
        with torch.inference_mode():
            torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def test_state_and_default_width():
    weights = dict.fromkeys("kuv", (2, 5, 384, 128)) | {"router": (2, 128, 5)}
    projections = dict.fromkeys(("in_proj.weight", "out_proj.weight"), (256, 256))
    assert shapes(flashmhf.FlashMHF(256, 2, 5, q_norm=True)) == weights | projections | {"q_norm.weight": (2, 128)}
    assert shapes(flashmhf.FlashMHF(256, 2, 5)) == weights | projections
    assert [flashmhf.nn.default_subnet_dim(d) for d in (64, 96, 128, 256)] == [192, 256, 384, 704]
    grouped = flashmhf.FlashMHF(256, 4, 5, 16, num_kv_heads=2, skip_linear=True)
    assert shapes(grouped) == dict.fromkeys("kuv", (2, 5, 16, 64)) | {"router": (4, 64, 5)}
    assert "num_kv_heads=2" in repr(grouped)


@pytest.mark.parametrize("leading", [(), (5,), (2, 5), (2, 3, 5)])
def test_parametric_kv(leading):
    module = randomised(flashmhf.ParametricKV(D_MODEL, HEADS, 30).double())
    s, x = dict(module.named_parameters()), torch.randn(*leading, D_MODEL, dtype=torch.float64)
    q = (x @ s["in_proj.weight"].T).unflatten(-1, (HEADS, HEAD_DIM))
    attention = (torch.einsum("...hd,hnd->...hn", q, s["k"]) / HEAD_DIM**0.5).softmax(-1)
    expected = torch.einsum("...hn,hnd->...hd", attention, s["v"]).flatten(-2) @ s["out_proj.weight"].T
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)


def test_dense_moe():
    """One head of the definition, which sees the whole of x."""
    module = randomised(flashmhf.DenseMoE(D_MODEL, SUBNETS, SUBNET_DIM).double())
    q = torch.randn(2, 5, 1, D_MODEL, dtype=torch.float64)
    weights = (module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight.T)
    networks = (weight.reshape(1, SUBNETS, SUBNET_DIM, D_MODEL) for weight in weights)
    expected = reference.forward(q, *networks, reference.gate(q, module.router[None]))
    torch.testing.assert_close(module(q[:, :, 0]), expected[:, :, 0], rtol=1e-10, atol=1e-10)


MODULES = {
    "flash_mhf": lambda: flashmhf.FlashMHF(D_MODEL, HEADS, SUBNETS, SUBNET_DIM, q_norm=True, bias=True),
    "grouped heads": lambda: flashmhf.FlashMHF(D_MODEL, HEADS, 2, SUBNET_DIM, num_kv_heads=2, q_norm=True, bias=True),
    "no projections": lambda: flashmhf.FlashMHF(D_MODEL, HEADS, 2, SUBNET_DIM, q_norm=True, skip_linear=True),
    "stacked": lambda: stack_weights(flashmhf.FlashMHF(D_MODEL, HEADS, 2, SUBNET_DIM, num_kv_heads=2)),
    "mhffn": lambda: flashmhf.MHFFN(D_MODEL, HEADS, 20),
    "mhffn with options": lambda: flashmhf.MHFFN(D_MODEL, HEADS, 20, num_kv_heads=2, q_norm=True, bias=True),
    "swiglu": lambda: flashmhf.SwiGLU(D_MODEL, 20, bias=True),
    "parametric_kv": lambda: flashmhf.ParametricKV(D_MODEL, HEADS, 20),
    "dense_moe": lambda: flashmhf.DenseMoE(D_MODEL, SUBNETS, SUBNET_DIM),
}
STORED = MODULES | {"fp8": lambda: flashmhf.quantize.to_fp8(flashmhf.FlashMHF(D_MODEL, 3, 2, 16))}
every_module = pytest.mark.parametrize("make", STORED.values(), ids=STORED)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@every_module
def test_autocast_takes_any_input(make, stored):
    """With weights of any dtype, as linear layers have it."""
    module = make().to(stored)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            module(torch.randn(3, D_MODEL, dtype=dtype))


# The official layout both ways; whole models in tests/models/test_conversion.py
@pytest.mark.parametrize("gated", [True, False])
def test_every_size_of_a_state_dict_is_checked_both_ways(gated):
    """One tensor of another size at a time, and other H, E and H_kv; with the right ones the same tensors."""
    settings = {"q_norm": True, "bias": True, "num_kv_heads": 3}
    network = flashmhf.FlashMHF(48, 6, 3, 16, **settings) if gated else flashmhf.MHFFN(48, 6, 48, **settings)
    ours = randomised(network).state_dict()
    official, sizes = convert.to_official(ours), (6, 3 if gated else None)
    back = convert.from_official(official, *sizes, num_kv_heads=3)
    assert back.keys() == ours.keys() and all(torch.equal(back[name], value) for name, value in ours.items())
    assert torch.equal(official["w_self.bias"], ours["in_proj.bias"])
    for state, call in (
        (ours, convert.to_official),
        (official, lambda s: convert.from_official(s, *sizes, num_kv_heads=3)),
    ):
        for name, value in state.items():
            for dim in range(value.dim()):
                with pytest.raises(ValueError, match="shape"):
                    call(state | {name: value.narrow(dim, 0, value.shape[dim] - 1)})
                with pytest.raises(ValueError, match="shape"):
                    call(state | {name: torch.cat([value, value], dim)})
            # k of four dimensions is a gated network's
            with pytest.raises((ValueError, KeyError), match="shape|router"):
                call(state | {name: value[None]})
    for heads, subnets, kv_heads in ((6, 4, 3), (6, 1, 3), (6, 6, 3), (3, 3, 3), (6, 3, 6), (12, 3, 3), (6, None, 3)):
        if gated or subnets is None and heads != 6:
            with pytest.raises(ValueError, match="shape"):
                convert.from_official(official, heads, subnets, num_kv_heads=kv_heads)


# The memory of parameters
@every_module
def test_a_state_dict_is_the_parameters_memory(make):
    """Weight averages, pruning and restored snapshots write into it."""
    module = make()
    for value in module.state_dict().values():
        value.fill_(2)
    stored = dict(module.named_parameters()) | dict(module.named_buffers())
    assert all((value.float() == 2).all() for value in stored.values())
    assert module.state_dict().keys() == stored.keys()


class AsLeaves(torch.fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, flashmhf.nn.network.Contiguous) or super().is_leaf_module(module, name)


@every_module
def test_older_compilers_take_a_network_as_their_errors_say(make):
    model, x = nn.Sequential(make()).requires_grad_(False), torch.randn(3, D_MODEL)
    with pytest.raises(TypeError, match="x is a Proxy of torch.fx.*the network as a leaf.*is_leaf_module"):
        torch.fx.symbolic_trace(model)
    assert torch.equal(torch.fx.GraphModule(model, AsLeaves().trace(model))(x), model(x))
    with pytest.raises(NotImplementedError, match="cannot compile a .*; supported: torch.jit.trace"):
        torch.jit.script(model)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


def transpose(module: nn.Module, name: str) -> None:
    """As a QR step of an optimizer leaves a weight."""
    getattr(module, name).data = getattr(module, name).data.mT.contiguous().mT


class Transposed(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.mT.contiguous().mT


@pytest.mark.parametrize("by", ["data", "parametrisation"])
@every_module
def test_weights_of_any_strides_are_computed(make, by, device, fresh_dynamo):
    """As linear layers do, in training, at inference and in a graph."""
    module, x = make().to(device), torch.randn(3, D_MODEL, device=device)
    expected = module(x)
    tensors = {**module._parameters, **module._buffers}
    for name in [name for name, tensor in tensors.items() if tensor.dim() > 1 and tensor.is_floating_point()]:
        if by == "parametrisation":
            nn.utils.parametrize.register_parametrization(module, name, Transposed(), unsafe=True)
        else:
            transpose(module, name)
        assert not getattr(module, name).is_contiguous()
    y = module(x)
    torch.testing.assert_close(y, expected)
    if y.requires_grad:
        y.sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)
        if by == "data":
            torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("hooked", ["network", "model"])
def test_a_hook_may_convert_what_is_loaded(hooked, assign):
    """From [E, d_e, H, d_h] here, whatever strides it leaves."""

    def convert(module, state, prefix, *_):
        for name in ("0.k", "0.u", "0.v"):
            state[name] = state[name].permute(2, 0, 1, 3)

    model, other = (nn.Sequential(flashmhf.FlashMHF(32, 2, 3, 16)) for _ in range(2))
    foreign = {n: w.permute(1, 2, 0, 3).contiguous() if n[-1] in "kuv" else w for n, w in other.state_dict().items()}
    (model if hooked == "model" else model[0]).register_load_state_dict_pre_hook(convert)
    model.load_state_dict(foreign, assign=assign)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    x = torch.randn(5, 32)
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize(
    ("name", "tool"), [*itertools.product(STORED, ("to", "assign", "deepcopy")), *((name, "grad") for name in MODULES)]
)
def test_weights_stay_contiguous(name, tool):
    """torch.channels_last changes the strides of parameters of four dimensions, and checkpoints keep strides."""
    make, x = STORED[name], torch.randn(5, D_MODEL)
    module = make()
    expected = module(x)
    if tool == "to":
        module.to(memory_format=torch.channels_last)
    elif tool == "grad":
        module(x).sum().backward()
        nn.Sequential(module).to(memory_format=torch.channels_last)
        assert all(parameter.grad.is_contiguous() for parameter in module.parameters())
    else:
        strided = {
            name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in module.state_dict().items()
        }
        module = copy.deepcopy(module) if tool == "deepcopy" else make()
        module.load_state_dict(strided, assign=True)
    # Projections keep a checkpoint's strides, as any linear layer does.
    stored = dict(module.named_parameters()) | dict(module.named_buffers())
    assert all(value.is_contiguous() for name, value in stored.items() if "." not in name)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("grad", [True, False])
@every_module
def test_the_meta_device_gives_shapes(make, grad):
    with torch.set_grad_enabled(grad):
        assert make().to("meta")(torch.empty(3, D_MODEL, device="meta")).shape == (3, D_MODEL)


# Training on a GPU
def train(backend: str, deterministic: bool = False, device: str = "cuda") -> tuple[torch.Tensor, nn.Module]:
    """Losses of 200 steps, and the model: fp32 weights, 16-bit computation, a function of another network to be
    learned. Scores and gates are far from the flat spots of their functions."""
    torch.manual_seed(2)
    how = {"backend": backend, "deterministic": deterministic}
    model = nn.ModuleList(randomised(flashmhf.FlashMHF(128, 2, 3, 80, **how)) for _ in range(2)).to(device)
    teacher = randomised(flashmhf.SwiGLU(128, 256)).to(device).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    losses = torch.empty(200, device=device)
    for step in range(200):
        y = x = torch.randn(7, 73, 128).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            for network in model:
                y = y + network(nn.functional.rms_norm(y, y.shape[-1:]))
            loss = nn.functional.mse_loss(y.float(), x + 2 * teacher(x).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    return losses, model


def test_loss_curve_is_that_of_the_eager_back_end(gpu_backend):
    """Step by step within 1 %, though rounding differs in every product of every step."""
    ours, _ = train(gpu_backend)
    eager, _ = train("eager")
    assert eager[-1] < 0.65 * eager[0]
    assert ((ours - eager).abs() / eager).max() < 0.01


def test_deterministic_training_repeats_bitwise(gpu_backend):
    (first, model), (second, again) = (train(gpu_backend, deterministic=True) for _ in range(2))
    assert torch.equal(first, second)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
