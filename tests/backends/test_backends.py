"""Selection of a back end, and what info says of it."""

import importlib.util
import inspect
import itertools
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import flashmhf
from flashmhf import backends
from flashmhf.backends import contract, driver, hopper, triton
from flashmhf.backends.triton import fp8 as fp8_triton
from flashmhf.testing import problem


@pytest.fixture
def uncached():
    """Selection without its cache before and after: these tests change what a back end says of itself."""
    caches = (backends.select, backends._warn_slow, hopper._load)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def small():
    p = problem(5, 2, 16, 2, 16, torch.float64)
    return (*p.operands, p.r)


def test_info():
    q, k, *_ = small()
    found, here = flashmhf.info(q, k), flashmhf.info()
    assert found.chosen == "eager" and found.reasons["eager"] is None and found.reasons["triton"]
    assert "device is cpu" in found.reasons["hopper"]
    assert "eager" in str(found) and "not usable" in str(found)
    assert here.reasons.keys() == {"hopper", "triton", "eager"}
    assert here.chosen is None
    assert here.details["torch"] == torch.__version__


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_explicit_back_end_that_cannot_run(backend):
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(NotImplementedError, match=f"backend='{backend}' cannot run: .*supported"):
            flashmhf.flash_mhf(*small(), backend=backend)
    flashmhf.flash_mhf(*small())


@pytest.mark.parametrize(("fp8", "modules"), [(False, backends.BACKENDS), (True, backends.FP8_BACKENDS)])
def test_auto_takes_the_first_that_can(monkeypatch, uncached, fp8, modules):
    reasons = {"hopper": None, "triton": None}
    monkeypatch.setattr(backends, "_warn_slow", lambda *args: None)  # asks the device
    for name in reasons:
        monkeypatch.setattr(modules[name], "why_not", lambda *a, _name=name, **k: reasons[_name])
    for blocked, expected in ((None, "hopper"), ("hopper", "triton"), ("triton", "eager")):
        if blocked:
            reasons[blocked] = "blocked"
        backends.select.cache_clear()
        chosen = backends.select("auto", torch.device("cuda"), torch.bfloat16, 64, 64, fp8=fp8)
        assert chosen is modules[expected]


@pytest.mark.parametrize(("capability", "triton_has", "message"), [
    ((9, 0), True, "this Hopper GPU does not get the hopper back end: "),
    ((9, 0), False, "this GPU gets the eager back end, plain PyTorch and slow: "),
    ((8, 0), False, "this GPU gets the eager back end, plain PyTorch and slow: "),
    ((8, 0), True, None),
])  # fmt: skip
def test_gpu_that_is_slower_than_its_owner_expects_warns_once_per_reason(
    monkeypatch, uncached, capability, triton_has, message
):
    device, reason = torch.device("cuda", 0), "no library"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for modules in (backends.BACKENDS, backends.FP8_BACKENDS):
        monkeypatch.setattr(modules["hopper"], "why_not", lambda *a, **k: reason)
        monkeypatch.setattr(modules["triton"], "why_not", lambda *a, **k: None if triton_has else "not here")

    def said(backend: str = "auto", fp8: bool = False) -> list[str]:
        backends.select.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backends.select(backend, device, torch.bfloat16, 128, 384, fp8=fp8)
        return [str(warning.message) for warning in caught]

    assert said(backend="eager") == []  # asked for
    for reason in ("no library", "another"):
        expected = [f"flashmhf: {message}{reason}{'' if triton_has else '; not here'}"] if message else []
        assert said() == expected and said() == said(fp8=True) == []


@pytest.mark.parametrize(("module", "device", "capability", "dtype", "sizes", "reason"), [
    (hopper, "cuda", (8, 0), torch.bfloat16, {}, "capability 8.0; supported: 9.0"),
    (hopper, "cuda", (10, 0), torch.bfloat16, {}, "capability 10.0; supported: 9.0"),
    (hopper, "cuda", (9, 0), torch.float32, {}, "dtype is float32; supported: bfloat16, float16"),
    (hopper, "cuda", (9, 0), torch.bfloat16, {"d_h": 80}, "d_h is 80; supported: 64, 96, 128, 256"),
    (hopper, "cuda", (9, 0), torch.bfloat16, {"d_e": 40}, "d_e is 40; supported: multiples of 16"),
    (hopper, "cuda", (9, 0), torch.bfloat16, {"activation": "gelu"},
     "supported: 'silu' (the triton and eager back ends have all)"),
    (triton, "meta", (9, 0), torch.float16, {}, "device is meta; supported: an NVIDIA GPU"),
    (triton, "cpu", (9, 0), torch.float16, {}, "device is cpu; supported"),
    (triton, "cuda", (9, 0), torch.float64, {}, "dtype is float64; supported: bfloat16, float16, float32"),
    (triton, "cuda", (9, 0), torch.float16, {"d_h": 48}, "d_h is 48; supported: 16, 32, 64, 96, 128, 192, 256"),
    (triton, "cuda", (9, 0), torch.float16, {"d_e": 24}, "d_e is 24; supported: multiples of 16"),
    (triton, "cuda", (7, 5), torch.float16, {}, "compute capability 7.5; supported: 8.0"),
    (triton, "cuda", (8, 0), torch.float16, {}, None),
    (fp8_triton, "cpu", (9, 0), torch.float16, {}, "device is cpu; supported"),
    (fp8_triton, "cuda", (8, 9), torch.float64, {}, "dtype is float64; supported"),
    (fp8_triton, "cuda", (8, 9), torch.bfloat16, {"d_h": 16}, "d_h is 16; supported: 32, 64"),
    (fp8_triton, "cuda", (8, 6), torch.bfloat16, {},
     "compute capability 8.6; supported for e4m3 products: 8.9 or later"),
    (fp8_triton, "cuda", (8, 9), torch.bfloat16, {}, None),
])  # fmt: skip
def test_why_not(monkeypatch, module, device, capability, dtype, sizes, reason):
    if module is not hopper:
        pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = module.why_not(torch.device(device), dtype, **{"d_h": 64, "d_e": 64} | sizes)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("cuda", "exists", "version", "driver_version", "reason"), [
    (None, False, None, 13000, "this PyTorch has no CUDA"),
    ("13.0", False, None, 13000, "installed without its CUDA library"),
    ("13.0", True, None, 0, "there is no NVIDIA driver"), ("13.0", True, None, 13000, "does not load"),
    ("13.0", True, "0.0.1", 13000, f"its CUDA library has version 0.0.1, the package has {flashmhf.__version__}"),
    ("13.0", True, "0", 12040, "driver supports CUDA 12.4 but the library was built with CUDA 13.0"),
    ("13.0", True, "0", 13000, None),
])  # fmt: skip
def test_why_the_library_is_not_usable(monkeypatch, tmp_path, uncached, cuda, exists, version, driver_version, reason):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(driver, "version", lambda: driver_version)
    monkeypatch.setattr(hopper, "LIBRARY", tmp_path / "library.so")
    if exists:
        hopper.LIBRARY.write_bytes(b"not a library")
    if version:
        monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
        monkeypatch.setattr(hopper.fakes, "register", lambda: None)
        monkeypatch.setattr(hopper, "build_info", lambda: {"version": version, "cuda_version": "13.0"})
    found = hopper.library()
    assert found is None if reason is None else reason in found


def test_threads_that_come_first_load_the_library_once(monkeypatch, uncached):
    def loaded() -> bool:
        calls.append(None)
        time.sleep(0.05)  # the others come meanwhile
        return False

    calls = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(hopper, "LIBRARY", SimpleNamespace(exists=loaded))
    monkeypatch.setattr(hopper, "NO_LIBRARY", SimpleNamespace(exists=lambda: False))
    with ThreadPoolExecutor(8) as pool:
        reasons = list(pool.map(lambda _: hopper.library(), range(8)))
    assert len(calls) == 1 and "was not built" in reasons[0] and reasons == reasons[:1] * 8


def machine(monkeypatch, *devices: tuple[str, tuple[int, int]]) -> None:
    """A machine with these CUDA devices (name, capability), the first of them current, and a library that loads."""
    index = lambda device: torch.device(device).index or 0  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: devices[index(device)][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices[index(device)][1])
    monkeypatch.setattr(hopper, "library", lambda: None)
    monkeypatch.setattr(hopper, "build_info", lambda: {"version": "0"})


def test_each_device_is_described_and_chosen_for_by_itself(monkeypatch, uncached):
    machine(monkeypatch, ("NVIDIA RTX A400", (8, 6)), ("NVIDIA H200", (9, 0)), ("NVIDIA T4", (7, 5)))
    found = flashmhf.info()
    assert found.details["device"] == "NVIDIA RTX A400" and "capability 8.6" in found.reasons["hopper"]
    assert "device: NVIDIA RTX A400" in str(found) and "hopper  not usable: device has" in str(found)
    assert "block shapes not timed on this GPU" in found.details["triton"] and "tune_triton" in str(found)
    assert triton.untimed(torch.device("cuda", 1)) is None
    chosen = [backends.select("auto", torch.device("cuda", i), torch.bfloat16, 128, 384) for i in range(3)]
    assert chosen[1] is hopper and hopper not in (chosen[0], chosen[2])


def test_an_amd_gpu_is_not_called_a_hopper_gpu(monkeypatch, uncached):
    machine(monkeypatch, ("AMD Instinct MI250X", (9, 0)))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(hopper, "library", lambda: "this PyTorch has no CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.select("auto", torch.device("cuda", 0), torch.bfloat16, 128, 384) is backends.eager


@pytest.mark.parametrize("protocol", [contract.Backend, contract.Fp8Backend])
def test_every_back_end_provides_the_contract(protocol):
    fp8 = protocol is contract.Fp8Backend
    modules = [*backends.FP8_BACKENDS.values()] if fp8 else [*backends.BACKENDS.values(), backends.reference]
    wanted = [(name, one) for name, one in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")]
    assert {"why_not", "forward", "layer"} <= dict(wanted).keys()
    for module, (function, declared) in itertools.product(modules, wanted):
        given = inspect.signature(getattr(module, function)).parameters
        named = list(inspect.signature(declared).parameters)[1:]
        assert list(given)[: len(named)] == named, function
        assert all(given[x].default is not inspect.Parameter.empty for x in list(given)[len(named) :]), function


@pytest.mark.gpu
def test_a_hopper_gpu_gets_the_hopper_back_end():
    if torch.cuda.get_device_capability() != hopper.CAPABILITY:
        pytest.skip("this GPU is not of compute capability 9.0")
    p = problem(100, 2, 128, 3, 64, torch.bfloat16, "cuda")
    assert flashmhf.info(p.q, p.k).chosen == "hopper", flashmhf.info(p.q, p.k)


def test_why_not_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in triton.why_not(torch.device("cuda"), torch.float16, d_h=64, d_e=64)
