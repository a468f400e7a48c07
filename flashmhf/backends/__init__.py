"""The choice of the back end: the first that supports device, dtype and shape, or the one asked for."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch

from .. import checks
from . import eager, hopper, reference, triton
from .contract import Backend, Fp8Backend
from .eager import fp8 as eager_fp8
from .hopper import fp8 as hopper_fp8
from .triton import fp8 as triton_fp8

# In the order in which "auto" takes them. "reference", the definition in plain operations, runs only by name.
BACKENDS: dict[str, Backend] = {"hopper": hopper, "triton": triton, "eager": eager}
FP8_BACKENDS: dict[str, Fp8Backend] = {"hopper": hopper_fp8, "triton": triton_fp8, "eager": eager_fp8}
REFERENCE = "reference"
NAMES = ("auto", *BACKENDS, REFERENCE)


def check_name(backend: object, *, names: tuple[str, ...] = NAMES) -> str:
    """Return the name. Raises TypeError if it is not a string and ValueError if it is not one of ``names``."""
    return checks.choice("backend", backend, names)


@functools.cache
def select(
    backend: str, device: torch.device, dtype: torch.dtype, d_h: int, d_e: int, activation: str = "silu",
    fp8: bool = False,
) -> Backend | Fp8Backend:  # fmt: skip
    """Return the back end. Raises ValueError for an unknown name, NotImplementedError for one that cannot run."""
    known = FP8_BACKENDS if fp8 else BACKENDS | {REFERENCE: reference}
    check_name(backend, names=("auto", *known))
    reasons = []
    for name in BACKENDS if backend == "auto" else [backend]:
        reason = known[name].why_not(device, dtype, d_h=d_h, d_e=d_e, activation=activation)
        if reason is None:
            _warn_slow(device, name, tuple(reasons))
            return known[name]
        reasons.append(reason)
    raise NotImplementedError(f"backend={backend!r} cannot run: {'; '.join(reasons)}")


def chooses_hopper(
    backend: str, device: torch.device, dtype: torch.dtype, d_h: int, d_e: int, activation: str = "silu"
) -> bool:
    """Return whether :func:`select` returns the hopper back end, in 16 bits and in FP8; sizes may be symbolic."""
    case = {"d_h": d_h, "d_e": d_e, "activation": activation}
    return backend in ("auto", "hopper") and hopper.why_not(device, dtype, **case) is None


@functools.cache
def _warn_slow(device: torch.device, chosen: str, reasons: tuple[str, ...]) -> None:
    """Warn once per reasons if an NVIDIA GPU gets no kernels, or a Hopper GPU not the Hopper kernels."""
    if not reasons or device.type != "cuda" or torch.version.hip is not None:
        return
    if chosen == "eager":
        found = "this GPU gets the eager back end, plain PyTorch and slow"
    elif torch.cuda.get_device_capability(device) == hopper.CAPABILITY:
        found = "this Hopper GPU does not get the hopper back end"
    else:
        return
    warnings.warn(f"flashmhf: {found}: {'; '.join(reasons)}", stacklevel=2)


@dataclass(frozen=True)
class Info:
    """Hold what :func:`info` found: the back end chosen (None without tensors), and why each cannot run, or None."""

    chosen: str | None
    reasons: dict[str, str | None]
    details: dict[str, object]

    def __str__(self) -> str:
        found = {name: "usable" if why is None else f"not usable: {why}" for name, why in self.reasons.items()}
        lines = [f"{name:<7} {text}" for name, text in found.items()]
        if self.chosen is not None:
            lines.append(f"chosen  {self.chosen}")
        return "\n".join(lines + [f"{key}: {value}" for key, value in self.details.items()])


def info(q: torch.Tensor | None = None, k: torch.Tensor | None = None, *, activation: str = "silu") -> Info:
    """Return which back end serves q [..., H, d_h] and k [H_kv, E, d_e, d_h], and why each of the others does not.

    Without q and k it returns what this machine has, for the current CUDA device with bf16, or else the CPU with fp32,
    d_h = 128 and d_e = 384. It initialises CUDA, after which a fork cannot use CUDA. Raises TypeError for wrong dtypes
    and non-tensors, ValueError for wrong shapes, strides and devices, an unknown activation, and one of q and k alone.
    """
    if (q is None) != (k is None):
        raise ValueError(f"{'q' if q is None else 'k'} is None; info takes both q and k, or neither")
    if q is None:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        dtype, d_h, d_e = torch.bfloat16 if on_gpu else torch.float32, 128, 384
    else:
        checks.operands(q, k, k, k)
        device, dtype, d_h, d_e = q.device, q.dtype, k.shape[3], k.shape[2]
    checks.activation(activation)
    case = {"d_h": d_h, "d_e": d_e, "activation": activation}
    reasons = {name: module.why_not(device, dtype, **case) for name, module in BACKENDS.items()}
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    details: dict[str, object] = {"device": device_name, "torch": torch.__version__}
    if hopper.library() is None:
        details["hopper library"] = hopper.build_info()
    if device.type == "cuda" and reasons["triton"] is None and (untimed := triton.untimed(device)):
        details["triton"] = untimed
    chosen = next(name for name, reason in reasons.items() if reason is None)
    return Info(None if q is None else chosen, reasons, details)
