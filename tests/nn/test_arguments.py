"""Arguments of modules: what constructors, calls, initialisation and state dicts refuse by name, and take."""

import itertools
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nested import nested_tensor as nested

import flashmhf
from flashmhf import convert
from flashmhf.nn.init import OfficialInit

FLASH = {"d_model": 48, "num_heads": 3, "num_subnets": 2, "subnet_dim": 16}
MAKERS = {
    "FlashMHF": partial(flashmhf.FlashMHF, **FLASH),
    "MHFFN": partial(flashmhf.MHFFN, d_model=48, num_heads=3, intermediate_dim=16),
    "DenseMoE": partial(flashmhf.DenseMoE, d_model=48, num_subnets=3, subnet_dim=16),
    "SwiGLU": partial(flashmhf.SwiGLU, d_model=48, intermediate_dim=16),
    "ParametricKV": partial(flashmhf.ParametricKV, d_model=48, num_heads=3, num_kv=16),
}
SIZES = [(name, size) for name, maker in MAKERS.items() for size in maker.keywords]
EVERY = " ".join(MAKERS)
MULTIHEAD = "FlashMHF MHFFN"


@pytest.mark.parametrize(("makers", "arguments", "exception", "message"), [
    (MULTIHEAD, {"backend": "tritn"}, ValueError,
     "backend is 'tritn'; supported: 'auto', 'hopper', 'triton', 'eager', 'reference'"),
    (MULTIHEAD, {"backend": None}, TypeError, "backend must be a str, got NoneType"),
    (MULTIHEAD, {"deterministic": 1}, TypeError, "deterministic must be a bool or None, got int"),
    (f"{MULTIHEAD} SwiGLU ParametricKV", {"bias": "no"}, TypeError, "bias must be a bool, got str"),
    (f"{MULTIHEAD} ParametricKV", {"d_model": 50}, ValueError, "d_model is 50; it must be a multiple of num_heads = 3"),
    *((name, {size: 0}, ValueError, f"{size} is 0; it must be at least 1") for name, size in SIZES),
    *((name, {size: 1.5}, TypeError, f"{size} must be an int, got float") for name, size in SIZES),
    *(
        (name, {"d_model": size}, TypeError, f"d_model must be an int, got {type(size).__name__}")
        for name in MAKERS
        for size in (48.0, np.float64(48), True, np.bool_(True), "48")
    ),
    (MULTIHEAD, {"num_kv_heads": 4}, ValueError, "num_kv_heads is 4; it must divide num_heads = 3"),
    (MULTIHEAD, {"activation": "tanh"}, ValueError, "activation is 'tanh'; supported: 'silu'"),
    (MULTIHEAD, {"skip_linear": True, "bias": True}, ValueError, "bias is True; .* skip_linear=True leaves out"),
    (EVERY, {"dtype": "bfloat16"}, TypeError, "dtype must be a torch.dtype or None, got str"),
    (EVERY, {"dtype": torch.int8}, TypeError, "dtype is int8; supported: bfloat16"),
    *(
        (makers, {name: value}, exception, f"{name} {message}")
        for makers, name in (("FlashMHF DenseMoE", "router_eps"), ("FlashMHF", "q_norm_eps"))
        for value, exception, message in (
            (-1e-20, ValueError, "is -1e-20; supported: finite numbers from 0"),
            (math.nan, ValueError, "is nan; supported"),
            (math.inf, ValueError, "is inf; supported"),
            ("1e-20", TypeError, "must be a float, got str"),
            (True, TypeError, "must be a float, got bool"),
            (None, TypeError, "must be a float, got NoneType"),
        )
    ),
])  # fmt: skip
def test_constructors_refuse(makers, arguments, exception, message):
    for name in makers.split():
        with pytest.raises(exception, match=message):
            MAKERS[name](**arguments)


@pytest.mark.parametrize(("call", "exception", "message"), [
    (lambda: flashmhf.param_groups(nn.Linear(2, 2).parameters(), 1e-3, 0.1), TypeError,
     "model must be a .*Module, got generator"),
    (lambda: flashmhf.param_groups(nn.Linear(2, 2), "1e-3", 0.1), TypeError, "lr must be a float, got str"),
    (lambda: flashmhf.param_groups(nn.Linear(2, 2), 1e-3, -0.1), ValueError, "weight_decay is -0.1"),
    (lambda: flashmhf.Muon([], lr="1e-3"), TypeError, "lr must be a float, got str"),
    (lambda: OfficialInit(k=-1.0), ValueError, "k is -1.0; supported: finite numbers from 0"),
    (lambda: OfficialInit(identity=1), TypeError, "identity must be a bool, got int"),
    (lambda: flashmhf.distributed.parallelize(nn.Linear(2, 2), "tp"), TypeError,
     "mesh must be a .*DeviceMesh, got str"),
    (lambda: flashmhf.distributed.Rank("0", 2), TypeError, "index must be an int, got str"),
    (lambda: flashmhf.distributed.Rank(0, 2.0), TypeError, "size must be an int, got float"),
    (lambda: flashmhf.distributed.shard(flashmhf.FlashMHF(**FLASH), 1), TypeError, "rank must be a Rank, got int"),
    *((partial(call, size), error, name)
      for call, name in ((flashmhf.nn.default_subnet_dim, "head_dim"), (flashmhf.distributed.shard_placement, "size"))
      for size, error in ((0, ValueError), (-5, ValueError), (1.5, TypeError), ("64", TypeError))),
])  # fmt: skip
def test_functions_refuse(call, exception, message):
    with pytest.raises(exception, match=message):
        call()


@pytest.mark.parametrize("name", MAKERS)
def test_the_initialisation_is_checked(name):
    for argument, value, exception, message in (
        ("init", 1, TypeError, "init must be a str, got int"),
        ("init", "xavier", ValueError, "init is 'xavier'"),
        *(("num_layers", n, TypeError if n == "a" else ValueError, "num_layers") for n in (0, -1, "a")),
        *(("initializer_range", std, ValueError, "initializer_range") for std in (-1.0, math.nan)),
    ):
        with pytest.raises(exception, match=message):
            MAKERS[name]().reset_parameters(**{argument: value})


@pytest.mark.parametrize("name", MAKERS)
def test_integers_of_other_libraries_are_sizes(name):
    sizes, kinds = MAKERS[name].keywords, itertools.cycle((np.int64, torch.tensor, np.int32, np.uint8))
    module = MAKERS[name](
        **{argument: kind(size) for (argument, size), kind in zip(sizes.items(), kinds, strict=False)}
    )
    for argument, size in sizes.items():
        assert type(getattr(module, argument)) is int and getattr(module, argument) == size
    module.load_state_dict(MAKERS[name]().state_dict())


FLOATS, DENSE = "supported: bfloat16, float16, float32, float64", "supported: dense tensors"
INPUTS = {  # what is given for x, and the error; of every module, whatever it does with x
    "width": (lambda x: x[:, 1:], ValueError, r"x has shape \[3, 47\]; expected"),
    "half": (lambda x: x.bfloat16(), TypeError, "x has dtype bfloat16; supported: float32, the module's dtype"),
    "double": (lambda x: x.double(), TypeError, "x has dtype float64; supported: float32"),
    "integers": (lambda x: x.long(), TypeError, f"x has dtype int64; {FLOATS}"),
    "complex": (lambda x: x.to(torch.complex64), TypeError, f"x has dtype complex64; {FLOATS}"),
    "device": (lambda x: x.to("meta"), ValueError, "x is on meta but the module is on cpu"),
    "array": (lambda x: x.numpy(), TypeError, "x must be a torch.Tensor, got ndarray"),
    "list": (lambda x: x.tolist(), TypeError, "x must be a torch.Tensor, got list"),
    "sparse": (lambda x: x.to_sparse(), TypeError, "x has layout torch.sparse_coo; supported: torch.strided"),
    "jagged": (lambda x: nested([x[:2], x[2:]], layout=torch.jagged), TypeError, f"x is a nested tensor; {DENSE}"),
    "nested": (lambda x: nested([x[:2], x[2:]]), TypeError, f"x is a nested tensor; {DENSE}"),
}
CALLED = MAKERS | {
    "bare": partial(flashmhf.FlashMHF, **FLASH, skip_linear=True),
    "fp8": lambda: flashmhf.quantize.to_fp8(flashmhf.FlashMHF(**FLASH)),
}
BY_THE_OPERATOR = ("half", "double", "device")  # an FP8 network leaves these to its operator, which names in_w


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "given"), [(n, g) for n in CALLED for g in INPUTS if n != "fp8" or g not in BY_THE_OPERATOR]
)
def test_a_wrong_input_is_refused_by_name(name, given):
    module, x = CALLED[name](), torch.randn(3, 48)
    spoil, error, message = INPUTS[given]
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(error, match=message):
            module(spoil(x))
    assert module(x).shape == x.shape


# The official layout
def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize("shape", [(1,), (1, 1), "whole"], ids=str)
@pytest.mark.parametrize("part", ["in_proj.bias", "out_proj.bias", "q_norm.weight"])
@pytest.mark.parametrize("settings", [{}, {"recompute_q": True}], ids=["", "recompute_q"])
def test_a_weight_that_would_be_broadcast_is_refused_in_training_and_inference(settings, part, shape):
    module = flashmhf.FlashMHF(48, 3, 2, 16, q_norm=True, bias=True, **settings)
    owner, name = module.get_submodule(part.partition(".")[0]), part.partition(".")[2]
    whole = tuple(getattr(owner, name).shape)
    shape = (1, *whole) if shape == "whole" else shape
    setattr(owner, name, nn.Parameter(torch.ones(shape)))
    for grad in (True, False):
        found = re.escape(f"has shape {list(shape)}; expected {list(whole)}")
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"(bias|q_norm).* {found}"):
            module(torch.randn(5, 48))


@pytest.mark.parametrize(("change", "sizes", "exception", "message"), [
    (lambda s: s | {"gate_weight": s["gate_weight"][0]}, (3, 2), ValueError,
     r"gate_weight has shape \[48\]; expected \[d_ff, H_kv d_h\]"),
    (lambda s: s | {"up_weight": s["up_weight"][:16]}, (3, 2), ValueError,
     r"up_weight has shape \[16, 48\]; expected \[32, 48\] \(gate",),
    (without("router"), (3, 2), KeyError, r"missing from the official state dict: \['router'\]"),
    (without("w_self.weight"), (3, 2), KeyError, "w_self.weight"),
    (lambda s: s | {"extra": torch.ones(1)}, (3, 2), ValueError, "unknown names .*extra"),
    (lambda s: s, (3, 2, 2), ValueError, "num_kv_heads is 2; it must divide num_heads = 3"),
    (lambda s: s, (3, 7), ValueError, "num_subnets = 7"),
    (lambda s: s, (3, 0), ValueError, "num_subnets"),
    (lambda s: [], (3, 2), TypeError, "state must be a mapping of names to tensors, got list"),
])  # fmt: skip
def test_what_does_not_convert_from_the_official_layout(change, sizes, exception, message):
    official = convert.to_official(flashmhf.FlashMHF(**FLASH).state_dict())
    with pytest.raises(exception, match=message):
        convert.from_official(change(official), *sizes[:2], num_kv_heads=sizes[2] if sizes[2:] else None)
    assert convert.from_official(official, np.int64(3), np.int64(2))["k"].shape == (3, 2, 16, 16)
