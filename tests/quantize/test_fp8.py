"""flashmhf.quantize: packing, the FP8 operators against float64, modules and whole networks, refusals."""

import copy
import math
from functools import partial

import pytest
import torch
from targets import doubled
from torch import Tensor, nn
from torch.nn.functional import linear

import flashmhf
from flashmhf import backends, quantize, reference, testing
from flashmhf.backends.contract import Router
from flashmhf.backends.eager import fp8 as eager
from flashmhf.backends.fp8_layout import E4M3, permutation, to_e4m3
from flashmhf.distributed import Rank, shard
from flashmhf.testing import SMALL, poisoned_memory, relative_l2

EXACT_FACTOR = 1.05  # of the error that the quantisation points alone cause
KERNEL_DISTANCE = 1.2e-2  # from exact sums of the same quantised operands: fp16 roundings
ONE_SIGN = 1.2e-2


def problem(tokens=200, heads=2, subnets=3, subnet_dim=80, head_dim=64, *, group=1, dtype=torch.bfloat16, device="cpu"):
    """(q, k, u, v, r)."""
    p = testing.problem(tokens, heads, head_dim, subnets, subnet_dim, dtype, num_kv_heads=heads // group)
    return tuple(x.to(device) for x in (*p.operands, p.r))


def exact(q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None) -> Tensor:
    return reference.forward(*(None if x is None else x.double() for x in (q, k, u, v, r)))


def assert_as_its_points(actual: Tensor, q: Tensor, k: Tensor, u: Tensor, v: Tensor, r: Tensor | None) -> None:
    """No more error than 1.05 of what the quantisation points cause with exact sums, in float64."""
    truth = exact(q, k, u, v, r)
    points = eager._forward(q, *quantize.pack_fp8(k, u, v).tensors, None if r is None else r.double(), torch.float64)
    assert torch.isfinite(actual).all()
    assert relative_l2(actual, truth) <= EXACT_FACTOR * relative_l2(points, truth)
    assert relative_l2(actual, points) <= KERNEL_DISTANCE * (3 if actual.numel() < SMALL else 1)


def test_the_rule_rejects_wrong_kernels():
    q, k, u, v, r = problem()
    packed = quantize.pack_fp8(k, u, v)
    good = quantize.forward(q, packed, r)
    assert_as_its_points(good, q, k, u, v, r)
    wrong = {
        "a gate of the wrong sub-network": quantize.forward(q, packed, r.roll(1, -1)),
        "a lost sub-network": quantize.forward(q, packed, r * torch.tensor([1.0, 1.0, 0.0])),
        "a biased sum": good * 0.97, "a swapped column": good[..., permutation(64)],
        "a token that nobody wrote": torch.cat([good[:-1], torch.full_like(good[:1], math.nan)]),
    }  # fmt: skip
    for name, bad in wrong.items():
        with pytest.raises(AssertionError):
            assert_as_its_points(bad, q, k, u, v, r)
            pytest.fail(f"passed: {name}")


def test_packing_and_unpacking():
    _, k, u, v, _ = problem(dtype=torch.float32)
    packed = quantize.pack_fp8(k, u, v)
    assert packed.k8.dtype == packed.v8.dtype == E4M3
    assert packed.v8.shape == (2, 3, 64, 80)
    assert packed.scales.shape == (3, 2, 3)
    for weight, unpacked in zip((k, u, v), quantize.unpack(packed), strict=True):
        assert relative_l2(unpacked, weight.double()) < 0.03
    assert torch.equal(packed.scales[0], packed.scales[0, :, :1].expand(2, 3))
    for weight in (packed.k8, packed.u8):
        assert weight.float().norm(dim=-1).max() <= 181
    place = permutation(16).tolist()
    assert place[:4] == [0, 1, 8, 9] and sorted(place) == list(range(16))
    plain = to_e4m3(k / packed.scales[0][..., None, None]).float()
    assert torch.equal(packed.k8.float(), plain[..., permutation(64)])
    # an outlier of 50 standard deviations keeps the others' bits, unless one product would leave fp16
    v[0, 0, 0, 0] = 50 * v.std()
    _, _, unpacked = quantize.unpack(quantize.pack_fp8(k, u, v))
    assert quantize.pack_fp8(k, u, 9 * v).v8.float().abs().max() <= 50.1
    v[0, 0, 0, 0] *= 4
    assert quantize.pack_fp8(k, u, v).v8.float().abs().max() <= 112
    rest = torch.ones_like(v, dtype=torch.bool)
    rest[0, 0, 0, 0] = False
    assert relative_l2(unpacked[rest], v[rest].double()) < 0.03


@pytest.mark.parametrize("head_dim, subnet_dim, group", [(64, 80, 1), (96, 48, 2), (128, 384, 1), (256, 16, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["r", "ones", "w"])
def test_error(device, head_dim, subnet_dim, group, dtype, gate):
    for tokens in (1, 77, 300):
        q, k, u, v, r = problem(tokens, 2 * group, 5, subnet_dim, head_dim, group=group, dtype=dtype, device=device)
        packed = quantize.pack_fp8(k, u, v)
        if gate == "w":
            w = torch.randn(2 * group, head_dim, 5, generator=torch.Generator().manual_seed(7)) * head_dim**-0.5
            w = w.to(device)
            r, out = flashmhf.gate(q, w), torch.ops.flashmhf.fp8_gated_forward(q, *packed.tensors, w, 1e-20)
        else:
            r = r if gate == "r" else None
            out = quantize.forward(q, packed, r)
        assert out.dtype == dtype and out.shape == q.shape
        assert_as_its_points(out, q, k, u, v, r)


def test_magnitudes_outliers_and_strides(device):
    q, k, u, v, r = problem(device=device)
    packed = quantize.pack_fp8(k, u, v)
    outliers = q.clone()
    outliers[..., 5] *= 20
    for x in (q * 1e-6, q * 1e4, outliers):
        assert_as_its_points(quantize.forward(x, packed, r), x, k, u, v, r)
    strided = torch.stack([q, q], 1).transpose(0, 1)  # [2, T, H, d_h], tokens at another stride
    out = quantize.forward(strided, packed, torch.stack([r, r]))
    torch.testing.assert_close(out[1], quantize.forward(q, packed, r), atol=0, rtol=0 if device == "cpu" else 2e-2)
    q, k, _, v, r = problem(300, 2, 22, 384, 128, device=device)
    v = v.abs()  # sums of one sign
    assert relative_l2(quantize.forward(q, quantize.pack_fp8(k, k, v), r), exact(q, k, k, v, r)) <= ONE_SIGN


def test_values_that_are_not_finite_stay_in_their_rows(device):
    q, k, u, v, r = problem(device=device)
    q[3, 1, 0], q[5, 0, 2], q[9] = math.nan, math.inf, 0
    out = quantize.forward(q, quantize.pack_fp8(k, u, v), r)
    assert out[3, 1].isnan().all() and not out[5, 0].isfinite().all() and (out[9] == 0).all()
    finite = torch.ones(200, 2, dtype=torch.bool, device=device)
    finite[3, 1] = finite[5, 0] = False
    assert out[finite].isfinite().all()


def test_weights_that_are_not_finite_leave_the_outputs_finite_that_the_definition_leaves():
    """A scale that had them made every output of the head NaN; a column of V concerns one column of the output."""
    for name, value in (("k", math.nan), ("k", math.inf), ("u", -math.inf), ("v", math.nan), ("v", math.inf)):
        q, *kuv, r = problem()
        weights = dict(zip("kuv", kuv, strict=True))
        weights[name][1, 2, 5, 7] = value
        truth = exact(q, **weights, r=r)
        out = quantize.forward(q, quantize.pack_fp8(**weights), r)
        finite = out.isfinite()
        assert torch.equal(finite, truth.isfinite()), (name, value)
        assert relative_l2(out.where(finite, 0), truth.where(finite, 0)) < 0.08, (name, value)


def test_what_a_subclass_computes_is_not_lost():
    with pytest.raises(NotImplementedError, match="network is a Doubled with a forward of its own"):
        quantize.quantize_(nn.Sequential(doubled(flashmhf.FlashMHF)(128, 2, 3, 32)))
    for name in ("split_heads", "normalise", "_run_networks", "join_heads"):
        kind = type("Halved", (flashmhf.FlashMHF,), {name: lambda self, x: x / 2})
        with pytest.raises(NotImplementedError, match=f"network is a Halved with a {name} of its own"):
            quantize.to_fp8(kind(128, 2, 3, 32))
        patched = flashmhf.FlashMHF(128, 2, 3, 32)
        setattr(patched, name, lambda x: x / 2)
        with pytest.raises(NotImplementedError, match=f"network is a FlashMHF with a {name} of its own"):
            quantize.to_fp8(patched)
    divided = shard(flashmhf.FlashMHF(128, 2, 3, 32), Rank(0, 2, all_reduce=lambda x: x))  # a hook sums over the ranks
    with pytest.raises(NotImplementedError, match="network has forward hooks"):
        quantize.to_fp8(divided)
    network, x = flashmhf.FlashMHF(128, 2, 3, 32), torch.randn(5, 128)
    adapted = copy.deepcopy(network)
    adapted.out_proj = doubled(nn.Linear)(128, 128, bias=False)
    adapted.out_proj.weight = network.out_proj.weight
    with torch.no_grad():
        served = quantize.to_fp8(adapted)
        assert relative_l2(served(x), adapted(x).double()) < 0.075


@pytest.mark.parametrize("assign", [False, True])
def test_states_of_other_kinds_are_refused(assign):
    served = nn.Sequential(quantize.to_fp8(flashmhf.FlashMHF(128, 2, 3, 32)))
    state = served.state_dict()
    for name, value, error, message in (
        ("k8", state["0.k8"].float(), TypeError, "0.k8 has dtype float32; supported: float"),  # copy_ would round it
        ("scales", state["0.scales"].bfloat16(), TypeError, "0.scales has dtype bfloat16; supported: float"),
        ("layout", torch.full_like(state["0.layout"], 9), ValueError, "layout is"),
        ("layout", 1, TypeError, "layout must be a torch.Tensor, got int"),
    ):
        with pytest.raises(error, match=message):
            served.load_state_dict({**state, f"0.{name}": value}, assign=assign, strict=False)


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.register_forward_hook(lambda *_: None), "forward hooks"),
    (lambda m: m.register_full_backward_hook(lambda *_: None), "backward hooks"),
    (lambda m: m.register_state_dict_post_hook(lambda *_: None), "state dict hooks"),
    (lambda m: m.register_state_dict_pre_hook(lambda *_: None), "state dict pre hooks"),
    (lambda m: m.register_load_state_dict_pre_hook(lambda *_: None), "load state dict pre hooks"),
    (lambda m: m.register_load_state_dict_post_hook(lambda *_: None), "load state dict post hooks"),
    (lambda m: m.register_buffer("step", torch.zeros(1)), "network holds step"),
    (lambda m: m.add_module("probe", nn.Linear(128, 1)), "network holds probe"),
    (lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))), "network holds scale"),
    (lambda m: m.compile(), "network is compiled"),
    (lambda m: m.k.register_hook(lambda grad: grad), "k has backward hooks"),
    (lambda m: m.v.register_post_accumulate_grad_hook(lambda _: None), "v has post accumulate grad hooks"),
    (lambda m: setattr(m.u, "weight_loader", print), "u has weight_loader"),
])  # fmt: skip
def test_what_packing_would_lose_is_refused_by_name(change, message):
    model = nn.Sequential(flashmhf.FlashMHF(128, 2, 3, 32))
    change(network := model[0])
    with pytest.raises(NotImplementedError, match=message):
        quantize.quantize_(model)
    assert model[0] is network


def test_a_network_that_torch_compile_has_wrapped_is_refused():
    """What it compiled would go on running in 16 bits."""
    model = nn.Sequential(torch.compile(flashmhf.FlashMHF(128, 2, 3, 32), backend="eager"))
    with pytest.raises(
        ValueError, match=r"0._orig_mod is within torch.compile's module, .*; supported: compiled after"
    ):
        quantize.quantize_(model)
    assert isinstance(model[0]._orig_mod, flashmhf.FlashMHF)


@pytest.mark.parametrize("assign", [False, True])
def test_a_hook_may_upgrade_an_older_state(assign):
    served, other = (quantize.to_fp8(flashmhf.FlashMHF(128, 2, 3, 32)) for _ in range(2))
    old = other.state_dict() | {"layout": torch.zeros(1, dtype=torch.uint8), "k8": other.k8.view(torch.uint8)}

    def upgrade(module, state, prefix, *_):
        state.update(layout=other.layout, k8=state["k8"].view(E4M3))

    served.register_load_state_dict_pre_hook(upgrade)
    served.load_state_dict(old, assign=assign)
    x = torch.randn(5, 128)
    assert torch.equal(served(x), other(x))


def test_states_and_dtypes_of_modules():
    network = flashmhf.FlashMHF(128, 2, 3, 80, q_norm=True, bias=True, dtype=torch.bfloat16)
    x, before = torch.randn(4, 50, 128, dtype=torch.bfloat16), copy.deepcopy(network.state_dict())
    with torch.no_grad():
        served = quantize.to_fp8(network)
        other = quantize.to_fp8(flashmhf.FlashMHF(128, 2, 3, 80, q_norm=True, bias=True, dtype=torch.bfloat16))
        other.load_state_dict(served.state_dict())
        assert torch.equal(other(x), served(x))
        halved = copy.deepcopy(served).half()
        assert halved.k8.dtype == E4M3 and halved.router.dtype == torch.float16
        assert halved.scales.dtype == torch.float32
        truth = copy.deepcopy(network).double()(x.double())
        assert relative_l2(served(x), truth) < 0.075 and relative_l2(halved(x.half()), truth) < 0.075
        for tensor in served.state_dict().values():
            tensor.zero_()
    assert network.training and network.in_proj.training and all(each.requires_grad for each in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_settings_and_attributes_stay():
    for settings in (
        {"backend": "eager", "deterministic": True, "router_eps": 0.5},
        {"backend": "triton", "num_kv_heads": 1, "skip_linear": True},
    ):
        network = flashmhf.FlashMHF(128, 2, 3, 80, **settings)
        network.layer_idx = 3
        served = quantize.to_fp8(network)
        for each in (served, copy.deepcopy(served), copy.deepcopy(network)):
            for name in "d_model num_heads head_dim num_kv_heads num_subnets subnet_dim activation layer_idx".split():
                assert getattr(each, name) == getattr(network, name), name
            assert {name: getattr(each, name) for name in settings} == settings


def test_quantize_a_model():
    shared = flashmhf.FlashMHF(128, 2, 3, 80)
    model = nn.Sequential(nn.Linear(128, 128), shared, nn.Sequential(flashmhf.FlashMHF(128, 1, 2, 64)), shared)
    x = torch.randn(10, 128)
    with torch.no_grad():
        truth = copy.deepcopy(model[:3]).double()(x.double())
        assert quantize.quantize_(model) == ["1", "2.0", "3"]
        assert relative_l2(model[:3](x), truth) < 0.15
        assert isinstance(model[1], quantize.Fp8FlashMHF)
        assert model[1] is model[3]
        assert model(x[:0].view(3, 0, 128)).shape == (3, 0, 128)
    bytes_before = 3 * 2 * 3 * 80 * 64 * 2  # of K, U and V in bf16
    packed = model[1].packed
    assert sum(x.numel() * x.element_size() for x in packed.tensors) < 0.51 * bytes_before


def test_compile(device):
    q, k, u, v, r = problem(device=device)
    packed = quantize.pack_fp8(k, u, v)
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(lambda q, r: quantize.forward(q, packed, r) * 2, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(q, r), quantize.forward(q, packed, r) * 2)
    # The other checks add e4m3 tensors, which PyTorch cannot.
    torch.library.opcheck(torch.ops.flashmhf.fp8_forward, (q, *packed.tensors, r), test_utils=("test_faketensor",))


@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_the_kernel_gives_equal_bits_each_time(needs_hopper, tokens):
    q, k, u, v, r = problem(tokens, 4, 5, 384, 128, device="cuda")
    packed = quantize.pack_fp8(k, u, v)
    first = quantize.forward(q, packed, r, backend="hopper")
    assert all(torch.equal(first, quantize.forward(q, packed, r, backend="hopper")) for _ in range(20))


def test_empty_leading_dimensions_and_autocast():
    q, k, u, v, r = problem(24)
    packed = quantize.pack_fp8(k, u, v)
    assert quantize.forward(q[:0], packed, r[:0]).shape == (0, 2, 64)
    shaped = quantize.forward(q.view(2, 3, 4, 2, 64), packed, r.view(2, 3, 4, 2, 3))
    assert torch.equal(shaped.view(24, 2, 64), quantize.forward(q, packed, r))
    with torch.autocast("cpu", torch.bfloat16):
        assert quantize.forward(q.float(), packed, r).dtype == torch.bfloat16


def test_refusals():
    q, k, u, v, r = problem()
    packed = quantize.pack_fp8(k, u, v)
    k8, u8, v8, scales = packed.tensors
    op = torch.ops.flashmhf.fp8_forward
    narrow = [x[:, :, :20].contiguous() for x in (k, u, v)]
    gelu = flashmhf.FlashMHF(64, 1, 1, 16, activation="gelu")
    wrong = quantize.PackedWeights(*packed.tensors, layout=2)
    for error, message, call, *given in (
        (TypeError, "k must be a torch.Tensor", quantize.pack_fp8, None, u, v),
        (ValueError, "multiples of 16, d_e is 20", quantize.pack_fp8, *narrow),
        (TypeError, "packed must be a flashmhf.quantize.PackedWeights", quantize.forward, q, (k, u, v)),
        (ValueError, "packed has layout 2; supported: 1", quantize.forward, q, wrong),
        (TypeError, "dtype is torch.int32; supported: bfloat16", quantize.unpack, packed, torch.int32),
        (TypeError, "backend must be a str, got NoneType", partial(quantize.forward, backend=None), q, packed, r),
        (TypeError, "k8 has dtype bfloat16; supported: float8_e4m3fn", op, q, k, u8, v8, scales),
        (ValueError, r"v8 has shape .*expected \[2, 3, 64, 80\]", op, q, k8, u8, k8, scales),
        (ValueError, r"scales has shape .*expected \[3, 2, 3\]", op, q, k8, u8, v8, scales[:2].contiguous()),
        (TypeError, "scales has dtype float64", op, q, k8, u8, v8, scales.double()),
        (ValueError, r"q has shape .*H a multiple of H_kv = 2", op, q[:, :1], k8, u8, v8, scales),
        (TypeError, "q has dtype int32", op, q.int(), k8, u8, v8, scales),
        (NotImplementedError, "backend='hopper' cannot run: device is cpu", partial(op, backend="hopper"), q,
         *packed.tensors),
        (NotImplementedError, "an input requires a gradient", quantize.forward, q.clone().requires_grad_(), packed),
        (TypeError, "network must be a flashmhf.FlashMHF, got Linear", quantize.to_fp8, nn.Linear(2, 2)),
        (ValueError, "activation is 'gelu'", quantize.Fp8FlashMHF, gelu),
        (ValueError, "backend is 'reference'; supported: 'auto', 'hopper', 'triton', 'eager'", quantize.to_fp8,
         flashmhf.FlashMHF(64, 1, 1, 16, backend="reference")),
        (ValueError, "model holds no FlashMHF", quantize.quantize_, nn.Sequential(nn.Linear(2, 2))),
        (ValueError, r"supported: to_fp8\(model\)", quantize.quantize_, gelu),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call(*given)
    assert backends.select("auto", q.device, q.dtype, 64, 80, fp8=True) is eager


# The network as one operator
def network(device="cpu", dtype=torch.bfloat16, d_model=256, heads=2, **options) -> flashmhf.FlashMHF:
    torch.manual_seed(1)
    module = flashmhf.FlashMHF(d_model, heads, 3, 80, device=device, dtype=dtype, **options).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if name.startswith("q_norm") else 0.0, parameter.shape[-1] ** -0.5)
    return module


def defined(served: quantize.Fp8FlashMHF, x: Tensor) -> Tensor:
    """What the network is: its parts by the definitions in PyTorch."""
    ends = [each if each is None else (each.weight, each.bias) for each in (served.in_proj, served.out_proj)]
    q = (x if ends[0] is None else linear(x, *ends[0])).unflatten(-1, (served.num_heads, served.head_dim))
    if served.q_norm is not None:
        q = reference.normalise_heads(q, served.q_norm.weight, served.q_norm.eps)
    mixed = eager.forward(q, *served.packed.tensors, Router(served.router, served.router_eps))
    return mixed.flatten(-2) if ends[1] is None else linear(mixed.flatten(-2), *ends[1])


@pytest.mark.parametrize(
    "options", [{}, {"skip_linear": True}, {"q_norm": True}, {"num_kv_heads": 1, "q_norm": True, "bias": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_module_values(device, options, dtype):
    plain = network(device, dtype, **options)
    served = quantize.to_fp8(plain)
    with torch.no_grad():
        for tokens in (7, 129) if device == "cpu" else (1, 7, 64, 100, 128, 129, 300, 1100):
            x = torch.randn(tokens, 256, device=device).to(dtype)
            with poisoned_memory():
                actual = served(x)
            expected = defined(served, x)
            assert actual.shape == x.shape and actual.dtype == dtype and relative_l2(actual, expected.double()) < 4e-2
            truth = copy.deepcopy(plain).double()
            truth.backend = "eager"
            truth = truth(x.double())
            assert relative_l2(actual, truth) <= 1.05 * relative_l2(expected, truth)


@pytest.mark.parametrize("tokens", [3, 100, 300])
def test_the_module_is_one_operator_of_the_library(needs_hopper, monkeypatch, tokens):
    """Called and compiled: the same kernels and bits. By its parts: other products, nearly the same values."""
    served = quantize.to_fp8(network("cuda", d_model=512, heads=4, q_norm=False))
    x = torch.randn(2, tokens, 512, device="cuda", dtype=torch.bfloat16)
    calls, module = [], backends.FP8_BACKENDS["hopper"]
    whole = module.layer
    monkeypatch.setattr(module, "layer", lambda *args: calls.append(whole(*args)) or calls[-1])
    with torch.no_grad():
        actual = served(x)
        assert len(calls) == 1 and calls[0] is actual
        assert relative_l2(served.join_heads(served._run_networks(served.query(x))), actual.double()) < 4e-2
        compiled = torch.compile(served, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(x), actual) and torch.equal(compiled(x[:1]), served(x[:1]))
        assert len(calls) == 4


def test_layouts_and_odd_sizes(device):
    """Views, one token without leading dimensions, d_model that no kernel takes, none at all."""
    served, odd = (quantize.to_fp8(network(device, d_model=size)) for size in (256, 192))
    narrow = quantize.to_fp8(flashmhf.FlashMHF(48, 1, 2, 16, device=device, dtype=torch.bfloat16))
    wide = torch.randn(5, 3, 264, device=device).bfloat16()
    with torch.no_grad():
        cut = wide[..., :256]
        for x in (cut, cut.transpose(0, 1), wide[..., 3:259], cut[0, 0], wide[:, :1, 8:]):
            assert relative_l2(served(x), served(x.contiguous()).double()) < 1e-2
            assert served(x).shape == x.shape
        for module, size in ((odd, 192), (narrow, 48)):
            for tokens in (5, 150):
                x = torch.randn(tokens, size, device=device).bfloat16()
                assert relative_l2(module(x), defined(module, x).double()) < 3e-2
        assert served(cut[:0]).shape == (0, 3, 256)
    # The other checks add e4m3 tensors, which PyTorch cannot.
    ends = (odd.in_proj.weight, None), (odd.out_proj.weight, None)
    args = (cut[0, :, :192], *ends[0], *odd.packed.tensors, odd.router, 1e-20, *ends[1])
    torch.library.opcheck(torch.ops.flashmhf.fp8_layer, args, test_utils=("test_faketensor",))


def test_refusals_of_the_whole_network():
    """The ends and q_norm are checked as in the 16-bit operator, tests/ops/test_layer.py, packed weights as above."""
    served = quantize.to_fp8(network())
    k8, u8, v8, scales = served.packed.tensors
    zeros, plain = torch.zeros(2, 256).bfloat16(), torch.zeros(256, 256).bfloat16()

    def whole(x=zeros, k8=k8, w=served.router, out_w=plain, in_w=plain):
        return torch.ops.flashmhf.fp8_layer(x, in_w, None, k8, u8, v8, scales, w, 1e-20, out_w, None)

    with pytest.raises(NotImplementedError, match="an input requires a gradient"):
        served(zeros.clone().requires_grad_())
    for error, message, changed in (
        (ValueError, r"x has shape \[2, 64\]", {"x": zeros[:, :64].contiguous()}),
        (ValueError, r"w has shape \[2, 128, 2\]", {"w": served.router[..., :2].contiguous()}),
        (ValueError, r"out_w has shape", {"out_w": plain[:, :128]}),
        (TypeError, "x must be a torch.Tensor, got NoneType", {"x": None}),
        (TypeError, "in_w must be a torch.Tensor, got NoneType", {"x": zeros.to("meta"), "in_w": None}),
        (ValueError, r"k8 has shape \[\]; expected four dimensions", {"k8": k8.flatten()[0]}),
        (ValueError, "out_w is on meta but x is on cpu", {"out_w": plain.to("meta")}),
    ):
        with pytest.raises(error, match=message):
            whole(**changed)
